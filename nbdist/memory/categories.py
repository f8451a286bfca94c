"""Finds the purpose of each block: read off its owner, or inferred from when and where.

Exact is what an object claims: a parameter, a gradient, an optimizer's state, at a moment at which
the objects were looked at. The rest is inferred, in this order:

- communication: allocated below a collective, or where DDP or FSDP gather, reduce and send;
- temporary: allocated and freed in one phase of a step;
- activations: allocated before a backward, there when one begins, and freed in a backward, or at
  least before the next one;
- gradients: allocated in a backward, not freed in it, and somebody's when objects were looked at;
- unknown: everything else, as cuBLAS's workspace, which no object of Python has.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from nbdist.memory.blocks import NOWHERE, held_bytes
from nbdist.memory.snapshot import (
    ACTIVATION,
    BACKWARD,
    BEFORE,
    BUFFER,
    COMMUNICATION,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    STAYS,
    TEMPORARY,
    UNKNOWN,
    AllocationFrame,
    BlockRow,
    Blocks,
    Integers,
    Phase,
    RankMemory,
    make_blocks,
)

# If a block has several claims, the first of these counts.
_ORDER = (PARAMETER, BUFFER, OPTIMIZER, GRADIENT, COMMUNICATION, UNKNOWN)
_RANK = {category: place for place, category in enumerate(_ORDER)}
# Operators of torch.distributed and its backends.
_COLLECTIVE = re.compile(r"^(c10d|_c10d_functional|gloo|nccl|record_param_comms)\b|^DDP")
# Files in which every line gathers, reduces or sends; wherever in a stack.
_SENDERS = re.compile(
    r"torch[/\\]distributed[/\\](fsdp[/\\]"
    r"(_fully_shard[/\\]_fsdp_(collectives|param|param_group)|_flat_param)"
    r"|distributed_c10d|_functional_collectives|_symmetric_memory[/\\]__init__)\.py$"
)
# The same where it is the innermost line: the user's model runs below `forward` of the first one.
_INNERMOST_SENDERS = re.compile(
    r"torch[/\\](nn[/\\]parallel[/\\]distributed|distributed[/\\]utils)\.py$"
)
_FORWARDS = frozenset({"forward", "_run_ddp_forward", "__init__"})


@dataclass(frozen=True, slots=True)
class Claim:
    """An object says that it owns memory.

    Attributes:
        time_ns: When the object was asked, since the recording began.
        address: Where the memory begins; NOWHERE where only its size is known.
        size_bytes: The size of all its memory.
        category: Place in CATEGORIES; UNKNOWN for a variable.
        name: The parameter's or variable's; may be empty.
    """

    time_ns: int
    address: int
    size_bytes: int
    category: int
    name: str = ""


def categorise(memory: RankMemory, claims: Sequence[Claim]) -> RankMemory:
    """The same memory with categories, whether they are exact, and names.

    Args:
        memory: Its phases are in order and do not overlap.
        claims: Of any order. One at which no block was there then says nothing.
    """
    blocks = memory.blocks
    owners = _owners(blocks, claims)
    category = _infer(memory)
    nobodys = _were_there(blocks, claims) & (category == GRADIENT)
    nobodys[list(owners)] = False
    category[nobodys] = UNKNOWN
    is_exact = np.zeros(len(blocks), np.bool_)
    names = list(memory.names)
    places = {name: place for place, name in enumerate(names)}
    name = blocks.name.copy()
    in_backward = _is_backward(memory.phases, blocks.end_ns)
    by_size = dict(_of_unknown_address(blocks, category, owners, claims))
    is_guess = (blocks.address != NOWHERE) & (category != COMMUNICATION)
    for place, claim in (*owners.items(), *by_size.items()):
        if claim.category != UNKNOWN:
            category[place] = claim.category
            is_exact[place] = place not in by_size or not is_guess[place]
        elif claim.name and category[place] == ACTIVATION and not in_backward[place]:
            category[place] = UNKNOWN  # the user's variable holds it, whatever backward uses
        if claim.name:
            if claim.name not in places:
                places[claim.name] = len(names)
                names.append(claim.name)
            name[place] = places[claim.name]
    columns = replace(
        blocks,
        category=category,
        is_exact=is_exact,
        name=name,
        end_ns=_end_buckets(blocks, category, by_size, claims),
    )
    return replace(memory, blocks=columns, names=tuple(names))


def with_foreign(memory: RankMemory, claims: Sequence[Claim]) -> RankMemory:
    """With what is claimed at the end and no allocator of torch has made.

    Files that are mapped, arrays of numpy, what other processes share: it begins where it is first
    claimed.
    """
    at = _index(memory.blocks)
    first: dict[tuple[int, int], Claim] = {}
    for claim in sorted(claims, key=lambda claim: claim.time_ns):
        if claim.address != NOWHERE and _block_at(memory.blocks, at, claim) < 0:
            first.setdefault((claim.address, claim.size_bytes), claim)
    last_ns = max((claim.time_ns for claim in claims), default=0)
    last_keys = {(claim.address, claim.size_bytes) for claim in claims if claim.time_ns == last_ns}
    rows = [claim for key, claim in first.items() if key in last_keys]
    if not rows:
        return memory
    added = make_blocks(BlockRow(c.address, c.size_bytes, c.time_ns, STAYS) for c in rows)
    columns = [
        np.concatenate([getattr(part, column.name) for part in (memory.blocks, added)])
        for column in fields(Blocks)
    ]
    order = np.argsort(np.append(memory.blocks.start_ns, added.start_ns), kind="stable")
    return replace(memory, blocks=Blocks(*columns).take(order))


_Index = dict[int, tuple[list[int], list[int]]]


def _index(blocks: Blocks) -> _Index:
    """Address -> starts and places of the blocks there, in order."""
    index: _Index = {}
    rows = zip(blocks.address.tolist(), blocks.start_ns.tolist(), strict=True)
    for place, (address, start_ns) in enumerate(rows):
        starts, places = index.setdefault(address, ([], []))
        starts.append(start_ns)
        places.append(place)
    return index


def _block_at(blocks: Blocks, index: _Index, claim: Claim) -> int:
    """The block that was at the claim's address then; -1 for none."""
    starts, places = index.get(claim.address, ([], []))
    number = bisect_right(starts, claim.time_ns) - 1
    if number < 0 or blocks.end_ns[places[number]] <= claim.time_ns:
        return -1
    return places[number]


