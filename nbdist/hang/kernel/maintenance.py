"""Keeps ranks fit for the next cell: groups made anew, ranks and controller replaced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.failures import ranks_phrase
from nbdist.core.units import seconds
from nbdist.errors import Interrupted, NbdistError, NotRunning, OptionError
from nbdist.hang import diagnose
from nbdist.hang.kernel import restart as hang_restart
from nbdist.hang.kernel.group_recovery import GroupRecovery, RecoveryOutcome
from nbdist.hang.kernel.health import Health
from nbdist.hang.kernel.restart import RestartResult
from nbdist.rpc.kernel import sigint

RESTART_S = 120.0
# Between two looks at ranks that no cell watches any more.
LOOK_PAUSE_S = 0.25
POLL_S = 0.01
# Ranks that fail for the same reason do so within this time of each other.
RELEASE_S = 1.0


class Maintenance:
    """The work on ranks that is due between their cells.

    Attributes:
        ended_by_us: The ranks that are being ended on purpose.
    """

    def __init__(self, ranks: Ranks, health: Health):
        self.ended_by_us: set[int] = set()
        self._ranks = ranks
        self._health = health
        self._given_up: set[int] = set()
        self._notes: list[str] = []

    def take_notes(self) -> list[str]:
        """Return unreported work and events of the hosts, a line each, and forget them."""
        notes, self._notes = self._notes, []
        return notes + self._ranks.cluster.engine_set.take_notes()

    def make_whole(self) -> None:
        """Replace a controller that has ended, and ranks that the user gave up on.

        Raises:
            StartError: If the new one does not come.
        """
        self.reconnect()
        if self._given_up and not self._ranks.is_stopped:
            restarted = self.restart(sorted(self._given_up), RESTART_S, lambda _text: None)
            self._notes += [
                f"{ranks_phrase(restarted.ranks)} replaced in {seconds(restarted.elapsed_s)}",
                *restarted.notes,
            ]

    def reconnect(self) -> None:
        """Replace a controller that has ended; the ranks keep all they have.

        Raises:
            StartError: If the new one does not come.
            OptionError: If this profile's cannot be started again.
        """
        if not self._ranks.is_stopped:
            note = hang_restart.reconnect(self._ranks)
            self._notes += [note] if note else []
            self._release_unheard()

    def _release_unheard(self) -> None:
        """Abort what can never end in a cell that ended for the notebook with its controller."""
        ranks, health = self._ranks, self._health
        certain: set[str] | None = None
        for _ in range(2):
            unheard = ranks.cluster.unheard.intersection(ranks.busy_ranks)
            if not unheard:
                return
            health.ask(unheard, time.monotonic())
            time.sleep(LOOK_PAUSE_S)
            findings = diagnose.diagnose(list(health.views_now().values()), time.monotonic())
            texts = {finding.text for finding in findings if finding.is_certain}
            certain = texts if certain is None else certain & texts
        if certain:
            health.abort()
            self._notes += [f"{text}; aborted" for text in sorted(certain)]

    def restart(
        self,
        ranks: Sequence[int] | None,
        deadline_s: float,
        progress: Callable[[str], None],
    ) -> RestartResult:
        """Put new processes in the place of ranks; None for those that have ended.

        Raises:
            NotRunning: After the ranks were stopped.
            OptionError: If none is named and none has ended; see restart.restart.
            RankBusy, StartError, NbdistError, Interrupted: See restart.restart.
        """
        if self._ranks.is_stopped:
            raise NotRunning("These ranks were stopped. %dist_init starts new ones.")
        hang_restart.check_launcher(self._ranks)
        chosen = self._health.dead if ranks is None else tuple(ranks)
        if not chosen:
            last = self._ranks.ranks[-1]
            raise OptionError(
                f"No rank has ended. %dist_restart {last} replaces rank {last}, whose variables "
                "are then lost; %dist_reset restarts all ranks."
            )
        self.ended_by_us |= set(chosen)
        try:
            restarted = hang_restart.restart(
                self._ranks, self._health, chosen, deadline_s, progress
            )
        finally:
            self.ended_by_us -= set(chosen)
        self._given_up -= set(restarted.ranks)
        self.ended_by_us -= set(restarted.ranks)  # those that an earlier cell gave up on, too
        self._health.watch_processes()
        return restarted

    @property
    def can_replace(self) -> bool:
        """Whether ranks can be given up: not where other launchers than nbdist's start them."""
        return self._ranks.cluster.can_restart

    def give_up(self, ranks: Sequence[int]) -> None:
        """End ranks that take no interrupt; the next cell begins with their replacement."""
        self._given_up |= set(ranks)
        self.ended_by_us |= set(ranks)
        engine = self._ranks.topology.engine_of_rank
        self._ranks.cluster.processes.end_engines([engine(rank) for rank in ranks])

    def release(self, futures: Sequence[Future[Any]]) -> None:
        """Break off the calls that ranks still wait in when another rank has failed.

        Ranks that answer soon by themselves are left alone.
        """
        end_s = time.monotonic() + RELEASE_S
        try:
            while not all(future.done() for future in futures):
                if time.monotonic() > end_s:
                    self._health.abort()
                    return
                time.sleep(POLL_S)
        except KeyboardInterrupt:  # whoever presses again does not want to wait
            self._health.abort()
            raise

    def recover(self, *, is_certain: bool = True) -> RecoveryOutcome:
        """Make the groups anew and wait for it.

        Unless it is certain, only where the ranks have made different numbers of calls.

        Raises:
            Interrupted: If the user interrupted it; the next cell begins with it.
        """
        presses_or_answers: SimpleQueue[bool] = SimpleQueue()  # a signal handler may put
        recovery = GroupRecovery(self._ranks, self._health, time.monotonic(), is_certain=is_certain)
        recovery.on_answer = lambda: presses_or_answers.put(False)
        with sigint.deferred_sigint() as pressed:
            pressed.send_to(lambda: presses_or_answers.put(True))
            while (pause_s := recovery.step(time.monotonic())) is not None:
                with contextlib.suppress(Empty):
                    if presses_or_answers.get(timeout=pause_s):
                        recovery.give_up()
                        raise Interrupted("the groups are recreated before the next cell")
        return recovery.outcome or RecoveryOutcome()

    def settle(self) -> None:
        """After collectives of nbdist's own that failed or were interrupted: back in step.

        Raises:
            Interrupted: If the user interrupts this as well; the next cell begins with it.
        """
        if not self._health.needs_recovery:  # else the next cell begins with it
            self._notes += self.recover(is_certain=False).lines

    def recover_if_needed(self) -> None:
        """Do what an earlier cell could not: it was given back while a rank was still busy.

        Raises:
            NbdistError: If the groups cannot be made anew.
            Interrupted: If the user interrupted it.
        """
        if self._health.needs_recovery and not self._ranks.busy_ranks:
            outcome = self.recover()
            if outcome.problem:
                raise NbdistError(f"The cell was not run: {outcome.problem}.")
            self._notes += outcome.lines
