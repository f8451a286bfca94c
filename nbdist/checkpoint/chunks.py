"""Which boxes a saved tensor consists of, and which rank writes each: every element once."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from nbdist.strategy.tensor_layout import Placement, Runs, local_runs

# A larger box is cut: it is read, compared and shared out in parts of this size.
MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of elements of one tensor.

    Attributes:
        offsets: Where it begins in the whole tensor, along each dim.
        sizes: Its elements along each dim.
        local: Where it begins in the local tensor of each rank that holds it.
        holders: These ranks, in order.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]
    holders: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class AssignedChunk:
    """A chunk of a tensor, and who writes it."""

    name: str
    chunk: Chunk
    writer: int


@functools.lru_cache(maxsize=4096)
def chunks(side: Placement, world_size: int) -> tuple[Chunk, ...]:
    """The boxes that ranks hold of a tensor, in order of their offsets.

    Ranks that hold the same elements are holders of the same boxes. A tensor without elements
    is one box without any.
    """
    holders: dict[tuple[Runs, ...], list[int]] = {}
    for rank in range(world_size):
        runs = local_runs(side.layout, side.degrees, rank)
        if runs is not None:
            holders.setdefault(runs, []).append(rank)
    if math.prod(side.layout.shape) == 0:
        nothing = (0,) * len(side.layout.shape)
        ranks = sorted(itertools.chain(*holders.values()))
        return (Chunk(nothing, side.layout.shape, nothing, tuple(ranks)),)
    boxes = [box for runs, ranks in holders.items() for box in _boxes(runs, tuple(ranks))]
    return tuple(sorted(boxes, key=lambda box: box.offsets))


def own_chunks(side: Placement, world_size: int, rank: int) -> tuple[Chunk, ...]:
    """The boxes that one rank holds."""
    return tuple(chunk for chunk in chunks(side, world_size) if rank in chunk.holders)


def is_complete(side: Placement, world_size: int) -> bool:
    """Whether the ranks together hold every element."""
    boxes = chunks(side, world_size)
    is_held = all(chunk.holders for chunk in boxes)  # one without elements may be nobody's
    return is_held and sum(chunk.count for chunk in boxes) == math.prod(side.layout.shape)


def assign_chunks(
    tensors: Iterable[tuple[str, Placement, int]],
    world_size: int,
    undivided: Collection[str] = (),
) -> list[AssignedChunk]:
    """Assign boxes to writers; the same on all ranks, and every element has one writer.

    A box that several ranks hold is shared out evenly: a large one is cut, and each part
    goes to the holder that has least to write so far, the first of several. Each tensor is its
    name, how it lies, and bytes of an element. What is undivided is written by its first holder.
    """
    written_bytes = [0] * world_size
    parts = []
    for name, side, item_bytes in tensors:
        for whole in chunks(side, world_size):
            limit = MOST_BYTES // item_bytes
            if whole.count * item_bytes >= MOST_BYTES // 64:  # smaller ones are not worth a cut
                limit = min(limit, -(-whole.count // len(whole.holders)))
            for chunk in _cut(whole, limit):
                holders = chunk.holders[:1] if name in undivided else chunk.holders
                writer = min(holders, key=lambda rank: (written_bytes[rank], rank))
                written_bytes[writer] += chunk.count * item_bytes
                parts.append(AssignedChunk(name, chunk, writer))
    return parts


def _boxes(runs: tuple[Runs, ...], holders: tuple[int, ...]) -> Iterator[Chunk]:
    """All combinations of the dims' runs; each run lies behind those before it."""
    dims = []
    for dim in runs:
        starts = itertools.accumulate((length for _, length in dim[:-1]), initial=0)
        dims.append([(start, n, at) for (start, n), at in zip(dim, starts, strict=False)])
    for box in itertools.product(*dims):
        offsets = tuple(start for start, _, _ in box)
        sizes = tuple(length for _, length, _ in box)
        yield Chunk(offsets, sizes, tuple(at for _, _, at in box), holders)


def _cut(whole: Chunk, limit: int) -> Iterator[Chunk]:
    """The same elements in boxes of at most `limit` elements, cut along the first dims."""
    dim = next((d for d, size in enumerate(whole.sizes) if size > 1), None)
    if dim is None or whole.count <= limit:
        yield whole
        return
    size = whole.sizes[dim]
    step = max(1, limit // max(1, math.prod(whole.sizes[dim + 1 :])))
    for start in range(0, size, step):
        part = replace(
            whole,
            offsets=_move(whole.offsets, dim, start),
            local=_move(whole.local, dim, start),
            sizes=(*whole.sizes[:dim], min(step, size - start), *whole.sizes[dim + 1 :]),
        )
        yield from _cut(part, limit)


def _move(place: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*place[:dim], place[dim] + by, *place[dim + 1 :])
