"""One ipyparallel cluster: started from a profile, watched, and ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
from ipyparallel.cluster.launcher import LocalProcessLauncher, SSHLauncher
from traitlets import TraitError
from traitlets.config import Config

from nbdist.client import launcher, presses, rundir
from nbdist.client.channel import Channel
from nbdist.client.guard import Guard
from nbdist.client.loop import LoopThread
from nbdist.core.failures import ranks_phrase
from nbdist.errors import OptionError, StartError

Progress = Callable[[str], None]

POLL_S = 0.01
STOP_GRACE_S = 2.0
OTHER_STOP_DEADLINE_S = 60.0
LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one of the cluster's processes.

    Attributes:
        engine: The engine, or None for the controller.
        code: Its exit code, negative for a signal; None where it cannot be known.
    """

    engine: int | None
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
        self._owner = os.getpid()
        # The launcher's number -> ipyparallel's engine id; equal where the launcher says so.
        self._engine_of: dict[int, int] = {}
        self._started: dict[int, LocalProcessLauncher] = {}
        self._guard = Guard(self.run_dir)
        try:
            self._log = _logger(self.run_dir)
            _mark(config, self.run_dir)
            self._cluster = _unstarted(config, self.run_dir, self._log)
        except BaseException:
            self._guard.close()
            raise

    @property
    def guardian_pid(self) -> int:
        """The process id of the guardian."""
        return self._guard.pid

    def pids(self) -> dict[int, int]:
        """Engine id -> process id of the living engines that this kernel has started itself."""
        return {
            self._engine_of.get(number, number): one.pid
            for number, one in self._own_launchers().items()
        }

    def controller_pid(self) -> int | None:
        """The controller's process id, where this kernel has started it itself and it lives."""
        one = self._cluster.controller
        return int(one.pid) if _is_own(one) and None not in self.exits else None

    def identify(self, pids: dict[int, int]) -> None:
        """Take in which engine has which process, where the launcher did not decide it.

        Args:
            pids: ipyparallel's engine id -> process id, as the engines report it.
        """
        engines = {pid: engine for engine, pid in pids.items()}
        self._engine_of = {
            n: engines[one.pid] for n, one in self._started.items() if one.pid in engines
        }
        known = list(self.exits.values())
        self.exits.clear()
        for one in known:
            engine = None if one.engine is None else self._engine_of.get(one.engine, one.engine)
            self.exits[engine] = replace(one, engine=engine)

    def exit_of(self, engine: int, deadline_s: float) -> Exit | None:
        """The end of an engine, waited for if it can be seen from here; None if it is unknown."""
        end_s = time.monotonic() + deadline_s
        seen_here = {self._engine_of.get(number, number) for number in self._started}
        while engine in seen_here and engine not in self.exits and time.monotonic() < end_s:
            time.sleep(POLL_S)
        return self.exits.get(engine)

    def _own_launchers(self) -> dict[int, LocalProcessLauncher]:
        # ipyparallel takes a launcher out of this when its process ends.
        launchers = getattr(self._cluster.engine_set, "launchers", {})
        return {int(i): one for i, one in list(launchers.items()) if _is_own(one)}

    def start(self, world_size: int, deadline_s: float, progress: Progress) -> None:
        """Start controller and engines, connect, and wait until all engines have registered.

        Raises:
            StartError: When a process ends, or after the deadline, naming who is missing.
        """
        end = time.monotonic() + deadline_s
        (self.run_dir / "profile" / "security").mkdir(parents=True, mode=0o700)
        progress("starting the controller and the engines")
        self._run(self._start_processes(world_size), end, "the controller's connection file")
        progress("waiting for the controller")
        client = self._run(
            # ipyparallel would give up after 10 s, whatever the start's deadline is.
            self._cluster.connect_client(timeout=max(1.0, end - time.monotonic())),
            end,
            "the controller",
        )
        self.channel = Channel(client)
        self._wait_for_engines(world_size, end, deadline_s, progress)

    async def _start_processes(self, world_size: int) -> None:
        # The engines' program waits for the connection file; other engines need it at once.
        controller = asyncio.ensure_future(self._cluster.start_controller())
        try:
            if self._cluster.send_engines_connection_env:
                await controller
                await asyncio.sleep(self._cluster.delay)
            else:
                await asyncio.sleep(0)
            await self._cluster.start_engines(world_size)
            # In the same step of the loop, so that no end of an engine is missed.
            self._watch_processes()
            await controller
        finally:
            controller.cancel()

    def _run(self, coroutine: Any, end_s: float, what: str) -> Any:
        try:
            return cluster_loop().run(coroutine, max(0.1, end_s - time.monotonic()))
        except TimeoutError as error:
            raise StartError(
                f"{what} did not come before the start's deadline (--timeout)."
            ) from error
        except (RuntimeError, OSError, ipyparallel.error.IPythonError) as error:
            self._raise_for_exits()
            raise StartError(f"The cluster could not start: {error}") from error

    def _watch_processes(self) -> None:
        controller = self._cluster.controller
        controller.on_stop(functools.partial(self._ended, None))
        if _is_own(controller):
            self._guard.watch(controller.pid)
        for number, one in self._own_launchers().items():
            one.on_stop(functools.partial(self._ended, number))
            self._started[number] = one
            self._guard.watch(one.pid)

    def _ended(self, number: int | None, stop_data: dict[str, Any]) -> None:
        """An engine or the controller has ended (called in the cluster's loop)."""
        engine = None if number is None else self._engine_of.get(number, number)
        code = stop_data.get("exit_code")
        self.exits[engine] = Exit(engine, code if isinstance(code, int) else None)
        if not self._is_stopping:
            self.on_exit(self.exits[engine])

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
                missing = self._missing(world_size)
                raise StartError(
                    f"{ready} of {world_size} ranks were ready after {deadline_s:.0f} s; "
                    f"{ranks_phrase(missing)} did not come. {self._log_tail(missing[0])}"
                    "A slow file system can be given more time with --timeout."
                )
            time.sleep(POLL_S)

    def _missing(self, world_size: int) -> list[int]:
        """The ranks for which the others wait: of local ones those that hold all back."""
        everybody = set(range(world_size))
        waiting = rundir.arrived(self.run_dir)
        assert self.channel is not None
        return sorted(everybody - waiting if waiting else ()) or sorted(
            everybody - set(self.channel.engine_ids)
        )

    def _raise_for_exits(self) -> None:
        """Tell why a process has ended before the start was complete, root cause first."""
        if not self.exits:
            return
        ended = sorted(self.exits.values(), key=lambda e: -1 if e.engine is None else e.engine)
        # The messages are the local launcher's case, where the engine's number is the rank.
        written = {
            e.engine: rundir.failure(self.run_dir, e.engine) for e in ended if e.engine is not None
        }
        for rank, failure in written.items():
            if failure is not None and not failure["message"].startswith("rank "):
                reason = failure["message"]
                if not failure["is_explained"]:
                    reason = f"{failure['kind']}: {reason}\n{failure['traceback']}"
                raise StartError(f"rank {rank} could not join: {reason}")
        # A rank that only waited in vain for another one comes last.
        first = next((e for e in ended if e.engine is None or written[e.engine] is None), None)
        if first is None:
            raise StartError(next(f["message"] for f in written.values() if f is not None))
        who = "The controller" if first.engine is None else f"rank {first.engine}"
        raise StartError(
            f"{who} ended before it was ready ({first.how}). {self._log_tail(first.engine)}"
        )

    def _log_tail(self, rank: int | None) -> str:
        one = self._cluster.controller if rank is None else self._started.get(rank)
        text = "" if one is None else str(one.get_output())
        lines = text.strip().splitlines()[-LOG_LINES:]
        return (
            "Its last lines:\n" + "\n".join(f"    {line}" for line in lines) + "\n" if lines else ""
        )

    def interrupt(self, engine: int) -> None:
        """Send SIGINT to one engine."""
        if engine in self.exits:
            return
        pid = self.pids().get(engine)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(pid, signal.SIGINT)
        elif self.channel is not None:
            self.channel.signal(engine, signal.SIGINT)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End every process of this run and remove its folder.

        Processes get SIGTERM first and `grace_s` to end; the guardian kills the rest.
        """
        # A forked child of the notebook that ends must not take the ranks along.
        if self._is_stopping or os.getpid() != self._owner:
            return
        self._is_stopping = True
        try:
            self._stop_processes(grace_s)
        finally:
            # Also when an interrupt comes in between: the guardian ends whatever is left. A
            # second one must not break that off; it takes CLOSE_DEADLINE_S at most.
            with presses.counted():
                is_clean = self._guard.close()
            for handler in list(self._log.handlers):
                self._log.removeHandler(handler)
                handler.close()
        if not is_clean:
            sys.stderr.write(f"nbdist: processes of {self.run_dir} could not all be ended\n")

    def _stop_processes(self, grace_s: float) -> None:
        # The loop may be in the middle of a start that was broken off: wait for its step.
        cluster_loop().run(asyncio.sleep(0), OTHER_STOP_DEADLINE_S)
        if self.channel is not None:
            self.channel.close()
        engines, controller = self.pids(), self.controller_pid()
        if self._cluster.engine_set is not None and not self._started:
            # A batch system's, or on other hosts: only their launcher can end them.
            self._stop_other(self._cluster.stop_engines(), "engines")
        if self._cluster.controller is not None and not _is_own(self._cluster.controller):
            self._stop_other(self._cluster.stop_controller(), "controller")
        _terminate([*engines.values(), *([controller] if controller else [])], grace_s)

    def _stop_other(self, coroutine: Any, what: str) -> None:
        """Let the launcher of another cluster end its own, or say that it did not."""
        try:
            cluster_loop().run(coroutine, OTHER_STOP_DEADLINE_S)
        except TimeoutError:
            sys.stderr.write(
                f"nbdist: the profile's launcher did not end the {what} in "
                f"{OTHER_STOP_DEADLINE_S:.0f} s; look after them with its own tools\n"
            )


def gives_ranks(config: Config) -> bool:
    """Whether the profile's launcher gives the ranks itself, on this machine.

    Raises:
        OptionError: If the profile has settings that ipyparallel does not understand.
    """
    try:
        cluster = _unstarted(config, Path(os.devnull), logging.getLogger("nbdist.cluster"))
    except (TraitError, ImportError, KeyError) as error:
        raise OptionError(f"The profile's settings cannot be used: {error}") from error
    return issubclass(cluster.engine_launcher_class, launcher.RankEngineSetLauncher)


def _unstarted(config: Config, run_dir: Path, log: logging.Logger) -> Any:
    return ipyparallel.Cluster(
        config=config,
        parent=None,
        log=log,
        load_profile=False,
        profile_dir=str(run_dir / "profile"),
        shutdown_atexit=False,
    )


def _logger(run_dir: Path) -> logging.Logger:
    logger = logging.getLogger(f"nbdist.cluster.{run_dir.name}")
    logger.addHandler(logging.FileHandler(run_dir / "cluster.log", delay=True))
    logger.propagate = False
    return logger


def _mark(config: Config, run_dir: Path) -> None:
    """Give every process of the run its mark, beside the variables that the profile sets.

    A process that changes its own environment is still found by its session; one that
    leaves its session is still found by this.
    """
    mark = {"NBDIST_RUN": str(run_dir)}
    for name in {"BaseLauncher", *(n for n, section in config.items() if "environment" in section)}:
        config[name].environment = {**config[name].get("environment", {}), **mark}


def _is_own(one: Any) -> bool:
    """Whether this launcher's process is a child of this kernel (SSH's pids are elsewhere)."""
    return (
        isinstance(one, LocalProcessLauncher) and not isinstance(one, SSHLauncher) and one.pid > 0
    )


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
