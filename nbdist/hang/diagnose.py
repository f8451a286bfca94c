"""Who waits for whom: deadlocks and late ranks, from what the ranks' call logs and looks say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nbdist.core.failures import ranks_phrase
from nbdist.hang.records import (
    Call,
    CallLog,
    FlightRecorderEntry,
    RankView,
    UnmatchedCall,
    WaitFinding,
)
from nbdist.hang.text import (
    BlockingRank,
    act_of,
    blamed_ranks,
    call_signature,
    call_text,
    last_call,
    line,
    place_suffix,
    place_text,
)
from nbdist.hang.wait_graph import OVER, WaitGraph, count_in, is_transfer, last_event_s

# A rank without flight recorder that sleeps in torch is spoken of after so many times `after_s`.
_SLEEPS_LONG = 3.0


def diagnose(
    views: Sequence[RankView], now_s: float, after_s: float = 1.0
) -> tuple[WaitFinding, ...]:
    """Why ranks wait that have waited for at least `after_s`.

    A finding is certain when none of its ranks can ever move again, whatever the other ranks do.
    Shorter waits are reported only beside a longer one. The views are those of all ranks; a rank's
    state has to be older than its log, or as old. The clock is the host's monotonic one.
    """
    scene = WaitGraph(views)
    if all(now_s - wait.since_s < after_s for wait in scene.waits.values()):
        return tuple(_sleepers(scene, now_s - _SLEEPS_LONG * after_s))  # as nearly always
    stuck = set(scene.needs) - scene.movable
    findings = []
    for waiting, is_certain in ((stuck, True), (set(scene.needs) - stuck, False)):
        for ranks in _together(waiting, scene.needs):
            waits = [scene.waits[rank] for rank in sorted(ranks)]
            if any(now_s - wait.since_s >= after_s for wait in waits):
                missing = scene.never_come(ranks)
                whom = blamed_ranks(waits, scene.needs) if is_certain else missing
                text = line(waits, scene.needs)
                marks = tuple(wait.key for wait in waits)
                is_doomed = bool(missing) and not is_certain
                findings.append(
                    WaitFinding(text, is_certain, tuple(sorted(ranks)), whom, marks, is_doomed)
                )
    return (*findings, *_sleepers(scene, now_s - _SLEEPS_LONG * after_s))


def mismatches(logs: Sequence[CallLog], run: int) -> tuple[str, ...]:
    """Calls of one cell run that ended on all ranks, whose logs these are, but did not fit.

    In ops that need the same shape on every rank Gloo gives wrong data then, without an error.
    """
    calls_by_number: dict[tuple[int, str, int], dict[int, Call]] = {}
    for log in logs:
        for call in log.calls:
            if call.run == run and call.number and call.peer is None and not is_transfer(call):
                calls_by_number.setdefault((log.generation, call.group, call.number), {})[
                    log.rank
                ] = call
    lines: dict[str, None] = {}
    broken: set[str] = set()
    for (_, group, _), calls in sorted(calls_by_number.items()):
        kinds = {act_of(call).kind for call in calls.values()}
        if len(kinds) > 1 and group not in broken:
            if len({call.op for call in calls.values()}) > 1:
                broken.add(group)  # what follows is out of step in any case
            if all(call.state == "done" for call in calls.values()):
                lines[f"{_mismatch(calls)}: the results are wrong"] = None
    return tuple(lines)


def unmatched(logs: Sequence[CallLog], run: int, ranks: Sequence[int]) -> UnmatchedCall | None:
    """A call of a cell run that not all members of its group have made, though all have ended.

    Such a call can end where it only sends, or is asynchronous and not waited for, and the next
    cell would meet it. None where there is none, where a member did not run the cell, where a
    thread waits in a call behind the cell, and where a log is older than the cell's end, as one of
    another host can be.
    """
    by_rank = {log.rank: log for log in logs}
    has_ended = {log.rank for log in logs if (log.run, log.state) == (run, "finished")}
    if len({log.generation for log in logs}) > 1 or not set(ranks) <= has_ended:
        return None
    for group in [group for log in logs for group in log.groups.values()]:
        members = {rank: by_rank[rank] for rank in group.ranks if rank in ranks}
        counts = {rank: count_in(log, group.name) for rank, log in members.items()}
        missing = [rank for rank, count in counts.items() if count == min(counts.values())]
        if len(members) < len(group.ranks) or len(missing) == len(members):
            continue
        calls = [
            call for log in members.values() for call in log.calls
            if (call.run, call.group) == (run, group.name) and not is_transfer(call)
        ]  # fmt: skip
        number = min(counts.values()) + 1
        call = next((call for call in calls if call.number == number), None)
        if call is not None and all(call.state in {"done", "issued"} for call in calls):
            callers = sorted(set(members) - set(missing))
            text = f"{ranks_phrase(callers)} called {call_text(act_of(call))}"
            if call.state == "issued":
                verb = "has" if len(callers) == 1 else "have"
                text += f" and {verb} not waited for it"
            text += f"; {ranks_phrase(missing)} finished without calling it"
            return UnmatchedCall(text, group.name, number)
    return None


def last_words(logs: Sequence[CallLog], rank: int, *, is_crash: bool) -> str:
    """Last words on an ended rank's torch.distributed calls; empty if it made none in this cell.

    Gloo writes past a part of a call that gets more bytes than it has, and so SIGABRT or SIGSEGV
    ends the process: then the text names who called it with what. Call it at once: a recovery
    counts all calls anew. The logs are those of all ranks, the ended one's too.
    """
    ended_log = next((log for log in logs if log.rank == rank and log.state == "running"), None)
    if ended_log is None or not any(c.run == ended_log.run for c in ended_log.calls[-1:]):
        return ""
    for call in reversed(ended_log.calls if is_crash else ()):
        is_open = call.run == ended_log.run and call.state in {"waiting", "issued"}
        if is_open and not is_transfer(call):
            parts = {log.rank: part for log in logs if (part := _part(log, ended_log, call))}
            if len({act_of(part).kind for part in parts.values()}) > 1:
                return _mismatch(parts)
    return last_call(ended_log)


def _part(log: CallLog, caller_log: CallLog, call: Call) -> Call | None:
    """A rank's part in another one's call, whatever became of it; None where it has none."""
    key = (call.group, call.number, call.run)
    parts = (c for c in reversed(log.calls) if (c.group, c.number, c.run) == key)
    same = None if log.generation != caller_log.generation else next(parts, None)
    return None if same is None or is_transfer(same) else same


def counts_differ(
    logs: Sequence[CallLog], newest: Mapping[int, Mapping[tuple[str, str], FlightRecorderEntry]]
) -> bool:
    """Whether members of a group have made different numbers of calls: it is out of step.

    It compares the logs of the living ranks, and rank -> its newest calls in the flight
    recorders by backend and group.
    """
    by_rank = {log.rank: log for log in logs}
    members: dict[str, set[int]] = {}
    for log in logs:
        for group in log.groups.values():
            members.setdefault(group.name, set()).update(set(group.ranks) & set(by_rank))
    for name, ranks in members.items():
        if len({count_in(by_rank[rank], name) for rank in ranks}) > 1:
            return True
    for log in logs:
        for channel, count in log.transfers.items():
            _, source, destination = channel
            other = by_rank.get(destination if log.rank == source else source)
            if other is not None and other.transfers.get(channel, 0) != count:
                return True
    return _newest_differ(members, newest)


def _newest_differ(
    members: Mapping[str, set[int]],
    newest: Mapping[int, Mapping[tuple[str, str], FlightRecorderEntry]],
) -> bool:
    for key in {key for calls in newest.values() for key in calls}:
        numbers = {rank: calls[key].number for rank, calls in newest.items() if key in calls}
        # A member whose recorder has other groups, but not this one, has made no call in it.
        idle = [
            rank for rank in members.get(key[1], ()) if newest.get(rank) and key not in newest[rank]
        ]
        if len(set(numbers.values())) > 1 or idle:
            return True
    return False


def _sleepers(scene: WaitGraph, until_s: float) -> Iterator[WaitFinding]:
    """Ranks that sleep in torch, with no record of where, while all others are done."""
    asleep = [rank for rank in scene.views if _is_asleep(scene, rank, until_s)]
    others = sorted(set(scene.views) - set(asleep))
    if not asleep or not others or any(scene.states[rank] not in OVER for rank in others):
        return
    by_place: dict[str, list[int]] = {}
    for rank in sorted(asleep):
        snapshot = scene.views[rank].snapshot
        at = place_text(snapshot.place) if snapshot is not None else ""
        by_place.setdefault(f"inside torch{' at ' if at else ''}{at}", []).append(rank)
    clauses = [
        f"{ranks_phrase(ranks)} sleep{'' if len(ranks) > 1 else 's'} {at}"
        for at, ranks in by_place.items()
    ]
    who = f"{ranks_phrase(others)} {'have' if len(others) > 1 else 'has'}"
    text = f"{'; '.join(clauses)}; {who} finished, and may be waited for there"
    yield WaitFinding(text, is_certain=False, waiting=tuple(sorted(asleep)), blamed=())


def _is_asleep(scene: WaitGraph, rank: int, until_s: float) -> bool:
    snapshot = scene.views[rank].snapshot
    if snapshot is None or scene.states[rank] != "running" or rank in scene.waits:
        return False
    is_blind = snapshot.is_in_torch and snapshot.is_asleep and not snapshot.newest
    return is_blind and last_event_s(scene.views[rank].log) <= until_s


def _together(ranks: set[int], needs: Mapping[int, Sequence[BlockingRank]]) -> list[set[int]]:
    """Waiting ranks by cause: two belong together that need the same rank, or one the other."""
    clusters: list[tuple[set[int], set[int]]] = []
    for rank in sorted(ranks):
        waiting, linked = {rank}, {rank} | {need.rank for need in needs[rank]}
        separate = []
        for cluster in clusters:
            if cluster[1] & linked:
                waiting |= cluster[0]
                linked |= cluster[1]
            else:
                separate.append(cluster)
        clusters = [*separate, (waiting, linked)]
    return sorted((waiting for waiting, _ in clusters), key=min)


def _mismatch(calls: Mapping[int, Call]) -> str:
    """`ranks 0-1 called all_reduce with different shapes: ..., ...`."""
    ops = {call.op for call in calls.values()}
    by_text: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        act = act_of(call)
        what = call_signature(act) if len(ops) > 1 else act.detail
        by_text.setdefault(f"{what}{place_suffix(act, with_source=False)}", []).append(rank)
    shapes = {call.detail.partition("]")[0] for call in calls.values()}
    what = "shapes" if len(shapes) > 1 else "arguments"
    which = f"{ops.pop()} with different {what}" if len(ops) == 1 else "different collectives"
    parts = ", ".join(f"{text} ({ranks_phrase(ranks)})" for text, ranks in by_text.items())
    return f"{ranks_phrase(sorted(calls))} called {which}: {parts}"
