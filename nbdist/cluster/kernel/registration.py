"""Waiting for engines that have been started, and telling why one does not come."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbdist.cluster.kernel import run_dir as cluster_run_dir
from nbdist.cluster.kernel.processes import Exit
from nbdist.core.failures import ranks_phrase
from nbdist.core.progress import Reporter
from nbdist.errors import StartError

POLL_S = 0.01
# After this long without news the controller is asked: a message of it may have been lost.
ASK_S = 0.25
# The line of an engine (ipyparallel 9.2) that gets no answer from the controller.
_UNANSWERED = re.compile(r"at tcp://([^\s:]+|\[[^\]]+\]):\d+.*Registration timed out", re.DOTALL)
# Enough for all that mpiexec says of too few slots, and for the end of a traceback.
LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class EngineRegistration:
    """Engines on their way.

    Attributes:
        run_dir: Where engines write why they could not join.
        expected: Their engine ids, which are ranks where it matters.
        exits: The ends so far of processes that matter: engine, None for the controller -> end.
        output: The output of a process (engine, None for the controller).
        ask: Asks the controller whom it lists; `registered` has those soon.
        state: The batch system's word on their job; empty without one.
    """

    run_dir: Path
    expected: tuple[int, ...]
    exits: Callable[[], Mapping[int | None, Exit]]
    registered: Callable[[], Collection[int]]
    output: Callable[[int | None], str]
    ask: Callable[[], None] = lambda: None
    state: Callable[[], str] = lambda: ""

    def wait(
        self,
        end_s: float,
        deadline_s: float,
        progress: Reporter,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Return once all are there; `check` is called often, and may raise to break off.

        It gives up at `end_s` of the monotonic clock; the message names the whole `deadline_s`.

        Raises:
            StartError: When a process ends, or at the end, naming who is missing.
        """
        reported, asked_s = -1, time.monotonic()
        while (ready := len(self.registered())) < len(self.expected):
            if ready != reported:
                progress(f"{ready} of {len(self.expected)} ranks ready")
                reported = ready
            self.raise_for_exits()
            check()
            if time.monotonic() > end_s:
                missing = self._missing()
                raise StartError(
                    f"{ready} of {len(self.expected)} ranks were ready after {deadline_s:.0f} s; "
                    f"{ranks_phrase(missing)} did not come. {self._log_tail(missing[0])}"
                    f"{self._job()}A slow start can be given more time with --timeout."
                )
            if time.monotonic() > asked_s + ASK_S:
                self.ask()
                asked_s = time.monotonic()
            time.sleep(POLL_S)

    def raise_for_exits(self) -> None:
        """Tell why a process has ended before all were there, root cause first.

        Raises:
            StartError: If one has.
        """
        exits = self.exits()
        if not exits:
            return
        ended = sorted(exits, key=lambda engine: -1 if engine is None else engine)
        # The messages are the local launcher's case, where the engine's number is the rank.
        written = {e: cluster_run_dir.failure(self.run_dir, e) for e in ended if e is not None}
        for rank, failure in written.items():
            if failure is not None and not failure["message"].startswith("rank "):
                reason = failure["message"]
                if not failure["is_explained"]:
                    reason = f"{failure['kind']}: {reason}\n{failure['traceback']}"
                raise StartError(f"rank {rank} could not join: {reason}")
        # A rank that only waited in vain for another one comes last.
        first = [engine for engine in ended if engine is None or written[engine] is None]
        if not first:
            raise StartError(next(f["message"] for f in written.values() if f is not None))
        who = "The controller" if first[0] is None else f"rank {first[0]}"
        who = exits[first[0]].starter or who
        raise StartError(
            f"{who} ended before it was ready ({exits[first[0]].how}). {self._log_tail(first[0])}"
            f"{_remedy(self.output(first[0]))}"
        )

    def _missing(self) -> list[int]:
        """The ranks for which the others wait: of local ones those that hold all back."""
        everybody = set(self.expected)
        waiting = cluster_run_dir.arrived_ranks(self.run_dir)
        return sorted(everybody - waiting if waiting else ()) or sorted(
            everybody.difference(self.registered())
        )

    def _job(self) -> str:
        state = self.state()
        return "\n    ".join(["Its job now:", *state.splitlines()]) + "\n" if state else ""

    def _log_tail(self, engine: int | None) -> str:
        lines = self.output(engine).strip().splitlines()[-LOG_LINES:]
        return "\n    ".join(["Its last lines:", *lines]) + "\n" if lines else ""


def _remedy(output: str) -> str:
    """The remedy for a process's last output; empty where none is known."""
    unanswered = _UNANSWERED.search(output)
    if unanswered is None:
        return ""
    return (
        f"It got no answer from the notebook's machine at {unanswered[1]}. Let the hosts' "
        "connections through its firewall, or name an address of it that they reach: "
        "c.Cluster.controller_ip in the profile."
    )
