"""Which part of a whole tensor a rank computes: from shapes, where no layout says it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nbdist.strategy.choice import Degrees


@dataclass(frozen=True, slots=True)
class RankShare:
    """Share of this rank in a step.

    Attributes:
        degrees: Of the strategy.
        place: This rank's, along each axis.
        samples: (first, behind the last, all) of the batches of all data-parallel ranks.
    """

    degrees: Degrees
    place: Degrees
    samples: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a whole tensor.

    Attributes:
        value: The elements, as the rank has them.
        axes: The axes of the mesh that split it.
    """

    value: torch.Tensor
    axes: frozenset[str]


def pieces(whole: torch.Tensor, shape: tuple[int, ...], share: RankShare) -> Iterator[Piece]:
    """Every part of a whole tensor that has this shape and that this rank may have.

    dp splits the batch: the first dim, or any other one; cp the sequence; tp hidden dims, heads or
    the sequence, also where query, key and value lie side by side.
    """
    if len(shape) != whole.dim():
        return
    split = [dim for dim, size in enumerate(whole.shape) if size != shape[dim]]
    axes = [axis for axis in ("dp", "cp", "tp") if _degree(share.degrees, axis) > 1]
    if len(split) > len(axes):
        return
    # Mostly the first dim is the batch's, so ways in which dp splits another one come last.
    ways = sorted(
        itertools.permutations(axes, len(split)),
        key=lambda way: any(a == "dp" and dim for a, dim in zip(way, split, strict=True)),
    )
    for chosen in ways:
        for parts in (1, 2, 3) if "tp" in chosen else (1,):
            value: torch.Tensor | None = whole
            for axis, dim in zip(chosen, split, strict=True):
                if value is not None:
                    value = _cut(value, dim, shape[dim], axis, parts, share)
            if value is not None and tuple(value.shape) == shape:
                yield Piece(value, frozenset(chosen))


def _degree(degrees: Degrees, axis: str) -> int:
    return int(getattr(degrees, axis))


def _cut(
    value: torch.Tensor, dim: int, length: int, axis: str, parts: int, share: RankShare
) -> torch.Tensor | None:
    size = value.shape[dim]
    if axis == "dp":
        first, last, total = share.samples
        if length * total != size * (last - first):
            return None
        return value.narrow(dim, size * first // total, length)
    degree, index = _degree(share.degrees, axis), int(getattr(share.place, axis))
    if axis == "cp":
        return value.narrow(dim, index * length, length) if length * degree == size else None
    if size % parts:
        return None
    several = value.reshape(*value.shape[:dim], parts, size // parts, *value.shape[dim + 1 :])
    chunks = several.chunk(degree, dim + 1)
    return chunks[index].flatten(dim, dim + 1) if index < len(chunks) else None
