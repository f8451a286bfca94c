"""Whether ranks drew the random numbers that their parts of a model need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbdist.strategy.choice import Degrees

# A mask of fewer elements may be the same by chance.
_FEWEST = 32


@dataclass(frozen=True, slots=True)
class Draw:
    """One mask of a dropout on one rank.

    Attributes:
        module: In whose forward it was drawn.
        call: Number of it within that module.
        shape: Of what was to be dropped out.
        p: The probability.
        mask: Digest of what would have been left.
        function: Of torch.nn.functional.
    """

    module: str
    call: int
    shape: tuple[int, ...]
    p: float
    mask: str
    function: str = "dropout"


@dataclass(frozen=True, slots=True)
class DrawProblem:
    """A dropout whose masks are equal where they must differ, or the other way.

    Attributes:
        axis: Of the mesh.
        is_equal: They are equal and must not be.
    """

    module: str
    axis: str
    ranks: tuple[int, ...]
    is_equal: bool


def draw_problems(
    draws: Sequence[Iterable[Draw]], degrees: Degrees, whole: Iterable[Draw]
) -> tuple[DrawProblem, ...]:
    """Dropouts whose masks are wrong between ranks, in the order of the forward.

    Args:
        draws: Of the ranks, in order, in a step under the strategy.
        degrees: Of the strategy.
        whole: Of the reference: what has the same hidden size there is not split by tp.
    """
    by_rank = [{(d.module, d.call): d for d in rank_draws} for rank_draws in draws]
    sizes = {(d.module, d.call): d.shape[1:] for d in whole}
    problems = []
    keys = dict.fromkeys(key for rank_draws in by_rank for key in rank_draws)
    for key in keys:
        for axis, must_differ in (("dp_replicate", True), ("dp_shard", True), ("tp", False)):
            for peers in _peers(degrees, axis):
                shown = {rank: by_rank[rank][key] for rank in peers if key in by_rank[rank]}
                if len(shown) < 2 or (not must_differ and not _is_whole(shown, sizes.get(key))):
                    continue
                is_equal = len({draw.mask for draw in shown.values()}) == 1
                large = all(_count(draw) >= _FEWEST for draw in shown.values())
                if is_equal == must_differ and large:
                    problems.append(DrawProblem(key[0], axis, tuple(shown), is_equal))
    return tuple(problems)


def _is_whole(shown: Mapping[int, Draw], size: tuple[int, ...] | None) -> bool:
    return all(draw.shape[1:] == size for draw in shown.values())


def _count(draw: Draw) -> int:
    count = 1
    for size in draw.shape:
        count *= size
    return count


def _peers(degrees: Degrees, axis: str) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks along an axis; none where it has one rank."""
    if getattr(degrees, axis) == 1:
        return ()
    return tuple(sorted({degrees.peers(rank, axis) for rank in range(degrees.product)}))
