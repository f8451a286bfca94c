"""The ranks of one notebook: run cells on them, and all that features offer."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbdist.bandwidth.kernel import BENCH_S, Bandwidth
from nbdist.bandwidth.results import Bench
from nbdist.cells.journal import CellHead
from nbdist.cells.kernel import status as cells_status
from nbdist.cells.kernel import wait
from nbdist.cells.kernel.cell_ranks import CellRanks
from nbdist.cells.kernel.cell_request import CellRequest, Sink
from nbdist.cells.kernel.cell_run import CellRun
from nbdist.cells.kernel.journals import Journals
from nbdist.cells.outputs import CellResult
from nbdist.checkpoint.kernel import Checkpoints, export_weights
from nbdist.checkpoint.results import Loaded, Saved, SaveStarted
from nbdist.checkpoint.safetensors import ExportedWeights
from nbdist.cluster.kernel import keep as keeping
from nbdist.cluster.kernel import run_dir
from nbdist.cluster.kernel import start as starting
from nbdist.cluster.kernel.cluster import Cluster
from nbdist.cluster.kernel.processes import WITHOUT_CONTROLLER, Exit
from nbdist.cluster.kernel.start import DEFAULT_GRACE_S, StartOptions
from nbdist.cluster.run_owner import Keep, Run
from nbdist.cluster.status import Status
from nbdist.comparison.kernel import Comparing
from nbdist.config import kernel as config_kernel
from nbdist.config.emit import SCRIPT
from nbdist.config.launch import Configured, configured
from nbdist.core.failures import ranks_phrase
from nbdist.core.progress import Reporter
from nbdist.core.ranks import rank_label
from nbdist.core.topology import Topology
from nbdist.core.units import is_stored, shown, span
from nbdist.errors import Interrupted, NbdistError
from nbdist.hang.kernel.maintenance import RESTART_S
from nbdist.hang.kernel.restart import RestartResult, await_idle
from nbdist.lints.kernel import replicas
from nbdist.lints.kernel.lints import Lints
from nbdist.lints.replicas import ReplicaCheck
from nbdist.memory.kernel.recordings import Memories
from nbdist.memory.snapshot import MemoryOptions, Snapshot
from nbdist.monitor.kernel.monitor import Monitor
from nbdist.planner.kernel import shortage
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.rpc.wire import CELL_FOR_ALL, CELL_KEPT, CELL_NUMBER, CELL_RUN
from nbdist.switch.kernel import Strategies
from nbdist.trace.kernel.recordings import Traces
from nbdist.trace.trace import Trace, TraceOptions
from nbdist.variables.kernel import Variables, VariableTransfer
from nbdist.verification.kernel import verify
from nbdist.verification.verdict import StepRequest, Verification

SYNC_MODEL_S = 300.0
TAKE_BACK = "The ranks go on and keep their variables; %dist_attach --take brings them back."
RECORD_ALL = TraceOptions()
RECORD_MEMORY = MemoryOptions()

sync_model: RankFunction[[int], list[str]] = RankFunction(
    "nbdist.parallel.reshard.sync_model:sync_model"
)


class Session(CellRanks):
    """Running ranks, and the way to them: cells, and a feature in each attribute."""

    def __init__(
        self,
        cluster: Cluster,
        topology: Topology,
        sink: Callable[[CellRequest], Sink],
        *,
        grace_s: float = DEFAULT_GRACE_S,
        seed: int | None = None,
    ):
        """Take over a started cluster, whose groups are formed; see CellRanks.

        `sink` makes the place where a cell's output goes.
        """
        super().__init__(cluster, topology, grace_s=grace_s, seed=seed)
        self.started_s = time.time()
        # The number of the notebook's cell that is running, for tracebacks of `run`.
        self.cell_number: Callable[[], int | None] = lambda: None
        self.panel: Callable[[], object] = lambda: None  # %dist_panel, to be displayed
        self._sink = sink
        self._run_ids = itertools.count(1)
        self.journals = Journals(self, self.health)
        self.lints = Lints()
        warn = functools.partial(shortage.warn, self, self.lints)
        self.strategy = Strategies(self, self.lints.of_switch, warn)
        self.variables = Variables(self)
        self.checkpoints = Checkpoints(self)
        self.traces = Traces(self, self.variables)
        self.memories = Memories(self, self.variables)
        self.bandwidth = Bandwidth(self)
        self.monitor = Monitor(self, self.health)
        self.hooks = (self.checkpoints, self.traces, self.memories, self.lints)
        cluster.processes.on_exit = self._note_exit
        cluster.on_taken = lambda: self._cut_off(cluster.taken, TAKE_BACK)

    def __repr__(self) -> str:
        state = "stopped" if self._was_stopped else self.topology.backend
        return f"<nbdist.Session ranks {rank_label(self.ranks)}, {state}>"

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
        return wait.wait(lambda: self.begin(request))

    def begin(self, request: CellRequest) -> CellRun:
        """Send a cell to its ranks; `cells.kernel.wait` sees it through.

        Raises:
            NotRunning: After the cluster was stopped.
            RankGone: If a chosen rank has ended.
            RankBusy: If a chosen rank still runs an earlier cell.
        """
        self.make_whole()
        self.check_ready(request.ranks)
        self.recover_if_needed()
        run_id = next(self._run_ids)
        cell = CellRun(self, request, self._sink(request), run_id)
        if self.cluster.is_kept:
            cell.on_finish = functools.partial(self.journals.note_shown, run_id)
        metadata: dict[str, Any] = {
            CELL_RUN: run_id,
            CELL_FOR_ALL: set(request.ranks) == set(self.ranks),
        }
        if request.number is not None:
            metadata[CELL_NUMBER] = request.number
        if self.cluster.is_kept:
            metadata[CELL_KEPT] = request.ranks
        cell.tell(self.maintenance.take_notes())
        for hook in self.hooks:
            cell.tell(hook.before(metadata))
        self.busy.take(request.ranks, cell)
        self._send(cell, metadata)
        return cell

    def _send(self, cell: CellRun, metadata: Mapping[str, Any]) -> None:
        channel = self.cluster.channel
        assert channel is not None
        unsent = list(cell.request.ranks)

        def send() -> None:
            while unsent:
                channel.execute(
                    self.topology.engine_of_rank(unsent[0]),
                    cell.request.code,
                    metadata,
                    on_message=functools.partial(cell.message, unsent[0]),
                    on_done=functools.partial(self._end, unsent[0], cell),
                )
                del unsent[0]

        try:
            channel.together(send)
        except BaseException:
            for rank in unsent:  # they would count as busy for ever
                self.free(rank)
            raise

    def _end(self, rank: int, cell: CellRun, reply: Any, ended_s: float | None = None) -> None:
        self.busy.end(rank, cell)
        cell.done(rank, reply, ended_s)

    def resume(self) -> CellRun | None:
        """The cell that kept ranks run, or ended while no notebook held them; None without one.

        As `begin`: what it has said so far comes first.
        """
        newest, *older = self.journals.heads() or (None,)
        for head in older:  # given up on, or interrupted, by the notebook that has sent them
            self._follow(self._again(head), self.journals.running_ranks(head)).is_over = True
        if newest is None or self.journals.was_shown(newest.run):
            return None
        cell = self._follow(self._again(newest), newest.ranks)
        cell.on_finish = functools.partial(self.journals.note_shown, newest.run)
        for rank in newest.ranks:
            if self.exit_of(rank):
                cell.exited(rank)
        return cell

    def _again(self, head: CellHead) -> CellRun:
        """A cell that ranks run already."""
        request = CellRequest(
            head.code, head.ranks, number=head.number, is_patient=is_stored(), began_s=head.began_s
        )
        return CellRun(self, request, self._sink(request), head.run)

    def _follow(self, cell: CellRun, ranks: Sequence[int]) -> CellRun:
        """Count ranks as busy with a cell until their journals say that they have ended it."""
        self.busy.take(ranks, cell)
        self.journals.feed(
            cell, ranks, lambda rank, reply, ended_s: self._end(rank, cell, reply, ended_s)
        )
        return cell

    def keep(self, options: StartOptions, seconds: float, save: str = "") -> None:
        """Let the ranks go on so long without this kernel; see cluster.kernel.keep."""
        keeping.keep(self.cluster, self.topology, options, seconds, save, self.started_s)

    def leave(self) -> None:
        """Let go of the ranks: they go on as long as they are kept, for whoever attaches."""
        self._was_stopped = True
        self._cut_off("This notebook has let go of the ranks", TAKE_BACK)
        self.traces.close()
        self.monitor.close()
        self.cluster.leave()
        self.health.close()

    def interrupt_left(self) -> str:
        """Interrupt the cell that attached ranks still run, as a press of the stop button does.

        What became of it, in a sentence without its full stop; empty where all ranks are idle.
        """
        self.status()  # ranks of other hosts are asked
        if all(log.state != "running" for log in self.health.logs().values()):
            return ""
        cell = self.resume()
        if cell is None:
            return ""
        cell.press()
        label = "A cell" if cell.number is None else f"Cell [{cell.number}]"
        try:
            wait.wait(lambda: cell)
        except (Interrupted, NbdistError) as error:
            return f"{label} was still running and was interrupted: {str(error).strip()}"
        return f"{label} has just ended"

    def skip_runs(self, newest: int) -> None:
        """Number the next cell behind those that another notebook has sent."""
        self._run_ids = itertools.count(newest + 1)

    def status(self, *, wants_stacks: bool = False) -> Status:
        """Status of every rank, within seconds; see cells.kernel.status."""
        self.maintenance.reconnect()
        now = cells_status.status(self, self.health, wants_stacks=wants_stacks)
        hosts = self.cluster.engine_set.status_lines()
        lines = [*self.checkpoints.status(), *hosts, self._keep_phrase()]
        return replace(now, waits=(*now.waits, *filter(None, lines)))

    def _keep_phrase(self) -> str:
        """Say how long the ranks go on without this notebook; empty where they do not."""
        keep = run_dir.read_keep(self.cluster.run_dir) if self.cluster.is_kept else None
        if keep is None:
            return ""
        saved = f", then saved to {shown(keep.save)}" if keep.save else ""
        return f"kept for {span(keep.keep_s)} after this notebook ends{saved}"

    def restart(
        self, ranks: str | Sequence[int] | None = None, deadline_s: float = RESTART_S
    ) -> RestartResult:
        """Put new processes in the place of ranks; the others keep variables, groups and models.

        Args:
            ranks: As in `run`; None for those that have ended.
            deadline_s: For all of it.

        Raises:
            NotRunning, OptionError, RankBusy, StartError, Interrupted: See Maintenance.restart.
        """
        chosen = None if ranks is None else self.chosen(ranks)
        return self.maintenance.restart(chosen, deadline_s, lambda _text: None)

    def stop(self) -> None:
        """End all ranks and remove what they left. Twice is harmless."""
        self.checkpoints.end()
        self._was_stopped = True
        self._cut_off("The ranks were stopped", "%dist_init starts new ones.")
        self.traces.close()
        self.monitor.close()
        self.cluster.stop()
        self.health.close()

    def _cut_off(self, why: str, what_now: str) -> None:
        for cell in self.busy.running():
            cell.cut_off(why, what_now)

    def _note_exit(self, end: Exit) -> None:
        if why := self.cluster.why_gone:
            self._cut_off(why, run_dir.WHAT_NOW)
        elif end.engine is None:
            self._cut_off(f"The cluster's controller ended ({end.how})", WITHOUT_CONTROLLER)
            return
        for place in self.topology.ranks:  # an engine beyond the ranks concerns nobody
            if place.engine_id == end.engine:
                is_ours = place.rank in self.maintenance.ended_by_us
                try:
                    self.health.note_exit(place.rank, end.code, is_ours=is_ours)
                finally:  # a cell that is not told would wait for ever
                    for cell in self.busy.running():
                        cell.exited(place.rank)

    def sync_model(self, source: int = 0, deadline_s: float = SYNC_MODEL_S) -> tuple[str, ...]:
        """Make models and optimizers of all ranks equal to those of one; the models' names.

        Raises:
            OptionError: If there is no such rank.
            NbdistError: What a rank raised, such as that its model is another one.
        """
        self.chosen([source])
        self.recover_if_needed()
        names = self.call_all(sync_model, source, deadline_s=deadline_s, is_collective=True)
        return tuple(names[source])

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

    def push(
        self, variables: Mapping[str, object], ranks: str | Sequence[int] | None = None
    ) -> VariableTransfer:
        """Give ranks copies of values under these names; see variables.kernel."""
        return self.variables.push(variables, ranks)

    def pull(
        self, name: str, ranks: str | Sequence[int] | None = None, *, is_whole: bool = False
    ) -> Any:
        """A variable's value on one rank, or a list in rank order; see variables.kernel."""
        return self.variables.pull([name], ranks, is_whole=is_whole).values[name]

    def trace(self) -> Trace:
        """Newest recorded trace; a TraceError if none was recorded."""
        return self.traces.last

    def bench(
        self,
        ops: str | Sequence[str] | None = None,
        sizes: str | Sequence[int] | None = None,
        limit_s: float = BENCH_S,
    ) -> Bench:
        """Measure the bandwidth of collectives between all ranks; see bandwidth.kernel."""
        return self.bandwidth.measure(ops, sizes, limit_s)

    def config(
        self,
        hosts: int | None = None,
        *,
        device: str = "",
        script: str = SCRIPT,
        clip: float = 0.0,
    ) -> Configured:
        """The strategy that counts as configurations: `.texts["accelerate"]` and others."""
        setting = config_kernel.setting(self, self.strategy.current(), hosts, device)
        return configured(replace(setting, script=script, clip=clip))

    def memory(self) -> Snapshot:
        """The memory that was recorded last; before any recording, whose it is at this moment."""
        return self.memories.last_or_now()

    def save(
        self,
        path: str | os.PathLike[str],
        asynchronous: bool = False,
        *,
        adapters_only: bool = False,
    ) -> Saved | SaveStarted:
        """Save models, optimizers and training state; see checkpoint.kernel."""
        return self.checkpoints.save(path, asynchronous=asynchronous, adapters_only=adapters_only)

    def load(self, path: str | os.PathLike[str], models_only: bool = False) -> Loaded:
        """Load a checkpoint into what is prepared; see checkpoint.kernel."""
        return self.checkpoints.load(path, models_only=models_only)

    def export_weights(
        self, path: str | Path, model: str = "", *, is_merged: bool = False, adapter: str = ""
    ) -> ExportedWeights:
        """Write a model's weights into one safetensors file; see checkpoint.kernel."""
        return export_weights(self, path, model, is_merged=is_merged, adapter=adapter)

    def check(self) -> ReplicaCheck:
        """Compare the models of all ranks, and look for NaN and inf; see lints.kernel.replicas."""
        return replicas.check(self)

    def check_every(self, every: int) -> None:
        """Look before every so many steps of an optimizer; 0 ends it; see lints.kernel.replicas."""
        replicas.check_every(self, every)

    def trace_nan(self) -> None:
        """Let the next cell tell the first module whose output is not finite."""
        replicas.trace_nan(self)

    def silence(self, *names: str, is_on: bool = True) -> None:
        """Tell these lints no more (`all` for all); with `is_on=False` tell them again."""
        self.lints.silence(names, is_on=is_on)

    def verify(
        self, request: StepRequest | None = None, *, against: str | None = None
    ) -> Verification:
        """Compare a step with the same of one process, or fsdp; see verification.kernel."""
        request = request or StepRequest()
        return verify(self, request if against is None else replace(request, against=against))

    def comparing(self, code: str) -> Comparing:
        """A comparison of strategies by this source; see comparison.kernel."""
        return Comparing(self, self.strategy, self, code)


