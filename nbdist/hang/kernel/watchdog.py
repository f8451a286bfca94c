"""Watches a running cell: who waits for whom, what to say of it, when to abort."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from nbdist.core.failures import ranks_are, ranks_phrase
from nbdist.hang import diagnose, text, wait_graph
from nbdist.hang.kernel.health import LOOK_PAUSE_S, Health
from nbdist.hang.records import RankView, WaitFinding

# How often call logs are read while a cell runs.
PAUSE_S = 0.25
# The same once the cell is being interrupted.
URGENT_PAUSE_S = 0.1
# A rank that has waited this long is looked at.
AFTER_S = 1.0
# A rank that is only late is reported after this long, and again after LATE_AGAIN_S.
LATE_S = 5.0
LATE_AGAIN_S = 60.0

States = Mapping[int, tuple[str, str]]


class Watchdog:
    """The waits of one cell.

    Attributes:
        next_s: When to look again.
    """

    def __init__(self, health: Health, began_s: float, grace_s: float, *, is_quiet: bool = False):
        """Watch a cell that was sent at `began_s`.

        A certain deadlock is left alone for `grace_s` after its report. A quiet watchdog reports
        deadlocks alone, and no finding that depends on time.
        """
        self._health = health
        self._grace_s = grace_s
        self._is_quiet = is_quiet
        self.next_s = began_s + AFTER_S - PAUSE_S
        self._was_urgent = False
        self._views: list[RankView] = []
        self._last: tuple[WaitFinding, ...] = ()
        self._findings: dict[tuple[int, ...], tuple[WaitFinding, float]] = {}
        self._reported: list[WaitFinding] = []
        self._reported_stopped: set[int] = set()
        self._reported_s: float | None = None
        self._late_s = math.inf
        self._late_again_s = 0.0
        self._states: dict[int, str] = {}
        health.forget_snapshots()

    @property
    def deadlock(self) -> WaitFinding | None:
        """The certain deadlock as it stands now, once it has been reported."""
        if self._reported_s is None:
            return None
        return next((finding for finding in self._last if finding.is_certain), None)

    @property
    def abort_s(self) -> float:
        """When the deadlock is to be aborted."""
        return math.inf if self._reported_s is None else self._reported_s + self._grace_s

    @property
    def waiting(self) -> dict[int, str]:
        """The ranks that are inside a collective now, each with where."""
        return {
            view.rank: place
            for view in self._views
            if (place := text.state_of(view.log, view)) and view.state == "running"
        }

    @property
    def places(self) -> dict[int, str]:
        """Places of ranks in the user's code, as far as they have answered."""
        return {
            view.rank: text.place_text(view.snapshot.place)
            for view in self._views
            if view.snapshot is not None and view.snapshot.place is not None
        }

    @property
    def stopped(self) -> frozenset[int]:
        """The ranks whose process a signal has stopped."""
        return frozenset(view.rank for view in self._views if view.state == "stopped")

    def look(
        self, now_s: float, states: Callable[[], States], *, is_urgent: bool = False
    ) -> list[str]:
        """Read the logs if it is time, and return the lines to print.

        If it is urgent, ask the ranks what they do, whether or not a rank seems to wait.
        """
        if is_urgent and not self._was_urgent:
            self.next_s = now_s  # who waits now has to be known, not who waited a moment ago
        self._was_urgent = is_urgent
        if now_s < self.next_s:
            return []
        self.next_s = now_s + (URGENT_PAUSE_S if is_urgent else PAUSE_S)
        cell_states = states()
        for rank, (state, _) in cell_states.items():
            # Once a rank has ended its cell, only its later answers count.
            if state != self._states.get(rank) and state != "running":
                self._health.forget_snapshot(rank)
            self._states[rank] = state
        self._views = self._health.views(cell_states)
        findings = diagnose.diagnose(self._views, now_s, AFTER_S)
        before, self._findings = self._findings, self._findings_since(findings, now_s)
        if is_urgent or findings or self._is_quiet_too_long(now_s):
            asked = [view.rank for view in self._views if view.state != "ended"]
            firm = [self._findings[finding.waiting][1] for finding in findings if _is_firm(finding)]
            urgent = [now_s - LOOK_PAUSE_S] if is_urgent else []
            self._health.ask(asked, now_s, newer_than_s=max([*firm, *urgent], default=0.0))
        # A finding must be seen twice: then a rank that begins to wait a moment later is in it.
        steady = [
            finding
            for finding in findings
            if finding.waiting in before and self._is_steady(finding, now_s)
        ]
        self._last = findings
        if not any(finding.is_certain for finding in findings):
            self._reported_s = None
        return [*self._stopped_lines(), *self._report(steady, now_s)]

    def _is_quiet_too_long(self, now_s: float) -> bool:
        """Whether a rank is done, or no rank has made a call for a while: does it wait in C++?"""
        since_s = [wait_graph.last_event_s(view.log) for view in self._views]
        is_done = any(view.state != "running" for view in self._views)
        return is_done or now_s - max(since_s, default=now_s) >= AFTER_S

    def _findings_since(
        self, findings: Sequence[WaitFinding], now_s: float
    ) -> dict[tuple[int, ...], tuple[WaitFinding, float]]:
        """The findings by their ranks, each with since when it is just that."""
        since = {}
        for finding in findings:
            old, old_s = self._findings.get(finding.waiting, (None, now_s))
            is_same = old is not None and _essence(finding) == _essence(old)
            since[finding.waiting] = finding, old_s if is_same else now_s
        return since

    def _is_steady(self, finding: WaitFinding, now_s: float) -> bool:
        """Whether a finding stands since an earlier look, and rests on facts alone.

        Logs and answers are of different moments: together they can show a state that never was.
        Where all of them are the same before and after a moment, they were so in that moment.
        """
        if not _is_firm(finding):
            return True
        _, since_s = self._findings[finding.waiting]
        ranks = {view.rank for view in self._views}
        logs = [view.log for view in self._views if view.rank in finding.waiting]
        if all(log is not None and log.waiting is not None for log in logs):
            # Else every recorder counts, also for what it lacks.
            ranks = {*finding.waiting, *finding.blamed}
        needed = [v for v in self._views if v.rank in ranks and v.state != "ended"]
        return since_s < now_s and all(v.snapshot and v.looked_s >= since_s for v in needed)

    def _report(self, steady: Sequence[WaitFinding], now_s: float) -> list[str]:
        lines = []
        for finding in steady:
            if finding.is_certain:
                self._reported_s = now_s if self._reported_s is None else self._reported_s
            # It may have been reported before further ranks began to wait.
            is_reported = any(
                set(old.waiting) <= set(finding.waiting) and set(old.blamed) >= set(finding.blamed)
                for old in self._reported
            )
            if _is_firm(finding) and not is_reported:
                self._reported.append(finding)
                lines.append(finding.text)
        if any(finding.is_certain for finding in steady) or self._is_quiet:
            return lines
        return lines + self._late([finding for finding in steady if not _is_firm(finding)], now_s)

    def _late(self, steady: Sequence[WaitFinding], now_s: float) -> list[str]:
        """Report ranks that are only late; seldom, since a slow rank may be late in every step."""
        if not steady:
            self._late_s = math.inf
            return []
        self._late_s = min(self._late_s, now_s)
        if now_s < self._late_s + LATE_S - AFTER_S or now_s < self._late_again_s:
            return []
        self._late_again_s = now_s + LATE_AGAIN_S
        return [finding.text for finding in steady]

    def _stopped_lines(self) -> list[str]:
        new = [v.rank for v in self._views if v.state == "stopped"]
        unreported = [rank for rank in new if rank not in self._reported_stopped]
        self._reported_stopped = set(new)
        if not unreported:
            return []
        who = ranks_phrase(unreported)
        return [f"{ranks_are(unreported)} stopped (SIGSTOP); kill -CONT resumes {who}"]


def _is_firm(finding: WaitFinding) -> bool:
    """Whether a finding is reported at once: it does not depend on time."""
    return finding.is_certain or finding.is_doomed


def _essence(finding: WaitFinding) -> tuple[object, ...]:
    """The fields that make two findings the same: where a rank computes does not matter."""
    return finding.is_certain, finding.is_doomed, finding.blamed, finding.marks
