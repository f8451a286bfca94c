"""Ranks and controller brought back while the others keep all they have."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from nbdist.cluster.kernel import run_dir, start
from nbdist.cluster.kernel.ranks import (
    Ranks,
    adopt_notebook,
    current_strategy,
    main_thread_name,
    prepare,
    set_strategy,
)
from nbdist.core import host
from nbdist.core.failures import ranks_are, ranks_phrase
from nbdist.core.progress import Reporter
from nbdist.core.ranks import rank_label
from nbdist.core.topology import EngineReport, StoreAt, Topology, replan
from nbdist.errors import Interrupted, NbdistError, OptionError, RankBusy, StartError
from nbdist.hang.kernel.health import Health, recover
from nbdist.hang.recovery import GroupSpec, MeshSpec, merge_groups
from nbdist.rpc.kernel import gather, sigint
from nbdist.rpc.kernel.channel import failure_of
from nbdist.rpc.kernel.functions import RankFunction

# In the environment of an engine that takes another's place: it joins later, when it is asked.
REPLACES = "NBDIST_REPLACES"
POLL_S = 0.01
INTERRUPT_S = 2.0
INTERRUPT_PAUSE_S = 0.1
# A message to an engine that has not found the new controller yet is lost, so it is sent again.
PING_PAUSE_S = 0.2
RECONNECT_DEADLINE_S = 30.0
# A rank whose cell's end was lost with the controller may be idle: it gets this long to say so.
UNHEARD_S = 2.0
SHOWN_NAMES = 12

take_plan: RankFunction[[Topology, Sequence[int]], tuple[str, int]] = RankFunction(
    "nbdist.engine.join:take_plan"
)
rejoin: RankFunction[[Topology, int, StoreAt, int, Sequence[GroupSpec]], None] = RankFunction(
    "nbdist.engine.join:rejoin"
)
names: RankFunction[[], tuple[str, ...]] = RankFunction("nbdist.rpc.rank.namespace:names")
group_names: RankFunction[[], dict[str, str]] = RankFunction(
    "nbdist.rpc.rank.namespace:group_names"
)
name_groups: RankFunction[[Mapping[str, str]], None] = RankFunction(
    "nbdist.rpc.rank.namespace:name_groups"
)
mesh_names: RankFunction[[], dict[str, MeshSpec]] = RankFunction(
    "nbdist.hang.rank.device_meshes:mesh_names"
)
name_meshes: RankFunction[[Sequence[Mapping[str, MeshSpec]]], tuple[str, ...]] = RankFunction(
    "nbdist.hang.rank.device_meshes:name_meshes"
)
created_groups: RankFunction[[], tuple[GroupSpec, ...]] = RankFunction(
    "nbdist.hang.rank.process_groups:created_groups"
)
catching_up: RankFunction[[bool], None] = RankFunction(
    "nbdist.parallel.live.live_models:catching_up"
)


@dataclass(frozen=True, slots=True)
class RestartResult:
    """The result of a restart.

    Attributes:
        ranks: Ranks that have new processes.
        elapsed_s: From the call until these ranks could take a cell.
        notes: Sentences that a person has to read.
    """

    ranks: tuple[int, ...]
    elapsed_s: float
    notes: tuple[str, ...]


def restart(
    ranks: Ranks, health: Health, named: Sequence[int], deadline_s: float, progress: Reporter
) -> RestartResult:
    """Put new processes in the place of ranks, and make all groups whole again.

    Ranks that have ended and were not named come back as well: no group of all ranks could be
    formed without them. The others have to be idle, and keep variables, groups and models. An
    interrupt, or a failure, leaves the ranks ended that were to be replaced, and the next restart
    brings them. The deadline is for all of it; `progress` is called with what it waits for.

    Raises:
        OptionError: On a profile whose processes nbdist does not start.
        RankBusy: If a rank that stays runs a cell.
        StartError: If a new process does not come, with its exit code and last lines.
        NbdistError: If the groups cannot be formed.
        Interrupted: If the user interrupted it.
    """
    began_s = time.monotonic()
    check_launcher(ranks)
    controller_note = reconnect(ranks)
    replaced = tuple(sorted({*named, *health.dead}))
    also = [rank for rank in replaced if rank not in named]
    busy = [rank for rank in ranks.busy_ranks if rank not in replaced]
    if busy:
        raise RankBusy(
            f"{ranks_are(busy)} still running a cell, and the groups can only be formed again "
            f"with all ranks. Wait, interrupt the cell, or restart all of them: "
            f"%dist_restart {rank_label(sorted({*busy, *replaced}))}"
        )
    missing_names = _Restart(ranks, health, replaced, began_s + deadline_s).run(progress)
    notes = [
        controller_note,
        f"{ranks_phrase(also)} had ended too, and restarted as well" if also else "",
        _missing_names_note(replaced, missing_names),
    ]
    return RestartResult(
        replaced, time.monotonic() - began_s, tuple(note for note in notes if note)
    )


def check_launcher(ranks: Ranks) -> None:
    """Refuse a restart where ipyparallel's own launchers have started the ranks.

    Raises:
        OptionError: If they have.
    """
    if not ranks.cluster.can_restart:
        raise OptionError(
            "Single ranks can be restarted only where nbdist starts the processes itself (the "
            "profiles local, ssh and slurm). %dist_reset restarts all ranks of this profile; their "
            "variables are lost."
        )


class _Restart:
    """The steps of one restart."""

    def __init__(self, ranks: Ranks, health: Health, replaced: tuple[int, ...], end_s: float):
        self._ranks = ranks
        self._health = health
        self._cluster = ranks.cluster
        self._replaced = replaced
        self._staying = tuple(rank for rank in ranks.ranks if rank not in replaced)
        self._end_s = end_s
        self._pressed = sigint.PendingInterrupts()

    def run(self, progress: Reporter) -> list[str]:
        """Do it; the names that ranks who stay have, and the new ones lack."""
        with sigint.deferred_sigint() as pressed:
            self._pressed = pressed
            groups = merge_groups(self._all(created_groups, self._staying, "report their groups"))
            engines = [self._ranks.topology.engine_of_rank(rank) for rank in self._replaced]
            left_s = self._end_s - time.monotonic()
            self._cluster.restart_engines(engines, {REPLACES: "1"}, left_s, progress, self._check)
            for rank in self._replaced:
                self._ranks.free(rank)
            try:
                self._form(groups, progress)
                there = self._all(names, self._staying, "report their variables")
                here = self._all(names, self._replaced[:1], "report their variables")[0]
            except BaseException:
                self._health.needs_recovery = True
                self._cluster.processes.end_engines(engines)
                raise
        # In the order in which the first rank that stays has made them.
        return list(dict.fromkeys(name for names in there for name in names if name not in here))

    def _form(self, groups: tuple[GroupSpec, ...], progress: Reporter) -> None:
        """Form the groups on all ranks at once, and give the new ones their names."""
        progress("forming the groups again")
        health, new, call = self._health, self._replaced, self._ranks.call
        reports = self._describe(new)
        plan = replan(self._ranks.topology, reports)
        store_at = self._find_store(plan, reports)
        health.generation += 1
        adopted = {}
        if start.is_this_host({place.host for place in plan.ranks}):
            folder = os.getcwd()  # noqa: PTH109  # a string for the wire
            adopted = {rank: adopt_notebook(call, rank, list(sys.path), folder) for rank in new}
        futures: dict[int, Future[Any]] = {
            rank: recover(call, rank, health.generation, ()) for rank in self._staying
        }
        for rank in new:
            futures[rank] = rejoin(call, rank, plan, rank, store_at, health.generation, groups)
        try:
            self._results(futures, "form the groups again")
        except BaseException:
            self._interrupt({rank: futures[rank] for rank in self._staying})
            raise
        self._results(adopted, "switch to the notebook's folder")
        self._catch_up(new)
        self._ranks.topology = plan
        run_dir.write_ranks(self._cluster.run_dir, [place.host for place in plan.ranks])
        health.needs_recovery = False

    def _catch_up(self, new: Sequence[int]) -> None:
        """Give new ranks their names, and what the others have chosen and named."""
        self._all(lambda c, rank: prepare(c, rank, self._ranks.seed), new, "prepare")
        chosen = self._ranks.strategy_chosen
        if chosen is not None:  # else it is what every rank begins with
            current = self._all(current_strategy, self._staying[:1], "report the strategy")
            choice = (*current, chosen)[0]
            self._all(lambda c, rank: set_strategy(c, rank, choice), new, "set the strategy")
        if self._staying:  # otherwise there is nobody to catch up with
            by_rank = self._all(group_names, self._staying, "report their groups")
            variables = {name: group for by_name in by_rank for name, group in by_name.items()}
            self._all(lambda c, rank: name_groups(c, rank, variables), new, "prepare")
            meshes = self._all(mesh_names, self._staying, "report their meshes")
            self._all(lambda c, rank: name_meshes(c, rank, meshes), new, "prepare")
            self._all(lambda c, rank: catching_up(c, rank, True), new, "prepare")

    def _describe(self, new: Sequence[int]) -> dict[int, EngineReport]:
        """Descriptions that the new processes give of themselves, by rank."""
        engine, address = self._ranks.topology.engine_of_rank, host.address_toward(host.ELSEWHERE)
        reports = self._all(
            lambda c, rank: start.describe(c, rank, engine(rank), address),
            new,
            "describe themselves",
        )
        return dict(zip(new, reports, strict=True))

    def _find_store(self, plan: Topology, reports: Mapping[int, EngineReport]) -> StoreAt:
        """The ranks' store, which the staying ranks have by then."""
        if not self._staying:
            assert self._cluster.channel is not None
            by_engine = {report.engine_id: report for report in reports.values()}
            call, end_s = self._cluster.channel.call, self._end_s
            return start.find_store(self._cluster, call, plan, by_engine, end_s)
        address, port = self._all(
            lambda c, rank: take_plan(c, rank, plan, self._replaced),
            self._staying,
            "take the new plan",
        )[0]
        if not port:
            return start.store_file(self._cluster)
        reached = self._all(
            lambda c, rank: start.reachable(c, rank, (address,), port),
            self._replaced,
            "reach the other ranks",
        )
        late = [rank for rank, by in zip(self._replaced, reached, strict=True) if not by]
        if late:
            hosts = sorted({plan.ranks[rank].host for rank in late})
            raise NbdistError(
                f"{ranks_phrase(late)} on {', '.join(hosts)} cannot reach the other ranks at "
                f"{address}, port {port}. Allow connections between the hosts"
            )
        return "", address, port

    def _interrupt(self, futures: Mapping[int, Future[Any]]) -> None:
        """Break off what ranks are doing; again and again, as they ignore it before they begin."""
        end_s = time.monotonic() + INTERRUPT_S
        while late := [rank for rank, future in futures.items() if not future.done()]:
            if time.monotonic() > end_s:
                return  # it ends by its own deadline
            for rank in late:
                self._ranks.interrupt(rank)
            time.sleep(INTERRUPT_PAUSE_S)

    def _all(
        self, function: Callable[..., Future[Any]], ranks: Iterable[int], what: str
    ) -> list[Any]:
        return self._results({rank: function(self._ranks.call, rank) for rank in ranks}, what)

    def _results(self, futures: Mapping[int, Future[Any]], what: str) -> list[Any]:
        while late := [rank for rank, future in futures.items() if not future.done()]:
            self._check()
            self._check_ends(futures, what)
            if time.monotonic() >= self._end_s:
                raise NbdistError(f"{ranks_phrase(late)} did not {what} before the deadline")
            if any(future.done() and future.exception() for future in futures.values()):
                break  # the others would wait for it
            time.sleep(POLL_S)
        for rank, future in futures.items():
            error = future.exception() if future.done() else None
            if error is not None:
                if not self._ranks.is_connected(rank):  # known a moment before its process's end
                    engine = self._ranks.topology.engine_of_rank(rank)
                    self._cluster.processes.exit_of(engine, gather.END_KNOWN_S)
                self._check_ends(futures, what)
                name, message, _ = failure_of(error) or ("", str(error), ())
                raise NbdistError(f"rank {rank} could not {what}: {name}: {message}") from error
        return [future.result() for future in futures.values()]

    def _check_ends(self, ranks: Iterable[int], what: str) -> None:
        ends = {rank: end for rank in ranks if (end := self._ranks.exit_of(rank))}
        if ends:
            how = next(iter(ends.values())).how
            raise NbdistError(f"{ranks_phrase(tuple(ends))} ended ({how}) before it could {what}")

    def _check(self) -> None:
        try:
            self._pressed.check()
        except KeyboardInterrupt:
            raise Interrupted(
                f"{ranks_phrase(self._replaced)} not restarted; %dist_restart "
                f"{rank_label(self._replaced)} tries again"
            ) from None


