"""Call logs by hand: what ranks have called, without ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nbdist.hang.diagnose import diagnose
from nbdist.hang.records import (
    Call,
    CallLog,
    FlightRecorderEntry,
    GroupRecord,
    RankView,
    SourceLine,
    ThreadSnapshot,
    WaitFinding,
)

RUN = 5
NOW_S = 100.0
WORLD = "0"


def at(line: int, source: str = "", cell: int = 12) -> SourceLine:
    return SourceLine(cell, "", line, source)


def call(  # noqa: PLR0913  # a record has many fields
    op: str,
    detail: str = "",
    *,
    line: int = 7,
    source: str = "",
    state: str = "done",
    group: str = WORLD,
    peer: int | None = None,
) -> Call:
    """A call of the present cell; `log` gives it its number."""
    place, began_s = at(line, source), NOW_S - 10
    ended_s = None if state in {"waiting", "issued"} else began_s
    return Call(op, detail, group, 0, peer, place, RUN, began_s, ended_s, state)


def log(
    rank: int,
    *calls: Call,
    groups: Mapping[str, tuple[int, ...]],
    state: str = "running",
    run: int = RUN,
    generation: int = 0,
) -> CallLog:
    """A rank's log after these calls, numbered as a rank numbers them."""
    counts: Counter[str] = Counter()
    transfers: Counter[tuple[str, int, int]] = Counter()
    numbered = []
    for call in calls:
        if call.peer is not None:
            ends = (rank, call.peer) if "send" in call.op else (call.peer, rank)
            transfers[call.group, *ends] += 1
            number = transfers[call.group, *ends]
        elif "recv" in call.op:
            number = 0
        else:
            counts[call.group] += 1
            number = counts[call.group]
            counts[call.group] -= call.state == "raised"  # it was not made
        numbered.append(replace(call, number=number))
    memberships = {
        n: GroupRecord(n, ranks, counts[n]) for n, ranks in groups.items() if rank in ranks
    }
    empty = CallLog(
        rank, 1000 + rank, generation, run, state, NOW_S - 20, memberships, dict(transfers), (), ()
    )
    return with_calls(empty, *numbered)


def with_calls(log: CallLog, *calls: Call) -> CallLog:
    """The log with these calls, as they are numbered."""
    return replace(log, calls=calls, waits=tuple(c for c in calls if c.state == "waiting"))


def view(
    rank: int,
    state: str,
    *calls: Call,
    world: int = 2,
    groups: Mapping[str, tuple[int, ...]] | None = None,
    how: str = "",
    snapshot: ThreadSnapshot | None = None,
) -> RankView:
    """A rank in a world of so many, with further groups."""
    every = {WORLD: tuple(range(world)), **(groups or {})}
    in_log = state if state in {"finished", "raised"} else "running"
    run = RUN if state not in {"absent", "busy"} else RUN - 1
    rank_log = log(rank, *calls, groups=every, state=in_log, run=run)
    return RankView(rank, state, how, rank_log, snapshot)


def snapshot(
    place: SourceLine | None = None, *, is_asleep: bool = True, **newest: FlightRecorderEntry
) -> ThreadSnapshot:
    """A rank that sleeps in torch, or computes; the flight recorder's calls by group."""
    named = {name.removeprefix("g"): entry for name, entry in newest.items()}
    return ThreadSnapshot(place, (), is_asleep, is_asleep, named)


def inner(op: str, detail: str, number: int, *, is_pending: bool = True) -> FlightRecorderEntry:
    """A call in the flight recorder."""
    return FlightRecorderEntry(op, detail, number, is_pending)


REDUCE = "dist.all_reduce(x)"


def reduce(state: str = "done", **fields: Any) -> Call:
    """The all_reduce of most tests."""
    return replace(call("all_reduce", "float32[3]", source=REDUCE, state=state), **fields)


def only_finding(*views: RankView) -> WaitFinding:
    """The finding of a diagnosis that has just one."""
    (finding,) = diagnose(views, NOW_S)
    return finding
