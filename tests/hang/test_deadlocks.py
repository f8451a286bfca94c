"""Random programs: the diagnosis against a simulator that knows nothing of it.

Ranks run random sequences of collectives (from Python and from C++, waited for or not), sends and
recvs over random groups, one step at a time, until nobody can move. At every step what is called
certain has to be stuck for good, and in the end everybody who waits has to be called certain.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from nbdist.hang.diagnose import diagnose
from nbdist.hang.records import (
    Call,
    CallLog,
    FlightRecorderEntry,
    GroupRecord,
    RankView,
    SourceLine,
    ThreadSnapshot,
)
from tests.support.call_logs import with_calls

PROGRAMS = 150
RUN = 3


@dataclass
class Part:
    """A rank's part in a call."""

    kind: str  # "python", "inner", "send" or "recv"
    op: str
    channel: tuple[object, ...]
    total: int  # its number among all calls of the channel
    number: int  # and among those that a call log records
    is_waited: bool


@dataclass
class Rank:
    """A rank, its program and how far it is."""

    program: list[tuple[str, ...]]
    end: str
    at: int = 0
    parts: list[Part] = field(default_factory=list)
    blocked: Part | None = None

    @property
    def is_over(self) -> bool:
        return self.at == len(self.program) and self.blocked is None


class Simulation:
    """All ranks; calls meet by their total number in their channel."""

    def __init__(self, source: random.Random):
        self.random = source
        size = source.choice((2, 2, 3, 4, 6))
        self.groups = {"0": tuple(range(size))}
        for name in "123":
            members = source.sample(range(size), source.randint(2, size))
            self.groups[name] = tuple(sorted(members))
        self.met: dict[tuple[object, ...], dict[int, str]] = {}
        self.ranks = [Rank([], source.choice(("finished", "raised", "ended"))) for _ in range(size)]
        self._write()

    def _write(self) -> None:
        """Programs that fit, then mistakes: steps dropped, doubled, swapped or changed."""
        for _ in range(self.random.randint(1, 6)):
            kind = self.random.choice(("python", "python", "async", "inner", "pass", "compute"))
            if kind == "pass":
                source, target = self.random.sample(range(len(self.ranks)), 2)
                self.ranks[source].program.append(("send", str(target)))
                self.ranks[target].program.append(("recv", str(source)))
                continue
            # A recorder's newest call tells nothing of those before it: apart from these.
            name = self.random.choice({"async": "23", "inner": "01"}.get(kind, "0123"))
            op = self.random.choice(("all_reduce", "barrier")) + ("_i" if kind == "inner" else "")
            for member in self.groups[name]:
                self.ranks[member].program.append((kind, name, op))
                if kind == "async":
                    self.ranks[member].program += [("compute",)] * self.random.randint(0, 1)
        for rank in self.ranks:
            if rank.program and self.random.random() < 0.3:
                self._spoil(rank.program)
            rank.program.insert(0, ("python", "0", "barrier"))  # no flight recorder is empty

    def _spoil(self, program: list[tuple[str, ...]]) -> None:
        at = self.random.randrange(len(program))
        what = self.random.choice(("drop", "double", "swap", "cut", "change"))
        if what == "drop":
            del program[at]
        elif what == "double":
            program.insert(at, program[at])
        elif what == "swap":
            other = self.random.randrange(len(program))
            program[at], program[other] = program[other], program[at]
        elif what == "cut":
            del program[at:]
        elif program[at][0] == "python":
            program[at] = ("python", program[at][1], "reduce_all")

    def movers(self) -> list[int]:
        """The ranks that can take a step now."""
        return [
            n
            for n, rank in enumerate(self.ranks)
            if (self.is_met(n, rank.blocked) if rank.blocked else rank.at < len(rank.program))
        ]

    def is_met(self, who: int, part: Part) -> bool:
        """Whether everybody has come to this call, with the same op."""
        here = self.met[(*part.channel, part.total)]
        needed = {who, int(str(part.channel[2]))} if part.kind == "recv" else None
        if part.kind in {"send", "recv"}:
            needed = {int(str(end)) for end in part.channel[1:]}
            return needed <= set(here)
        return set(self.groups[str(part.channel[0])]) <= set(here) and len(set(here.values())) == 1

    def step(self, who: int) -> None:
        """One rank leaves its call, or makes its next step."""
        rank = self.ranks[who]
        if rank.blocked:
            rank.blocked = None
            return
        kind, *fields = rank.program[rank.at]
        rank.at += 1
        if kind == "compute":
            waiting = [p for p in rank.parts if not p.is_waited]
            if waiting:  # wait for a call that was issued before
                waiting[0].is_waited = True
                rank.blocked = waiting[0]
            return
        if kind in {"send", "recv"}:
            ends = (who, int(fields[0])) if kind == "send" else (int(fields[0]), who)
            channel: tuple[object, ...] = ("0", *ends)
            op = kind
        else:
            channel, op = (fields[0],), fields[1]
        mine = [p for p in rank.parts if p.channel == channel]
        recorded = sum(p.kind != "inner" for p in mine) + (kind != "inner")
        is_waited = kind != "async"
        part = Part(
            "python" if kind == "async" else kind, op, channel, len(mine) + 1, recorded, is_waited
        )
        rank.parts.append(part)
        self.met.setdefault((*channel, part.total), {})[who] = op
        if is_waited:
            rank.blocked = part

    def views(self) -> list[RankView]:
        return [self._view(n, rank) for n, rank in enumerate(self.ranks)]

    def _view(self, who: int, rank: Rank) -> RankView:
        state = rank.end if rank.is_over else "running"
        groups, transfers, calls = Counter[str](), Counter[tuple[str, int, int]](), []
        newest = {}
        for part in rank.parts:
            name = str(part.channel[0])
            is_over = part is not rank.blocked and part.is_waited
            if part.kind in {"python", "inner"}:
                newest[name] = FlightRecorderEntry(part.op, "f[3]", part.total, not is_over)
            if part.kind != "inner":
                calls.append(self._call(who, part, part is rank.blocked))
            if part.kind == "python":
                groups[name] += 1
            elif part.kind != "inner":
                transfers[name, int(str(part.channel[1])), int(str(part.channel[2]))] += 1
        is_inner = rank.blocked is not None
        snapshot = ThreadSnapshot(SourceLine(1, "", 1), (), is_inner, is_inner, newest)
        memberships = {n: GroupRecord(n, m, groups[n]) for n, m in self.groups.items() if who in m}
        in_log = state if state in {"finished", "raised"} else "running"
        log = CallLog(who, who, 0, RUN, in_log, 0.0, memberships, transfers, (), ())
        log = with_calls(log, *calls)
        return RankView(who, state, "x" * (state != "finished"), log, snapshot)

    def _call(self, who: int, part: Part, is_blocked: bool) -> Call:
        state = "waiting" if is_blocked else "done" if part.is_waited else "issued"
        peer = None
        if part.kind in {"send", "recv"}:
            peer = int(str(part.channel[2 if part.kind == "send" else 1]))
        place = SourceLine(1, "", part.number)
        name = str(part.channel[0])
        return Call(part.op, "f[3]", name, part.number, peer, place, RUN, 0.0, None, state)


