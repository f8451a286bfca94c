"""Ranks that outlive their notebook: what is written down for it, and who attaches to them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist.cluster import run_owner
from nbdist.cluster.hosts import OWN_NAMES
from nbdist.cluster.kernel import ipp_cluster, run_dir, runs
from nbdist.cluster.kernel.cluster import Cluster
from nbdist.cluster.kernel.start import StartOptions
from nbdist.cluster.run_owner import ELSEWHERE, KEPT, RUNNING, Keep, Run
from nbdist.core import host
from nbdist.core.failures import ranks_phrase
from nbdist.core.topology import Topology
from nbdist.core.units import shown
from nbdist.core.versions import VERSION
from nbdist.errors import AlreadyRunning, NbdistError, NotRunning, OptionError, StartError
from nbdist.rpc.kernel.channel import Channel
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.strategy.choice import Strategy

ATTACH_S = 60.0
# Ranks answer in milliseconds, unless C code holds Python's lock.
ANSWER_S = 5.0
ASK_AGAIN_S = 0.5
LOCK = "attach.lock"

standing: RankFunction[[], tuple[Topology, int, int, Strategy]] = RankFunction("standing")


@dataclass(frozen=True, slots=True)
class Attached:
    """A kept run that this kernel holds now.

    Attributes:
        options: The options of the run's start.
        since_s: When that was, in Unix time.
        generation: How often its groups have been made anew.
        run: The number of its newest cell.
        silent: The ranks that live, but have not answered.
    """

    cluster: Cluster
    topology: Topology
    options: StartOptions
    since_s: float
    generation: int
    run: int
    strategy: Strategy
    silent: tuple[int, ...]


def keep(
    cluster: Cluster,
    topology: Topology,
    options: StartOptions,
    seconds: float,
    save: str,
    since_s: float,
) -> None:
    """Let ranks go on for a time without this kernel; they were started at `since_s`, in Unix time.

    `save` is where a checkpoint is written when their time is over; empty for none.

    Raises:
        StartError: If the run's folder cannot be written.
    """
    path = os.path.abspath(save) if save else ""  # noqa: PTH100  # of what is not there yet
    stop = (sys.executable, "-m", "nbdist", "stop", str(cluster.run_dir), "--save", path)
    start = {"options": options, "topology": topology, "since_s": since_s}
    gpus = {place.device_uuid: place.device_name for place in topology.ranks if place.device_uuid}
    written = Keep(
        seconds,
        path,
        stop if save else (),
        VERSION,
        sys.executable,
        since_s,
        tuple(gpus.values()),
    )
    cluster.keep(seconds, start, written)


def find(named: str) -> Run:
    """The run that is meant by its name, the beginning of that, or its folder; "" for the only one.

    Raises:
        NotRunning: If no ranks are kept.
        OptionError: If several are, none is meant, or it is another user's.
    """
    if named and os.sep in named:
        return _in_folder(Path(named))
    kept_runs = runs.kept()
    begin = named.removeprefix("run-")
    chosen = [run for run in kept_runs if run.name.removeprefix("run-").startswith(begin)]
    if not named:
        chosen = [run for run in kept_runs if run.state == KEPT] or list(kept_runs)
    if len(chosen) == 1:
        return chosen[0]
    others = [Path(folder).name for folder in runs.folders()]
    if others := [name for name in others if named and name.removeprefix("run-") == begin]:
        raise OptionError(
            f"{others[0]} is not kept: its ranks end with their notebook, and what they print is "
            "there alone. %dist_init --keep starts ranks that are kept; %dist_detach keeps those "
            "of a notebook."
        )
    if damaged := [run for run in map(Path, runs.folders()) if run_dir.has_damaged_keep(run)]:
        raise NotRunning(
            f"What is written of how {damaged[0].name} is kept is damaged ({run_owner.KEEP} and "
            f"{run_owner.KEEP_COPY} in {damaged[0]}), so nobody can attach to it. `nbdist doctor` "
            "shows how to end its ranks."
        )
    if not kept_runs:
        raise NotRunning(
            "No ranks of yours are kept on this machine. %dist_init --keep starts ranks that "
            "outlive their notebook; %dist_detach lets go of those of another notebook."
        )
    what = f"There is no run {named!r}" if not chosen else f"{len(chosen)} runs are kept"
    raise OptionError(f"{what}. Name one of: {', '.join(run.name for run in kept_runs)}.")


def _in_folder(folder: Path) -> Run:
    folder = Path(os.path.abspath(folder))  # noqa: PTH100  # links are not followed
    try:
        owner_id = folder.lstat().st_uid
    except OSError as error:
        raise OptionError(f"There is no run in {folder} ({error.strerror}).") from error
    if owner_id != os.getuid():
        raise OptionError(
            f"{folder} belongs to another user (number {owner_id}). Only who has started ranks can "
            "attach to them."
        )
    run = runs.read(folder)
    if run.keep is None:
        raise OptionError(f"{folder} is not the folder of ranks that are kept.")
    return run


def check(run: Run, *, takes: bool) -> None:
    """Refuse a run that another kernel holds, or that this nbdist cannot read.

    Raises:
        AlreadyRunning: If its notebook lives, unless this `takes` it.
        StartError: If it is of another version, or its ranks are on another machine.
        NbdistError: If it is not kept any more.
    """
    assert run.keep is not None
    owner = run.owner
    if run.state in {RUNNING, ELSEWHERE} and owner is not None and not takes:
        since = shown(time.strftime("%H:%M:%S", time.localtime(owner.since_s)))
        where = f" on {owner.machine.host}" if run.state == ELSEWHERE else ""
        raise AlreadyRunning(
            f"{run.name} is held by the kernel {shown(owner.pid)}{where} ({owner.where}) since "
            f"{since}. Type %dist_detach there, or take it with %dist_attach {run.name} --take."
        )
    if run.state not in {KEPT, RUNNING, ELSEWHERE}:
        raise NbdistError(
            f"{run.name} is not kept any more ({run.state}). `nbdist doctor "
            "--clean` removes what is left."
        )
    if run.keep.version != VERSION:
        raise StartError(
            f"{run.name} was started by nbdist {run.keep.version}, and this is {VERSION}. Attach "
            f"in a kernel of {run.keep.python}, or end its ranks there: {run.keep.python} -m "
            f"nbdist stop {run.name}"
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the run's lock: of two kernels that attach at the same moment, one gets an error."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise AlreadyRunning(
                f"Another kernel is attaching to {folder.name} just now."
            ) from error
        yield


def attach(run: Run, *, takes: bool = False, keep: Keep | None = None) -> Attached:
    """Hold a kept run in this kernel; `takes` it from the kernel that holds it.

    `keep` holds from now on, even if the run cannot be reached; None changes nothing.

    Raises:
        AlreadyRunning, StartError, NbdistError: See `check` and `Cluster.attach`. Its ranks go on.
    """
    folder = Path(run.folder)
    with _locked(folder):
        run = runs.read(folder)
        check(run, takes=takes)
        try:
            start = run_dir.read_start(folder)
        except (OSError, pickle.PickleError, ImportError, AttributeError, EOFError) as error:
            raise StartError(
                f"What is needed to attach to {run.name} cannot be read ({error}). `nbdist stop "
                f"{run.name}` ends its ranks."
            ) from error
        _check_place(run, start)
        run_dir.take(folder)
        if keep is not None:
            run_dir.write_keep(folder, keep)
    keep = keep or run.keep
    assert keep is not None
    cluster = Cluster.attach(folder, start, keep, start["topology"].world_size, ATTACH_S)
    try:
        return _ask(cluster, start)
    except BaseException:
        cluster.leave()
        raise


def _check_place(run: Run, start: Mapping[str, Any]) -> None:
    """Refuse a run of another machine that cannot be reached from here."""
    there, config = start["machine"].host, start["config"]
    if start["machine"] == host.this_machine():
        return
    named = {name for name, *_ in config.AgentEngineSetLauncher.get("hosts", [])}
    is_local = ipp_cluster.launchers(config)[1].is_on_this_machine
    if is_local or OWN_NAMES & named:
        why = f"Ranks of {run.name} are processes of {there}"
    elif not start["connection"].is_open:
        why = f"{run.name} was started without --keep, so its controller listens on {there} alone"
    else:
        return
    raise StartError(f"{why}, and this is {host.this_machine().host}. Attach in a notebook there.")


def _answers(channel: Channel, ranks: Sequence[int]) -> dict[int, Any]:
    """Return the ranks' answers that come within ANSWER_S.

    Ranks are asked repeatedly: a new controller loses messages to a rank that has not found it.
    """
    asked: dict[Future[Any], int] = {}
    answers: dict[int, Any] = {}
    end_s = time.monotonic() + ANSWER_S
    while len(answers) < len(ranks) and time.monotonic() < end_s:
        asked |= {standing(channel.ask, rank): rank for rank in ranks if rank not in answers}
        again_s = time.monotonic() + ASK_AGAIN_S
        while len(answers) < len(ranks) and (left_s := again_s - time.monotonic()) > 0:
            if not asked:  # each has failed at once
                time.sleep(left_s)
                break
            for future in wait(asked, left_s, FIRST_COMPLETED).done:
                rank = asked.pop(future)
                if future.exception() is None:
                    answers[rank] = future.result()
    return answers


def _ask(cluster: Cluster, start: dict[str, Any]) -> Attached:
    assert cluster.channel is not None
    channel = cluster.channel
    world_size = start["topology"].world_size
    living = sorted(
        set(channel.engine_ids).intersection(range(world_size)).difference(cluster.processes.exits)
    )
    if not living:
        name = cluster.run_dir.name
        raise StartError(
            f"All ranks of {name} have ended, so there is nothing to attach to. `nbdist stop "
            f"{name}` removes what is left of it."
        )
    answers = _answers(channel, living)
    if not answers:
        raise StartError(
            f"No rank has answered within {ANSWER_S:.0f} s ({ranks_phrase(living)} connected). "
            "They may be in C code that holds Python's lock: try again, or end them with "
            "`nbdist stop`."
        )
    topology, generation, _, strategy = max(answers.values(), key=lambda answer: answer[1])
    return Attached(
        cluster,
        topology,
        start["options"],
        start["since_s"],
        generation,
        max(run for _, _, run, _ in answers.values()),
        strategy,
        tuple(rank for rank in living if rank not in answers),
    )