@dataclass(frozen=True, slots=True)
class StartedSession:
    """A running session, how long its start took, and what there is to say about it."""

    session: Session
    elapsed_s: float
    notes: tuple[str, ...]


def attach(
    run: Run,
    sink: Callable[[CellRequest], Sink],
    *,
    takes: bool = False,
    keep: Keep | None = None,
) -> tuple[StartedSession, StartOptions]:
    """Hold the ranks of a kept run, with the options of their start; see cluster.kernel.keep.

    Raises:
        AlreadyRunning, StartError, NbdistError: See keep.attach.
    """
    began_s = time.monotonic()
    attached = keeping.attach(run, takes=takes, keep=keep)
    options = attached.options
    try:
        session = Session(
            attached.cluster, attached.topology, sink, grace_s=options.grace_s, seed=options.seed
        )
        session.health.generation = attached.generation
        session.strategy_chosen = attached.strategy
        session.started_s = attached.since_s
        session.skip_runs(attached.run)
        silent = sorted({*attached.silent, *await_idle(session, session.health)})
    except BaseException:
        attached.cluster.leave()
        raise
    notes = [f"{ranks_phrase(silent)} did not answer"] if silent else []
    return StartedSession(session, time.monotonic() - began_s, tuple(notes)), options


def start(
    options: StartOptions, sink: Callable[[CellRequest], Sink], progress: Reporter
) -> StartedSession:
    """Bring ranks up; the strategy of the options, if any, is the chosen one.

    Raises:
        OptionError: If an option cannot be met on this machine; nothing has been started.
        StartError: If a process did not come up; everything has been ended again.
    """
    began_s = time.monotonic()
    cluster, topology, notes = starting.start(options, progress)
    try:
        session = Session(cluster, topology, sink, grace_s=options.grace_s, seed=options.seed)
        if options.strategy is not None:
            session.strategy_chosen = options.strategy.on(topology)
        if options.keep_s:
            session.keep(options, options.keep_s, options.save)
    except BaseException:
        cluster.stop(grace_s=0)
        raise
    return StartedSession(session, time.monotonic() - began_s, notes)