def certain(views: list[RankView], doomed: set[frozenset[int]] | None = None) -> set[int]:
    """The ranks that are said to be stuck; those that are told of at all are told once.

    Sets of ranks of which one has to be stuck in the end are put into `doomed`.
    """
    findings = diagnose(views, 10.0)
    waiting = [rank for finding in findings for rank in finding.waiting]
    assert len(waiting) == len(set(waiting))
    for finding in findings:
        assert finding.text
        assert bool(finding.blamed) == (finding.is_certain or finding.is_doomed)
        if doomed is not None and finding.is_doomed:
            doomed.add(frozenset(finding.waiting))
    return {rank for finding in findings if finding.is_certain for rank in finding.waiting}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.faults) for n in (1, 2, 3))]
)
def test_random_programs(seed: int) -> None:
    """Certain is what never moves again; in the end, all who wait and nobody else."""
    deadlocks = n_doomed = 0
    for program in range(PROGRAMS):
        number = seed * PROGRAMS + program
        print(f"seed {number}")  # noqa: T201  # shown when it fails
        simulation = Simulation(random.Random(number))
        accused: set[int] = set()
        doomed: set[frozenset[int]] = set()
        while movers := simulation.movers():
            accused |= certain(simulation.views(), doomed)
            who = simulation.random.choice(movers)
            assert who not in accused
            simulation.step(who)
        stuck = {n for n, rank in enumerate(simulation.ranks) if rank.blocked}
        assert certain(simulation.views()) == stuck
        assert accused <= stuck
        assert all(ranks & stuck for ranks in doomed)
        n_doomed += len(doomed)
        deadlocks += bool(stuck)
    # Both outcomes have to be seen, or nothing was shown.
    assert PROGRAMS // 5 < deadlocks < PROGRAMS * 4 // 5
    assert n_doomed > PROGRAMS // 20
