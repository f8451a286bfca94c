"""Identifies the collectives of a trace: name, size and process group of each."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist.trace import names as trace_names

# In the header of a rank's file: process groups, as torch's profiler writes them.
INFO = "distributedInfo"
# A thread of Gloo's begins a call after it was issued; clocks are read at different moments.
SLACK_NS = 50_000


@dataclass(frozen=True, slots=True)
class TraceGroup:
    """A process group whose collectives a trace has.

    Attributes:
        name: The user's name.
        torch_name: torch's name.
    """

    name: str
    ranks: tuple[int, ...]
    torch_name: str


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A call of a collective, as some part of the trace has it.

    Attributes:
        name: As people write it.
        start_ns: When it began, or was issued.
        torch_group: torch's name of its group; empty where it is unknown.
    """

    name: str
    start_ns: int
    args: Mapping[str, Any]
    lane: int = -1
    torch_group: str = ""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The identity of a call.

    Attributes:
        name: As people write it, of what the program has called.
        size_bytes: The whole message, which all ranks of the group make or get.
        group: Place in the groups; -1 where it is unknown.
    """

    name: str
    size_bytes: int
    group: int


# Torch's descriptions of groups of all ranks. Where ranks share a GPU it makes one more for meshes.
_WHOLE = frozenset({"default_pg", "mesh_default"})


def groups_of(header: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[TraceGroup, ...]:
    """The process groups of a file's header, and those that the recorded cell has made.

    Torch writes the header when the recording begins. What nbdist adds at its end, `ours`, has the
    groups of that time, as torch's header has them, and the user's names by torch's names.
    """
    info, names = header.get(INFO), ours.get("groups")
    called = names if isinstance(names, dict) else {}
    listed = info.get("pg_config") if isinstance(info, dict) else None
    groups: dict[str, TraceGroup] = {}
    for config in [*(listed if isinstance(listed, list) else []), *ours.get("made", [])]:
        torch_name = str(config.get("pg_name", len(groups)))
        description = str(config.get("pg_desc") or "")
        name = called.get(torch_name) or ("all ranks" if description in _WHOLE else description)
        # The ranks are left out where the group is of all.
        ranks = config.get("ranks") or range(int(config.get("pg_size") or 1))
        group = TraceGroup(name or f"group {torch_name}", tuple(map(int, ranks)), torch_name)
        groups.setdefault(torch_name, group)
    return tuple(groups.values())


def of_nccl(call: CollectiveCall, groups: Sequence[TraceGroup]) -> Meaning:
    """A kernel of NCCL, by the notes that torch gives it (ParamCommsUtils.hpp)."""
    args = call.args
    name = trace_names.collective(str(args.get("Collective name") or call.name))
    place = _place(str(args.get("Process Group Name", "")), groups)
    n_ranks = int(args.get("Group size") or (len(groups[place].ranks) if place >= 0 else 1))
    width = trace_names.type_bytes(str(args.get("dtype", "")))
    sizes = [int(args.get(key) or 0) for key in ("In msg nelems", "Out msg nelems")]
    return Meaning(name, _whole(name, max(sizes) * width, n_ranks), place)


def of_gloo(
    calls: Sequence[CollectiveCall],
    issued: Sequence[CollectiveCall],
    recorded: Sequence[CollectiveCall],
    groups: Sequence[TraceGroup],
) -> list[Meaning]:
    """Match Gloo's calls with the operators issued before each; the trace has no link of both.

    Gloo does some collectives by way of others (a reduce-scatter as an all-reduce): the
    meaning is what the program has called.

    Args:
        calls: Gloo's own, in the order of their starts.
        issued: Operators c10d::*, likewise.
        recorded: Entries of torch's flight recorder from the same time; may be empty.
        groups: The trace's groups.
    """
    # Each of Gloo's threads, a lane, belongs to one group, which most of its calls name.
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    waiting = _Waiting(recorded)
    for call in calls:
        seen = waiting.take(call, sum(_elements(call.args)))
        if seen is not None:
            votes[call.lane][_place(seen.torch_group, groups)] += 1
    group_of = {lane: counted.most_common(1)[0][0] for lane, counted in votes.items()}
    waiting = _Waiting(issued)
    meanings = []
    for call in calls:
        place = group_of.get(call.lane, 0 if len(groups) == 1 else -1)
        n_ranks = len(groups[place].ranks) if place >= 0 else 1
        elements = sum(_elements(call.args))
        types = call.args.get("Input type") or [""]
        width = trace_names.type_bytes(str(types[0]))
        partner = waiting.take(call, elements)
        name = call.name if partner is None else partner.name
        if partner is not None:
            elements = max([elements, *_elements(partner.args)])
        elif name == "all-gather":
            elements *= n_ranks
        meanings.append(Meaning(name, _whole(name, elements * width, n_ranks), place))
    return meanings


def _whole(name: str, size_bytes: int, n: int) -> int:
    """An all-to-all's message is what all ranks give; of the others, the larger of in and out."""
    return size_bytes * n if name == "all-to-all" else size_bytes


def _place(torch_name: str, groups: Sequence[TraceGroup]) -> int:
    names = [group.torch_name for group in groups]
    return names.index(torch_name) if torch_name in names else -1


def _elements(args: Mapping[str, Any]) -> list[int]:
    """Elements of each input of an operator; a list of tensors counts as one."""
    dims = args.get("Input Dims")
    return [_count(shape) for shape in dims] if isinstance(dims, list) else []


def _count(dims: Any) -> int:
    if not isinstance(dims, list) or not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(map(_count, dims))
    return math.prod(dims)


# How Gloo does a collective where it has another name (torch 2.11 to 2.13, ProcessGroupGloo.cpp).
_DONE_BY = {"reduce-scatter": {"all-reduce", "reduce-scatter"}}


class _Waiting:
    """Calls that were issued and not matched yet."""

    def __init__(self, issued: Iterable[CollectiveCall]):
        self._by_name: dict[str, list[CollectiveCall]] = defaultdict(list)
        for call in issued:
            for gloo_name in _DONE_BY.get(call.name, {call.name}):
                self._by_name[gloo_name].append(call)
        self._matched: set[int] = set()
        self._first: Counter[str] = Counter()

    def take(self, call: CollectiveCall, elements: int) -> CollectiveCall | None:
        """The first that fits: issued before, and with an input of that many elements."""
        queue = self._by_name[call.name]
        while (
            self._first[call.name] < len(queue)
            and id(queue[self._first[call.name]]) in self._matched
        ):
            self._first[call.name] += 1
        for candidate in queue[self._first[call.name] :]:
            if candidate.start_ns > call.start_ns + SLACK_NS:
                return None
            sizes = _elements(candidate.args)
            if id(candidate) not in self._matched and (elements in sizes or not elements):
                self._matched.add(id(candidate))
                return candidate
        return None
