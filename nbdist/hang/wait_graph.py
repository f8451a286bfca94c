"""Finds what waiting ranks need from each other, by their call logs and looks.

Every rank that waits needs the parts of other ranks in its call. A rank can be needed that will
never come (it has finished), one that waits itself, and one that may still come. The search
goes back from the ranks that may still come: a rank that needs such a rank, or needs one that
does, can still move. Waiting ranks that are not reached can not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nbdist.hang.records import Call, CallLog, FlightRecorderEntry, RankView
from nbdist.hang.text import BlockingRank, CallText, WaitText, act_inside, act_of

# Ranks in these states make no further call in this cell.
OVER = frozenset({"finished", "raised", "ended", "absent"})
# The reasons for which a call of other ranks can never be made whole.
NEVER_COME = frozenset({"finished", "absent", "instead"})
# The part that one of a transfer's two ranks needs from the other.
_PARTNERS = {True: "a recv from", False: "a send to"}


class WaitGraph:
    """All ranks at one moment.

    Attributes:
        states: The ranks' states, those of their logs where these are newer.
        waits: Ranks that wait.
    """

    def __init__(self, views: Sequence[RankView]):
        self.views = {view.rank: view for view in views}
        self.run = max(
            (v.log.run for v in views if v.log is not None and v.state not in {"absent", "busy"}),
            default=0,
        )
        self._histories: dict[tuple[int, str], _CallHistory] = {}
        self._parts: dict[tuple[int, str, int, str, str], BlockingRank | None] = {}
        self.states = {view.rank: self._state(view) for view in views}
        waits = ((view.rank, self._wait(view)) for view in views)
        self.waits = {rank: wait for rank, wait in waits if wait is not None}

    @cached_property
    def needs(self) -> dict[int, tuple[BlockingRank, ...]]:
        """Return what waiting ranks need; ranks that lack nothing and can go on are left out."""
        needs = {rank: tuple(self._needs(rank)) for rank in self.waits}
        return {r: lacks for r, lacks in needs.items() if lacks and all(self._others[r])}

    @cached_property
    def _others(self) -> dict[int, list[tuple[BlockingRank, ...]]]:
        return {rank: self._in_other_threads(rank) for rank in self.waits}

    def never_come(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Ranks whose part in these ranks' calls will be missing, whatever the others do."""
        missing = {
            need.rank
            for rank in ranks
            if not self._is_at_work(rank)
            for need in self.needs[rank]
            if need.kind in NEVER_COME and not need.is_open
        }
        return tuple(sorted(missing))

    def _state(self, view: RankView) -> str:
        log = view.log
        if log is not None and log.run == self.run and view.state != "ended":
            if view.state == "running" and log.state in {"finished", "raised"}:
                return log.state  # its reply is still on its way
            if view.state in {"finished", "raised"} and log.state == "running":
                return "running"  # the log is the older one: what it counts is not the end
        return view.state

    def _wait(self, view: RankView) -> WaitText | None:
        if self.states[view.rank] != "running":
            return None
        call = self._call(view.rank)
        if call is None:
            return self._inner_wait(view)
        partner = _PARTNERS["send" in call.op] if is_transfer(call) else ""
        members = () if partner else self._shown_members(call.group)
        ends = (str(view.rank), str(call.peer)) if partner else ()
        key = ("call", call.group, str(call.number), *ends)
        group = self._description(call.group)
        return WaitText(view.rank, key, act_of(call), members, partner, call.began_s, group)

    def _call(self, rank: int) -> Call | None:
        """The call from Python in which a rank, or its GPU, waits; another cell's log is no log."""
        log = self.views[rank].log
        if log is None or log.run != self.run or log.state != "running":
            return None
        call = log.waiting
        # Work that C++ has issued is waited for without a number: the recorder knows which it is.
        if call is None or (call.op == "wait" and not call.number):
            return self._queued_call(rank)
        return call

    def _in_other_threads(self, rank: int) -> list[tuple[BlockingRank, ...]]:
        """The parts lacking in further calls that the rank is in at the same time."""
        log = self.views[rank].log
        if log is None or self._call(rank) is None:
            return []
        # The newest is the main thread's: the call that it waits in, or the wait for its GPU.
        return [tuple(self._call_needs(rank, call)) for call in log.waits[:-1]]

    def _inner_wait(self, view: RankView) -> WaitText | None:
        """A wait in a call that C++ issued, or for a call that a GPU has to do.

        Gloo's recorder never sees some calls end. So a pending one is waited in only if the main
        thread sleeps and a rank's part is missing.
        """
        for pending in self._pending(view.rank):
            call, group = pending.call, pending.call.group
            act = act_inside(call, view.snapshot.place if view.snapshot else None)
            key = ("device" if pending.is_on_device else "inner", group, str(call.number))
            members, since_s = self._shown_members(group), last_event_s(view.log)
            return WaitText(view.rank, key, act, members, "", since_s, self._description(group))
        return None

    def _queued_call(self, rank: int) -> Call | None:
        """The oldest call from Python that the rank's GPU waits in, and the rank for the GPU.

        A call on a GPU is over for Python once it is queued. It is waited in if the main thread
        is held while the GPU has calls of its group to do, and a rank's part is missing.
        """
        snapshot, log = self.views[rank].snapshot, self.views[rank].log
        if log is None or snapshot is None or not snapshot.is_held or log.run != self.run:
            return None
        groups = {call.group for call in snapshot.device_calls if call.is_pending}
        queued = (
            call
            for call in log.calls
            if call.run == self.run and call.group in groups and call.state in {"done", "issued"}
        )
        return next((call for call in queued if call.number and self._is_lacking(rank, call)), None)

    def _is_lacking(self, rank: int, call: Call) -> bool:
        """Whether a log shows that a rank has not come to this call, or came with another."""
        mine = self.views[rank].log
        if mine is None or is_transfer(call):
            return mine is not None and self._lacks_partner(mine, call)
        for q in self._members(call.group):
            log = self.views[q].log
            if q == rank or log is None:
                continue
            if log.generation != mine.generation or count_in(log, call.group) < call.number:
                return True
            theirs = self._history(log, call.group).calls.get(call.number)
            if theirs is not None and act_of(theirs).kind != act_of(call).kind:
                return True
        return False

    def _lacks_partner(self, mine: CallLog, call: Call) -> bool:
        """Whether the other end of a transfer has made fewer; not where its log is not known."""
        view = None if call.peer is None else self.views.get(call.peer)
        if view is None or view.log is None or call.peer is None:
            return False
        ends = (mine.rank, call.peer) if "send" in call.op else (call.peer, mine.rank)
        count = view.log.transfers.get((call.group, *ends), 0)
        return view.log.generation != mine.generation or count < call.number

    def _pending(self, rank: int) -> list[_PendingCall]:
        """Calls in a recorder that lack a rank's part."""
        view = self.views[rank]
        snapshot, log = view.snapshot, view.log
        if snapshot is None:
            return []
        others = [q for q in self.views if q != rank]
        for call in snapshot.device_calls if snapshot.is_held else ():
            entry = _PendingCall(call, is_on_device=True)
            is_due = call.is_pending and not call.is_transfer
            if is_due and any(self._lacks_part(q, entry) for q in others):
                return [entry]  # the oldest: those behind it wait for it
        if not (snapshot.is_in_torch and snapshot.is_asleep):
            return []
        # Python has issued a call there and does not wait for it: this may be it.
        issued = {
            call.group
            for call in (() if log is None else log.calls)
            if call.state == "issued" and call.run == self.run
        }
        entries = [
            _PendingCall(replace(call, group=group), is_open=group in issued)
            for group, call in snapshot.newest.items()
            if call.is_pending
        ]
        entries = [e for e in entries if any(self._lacks_part(q, e) for q in others)]
        return [entry for entry in entries if not entry.is_open] or entries

    def _lacks_part(self, q: int, pending: _PendingCall) -> bool:
        """Whether q, a member of the group, has not come to this call, or came with another."""
        if q not in self._members(pending.call.group):
            return False
        newest, theirs = self._part_inside(q, pending)
        is_behind = newest is None or newest.number < pending.call.number
        return is_behind or (theirs is not None and _differ(theirs, pending.call))

    def _part_inside(
        self, q: int, pending: _PendingCall
    ) -> tuple[FlightRecorderEntry | None, FlightRecorderEntry | None]:
        """(q's newest call of the group in the recorder, its call of this number if there)."""
        snapshot, group = self.views[q].snapshot, pending.call.group
        if snapshot is None:
            return None, None
        calls = [snapshot.newest[group]] if group in snapshot.newest else []
        if pending.is_on_device:
            calls = [c for c in snapshot.device_calls if c.group == group and not c.is_transfer]
        same = (call for call in calls if call.number == pending.call.number)
        return (calls[-1] if calls else None), next(same, None)

    def _needs(self, rank: int) -> Iterator[BlockingRank]:
        call = self._call(rank)
        if call is None:
            for pending in self._pending(rank):
                for q in self._members(pending.call.group):
                    if q != rank and (need := self._inner_need(q, pending)):
                        yield replace(need, is_open=need.is_open or pending.is_open)
        else:
            # No thread waits for issued work: a GPU may do something else before it.
            is_open = call.state == "issued"
            needs = self._call_needs(rank, call)
            yield from (replace(need, is_open=need.is_open or is_open) for need in needs)

    def _call_needs(self, rank: int, call: Call) -> Iterator[BlockingRank]:
        if is_transfer(call):
            yield from self._transfer_needs(rank, call)
        elif call.number:
            yield from self._collective_needs(rank, call)

    def _inner_need(self, q: int, pending: _PendingCall) -> BlockingRank | None:
        call, snapshot = pending.call, self.views[q].snapshot
        newest, theirs = self._part_inside(q, pending)
        if newest is None or newest.number < call.number:
            # A recorder that knows other groups, but not this one, has seen no call in it.
            is_read = snapshot is not None and bool(snapshot.newest or pending.is_on_device)
            return self._missing(q, is_open=not (self.states[q] in OVER or is_read))
        if theirs is None:
            return None
        if _differ(theirs, call):
            wait = self.waits.get(q)
            place = wait.act.place if wait is not None else None
            act = CallText(theirs.op, theirs.detail, place)
            return BlockingRank(q, "instead" if theirs.op != call.op else "unlike", theirs=act)
        if theirs.is_pending and self.states[q] == "ended":
            return self._need(q, "ended in", is_open=True)  # its part may have been done
        return None

    def _collective_needs(self, rank: int, call: Call) -> Iterator[BlockingRank]:
        mine = self.views[rank].log
        others = [q for q in self._members(call.group) if q != rank]
        needs = [need for q in others if (need := self._part(q, rank, call)) is not None]
        if not needs and mine is not None:  # all have come: only an earlier mistake can explain it
            earlier = (self._earlier(q, mine, call, is_open=True) for q in others)
            needs = [need for need in earlier if need is not None]
        # A rank that ended after issuing the call may have done its part: no reason beside others.
        firm = [need for need in needs if need.kind != "ended in" or not need.is_open]
        yield from firm or needs

    def _part(self, q: int, rank: int, call: Call) -> BlockingRank | None:
        """Why q's part in this call is missing; None where it is there."""
        mine, log = self.views[rank].log, self.views[q].log
        if log is None or mine is None:
            return self._missing(q, is_open=True)
        is_same = log.generation == mine.generation
        if not is_same or count_in(log, call.group) < call.number:
            broken = self._broken_in(log, call)
            if broken is not None:
                return self._unfit(q, act_of(call), broken)
            earlier = None if q in self.waits else self._earlier(q, mine, call)
            return (earlier if is_same else None) or self._missing(q)
        # All ranks in one call need the same of each other.
        key = q, call.group, call.number, call.op, call.detail
        if key not in self._parts:
            theirs = self._history(log, call.group).calls.get(call.number)
            self._parts[key] = None if theirs is None else self._unfit(q, act_of(call), theirs)
        return self._parts[key]

    def _broken_in(self, log: CallLog, call: Call) -> Call | None:
        """A rank's call of this number in this cell that raised, for which it is not counted."""
        key = self.run, call.group, call.number
        raised = (c for c in reversed(log.calls) if c.state == "raised" and not is_transfer(c))
        return next((c for c in raised if (c.run, c.group, c.number) == key), None)

    def _unfit(
        self, q: int, mine: CallText, theirs: Call, *, fits_any: bool = False
    ) -> BlockingRank | None:
        """Why q's call of the same number is no part in this one; None where it is."""
        act, state = act_of(theirs), self.states[q]
        differs = not fits_any and act.kind != mine.kind
        if state == "ended" and theirs.state in {"waiting", "issued"}:
            is_open = theirs.state == "issued" and not differs  # its part may have been done
            return self._need(q, "ended in", act if differs else None, is_open=is_open)
        if theirs.state == "raised":
            return self._need(q, "raised in", act if differs else None)
        if differs:
            kind = "instead" if act.op != mine.op else "unlike"
            return BlockingRank(q, kind, theirs=act)
        if state == "stopped" and theirs.state != "done":
            return self._need(q, "stopped")
        return None

    def _earlier(
        self, q: int, mine: CallLog, call: Call, *, is_open: bool = False
    ) -> BlockingRank | None:
        """The first number before this at which q called another op, in this cell."""
        log = self.views[q].log
        if log is None or log.generation != mine.generation:
            return None
        history, other_history = self._history(mine, call.group), self._history(log, call.group)
        if history.ops == other_history.ops:  # nearly always
            return None
        for number, my_call in history.calls.items():
            their_call = other_history.calls.get(number)
            if (
                number < call.number
                and my_call.run == self.run
                and their_call
                and their_call.op != my_call.op
            ):
                acts = act_of(their_call), act_of(my_call)
                return BlockingRank(q, "earlier", theirs=acts[0], mine=acts[1], is_open=is_open)
        return None

    def _history(self, log: CallLog, group: str) -> _CallHistory:
        history = self._histories.get((log.rank, group))
        if history is None:
            count = count_in(log, group)
            by_number = {
                call.number: call  # the newest of a number: older ones were before a recovery
                for call in log.calls
                if call.group == group and 0 < call.number <= count and not is_transfer(call)
            }
            calls = dict(sorted(by_number.items()))
            ops = tuple((number, call.op) for number, call in calls.items())
            history = self._histories[log.rank, group] = _CallHistory(calls, ops)
        return history

    def _transfer_needs(self, rank: int, call: Call) -> Iterator[BlockingRank]:
        if call.peer is None:
            yield from self._any_needs(rank, call)
            return
        is_send = "send" in call.op
        ends = (rank, call.peer) if is_send else (call.peer, rank)
        mine = self.views[rank].log
        view = self.views.get(call.peer)
        if view is None or mine is None or not call.number:
            return
        log = view.log
        if log is None:
            yield self._missing(call.peer, is_open=True)
        elif (
            log.generation != mine.generation
            or log.transfers.get((call.group, *ends), 0) < call.number
        ):
            yield self._missing(call.peer)
        else:
            theirs = _other_end(log, call, rank)
            need = theirs and self._unfit(call.peer, act_of(call), theirs, fits_any=True)
            if need:
                yield need

    def _any_needs(self, rank: int, call: Call) -> Iterator[BlockingRank]:
        """A recv from any rank: none is needed for sure, but all until one has sent."""
        mine = self.views[rank].log
        others = [q for q in self._members(call.group) if q != rank]
        logs = [self.views[q].log for q in others]
        for q, log in zip(others, logs, strict=True):
            channel = (call.group, q, rank)
            sent = 0 if log is None else log.transfers.get(channel, 0)
            if mine is not None and sent > mine.transfers.get(channel, 0):
                return
        for q, log in zip(others, logs, strict=True):
            yield self._missing(q, is_open=log is None)

    def _missing(self, q: int, *, is_open: bool = False) -> BlockingRank:
        """Report that rank q has not come, and what it does instead."""
        state = self.states[q]
        snapshot = self.views[q].snapshot
        is_done = q in self.waits or state in {"finished", "raised"}
        if is_done and snapshot is not None and snapshot.free_threads:
            return BlockingRank(q, "threaded", ", ".join(snapshot.free_threads), is_open=True)
        if state == "running" and q in self.waits:
            return BlockingRank(q, "waiting", theirs=self.waits[q].act, is_open=is_open)
        if is_open and state == "ended":  # nothing comes any more, whether it had called it or not
            return self._need(q, "gone")
        if is_open and state in OVER:
            state = "unknown"
        return self._need(q, state, is_open=is_open)

    def _need(
        self, q: int, kind: str, theirs: CallText | None = None, *, is_open: bool = False
    ) -> BlockingRank:
        view = self.views[q]
        at = view.snapshot.place if view.snapshot is not None and kind == "running" else None
        return BlockingRank(q, kind, view.how, at, theirs, is_open=is_open)

    def _members(self, group: str) -> tuple[int, ...]:
        """The ranks of a group, as far as anybody's log knows it; else those that name it."""
        for view in self.views.values():
            if view.log is not None and group in view.log.groups:
                ranks = view.log.groups[group].ranks
                return tuple(rank for rank in ranks if rank in self.views)
        if group in {"", "0"}:  # torch's name of the world
            return tuple(self.views)
        return tuple(
            rank
            for rank, view in self.views.items()
            if (snapshot := view.snapshot)
            and group in {*snapshot.newest, *(call.group for call in snapshot.device_calls)}
        )

    def _description(self, group: str) -> str:
        """The name of a group, from a rank whose log knows it."""
        logs = (view.log for view in self.views.values() if view.log is not None)
        descriptions = (log.groups[group].description for log in logs if group in log.groups)
        return next(filter(None, descriptions), group)

    def _shown_members(self, group: str) -> tuple[int, ...]:
        members = self._members(group)
        return () if set(members) == set(self.views) else members

    def _is_at_work(self, rank: int) -> bool:
        """Whether it is not the main thread that waits: that one may still end the cell."""
        view = self.views[rank]
        is_new = view.looked_s >= last_event_s(view.log)
        return view.snapshot is not None and is_new and view.snapshot.is_free

    def _has_thread_in_call(self, rank: int) -> bool:
        """Whether it has ended the cell with a thread left in a call, after which it may go on."""
        log = self.views[rank].log
        return self.states[rank] != "ended" and log is not None and log.waiting is not None

    @cached_property
    def movable(self) -> set[int]:
        """Waiting ranks from which a chain of needs leads to a rank that may still come."""
        # A call that releases a rank's other threads could release the rank.
        links = {r: [*self.needs[r], *(n for o in self._others[r] for n in o)] for r in self.needs}
        movable = {rank for rank in self.needs if self._is_at_work(rank)}
        over = {rank for rank, state in self.states.items() if state in OVER}
        fixed = {r for r in over if not self._has_thread_in_call(r)} | set(self.needs)
        while True:
            more = {
                rank
                for rank, needs in links.items()
                if rank not in movable
                and any(n.is_open or n.rank not in fixed or n.rank in movable for n in needs)
            }
            if not more:
                return movable
            movable |= more


