"""The processes of one run: which of them this kernel started, how they end, and are ended."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from ipyparallel.cluster.launcher import LocalProcessLauncher

from nbdist.cluster.agent import guardian
from nbdist.cluster.kernel import ipp_launchers, orphans
from nbdist.cluster.kernel.guard import Guard
from nbdist.cluster.kernel.launchers.agent_set import AgentEngine
from nbdist.cluster.kernel.launchers.agents import SILENT_S
from nbdist.cluster.kernel.launchers.rank_set import RankSet, is_own
from nbdist.core import host
from nbdist.core.exit_cause import exit_words
from nbdist.errors import StartError
from nbdist.rpc.kernel import sigint

POLL_S = 0.01
END_SESSION_S = 5.0

# The state of ranks whose controller has ended.
WITHOUT_CONTROLLER = (
    "The ranks go on and keep their variables, but what they print and reply now is lost. The "
    "next cell starts another controller."
)


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one of the cluster's processes.

    Attributes:
        engine: The engine, or None for the controller.
        code: Its exit code, negative for a signal; None where it cannot be known.
        unreachable: Why its host cannot be reached: the process may live on there, but is lost.
        starter: "mpiexec", which had started all engines as one and has ended with them; the code
            is its own then. Empty otherwise.
        words: The starter's words on that.
    """

    engine: int | None
    code: int | None
    unreachable: str = ""
    starter: str = ""
    words: str = ""

    @property
    def how(self) -> str:
        """`exit code 1`, `signal SIGKILL`."""
        code = "unknown exit code" if self.code is None else exit_words(self.code)
        if self.unreachable:
            return self.unreachable
        if self.starter:
            words = f': "{self.words}"' if self.words else ""
            return f"{self.starter} ended all ranks, {code}{words}"
        return code


def _pid_here(engine: LocalProcessLauncher | AgentEngine) -> int:
    """The process of this machine that is an engine, or carries the connection to its agent."""
    return int(engine.pid if is_own(engine) else engine.agent.pid)


