"""Which part of a tensor each rank holds, and who sends what to whom when that changes."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from nbdist.strategy.choice import Degrees

# Pieces of one dim that lie one behind the other in a rank's local tensor: (start in the
# whole tensor, length). In ascending order, none empty, none that touches the next.
Runs = tuple[tuple[int, int], ...]

# The same of a piece that is sent: (start in the source's local tensor, start in the target's
# local tensor, length).
Cuts = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one parameter or buffer lies on the ranks of a mesh.

    First the stages, then tp and ep split, then dp_shard splits what they have left. A split is
    torch.chunk's: pieces of ceil(n / degree), the last ones shorter or empty.

    Attributes:
        shape: Of the whole tensor.
        stages: Coordinates along pp that hold it; None for all.
        tp_dim: The dim that tp splits; None if each rank along tp has all of it.
        tp_parts: How many parts of equal length lie side by side in tp_dim, each split for
            itself: 3 where query, key and value are one weight.
        shard_dim: The dim that dp_shard splits; None if each rank along it has all of it.
        ep_dim: The dim of experts, which ep splits. dp_shard then splits each share over the ranks
            that have the same one.
        ranks: The only ranks that hold it (the optimizer's state under zero1); None for all
            that the axes name.
    """

    shape: tuple[int, ...]
    stages: frozenset[int] | None = None
    tp_dim: int | None = None
    tp_parts: int = 1
    shard_dim: int | None = None
    ep_dim: int | None = None
    ranks: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A layout on a mesh (all 1 where every rank is by itself): what each rank holds."""

    layout: TensorLayout
    degrees: Degrees


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of elements that one rank needs and others have.

    Attributes:
        sources: The ranks that have it, each at the same place of its local tensor.
        target: The rank that needs it; may be one of the sources.
        dims: For each dim, where it lies. The box is all combinations of the dims' cuts.
        shape: How many elements along each dim.
        is_stretch: Its elements lie one behind the other in both local tensors.
    """

    sources: tuple[int, ...]
    target: int
    dims: tuple[Cuts, ...]
    shape: tuple[int, ...]
    is_stretch: bool


# A switch asks for the same some ten times, for each parameter and its states.
@functools.lru_cache(maxsize=16384)
def local_runs(layout: TensorLayout, degrees: Degrees, rank: int) -> tuple[Runs, ...] | None:
    """Runs that a rank holds of a tensor, for each dim; None if it holds nothing of it.

    A rank whose share of a split is empty holds an empty tensor: a dim without runs. Equal
    for two ranks exactly when they hold the same elements.
    """
    place = degrees.coordinate(rank)
    if layout.ranks is not None and rank not in layout.ranks:
        return None
    if layout.stages is not None and place.pp not in layout.stages:
        return None
    dims: list[Runs] = [((0, size),) if size else () for size in layout.shape]
    if layout.tp_dim is not None:
        size, remainder = divmod(layout.shape[layout.tp_dim], layout.tp_parts)
        assert not remainder, (layout, "parts are not of equal length")
        start, stop = _chunk(size, degrees.tp, place.tp)
        parts = ((number * size + start, stop - start) for number in range(layout.tp_parts))
        dims[layout.tp_dim] = _join_runs(parts)
    number, count = place.dp_shard, degrees.dp_shard
    if layout.ep_dim is not None:
        share, number = degrees.ep_place(rank)
        count = degrees.dp // degrees.ep
        start, stop = _chunk(layout.shape[layout.ep_dim], degrees.ep, share)
        dims[layout.ep_dim] = _join_runs([(start, stop - start)])
    if layout.shard_dim is not None:
        runs = dims[layout.shard_dim]
        start, stop = _chunk(_length(runs), count, number)
        lengths = [length for _, length in runs]
        pieces = ((runs[i][0] + skip, n) for i, skip, n in _between(lengths, start, stop))
        dims[layout.shard_dim] = _join_runs(pieces)
    return tuple(dims)


def local_shape(layout: TensorLayout, degrees: Degrees, rank: int) -> tuple[int, ...] | None:
    """Shape of what a rank holds; None if it holds nothing of it."""
    runs = local_runs(layout, degrees, rank)
    return None if runs is None else tuple(map(_length, runs))


@functools.lru_cache(maxsize=4096)
def is_first(layout: TensorLayout, degrees: Degrees, rank: int) -> bool:
    """Whether a rank holds a part that no lower rank holds: who counts it, where each is once."""
    runs = local_runs(layout, degrees, rank)
    if runs is None:
        return False
    return all(local_runs(layout, degrees, lower) != runs for lower in range(rank))


def is_same(old: Placement, new: Placement, world_size: int) -> bool:
    """Whether every rank holds the same on both sides."""
    return old == new or all(
        local_runs(old.layout, old.degrees, rank) == local_runs(new.layout, new.degrees, rank)
        for rank in range(world_size)
    )


@functools.lru_cache(maxsize=4096)
def missing_on_ranks(old: Placement, new: Placement, world_size: int) -> tuple[int, ...]:
    """Ranks that need elements on the new side which no rank has on the old one."""
    covered: Counter[int] = Counter()
    for transfer in transfers(old, new, world_size):
        covered[transfer.target] += math.prod(transfer.shape)
    return tuple(
        rank
        for rank in _changing(old, new, world_size)
        if covered[rank] != math.prod(local_shape(new.layout, new.degrees, rank) or (0,))
    )