def is_transfer(call: Call) -> bool:
    """Whether it is a send or a recv, also one from any rank."""
    return "send" in call.op or "recv" in call.op


def count_in(log: CallLog, group: str) -> int:
    """Collectives that the rank has made in the group."""
    return log.groups[group].calls if group in log.groups else 0


def last_event_s(log: CallLog | None) -> float:
    """When the rank was last seen to do something; a wait that C++ began is younger."""
    if log is None:
        return 0.0
    times = [log.since_s, *(call.ended_s or call.began_s for call in log.calls[-1:])]
    return max(times)


@dataclass(frozen=True, slots=True)
class _PendingCall:
    """A call that a rank waits in by a flight recorder; it may be open whether it does."""

    call: FlightRecorderEntry
    is_on_device: bool = False
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class _CallHistory:
    """A rank's collectives in one group since the last recovery, by number, and their ops."""

    calls: Mapping[int, Call]
    ops: tuple[tuple[int, str], ...]


def _other_end(log: CallLog, call: Call, rank: int) -> Call | None:
    """The call of the same number at the other end of a transfer."""
    key, is_send = (call.group, call.number, rank), "send" in call.op
    transfers = (c for c in reversed(log.calls) if is_transfer(c) and ("send" in c.op) != is_send)
    return next((c for c in transfers if (c.group, c.number, c.peer) == key), None)


def _differ(mine: FlightRecorderEntry, theirs: FlightRecorderEntry) -> bool:
    """Whether two calls of one number do not fit together."""
    if mine.number != theirs.number:
        return False
    return act_inside(mine, None).kind != act_inside(theirs, None).kind
