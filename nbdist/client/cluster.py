"""One ipyparallel cluster: started from a profile, watched, and ended without a trace."""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
from traitlets.config import Config

from nbdist.client import launcher, rundir
from nbdist.client.channel import Channel
from nbdist.client.guard import Guard
from nbdist.client.loop import LoopThread
from nbdist.core.failures import ranks_phrase
from nbdist.errors import StartError

Progress = Callable[[str], None]

POLL_S = 0.01
STOP_GRACE_S = 2.0
OTHER_STOP_DEADLINE_S = 60.0
LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one of the cluster's processes.

    Attributes:
        rank: The rank, or None for the controller.
        code: Its exit code, negative for a signal; None where it cannot be known.
    """

    rank: int | None
    code: int | None

    @property
    def how(self) -> str:
        """`exit code 1`, `signal SIGKILL`."""
        if self.code is None:
            return "unknown exit code"
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"signal {signal.Signals(-self.code).name}"
        except ValueError:
            return f"signal {-self.code}"


@functools.cache
def cluster_loop() -> LoopThread:
    """The one loop of this process that all clusters use."""
    return LoopThread("nbdist-cluster")


def installed_torch() -> str | None:
    """The version of the torch that local engines will import, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


class Cluster:
    """A controller and its engines, with their run folder and guardian."""

    def __init__(self, config: Config):
        """Make the run folder and the guardian; `start` brings the processes up.

        Args:
            config: The profile's settings, with the launcher's own added.
        """
        self.run_dir: Path = rundir.create()
        self.exits: dict[int | None, Exit] = {}
        self.on_exit: Callable[[Exit], None] = lambda _: None
        self.channel: Channel | None = None
        self._is_stopping = False
        self._config = config
        self._guard = Guard(self.run_dir)
        # A process that changes its own environment is still found by its session; one that
        # leaves its session is still found by this.
        config.BaseLauncher.environment = {"NBDIST_RUN": str(self.run_dir)}
        logger = logging.getLogger(f"nbdist.cluster.{self.run_dir.name}")
        logger.addHandler(logging.FileHandler(self.run_dir / "cluster.log", delay=True))
        logger.propagate = False
        self._cluster = ipyparallel.Cluster(
            config=config,
            parent=None,
            log=logger,
            load_profile=False,
            profile_dir=str(self.run_dir / "profile"),
            shutdown_atexit=False,
        )

    @property
    def is_local(self) -> bool:
        """Whether the launcher gives the ranks, on this machine."""
        return issubclass(self._cluster.engine_launcher_class, launcher.RankEngineSetLauncher)

    @property
    def guardian_pid(self) -> int:
        """The process id of the guardian."""
        return self._guard.pid

    def pids(self) -> dict[int, int]:
        """Engine number -> process id, for engines that this kernel has started itself."""
        launchers = getattr(self._cluster.engine_set, "launchers", {})
        return {int(i): one.pid for i, one in launchers.items() if getattr(one, "pid", 0) > 0}

    def controller_pid(self) -> int | None:
        """The controller's process id, where this kernel has started it itself."""
        pid = getattr(self._cluster.controller, "pid", -1)
        return pid if pid > 0 else None

    def start(self, world_size: int, deadline_s: float, progress: Progress) -> None:
        """Start controller and engines, connect, and wait until all engines have registered.

        Raises:
            StartError: When a process ends, or after the deadline, naming who is missing.
        """
        end = time.monotonic() + deadline_s
        (self.run_dir / "profile" / "security").mkdir(parents=True, mode=0o700)
        progress("starting the controller and the engines")
        self._run(self._start_processes(world_size), end, "the controller's connection file")
        self._watch_processes()
        progress("waiting for the controller")
        client = self._run(self._cluster.connect_client(), end, "the controller")
        self.channel = Channel(client)
        self._wait_for_engines(world_size, end, deadline_s, progress)

    async def _start_processes(self, world_size: int) -> None:
        if self._cluster.send_engines_connection_env:
            await self._cluster.start_cluster(world_size)
        else:
            controller = asyncio.ensure_future(self._cluster.start_controller())
            await asyncio.sleep(0)
            await self._cluster.start_engines(world_size)
            await controller

    def _run(self, coroutine: Any, end_s: float, what: str) -> Any:
        try:
            return cluster_loop().run(coroutine, max(0.1, end_s - time.monotonic()))
        except TimeoutError as error:
            raise StartError(
                f"{what} did not come before the start's deadline (--timeout)."
            ) from error
        except (RuntimeError, OSError) as error:
            self._raise_for_exits()
            raise StartError(f"The cluster could not start: {error}") from error

    def _watch_processes(self) -> None:
        for pid in (self.controller_pid(), *self.pids().values()):
            if pid is not None:
                self._guard.watch(pid)
        self._cluster.controller.on_stop(functools.partial(self._ended, None))
        for number, one in getattr(self._cluster.engine_set, "launchers", {}).items():
            one.on_stop(functools.partial(self._ended, int(number)))

    def _ended(self, rank: int | None, stop_data: dict[str, Any]) -> None:
        """An engine or the controller has ended (called in the cluster's loop)."""
        code = stop_data.get("exit_code")
        self.exits[rank] = Exit(rank, code if isinstance(code, int) else None)
        if not self._is_stopping:
            self.on_exit(self.exits[rank])

    def _wait_for_engines(
        self, world_size: int, end_s: float, deadline_s: float, progress: Progress
    ) -> None:
        assert self.channel is not None
        told = -1
        while (ready := len(self.channel.engine_ids)) < world_size:
            if ready != told:
                progress(f"{ready} of {world_size} ranks ready")
                told = ready
            self._raise_for_exits()
            if time.monotonic() > end_s:
                missing = sorted(set(range(world_size)) - set(self.channel.engine_ids))
                raise StartError(
                    f"{ready} of {world_size} engines were ready after {deadline_s:.0f} s; "
                    f"{ranks_phrase(missing)} did not come. {self._log_tail(missing[0])}"
                    "A slow file system can be given more time with --timeout."
                )
            time.sleep(POLL_S)

    def _raise_for_exits(self) -> None:
        """Tell why a process has ended before the start was complete, root cause first."""
        if not self.exits:
            return
        ended = sorted(self.exits.values(), key=lambda e: -1 if e.rank is None else e.rank)
        for one in ended:
            written = None if one.rank is None else rundir.failure(self.run_dir, one.rank)
            if written is not None and not written["message"].startswith("rank "):
                reason = written["message"]
                if not written["is_explained"]:
                    reason = f"{written['kind']}: {reason}\n{written['traceback']}"
                raise StartError(f"rank {one.rank} could not join: {reason}")
        first = ended[0]
        who = "The controller" if first.rank is None else f"rank {first.rank}"
        raise StartError(
            f"{who} ended before it was ready ({first.how}). {self._log_tail(first.rank)}"
        )

    def _log_tail(self, rank: int | None) -> str:
        if rank is None:
            one = self._cluster.controller
        else:
            one = getattr(self._cluster.engine_set, "launchers", {}).get(str(rank))
        text = "" if one is None else str(one.get_output())
        lines = text.strip().splitlines()[-LOG_LINES:]
        return (
            "Its last lines:\n" + "\n".join(f"    {line}" for line in lines) + "\n" if lines else ""
        )

    def interrupt(self, engine: int) -> None:
        """Send SIGINT to one engine."""
        pid = self.pids().get(engine)
        if pid is not None and self.exits.get(engine) is None:
            os.kill(pid, signal.SIGINT)
        elif pid is None and self.channel is not None:
            self.channel.signal(engine, signal.SIGINT)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End every process of this run and remove its folder.

        Processes get SIGTERM first and `grace_s` to end; the guardian kills the rest.
        """
        if self._is_stopping:
            return
        self._is_stopping = True
        if self.channel is not None:
            self.channel.close()
        own = [pid for pid in (*self.pids().values(), self.controller_pid()) if pid is not None]
        if own:
            _terminate(own, grace_s)
        else:
            cluster_loop().run(self._cluster.stop_cluster(), OTHER_STOP_DEADLINE_S)
        if not self._guard.close():
            sys.stderr.write(f"nbdist: processes of {self.run_dir} could not all be ended\n")


def _terminate(pids: list[int], grace_s: float) -> None:
    processes = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            process.terminate()
        except psutil.NoSuchProcess:
            continue
        processes.append(process)
    psutil.wait_procs(processes, timeout=grace_s)
