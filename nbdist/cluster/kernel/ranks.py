"""The ranks of a started cluster: who they are, calls to them, interrupts, how they end.

Only here do rank and engine meet: outside, everything is a rank.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from nbdist.cluster.kernel import run_dir
from nbdist.cluster.kernel.cluster import Cluster
from nbdist.cluster.kernel.processes import Exit
from nbdist.core.failures import ranks_phrase
from nbdist.core.ranks import parse_ranks, rank_label
from nbdist.core.topology import Topology
from nbdist.errors import Interrupted, NotRunning, RankGone
from nbdist.rpc.kernel import gather, sigint
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.strategy.choice import Strategy

T = TypeVar("T")

POLL_S = 0.01
CALL_DEADLINE_S = 30.0

prepare: RankFunction[[int | None], Topology] = RankFunction("nbdist.engine.join:prepare")
adopt_notebook: RankFunction[[list[str], str], None] = RankFunction(
    "nbdist.engine.join:adopt_notebook"
)
# The memory by kind, asked of a rank's control thread by `ask`.
memory_bytes: RankFunction[[], dict[str, int]] = RankFunction("memory")
# The name of the main thread: a rank that answers runs cells that are sent to it.
main_thread_name: RankFunction[[], str] = RankFunction("nbdist.engine.responder:ping")
barrier: RankFunction[[str, float], float] = RankFunction("nbdist.engine.join:barrier")
current_strategy: RankFunction[[], Strategy] = RankFunction("nbdist.parallel.live.registry:current")
set_strategy: RankFunction[[Strategy], None] = RankFunction(
    "nbdist.parallel.live.registry:set_choice"
)


class RunningCell(Protocol):
    """The part of a running cell that a caller of its ranks needs."""

    run_id: int
    is_over: bool  # nobody waits for it any more

    @property
    def number(self) -> int | None:
        """The notebook's cell number; None where there is none."""

    def press(self) -> None:
        """The user has pressed interrupt."""

    def exited(self, rank: int) -> None:
        """The process of a rank has ended."""

    def cut_off(self, why: str, what_now: str) -> None:
        """Nothing more can be heard from any rank."""