# The blocks of a model, and the moments of each weight, ask the same again and again.
@functools.lru_cache(maxsize=256)
def transfers(old: Placement, new: Placement, world_size: int) -> tuple[Transfer, ...]:
    """Transfers that each rank needs to get from the old side to the new one, by target.

    A rank that holds the same on both sides needs nothing. The pieces of a target do not
    overlap, and together they are all it will hold, what it has already included.
    """
    parts: dict[tuple[Runs, ...], list[int]] = {}
    for rank in range(world_size):
        runs = local_runs(old.layout, old.degrees, rank)
        if runs is not None:
            parts.setdefault(runs, []).append(rank)
    pieces = []
    for target in _changing(old, new, world_size):
        wanted = local_runs(new.layout, new.degrees, target)
        assert wanted is not None
        for runs, sources in parts.items():
            dims = tuple(map(_common, runs, wanted))
            if all(dims):
                shape = tuple(sum(length for *_, length in cuts) for cuts in dims)
                is_stretch = all(len(cuts) == 1 for cuts in dims) and all(
                    _is_stretch(shape, tuple(map(_length, whole))) for whole in (runs, wanted)
                )
                pieces.append(Transfer(tuple(sources), target, dims, shape, is_stretch))
    return tuple(pieces)


def split(transfer: Transfer, limit: int) -> Iterator[Transfer]:
    """Cut a piece into boxes of at most `limit` elements, along its first dims."""
    shape = transfer.shape
    dim = next((d for d, size in enumerate(shape) if size > 1), None)
    if dim is None or math.prod(shape) <= limit:
        yield transfer
        return
    step = max(1, limit // math.prod(shape[dim + 1 :]))
    lengths = [length for *_, length in transfer.dims[dim]]
    for start in range(0, shape[dim], step):
        cuts = tuple(
            (transfer.dims[dim][i][0] + skip, transfer.dims[dim][i][1] + skip, length)
            for i, skip, length in _between(lengths, start, min(start + step, shape[dim]))
        )
        size = sum(length for *_, length in cuts)
        dims = (*transfer.dims[:dim], cuts, *transfer.dims[dim + 1 :])
        cut = (*shape[:dim], size, *shape[dim + 1 :])
        yield from split(replace(transfer, dims=dims, shape=cut), limit)


def _changing(old: Placement, new: Placement, world_size: int) -> list[int]:
    """The ranks that hold something on the new side that is not what they have."""
    return [
        rank
        for rank in range(world_size)
        if (wanted := local_runs(new.layout, new.degrees, rank)) is not None
        and wanted != local_runs(old.layout, old.degrees, rank)
    ]


def _chunk(size: int, degree: int, index: int) -> tuple[int, int]:
    """Start and end of torch.chunk's piece. Source: torch.chunk, DTensor's Shard."""
    step = -(-size // degree)
    return min(step * index, size), min(step * (index + 1), size)


def _between(lengths: Iterable[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Which of the runs that lie one behind the other cover [start, stop).

    Yields:
        Index of the run, elements of it before the first one, elements taken.
    """
    offset = 0
    for index, length in enumerate(lengths):
        first, last = max(start, offset), min(stop, offset + length)
        if first < last:
            yield index, first - offset, last - first
        offset += length


def _join_runs(pieces: Iterable[tuple[int, int]]) -> Runs:
    """The same elements in as few runs as can be."""
    joined: list[tuple[int, int]] = []
    for start, length in pieces:
        if not length:
            continue
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return tuple(joined)


def _common(old: Runs, new: Runs) -> Cuts:
    """The elements of one dim that both have."""
    cuts = []
    old_offset = 0
    for old_start, old_length in old:
        new_offset = 0
        for new_start, new_length in new:
            first = max(old_start, new_start)
            last = min(old_start + old_length, new_start + new_length)
            if first < last:
                starts = old_offset + first - old_start, new_offset + first - new_start
                cuts.append((*starts, last - first))
            new_offset += new_length
        old_offset += old_length
    return tuple(cuts)


def _is_stretch(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a box of this shape is contiguous in a tensor: single, then any, then full dims."""
    first = next((dim for dim, size in enumerate(shape) if size > 1), len(shape))
    return shape[first + 1 :] == whole[first + 1 :]


def _length(dim: Runs) -> int:
    return sum(length for _, length in dim)


def owners(
    layouts: Mapping[str, TensorLayout], world_size: int, frozen: Collection[str] = ()
) -> dict[str, int]:
    """Parameter -> the rank that keeps its state: the largest first, to whom has least so far.

    Those that are frozen, and have none, come last. Alike on all ranks.
    """
    loads = [0] * world_size
    owner_of = {}
    sizes = {name: math.prod(layout.shape) for name, layout in layouts.items()}
    for name in sorted(sizes, key=lambda each: (each in frozen, -sizes[each], each)):
        owner_of[name] = loads.index(min(loads))
        loads[owner_of[name]] += sizes[name]
    return owner_of