class Processes:
    """The controller and the engines of one cluster: which live, and how the others ended.

    Attributes:
        cluster: The cluster of ipyparallel whose processes they are.
        exits: Engine, or None for the controller -> its end.
        on_exit: Called with each end, in the cluster's loop.
        replaced: Engines that end on purpose: `on_exit` is not called for them.
    """

    cluster: Any

    def __init__(self, guard: Guard):
        """Take the guard's run; what starts is shown to the guard."""
        self.exits: dict[int | None, Exit] = {}
        self.on_exit: Callable[[Exit], object] = lambda _: None
        self.replaced: frozenset[int] = frozenset()
        self._guard = guard
        # The launcher's number -> ipyparallel's engine id; equal where the launcher says so.
        self._engine_of: dict[int, int] = {}
        self._started: dict[int, LocalProcessLauncher | AgentEngine] = {}

    def is_living(self, pid: int) -> bool:
        """Whether a process of this machine is the one that was noted under its id."""
        return pid > 0 and host.started(pid) == self._guard.sessions.get(pid, "")

    @property
    def engine_set(self) -> RankSet:
        """The launcher of the engines; without any, one that has started none."""
        return self.cluster.engine_set or RankSet()

    @property
    def sees_ends(self) -> bool:
        """Whether the end of an engine is seen by its process or agent, not by the controller."""
        return bool(self._started) or is_own(self.cluster.engine_set)

    @property
    def has_local_engines(self) -> bool:
        """Whether this kernel has started engines' processes itself."""
        return any(map(is_own, self._started.values()))

    def pids(self) -> dict[int, int]:
        """Engine id -> process id of the living engines that this kernel has started itself."""
        return {
            self._engine_of.get(number, number): engine.pid
            for number, engine in self.engine_set.engine_launchers().items()
            if is_own(engine)
        }

    def controller_pid(self) -> int | None:
        """The controller's process id, where this kernel has started it itself and it lives."""
        controller = self.cluster.controller
        lives_here = is_own(controller) and None not in self.exits
        return int(controller.pid) if lives_here else None

    def terminate(self, grace_s: float) -> None:
        """Ask controller and engines of this machine to end; wait until `grace_s` is over."""
        pids = [*self.pids().values(), *filter(None, [self.controller_pid()])]
        # A start that was broken off has watched none of them yet.
        starts = {pid: self._guard.sessions.get(pid) or host.started(pid) or "" for pid in pids}
        orphans.terminate(starts, grace_s)

    def identify(self, pids: dict[int, int]) -> None:
        """Note which engine has which process, where the launcher did not decide it."""
        engines = {pid: engine for engine, pid in pids.items()}
        self._engine_of = {
            n: engines[engine.pid] for n, engine in self._started.items() if engine.pid in engines
        }
        exits = list(self.exits.values())
        self.exits.clear()
        for exit_ in exits:
            number = exit_.engine
            engine = None if number is None else self._engine_of.get(number, number)
            self.exits[engine] = replace(exit_, engine=engine)

    def exit_of(self, engine: int, deadline_s: float) -> Exit | None:
        """The end of an engine, waited for if it can be seen from here; None if it is unknown."""
        end_s = time.monotonic() + deadline_s
        seen_here = {self._engine_of.get(number, number) for number in self._started}
        while engine in seen_here and engine not in self.exits and time.monotonic() < end_s:
            time.sleep(POLL_S)
        return self.exits.get(engine)

    def watch_controller(self) -> None:
        """Note the controller's end."""
        controller = self.cluster.controller
        controller.on_stop(functools.partial(self._note_end, None))
        if is_own(controller):
            self.guard(controller.pid)

    def watch_engine(self, number: int, engine: LocalProcessLauncher | AgentEngine) -> None:
        """Note the end of what the launcher has started under this number."""
        engine.on_stop(functools.partial(self._note_end, number))
        self._started[number] = engine
        pid = _pid_here(engine)
        if pid not in self._guard.sessions:
            self.guard(pid)

    def watch_set(self, world_size: int) -> None:
        """Watch the one process, mpiexec for example, that has started all engines."""
        engine_set = self.cluster.engine_set
        if not is_own(engine_set):
            return

        def note_ends(stop_data: dict[str, Any]) -> None:
            code, starter = stop_data.get("exit_code"), Path(engine_set.args[0]).name
            words = ipp_launchers.last_words(engine_set)
            for engine in range(world_size):
                self.note(Exit(engine, code, starter=starter, words=words))

        engine_set.on_stop(note_ends)
        self.guard(engine_set.pid)

    def guard(self, pid: int) -> None:
        """Let a process, which leads a session of its own, end with this run at the latest."""
        self._guard.watch(pid)

    def _note_end(self, number: int | None, stop_data: dict[str, Any]) -> None:
        """An engine or the controller has ended (called in the cluster's loop)."""
        engine = None if number is None else self._engine_of.get(number, number)
        code = stop_data.get("exit_code")
        unreachable = str(stop_data.get("unreachable", ""))
        self.note(Exit(engine, code if isinstance(code, int) else None, unreachable))

    def note(self, end: Exit) -> None:
        """Note an end, and report it where it was not on purpose."""
        self.exits[end.engine] = end
        if end.engine not in self.replaced:
            self.on_exit(end)

    def output(self, engine: int | None) -> str:
        """The output of an engine, or of the controller, until now."""
        process = self.cluster.controller if engine is None else self._started.get(engine)
        if process is None:  # one file for all of them, if any
            return ipp_launchers.output(self.cluster.engine_set)
        return str(process.get_output())

    def end_engines(self, engines: Collection[int]) -> None:
        """Kill engines that this kernel has started, with all processes of their sessions."""
        with sigint.deferred_sigint():
            for engine in engines:
                self.kill(engine)

    def kill(self, engine: int) -> None:
        """End an engine's process and its session, and wait until it is known.

        Raises:
            StartError: If it lives on.
        """
        started = self._started.get(engine)
        if started is None:  # it had ended before this kernel attached
            return
        if not is_own(started):
            started.end()
            # A host that was cut off just now is seen to be by then.
            if self.exit_of(engine, SILENT_S + END_SESSION_S) is None:
                raise StartError(f"rank {engine} on {started.agent.host} could not be ended")
            return
        pid = started.pid
        if not self._end_session(pid):
            raise StartError(
                f"process {pid} of rank {engine}, or one of its children, cannot be ended "
                "(uninterruptible in the kernel?)"
            )
        self.exit_of(engine, END_SESSION_S)

    def kill_controller(self) -> None:
        """End the rest of the controller's session: its heart monitor holds its ports."""
        self._end_session(self.cluster.controller.pid)

    def kill_others(self) -> None:
        """End what this machine has of the run beside the engines that are watched."""
        for pid in set(self._guard.sessions).difference(map(_pid_here, self._started.values())):
            self._end_session(pid)

    def _end_session(self, pid: int) -> bool:
        """Kill a process, which may have ended, and its session; False if something lives on."""
        _, left = guardian.end_all({pid: self._guard.sessions[pid]}, deadline_s=END_SESSION_S)
        return not left

    def interrupt(self, engine: int) -> bool:
        """Send SIGINT to one engine; False where that is for the controller to do."""
        if engine in self.exits:
            return True
        engines = self.engine_set.engine_launchers().items()
        launchers = [el for n, el in engines if self._engine_of.get(n, n) == engine]
        for launcher in launchers:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended just now
                launcher.signal(signal.SIGINT)
        return bool(launchers)