def _missing_names_note(replaced: Collection[int], missing_names: Sequence[str]) -> str:
    if not missing_names:
        return ""
    shown = ", ".join(missing_names[:SHOWN_NAMES])
    if len(missing_names) > SHOWN_NAMES:
        shown += f" and {len(missing_names) - SHOWN_NAMES} more"
    return (
        f"{ranks_are(sorted(replaced))} missing {shown}: define what you need "
        f"again with %%rank [{rank_label(sorted(replaced))}], then run %dist_sync_model"
    )


def reconnect(ranks: Ranks) -> str:
    """Start a new controller where the old one has ended; what was done, or "" for nothing.

    A rank that was in a cell goes on with it, unheard, and counts as busy until it has answered
    again. Cheap to call when nothing has happened.

    Raises:
        OptionError: If this profile's controller cannot be started again.
        StartError: If the new one, or a rank's connection to it, does not come.
    """
    cluster = ranks.cluster
    end = cluster.processes.exits.get(None)
    if end is None:
        for rank in tuple(cluster.unheard):  # the answer comes when they are idle
            _ping(ranks, rank, cluster.unheard)
        return ""
    began_s = time.monotonic()
    end_s = began_s + RECONNECT_DEADLINE_S
    cluster.restart_controller(RECONNECT_DEADLINE_S)
    cluster.unheard = set(ranks.busy_ranks)
    late = _await_answers(ranks, set(_living(ranks)) - cluster.unheard, end_s)
    if late:
        raise StartError(
            f"{ranks_phrase(sorted(late))} did not find the new controller. Run "
            f"{ranks.restart_verb(sorted(late))}."
        )
    # Unheard ranks count as busy, and may be idle.
    late = _await_answers(ranks, cluster.unheard, time.monotonic() + UNHEARD_S)
    still_busy = f"; {ranks_are(sorted(late))} still in a cell" if late else ""
    return (
        f"The cluster's controller had ended ({end.how}). A new one took its place in "
        f"{time.monotonic() - began_s:.1f} s; the ranks have kept their variables{still_busy}."
    )