class Ranks:
    """The ranks of a cluster, and the way to them.

    The functions that keep ranks fit for their next call are set by packages above.

    Attributes:
        topology: Which engine has which rank.
        seed: Set on every rank, also on one that replaces another.
        cells: Rank -> the cell that it runs, since when; of idle ranks nothing.
        ended_runs: Rank -> the newest cell whose end was heard of, by its `run_id`.
        strategy_chosen: The last choice, for a process that takes a rank's place; None without
            one.
    """

    def __init__(self, cluster: Cluster, topology: Topology, *, seed: int | None = None):
        self.cluster = cluster
        self.topology = topology
        self.seed = seed
        self.cells: dict[int, tuple[RunningCell, float]] = {}
        self.ended_runs: dict[int, int] = {}
        self.strategy_chosen: Strategy | None = None
        self._was_stopped = False
        # Replaces a controller that has ended, and ranks that the user gave up on.
        self.make_whole: Callable[[], None] = lambda: None
        # Refuses ranks that can take nothing now: as `check_alive`, or with a RankBusy.
        self.check_ready: Callable[[Sequence[int]], None] = self.check_alive
        # Makes the groups anew where an earlier cell has left that to be done.
        self.recover_if_needed: Callable[[], None] = lambda: None
        # After collectives of nbdist's own that failed or were interrupted: back in step.
        self.settle: Callable[[], None] = lambda: None
        # Breaks off what ranks still wait in when another one of them has failed.
        self.release: Callable[[Sequence[Future[Any]]], None] = lambda _futures: None

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, dead ones too."""
        return tuple(place.rank for place in self.topology.ranks)

    def chosen(self, ranks: str | Sequence[int] | None) -> tuple[int, ...]:
        """The ranks that are meant, checked.

        Raises:
            OptionError: If one does not exist.
        """
        if ranks is None:
            return self.ranks
        text = ranks if isinstance(ranks, str) else ",".join(map(str, ranks))
        return parse_ranks(text, self.topology.world_size)

    @property
    def is_stopped(self) -> bool:
        """Whether the ranks were ended, by `stop` or from outside the notebook."""
        return self._was_stopped or bool(self.cluster.why_gone)

    def is_busy(self, rank: int) -> bool:
        """Whether a rank runs a cell, or did when it ended."""
        return rank in self.cells

    @property
    def busy_ranks(self) -> tuple[int, ...]:
        """The ranks that run a cell, or were given up on in one, and live."""
        return tuple(r for r in self.ranks if self.is_busy(r) and not self.exit_of(r))

    def running_cell(self, rank: int) -> tuple[int | None, float] | None:
        """(the notebook's cell number, since when) of the cell that a rank runs; None if idle."""
        busy = self.cells.get(rank)
        return None if busy is None else (busy[0].number, busy[1])

    def free(self, rank: int) -> None:
        """Count a rank as idle: its cell cannot be heard of any more."""
        self.cells.pop(rank, None)

    def exit_of(self, rank: int) -> Exit | None:
        """The end of a rank's process; None while it lives."""
        return self.cluster.processes.exits.get(self.topology.engine_of_rank(rank))

    def is_connected(self, rank: int) -> bool:
        """Whether the rank lives and is registered; which of both ends first differs.

        The exit of a rank on another host may be unknown.
        """
        channel = self.cluster.channel
        engine = self.topology.engine_of_rank(rank)
        return (
            channel is not None
            and engine in channel.engine_ids
            and engine not in self.cluster.processes.exits
        )

    def interrupt(self, rank: int) -> None:
        """Send SIGINT to a rank; its variables stay."""
        self.cluster.interrupt(self.topology.engine_of_rank(rank))

    def call(self, rank: int, name: str, *args: Any) -> Future[Any]:
        """Call `module:function` in a rank's main thread; see rpc.kernel.functions."""
        assert self.cluster.channel is not None
        return self.cluster.channel.call(self.topology.engine_of_rank(rank), name, *args)

    def ask(self, question: Callable[..., Future[T]], rank: int) -> Future[T] | None:
        """An answer from the rank's control thread; None where it cannot be reached.

        The question is a control function; see rpc.kernel.functions.
        """
        channel = self.cluster.channel
        if channel is None or not self.is_connected(rank):
            return None
        engine = self.topology.engine_of_rank(rank)
        return question(lambda _rank, name, *args: channel.ask(engine, name, *args), rank)

    def ask_all(self, question: Callable[..., Future[T]]) -> dict[int, Future[T]]:
        """The same from every rank that can be reached."""
        asked = {rank: self.ask(question, rank) for rank in self.ranks}
        return {rank: future for rank, future in asked.items() if future is not None}

    def call_all(
        self,
        function: Callable[..., Future[Any]],
        *args: Any,
        deadline_s: float,
        is_collective: bool = False,
        ranks: Sequence[int] | None = None,
        patience_s: float = 0.0,
    ) -> list[Any]:
        """Call a rank function on every rank, or some, at once; results in their order.

        After an interrupt by the user a short call may end by itself, within `patience_s`: its
        collectives are then in step. Longer ones are interrupted on the ranks as well.

        Raises:
            RankGone, RankBusy: As for a cell.
            NbdistError: If a rank raised, or has not answered by the deadline.
            Interrupted: If the user interrupted it; the ranks have been interrupted too.
        """
        ranks = self.ranks if ranks is None else ranks
        self.make_whole()
        self.check_ready(ranks)
        end_of_controller = functools.partial(self._controller_end, ranks)
        # Ctrl-C waits until all ranks are asked, for they may wait for each other.
        with sigint.deferred_sigint() as pressed:
            futures = {rank: function(self.call, rank, *args) for rank in ranks}
        try:
            pressed.check()
            return gather.gather_results(futures, deadline_s, end_of_controller)
        except (KeyboardInterrupt, RankGone) as error:
            if not isinstance(error, RankGone):
                gather.wait_done(list(futures.values()), patience_s)
            late = [rank for rank, future in futures.items() if not future.done()]
            for rank in late:
                self.interrupt(rank)
            if isinstance(error, RankGone):
                raise
            message = f"{ranks_phrase(late)} had not answered" if late else "all ranks are back"
            raise Interrupted(message) from error
        finally:
            if is_collective:  # peers of a rank that failed would wait for it for ever
                self.release(list(futures.values()))

    def _controller_end(self, ranks: Sequence[int]) -> str:
        """How the controller ended; raises where a rank has, for which the others would wait."""
        end = self.cluster.processes.exits.get(None)
        if end is None:
            self.check_alive(ranks)
        return "" if end is None else end.how

    def check_alive(self, ranks: Sequence[int]) -> None:
        """Refuse ranks that have ended, busy or not.

        Raises:
            NotRunning: After the ranks were stopped.
            RankGone: If one has ended.
        """
        if self.is_stopped:
            why = self.cluster.why_gone or "These ranks were stopped"
            raise NotRunning(f"{why}. {run_dir.WHAT_NOW}")
        gone = {rank: self.end_of(rank) for rank in ranks if not self.is_connected(rank)}
        if gone:
            alive = [rank for rank in self.ranks if self.is_connected(rank)]
            others = f"%%rank [{rank_label(alive)}] runs on the others; " if alive else ""
            verb = "have" if len(gone) > 1 else "has"
            by_end: dict[str, list[int]] = {}
            for rank, end in gone.items():
                by_end.setdefault(end or "its connection is lost", []).append(rank)
            how = ", ".join(f"{ranks_phrase(alike)}: {end}" for end, alike in by_end.items())
            back = f"{self.restart_verb(tuple(gone))} brings it back; "
            raise RankGone(
                f"{ranks_phrase(tuple(gone))} {verb} ended ({how}). "
                f"{back if self.cluster.can_restart else ''}{others}%dist_reset restarts all ranks."
            )

    def restart_verb(self, ranks: Sequence[int]) -> str:
        """The line that brings ranks back: all of them where this launcher can bring back none."""
        can_restart = self.cluster.can_restart
        return f"%dist_restart {rank_label(ranks)}" if can_restart else "%dist_reset"

    def check_death(self, ranks: Sequence[int]) -> None:
        """Say that one of the ranks has ended; a failed call may show it before the process does.

        Raises:
            NotRunning, RankGone: As `check_alive`; nothing if all live on.
        """
        end_s = time.monotonic() + gather.END_KNOWN_S
        while all(map(self.is_connected, ranks)) and time.monotonic() < end_s:
            time.sleep(POLL_S)
        self.check_alive(ranks)

    def sync(self, deadline_s: float = CALL_DEADLINE_S) -> list[float]:
        """Wait until all ranks are idle and together; how long each waited, in seconds.

        Raises:
            NbdistError: Naming the ranks that did not come.
        """
        key = uuid.uuid4().hex
        return self.call_all(barrier, key, deadline_s, deadline_s=deadline_s + 5)

    def end_of(self, rank: int) -> str:
        """How the rank's process ended; empty while it lives."""
        end = self.exit_of(rank)
        return "" if end is None else end.how