def _owners(blocks: Blocks, claims: Sequence[Claim]) -> dict[int, Claim]:
    """Block -> the claim on it that counts: the strongest, of those the first."""
    index = _index(blocks)
    owners: dict[int, Claim] = {}
    for claim in sorted(claims, key=lambda claim: (_RANK[claim.category], claim.time_ns)):
        if claim.address == NOWHERE:
            continue
        place = _block_at(blocks, index, claim)
        if place >= 0 and (place not in owners or (claim.name and not owners[place].name)):
            previous = owners.get(place)
            owners[place] = claim if previous is None else replace(previous, name=claim.name)
    return owners


def _were_there(blocks: Blocks, claims: Sequence[Claim]) -> npt.NDArray[np.bool_]:
    """Which blocks were there at a time at which the objects were looked at."""
    looks_ns = np.array([*sorted({claim.time_ns for claim in claims}), STAYS], np.int64)
    next_ns = looks_ns[np.searchsorted(looks_ns[:-1], blocks.start_ns)]
    were_there: npt.NDArray[np.bool_] = (next_ns != STAYS) & (next_ns < blocks.end_ns)
    return were_there


def _of_unknown_address(
    blocks: Blocks,
    category: npt.NDArray[np.int8],
    owners: dict[int, Claim],
    claims: Sequence[Claim],
) -> Iterator[tuple[int, Claim]]:
    """Pair claims that have only a size with blocks of that size that were there without owner.

    It was allocated to send, or it was there before the history began, which tells no more of it.
    """
    is_open = (category == COMMUNICATION) | (blocks.start_ns == BEFORE)
    is_open[list(owners)] = False
    used: dict[int, set[int]] = {}
    for claim in sorted(claims, key=lambda claim: claim.time_ns):
        if claim.address != NOWHERE:
            continue
        is_there = (blocks.start_ns <= claim.time_ns) & (blocks.end_ns > claim.time_ns)
        is_size = np.isin(blocks.size_bytes, (claim.size_bytes, held_bytes(claim.size_bytes)))
        fitting = np.flatnonzero(is_open & is_there & is_size)
        used_places = used.setdefault(claim.time_ns, set())
        free = [place for place in fitting.tolist() if place not in used_places]
        if free:
            used_places.add(free[0])
            yield free[0], claim


