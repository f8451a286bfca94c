"""The ranks of one notebook: run cells on them, call them, interrupt them.

Only here do rank and engine meet: outside, everything is a rank.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from nbdist.client import answers, driving, monitor, outside, presses, remote, shortages, states
from nbdist.client.bandwidth import Bandwidth
from nbdist.client.checkpoints import Checkpoints
from nbdist.client.cluster import Cluster
from nbdist.client.exits import WITHOUT_CONTROLLER, Exit
from nbdist.client.health import Health
from nbdist.client.lints import Lints
from nbdist.client.memory import Memories
from nbdist.client.readiness import Readiness
from nbdist.client.repair import Restarted
from nbdist.client.request import CellRequest, Sink
from nbdist.client.run import CellRun
from nbdist.client.strategy import Strategies
from nbdist.client.subjects import Subjects
from nbdist.client.trace import Traces
from nbdist.client.upkeep import RESTART_S, Upkeep
from nbdist.client.variables import Variables
from nbdist.client.watchdog import Watchdog
from nbdist.core import hints
from nbdist.core.cells import CellResult
from nbdist.core.failures import RankFailure, ranks_phrase
from nbdist.core.ranks import parse_ranks, rank_label
from nbdist.core.snapshot import MemoryOptions, Snapshot
from nbdist.core.status import Status
from nbdist.core.topology import Topology
from nbdist.core.trace import Trace, TraceOptions
from nbdist.core.units import is_stored
from nbdist.core.wire import CELL_FOR_ALL, CELL_NUMBER, CELL_RECORDING, CELL_RUN
from nbdist.errors import Interrupted, RankGone

GRACE_S = 5.0
SYNC_MODEL_S = 300.0
CALL_DEADLINE_S = 30.0
RECORD_ALL = TraceOptions()
RECORD_MEMORY = MemoryOptions()


class Session(Subjects):
    """Running ranks, and the way to them."""

    def __init__(
        self,
        cluster: Cluster,
        topology: Topology,
        sink: Callable[[CellRequest], Sink],
        *,
        grace_s: float = GRACE_S,
        seed: int | None = None,
    ):
        """Use a started cluster.

        Args:
            cluster: Started, its groups formed.
            topology: Which engine has which rank.
            sink: Makes the place where a cell's output goes.
            grace_s: A certain deadlock is aborted this long after it was told.
            seed: Set on every rank, also on one that replaces another.
        """
        self.topology = topology
        self.seed = seed
        self.grace_s = grace_s
        self.health = Health(cluster, topology)
        self.started_s = time.time()
        # The number of the notebook's cell that is running, for tracebacks of `run`.
        self.cell_number: Callable[[], int | None] = lambda: None
        # Whether the notebook itself has a variable of a name, for hints.
        self.has_name: Callable[[str], bool] = lambda _name: False
        self.panel: Callable[[], object] = lambda: None  # %dist_panel, to be displayed
        self._cluster = cluster
        self._sink = sink
        self._is_stopped = False
        self.readiness = Readiness(self)
        self.upkeep = Upkeep(self)
        self.strategy = Strategies(self)
        self.variables = Variables(self)
        self.traces = Traces(self)
        self.memories = Memories(self)
        self.bandwidth = Bandwidth(self)
        self.checkpoints = Checkpoints(self)
        self.lints = Lints()
        self.monitor = monitor.Monitor(self)
        self._run_ids = itertools.count(1)
        cluster.on_exit = self._note_exit

    def __repr__(self) -> str:
        state = "stopped" if self._is_stopped else self.topology.backend
        return f"<nbdist.Session ranks {rank_label(self.ranks)}, {state}>"

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, dead ones too."""
        return tuple(place.rank for place in self.topology.ranks)

    @property
    def cluster(self) -> Cluster:
        """The cluster under the ranks."""
        return self._cluster

    def run(
        self,
        code: str,
        *,
        ranks: str | Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> CellResult:
        """Run source on ranks as a distributed cell and wait for it.

        Args:
            code: Source as in a cell, magics included.
            ranks: "0,2-3", numbers, or None for all.
            timeout_s: Interrupt the ranks after this long.

        Raises:
            DistributedError: If it failed on a rank; see also `begin`.
        """
        request = CellRequest(
            code,
            self.chosen(ranks),
            number=self.cell_number(),
            timeout_s=timeout_s,
            is_patient=is_stored(),
        )
        return driving.wait(lambda: self.begin(request))

    def begin(self, request: CellRequest) -> CellRun:
        """Send a cell to its ranks; `driving.wait` or `driving.wait_async` see it through.

        Raises:
            NotRunning: After the cluster was stopped.
            RankGone: If a chosen rank has ended.
            RankBusy: If a chosen rank still runs an earlier cell.
        """
        self.upkeep.make_whole()
        self.readiness.check(request.ranks)
        self.upkeep.recover_if_needed()
        run_id = next(self._run_ids)
        one = CellRun(self, request, self._sink(request), run_id)
        one.tell(self.upkeep.take_notes())
        assert self._cluster.channel is not None
        metadata: dict[str, Any] = {
            CELL_RUN: run_id,
            CELL_FOR_ALL: set(request.ranks) == set(self.ranks),
        }
        if request.number is not None:
            metadata[CELL_NUMBER] = request.number
        if token := self.traces.token or self.memories.token:
            metadata[CELL_RECORDING] = token
        self.readiness.take(request.ranks, one)
        for number, rank in enumerate(request.ranks):
            try:
                self._cluster.channel.execute(
                    self.topology.engine_of_rank(rank),
                    request.code,
                    metadata,
                    on_message=self.lints.listening(
                        run_id, rank, functools.partial(one.message, rank)
                    ),
                    on_done=functools.partial(self._end, rank, one),
                )
            except BaseException:
                for unsent in request.ranks[number:]:  # they would count as busy for ever
                    self.readiness.free(unsent)
                raise
        return one

    def chosen(self, ranks: str | Sequence[int] | None) -> tuple[int, ...]:
        """The ranks that are meant, checked.

        Raises:
            OptionError: If one does not exist.
        """
        if ranks is None:
            return self.ranks
        text = ranks if isinstance(ranks, str) else ",".join(map(str, ranks))
        return parse_ranks(text, self.topology.world_size)

    def call_all(
        self,
        function: Callable[..., Future[Any]],
        *args: Any,
        deadline_s: float,
        is_collective: bool = False,
        ranks: Sequence[int] | None = None,
        patience_s: float = 0.0,
    ) -> list[Any]:
        """Call one of remote's functions on every rank, or some, at once; results in their order.

        After an interrupt by the user a short call may end by itself, within `patience_s`: its
        collectives are then in step. Longer ones are interrupted on the ranks as well.

        Raises:
            RankGone, RankBusy: As for a cell.
            NbdistError: What a rank raised, or who has not answered by the deadline.
            Interrupted: If the user interrupted it; the ranks have been interrupted too.
        """
        ranks = self.ranks if ranks is None else ranks
        self.upkeep.make_whole()
        self.readiness.check(ranks)
        end_of_controller = functools.partial(self._controller_end, ranks)
        # Whatever is pressed meanwhile: all ranks are asked, for they may wait for each other.
        with presses.counted() as pressed:
            futures = {rank: function(self.call, rank, *args) for rank in ranks}
        try:
            pressed.check()
            return answers.collect(futures, deadline_s, end_of_controller)
        except (KeyboardInterrupt, RankGone) as error:
            if not isinstance(error, RankGone):
                answers.let_end(list(futures.values()), patience_s)
            late = [rank for rank, future in futures.items() if not future.done()]
            for rank in late:
                self.interrupt(rank)
            if isinstance(error, RankGone):
                raise
            told = f"{ranks_phrase(late)} had not answered" if late else "all ranks are back"
            raise Interrupted(told) from error
        finally:
            if is_collective:  # peers of a rank that failed would wait for it for ever
                self.upkeep.release(list(futures.values()))

    def _controller_end(self, ranks: Sequence[int]) -> str:
        """How the controller ended; raises where a rank has, for which the others would wait."""
        end = self._cluster.exits.get(None)
        if end is None:
            self.readiness.check_alive(ranks)
        return "" if end is None else end.how

    def status(self, *, wants_stacks: bool = False) -> Status:
        """What every rank does now, within seconds; see client.states."""
        return states.status(self, wants_stacks=wants_stacks)

    def sync(self, deadline_s: float = CALL_DEADLINE_S) -> list[float]:
        """Wait until all ranks are idle and together; how long each waited, in seconds.

        Raises:
            NbdistError: Naming the ranks that did not come.
        """
        key = uuid.uuid4().hex
        return self.call_all(remote.barrier, key, deadline_s, deadline_s=deadline_s + 5)

    @property
    def busy_ranks(self) -> tuple[int, ...]:
        """The ranks that run a cell, or were given up on in one, and live."""
        busy = self.readiness.is_busy
        return tuple(rank for rank in self.ranks if busy(rank) and not self.exit_of(rank))

    def running_cell(self, rank: int) -> tuple[int | None, float] | None:
        """(the notebook's cell number, since when) of the cell that a rank runs; None if idle."""
        return self.readiness.cell_of(rank)

    @property
    def is_stopped(self) -> bool:
        """Whether the ranks were ended, by `stop` or from outside."""
        return self._is_stopped or bool(outside.told(self._cluster.run_dir))

    def watchdog(self, began_s: float, *, is_quiet: bool) -> Watchdog:
        """What watches a cell of these ranks."""
        return Watchdog(self.health, began_s, self.grace_s, is_quiet=is_quiet)

    def rank_states(self) -> dict[int, tuple[str, str]]:
        """Every rank as far as no cell is asked: "busy" or "absent", as core.calls says it."""
        return {r: ("busy" if self.readiness.is_busy(r) else "absent", "") for r in self.ranks}

    def restart(
        self, ranks: str | Sequence[int] | None = None, deadline_s: float = RESTART_S
    ) -> Restarted:
        """Put new processes in the place of ranks; the others keep variables, groups and models.

        Args:
            ranks: As in `run`; None for those that have ended.
            deadline_s: For all of it.

        Raises:
            NotRunning, OptionError, RankBusy, StartError, Interrupted: See Upkeep.restart.
        """
        chosen = None if ranks is None else self.chosen(ranks)
        return self.upkeep.restart(chosen, deadline_s, lambda _text: None)

    def free(self, rank: int) -> None:
        """Count a rank as idle: its cell cannot be heard of any more."""
        self.readiness.free(rank)

    def free_silent(self) -> set[int]:
        """Count ranks as idle whose cell has ended without a reply; which ones."""
        return self.readiness.free_silent()

    def sync_model(self, source: int = 0, deadline_s: float = SYNC_MODEL_S) -> tuple[str, ...]:
        """Make models and optimizers of all ranks equal to those of one; the models' names.

        Raises:
            OptionError: If there is no such rank.
            NbdistError: What a rank raised, such as that its model is another one.
        """
        self.chosen([source])
        self.upkeep.recover_if_needed()
        told = self.call_all(remote.sync_model, source, deadline_s=deadline_s, is_collective=True)
        return tuple(told[source])

    def profile(
        self,
        code: str,
        options: TraceOptions = RECORD_ALL,
        ranks: str | Sequence[int] | None = None,
    ) -> Trace:
        """Run source on all ranks, as `run`; what these ranks (None: all) recorded of it."""
        with self.traces.recording(options, ranks):
            self.run(code)
        return self.traces.last

    def record_memory(
        self,
        code: str,
        options: MemoryOptions = RECORD_MEMORY,
        ranks: str | Sequence[int] | None = None,
    ) -> Snapshot:
        """Run source on all ranks, as `run`; what it allocated on these ranks (None: all)."""
        with self.memories.recording(options, ranks):
            self.run(code)
        return self.memories.last_or_now()

    def interrupt(self, rank: int) -> None:
        """Send SIGINT to a rank; its variables stay."""
        self._cluster.interrupt(self.topology.engine_of_rank(rank))

    def stop(self) -> None:
        """End all ranks and remove what they left. Twice is harmless."""
        self.checkpoints.end()
        self._is_stopped = True
        self._cut_off("The ranks were stopped", "%dist_init starts new ones.")
        self.traces.close()
        self.monitor.close()
        self._cluster.stop()
        self.health.close()

    def death(self, rank: int) -> str:
        """How a rank ended, as a sentence."""
        self._cluster.exit_of(self.topology.engine_of_rank(rank), answers.END_KNOWN_S)
        told = self.health.end_of(rank)
        how = f" ({told})" if told else ""
        doing = self.health.last_words_of(rank)
        last = f"; {doing}" if doing else ""
        return f"ended{how} while running this cell{last}; variables there are lost"

    def explained(self, failure: RankFailure) -> RankFailure:
        """The failure, with what to do where that is known: names, modules, memory."""
        told = hints.explained(failure, hints.Surroundings(sys.executable, self.has_name))
        return replace(told, advice=shortages.advice(self, failure))

    def call(self, rank: int, name: str, *args: Any) -> Future[Any]:
        """Call `module:function` in a rank's main thread; see client.remote."""
        assert self._cluster.channel is not None
        return self._cluster.channel.call(self.topology.engine_of_rank(rank), name, *args)

    def exit_of(self, rank: int) -> Exit | None:
        """The end of a rank's process; None while it lives."""
        return self._cluster.exits.get(self.topology.engine_of_rank(rank))

    def is_connected(self, rank: int) -> bool:
        """Whether the rank can be reached; of ranks on other hosts no exit may be known."""
        return self.health.is_reachable(rank)

    def _cut_off(self, why: str, what_now: str) -> None:
        for one in self.readiness.running():
            one.cut_off(why, what_now)

    def _note_exit(self, end: Exit) -> None:
        if told := outside.told(self._cluster.run_dir):
            self._cut_off(told, outside.WHAT_NOW)
        elif end.engine is None:
            self._cut_off(f"The cluster's controller ended ({end.how})", WITHOUT_CONTROLLER)
            return
        for place in self.topology.ranks:  # an engine beyond the ranks concerns nobody
            if place.engine_id == end.engine:
                is_ours = place.rank in self.upkeep.ended_by_us
                try:
                    self.health.note_exit(place.rank, end.code, is_ours=is_ours)
                finally:  # a cell that is not told would wait for ever
                    for one in self.readiness.running():
                        one.exited(place.rank)

    def _end(self, rank: int, one: CellRun, reply: Any) -> None:
        self.readiness.end(rank, one)
        one.done(rank, reply)