def await_idle(ranks: Ranks, health: Health) -> tuple[int, ...]:
    """Wait until the main threads of idle ranks hear messages; return the ranks that do not.

    Needed where a controller was replaced while no notebook held the ranks: a rank's connections
    come back one by one, and a cell sent before is lost. A rank in a cell hears later.
    """
    health.refresh(UNHEARD_S)
    idle = {rank for rank, log in health.logs().items() if log.state != "running"}
    silent, ranks.cluster.unheard = ranks.cluster.unheard & idle, set()
    return tuple(sorted(_await_answers(ranks, silent, time.monotonic() + RECONNECT_DEADLINE_S)))


def _living(ranks: Ranks) -> list[int]:
    return [rank for rank in ranks.ranks if ranks.exit_of(rank) is None]


def _await_answers(ranks: Ranks, silent: set[int], end_s: float) -> set[int]:
    """Ask silent ranks until all have answered; return the living ones that have not."""
    next_s = 0.0
    while (late := silent.intersection(_living(ranks))) and time.monotonic() < end_s:
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + PING_PAUSE_S
            for rank in late | ranks.cluster.unheard:
                _ping(ranks, rank, silent)
        time.sleep(POLL_S)
    return late


def _ping(ranks: Ranks, rank: int, silent: set[int]) -> None:
    unheard = ranks.cluster.unheard

    def mark_heard(answer: Future[Any]) -> None:
        if answer.exception() is None:
            if rank in unheard:
                unheard.discard(rank)
                ranks.free(rank)
            silent.discard(rank)  # may be the same set

    main_thread_name(ranks.call, rank).add_done_callback(mark_heard)