def _end_buckets(
    blocks: Blocks,
    category: npt.NDArray[np.int8],
    nowhere: Mapping[int, Claim],
    claims: Sequence[Claim],
) -> Integers:
    """Ends, with those of what was there before, has no address, and has been replaced.

    Nobody sees DDP's buckets go. After its first backward it makes new ones, of as many bytes
    together, and then drops the old ones; what it tells of them is one step behind.
    """
    last_ns = max((claim.time_ns for claim in claims), default=0)
    last = [claim for claim in claims if claim.address == NOWHERE and claim.time_ns == last_ns]
    old = [place for place in nowhere if blocks.address[place] == NOWHERE]
    gone = [place for place in old if nowhere[place].time_ns != last_ns]
    is_new = (category == COMMUNICATION) & (blocks.start_ns != BEFORE) & (blocks.end_ns == STAYS)
    newer = np.flatnonzero(is_new & (blocks.address != NOWHERE)).tolist()
    old_bytes = int(blocks.size_bytes[old].sum())
    if not gone and old_bytes == int(blocks.size_bytes[newer].sum()):
        gone = old  # told of as before, and made anew
    elif old_bytes == sum(claim.size_bytes for claim in last) and not newer:
        gone = []  # told of otherwise, but they were made anew before the recording
    end_ns = blocks.end_ns.copy()
    if gone:
        end_ns[gone] = blocks.start_ns[newer].min() if newer else last_ns
    return end_ns


def _infer(memory: RankMemory) -> npt.NDArray[np.int8]:
    """The category of each block as if it had no owner."""
    blocks, phases = memory.blocks, memory.phases
    start, end = _segments(phases, blocks.start_ns), _segments(phases, blocks.end_ns)
    is_stay = blocks.end_ns == STAYS
    is_before = blocks.start_ns == BEFORE
    n_segments = 2 * len(phases) + 1
    end = np.where(is_stay, n_segments, end)
    first, second = _next_backwards(phases)
    begins, ends_before = first[start], second[start]
    in_backward = _is_backward(phases, blocks.end_ns)
    is_forward = start % 2 == 0
    from_backward = ~is_forward & _is_backward(phases, blocks.start_ns)

    category = np.full(len(blocks), UNKNOWN, np.int8)
    is_seen = is_forward & (end >= begins) & (begins < n_segments)
    category[is_seen & (in_backward | (end < ends_before)) & ~is_before] = ACTIVATION
    category[is_seen & is_stay & (ends_before >= n_segments) & ~is_before] = ACTIVATION
    category[is_before & in_backward] = ACTIVATION
    category[from_backward & (end != start)] = GRADIENT
    category[(start == end) & ~is_before] = TEMPORARY
    # Allocated to gather, reduce or send. The last entry stands for a place of -1: not known.
    operators = np.array([*(bool(_COLLECTIVE.search(name)) for name in memory.names), False])
    stacks = np.array([*(_sends(stack) for stack in memory.stacks), False])
    category[operators[blocks.operator] | stacks[blocks.stack]] = COMMUNICATION
    return category


def _segments(phases: Sequence[Phase], times_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Which part of the history each time is in: 2 k + 1 in phase k, 2 k just before it."""
    edges = np.array([(phase.start_ns, phase.end_ns) for phase in phases], np.int64).reshape(-1)
    return np.searchsorted(edges, times_ns, side="right").astype(np.int64)


def _is_backward(phases: Sequence[Phase], times_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    is_kind = np.zeros(2 * len(phases) + 1, np.bool_)
    for number, phase in enumerate(phases):
        is_kind[2 * number + 1] = phase.kind == BACKWARD
    is_backward: npt.NDArray[np.bool_] = is_kind[_segments(phases, times_ns)] & (times_ns != STAYS)
    return is_backward


def _next_backwards(
    phases: Sequence[Phase],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Find for each segment the first backward that begins after it, and the second."""
    n = 2 * len(phases) + 1
    first, second = np.full(n, n, np.int64), np.full(n, n, np.int64)
    next_one, next_two = n, n
    for segment in range(n - 1, -1, -1):
        first[segment], second[segment] = next_one, next_two
        if segment % 2 and phases[segment // 2].kind == BACKWARD:
            next_one, next_two = segment, next_one
    return first, second


def _sends(stack: Sequence[AllocationFrame]) -> bool:
    if any(_SENDERS.search(frame.file) for frame in stack):
        return True
    if not stack:
        return False
    return bool(_INNERMOST_SENDERS.search(stack[0].file)) and stack[0].function not in _FORWARDS
