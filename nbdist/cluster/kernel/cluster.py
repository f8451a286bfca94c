"""One ipyparallel cluster: started from a profile, watched, and ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import LocalProcessLauncher
from traitlets.config import Config

from nbdist.cluster.kernel import (
    controller,
    ipp_cluster,
    ipp_launchers,
    run_dir,
)
from nbdist.cluster.kernel.event_loop import current, run_in_loop
from nbdist.cluster.kernel.guard import Guard
from nbdist.cluster.kernel.launchers.agent_set import AgentEngine
from nbdist.cluster.kernel.launchers.rank_set import LOCAL, OTHER, RankSet, is_own
from nbdist.cluster.kernel.processes import Exit, Processes
from nbdist.cluster.kernel.registration import POLL_S, EngineRegistration
from nbdist.cluster.run_owner import Keep
from nbdist.core.failures import ranks_phrase
from nbdist.core.host import this_machine
from nbdist.core.progress import Reporter
from nbdist.core.units import shown
from nbdist.errors import NbdistError, OptionError, StartError
from nbdist.rpc.kernel import sigint
from nbdist.rpc.kernel.channel import Channel

STOP_GRACE_S = 2.0
# By then an engine's last output is with the controller, and on its way here.
LAST_WORDS_S = 0.05
OTHER_STOP_DEADLINE_S = 60.0
# By then the end of a local process is seen, which its engine's lost connection announces.
LOST_S = 1.0
LOST = "its connection is lost: its process ended, or its host cannot be reached"


class Cluster:
    """A controller and its engines, with their run folder and guardian."""

    _keep_s = 0.0
    taken = ""  # that another kernel has the ranks, as a sentence without its full stop

    def __init__(
        self,
        config: Config,
        find_hosts: Callable[[str, Callable[[Sequence[str]], None]], None] = lambda *_: None,
    ):
        """Make the run folder and the guardian; `start` brings the processes up.

        `find_hosts` completes the config. It is called with the run's name, and with what takes
        the command that ends what it has asked for elsewhere.
        """
        folder = run_dir.create()
        run_dir.reserve(folder)
        self._set_up(folder, config)
        try:
            find_hosts(self.run_dir.name, self._guard.promise)
            ipp_cluster.mark(config, self.run_dir)
            ipp_cluster.use_folder(config, self.run_dir)
            log = ipp_cluster.logger(self.run_dir)
            self._take(ipp_cluster.cluster(config, self.run_dir, log))
        except BaseException:
            self._close_guard()
            raise

    def _set_up(self, folder: Path, config: Config) -> None:
        self.run_dir = folder
        self.channel: Channel | None = None
        # Ranks that may not have found a newer controller, or whose cell's end an earlier one took.
        self.unheard: set[int] = set()
        self._is_stopping = False
        self._owner = os.getpid()
        self._connection: controller.Connection | None = None
        self._config = config
        self._machine = this_machine()  # the controller's
        self._guard = Guard(folder)
        self.processes = Processes(self._guard)
        # Called, in a thread of its own, when another kernel has taken the ranks.
        self.on_taken: Callable[[], object] = lambda: None
        self._guard.on_taken = self._note_taken

    def _take(self, cluster: Any) -> None:
        self._cluster = self.processes.cluster = cluster

    @classmethod
    def attach(
        cls, folder: Path, start: Mapping[str, Any], keep: Keep, world_size: int, deadline_s: float
    ) -> Cluster:
        """Connect to a kept run that another kernel has started, or this one has left.

        Args:
            folder: The run's folder; this kernel holds the run now.
            start: The content that `keep` has written down.
            keep: The record of the run as kept until now, and from now on.
            world_size: The number of the run's ranks, ended ones too.
            deadline_s: For all of it.

        Raises:
            StartError: If it cannot be reached. Its ranks go on; they are kept as before.
        """
        self = cls.__new__(cls)
        self._set_up(folder, start["config"])
        self._connection, self._machine = start["connection"], start["machine"]
        self._keep_s = keep.keep_s
        self._guard.keep(keep.keep_s)
        end_s = time.monotonic() + deadline_s
        try:
            self._run(self._reopen(world_size), end_s, "what the kernel before has left")
            if self._cluster.controller is None:
                self._start_missing_controller(end_s)
                self.unheard = set(range(world_size))
            else:
                self.channel = self._connect(end_s, ())
                self._forget_ended()
        except BaseException:
            self.leave()
            raise
        return self

    async def _reopen(self, world_size: int) -> None:
        log = ipp_cluster.logger(self.run_dir)
        is_distant = self._machine != this_machine()
        is_living = self.processes.is_living
        self._take(
            ipp_cluster.reopen(self._config, self.run_dir, log, is_living, is_distant=is_distant)
        )
        await self.engine_set.attach()
        if self._cluster.controller is not None:
            self.processes.watch_controller()
        engines = self._watch_engines()
        for rank in set(range(world_size)).difference(engines):
            self.processes.exits[rank] = Exit(rank, None)

    def keep(self, seconds: float, start: Mapping[str, Any], keep: Keep) -> None:
        """From now on let the ranks go on this many seconds without a kernel; 0 for not.

        Args:
            seconds: The time without a kernel.
            start: Values that `attach` needs beside those that the cluster has.
            keep: The part that every nbdist can read.

        Raises:
            StartError: If the run's folder cannot be written.
        """
        self._keep_s = seconds
        self.engine_set.keep(seconds)
        self._note_change()
        written = {
            **start,
            "config": self._config,
            "connection": self._connection,
            "machine": self._machine,
        }
        run_dir.write_start(self.run_dir, written)
        run_dir.write_keep(self.run_dir, keep)
        self._guard.keep(seconds)

    @property
    def is_kept(self) -> bool:
        """Whether the ranks go on without this kernel."""
        return bool(self._keep_s)

    @property
    def why_gone(self) -> str:
        """Why the ranks are this kernel's no more, as a sentence without its full stop; or ""."""
        # The guardian reports it only at its next look; until then two kernels would send cells.
        if not self.taken and self._guard.is_taken:
            self._note_taken()
        return self.taken or run_dir.ended_from_outside(self.run_dir)

    def _note_change(self) -> None:
        """Write down which processes there are, for a kernel that attaches."""
        if self._keep_s:
            self._cluster.update_cluster_file()
            self._promise_ending(self.engine_set)

    def _promise_ending(self, engine_set: RankSet) -> None:
        """Note the command by which kept ranks of other hosts are ended without this kernel."""
        if (ending := engine_set.ending()) is not None:
            self._guard.promise(ending)

    def _note_taken(self) -> None:
        owner = run_dir.owner(self.run_dir)
        who = f"The kernel {shown(owner.pid)} ({owner.where})" if owner else "Another kernel"
        self.taken = f"{who} has taken these ranks"
        self.on_taken()
        self.leave()

    def leave(self) -> None:
        """Let go of the ranks: they go on as long as they are kept. Twice is harmless."""
        if self._is_stopping or os.getpid() != self._owner:
            return
        self._is_stopping = True
        self.processes.on_exit = lambda _: None
        with sigint.deferred_sigint():
            if hasattr(self, "_cluster"):
                ipp_cluster.silence(self._cluster)
                self.engine_set.leave()
            if self.channel is not None:
                self.channel.close()
            if not self.taken:
                run_dir.note_detached(self.run_dir, self._keep_s)
            self._guard.leave()

    def start(self, world_size: int | None, deadline_s: float, progress: Reporter) -> int:
        """Start controller and engines, connect, and wait until all engines have registered.

        On hosts with agents None means as many ranks as there are places. Returns the number.

        Raises:
            StartError: When a process ends, or after the deadline, naming who is missing.
        """
        end = time.monotonic() + deadline_s
        (self.run_dir / "profile" / "security").mkdir(parents=True, mode=0o700)
        progress("starting the controller and the engines")
        starting = self._start_processes(world_size or 0)
        world_size = self._run(starting, end, "the controller's connection file")
        progress("waiting for the controller")
        self.channel = self._connect(end)
        self._arrivals(None, world_size).wait(end, deadline_s, progress)
        self._connection = controller.Connection.of(
            self.run_dir / "profile", self._cluster.cluster_id
        )
        return world_size

    async def _start_processes(self, world_size: int) -> int:
        # The engines' program waits for the connection file; other engines need it at once.
        starting = asyncio.ensure_future(self._cluster.start_controller())
        try:
            if self._cluster.send_engines_connection_env:
                await starting
                await asyncio.sleep(self._cluster.delay)
            else:
                await asyncio.sleep(0)
            await self._cluster.start_engines(world_size)
            # In the same step of the loop, so that no end of an engine is missed.
            self.processes.watch_controller()
            self._watch_engines()
            self.processes.watch_set(world_size)
            await starting
        finally:
            starting.cancel()
        return self.engine_set.world_size or world_size

    def _connect(self, end_s: float, engines: Collection[int] | None = None) -> Channel:
        # ipyparallel would give up after 10 s, whatever the deadline is.
        coroutine = self._cluster.connect_client(
            timeout=max(1.0, end_s - time.monotonic()), context=controller.client_context()
        )
        is_here = self._machine == this_machine()
        what = "the controller" if is_here else f"the controller on {self._machine.host}"
        channel = Channel(self._run(coroutine, end_s, what, engines), self._cluster.log)
        if not self.can_restart:
            channel.on_lost = self._note_lost
        return channel

    def _run(
        self, coroutine: Any, end_s: float, what: str, engines: Collection[int] | None = None
    ) -> Any:
        try:
            return run_in_loop(coroutine, max(0.1, end_s - time.monotonic()))
        except TimeoutError as error:
            raise StartError(
                f"{what} was not ready before the start's deadline (--timeout)."
            ) from error
        except NbdistError:
            raise
        except Exception as error:  # a launcher's, its command's, or its template's
            self._arrivals(engines).raise_for_exits()
            why = ipp_launchers.explain(error)
            raise StartError(f"The cluster could not start: {why}") from error

    def _watch_engines(self) -> Collection[int]:
        engines = self.engine_set.engine_launchers()
        for number, engine in engines.items():
            self._watch_engine(number, engine)
        return engines

    def _watch_engine(self, number: int, engine: LocalProcessLauncher | AgentEngine) -> None:
        self.processes.watch_engine(number, engine)
        if self.can_restart:  # an engine without a nanny, which would tell the controller
            engine.on_stop(functools.partial(self._forget, number))

    def _note_lost(self, engine: int) -> None:
        """The controller has lost an engine: its end, where none of a process is seen from here."""

        def note() -> None:
            if engine not in self.processes.exits:
                self.processes.note(Exit(engine, None, LOST))

        loop, delay_s = current(), LOST_S if self.processes.sees_ends else 0.0
        loop.call_soon_threadsafe(loop.call_later, delay_s, note)

    def _forget(self, engine: int, _stop_data: dict[str, Any]) -> None:
        """Tell the controller, in a moment, of an engine that has ended."""

        def forget() -> None:
            if self.channel is not None and not self._is_stopping:
                self.channel.forget(engine)

        asyncio.get_running_loop().call_later(LAST_WORDS_S, forget)

    def _forget_ended(self) -> None:
        """Tell the controller of ranks that ended while no kernel was there to do it."""
        assert self.channel is not None
        if self.can_restart:  # then the engine's id is the rank
            for engine in self.processes.exits:
                if engine is not None:
                    self.channel.forget(engine)

    def _arrivals(self, engines: Collection[int] | None, world_size: int = 0) -> EngineRegistration:
        """The registration to wait for: of some engines, or at the start of any `world_size`."""

        def exits() -> dict[int | None, Exit]:
            exits = self.processes.exits.copy()
            return {e: x for e, x in exits.items() if engines is None or e in {None, *engines}}

        def registered() -> list[int]:
            engine_ids = set() if self.channel is None else set(self.channel.engine_ids)
            if engines is not None:
                return sorted(engine_ids.intersection(engines))
            # Ranks that join by themselves must both register and join: they do so side by side.
            is_local = self.engine_set.kind == LOCAL
            joined = run_dir.joined_ranks(self.run_dir) if is_local else engine_ids
            return sorted(engine_ids & joined)

        expected = tuple(range(world_size) if engines is None else engines)
        return EngineRegistration(
            self.run_dir,
            expected,
            exits,
            registered,
            self.processes.output,
            lambda: None if self.channel is None else self.channel.ask_for_engines(),
            lambda: ipp_launchers.state(self._config, self._cluster.engine_set),
        )

    @property
    def is_encrypted(self) -> bool:
        """Whether the controller was started with CURVE."""
        return self._connection is not None and self._connection.is_encrypted

    @property
    def can_restart(self) -> bool:
        """Whether single engines can be started again: those of nbdist's own launchers."""
        return self.engine_set.kind != OTHER

    @property
    def engine_set(self) -> RankSet:
        """The launcher that has started the engines, and speaks for their hosts."""
        return self.processes.engine_set

    def restart_engines(
        self,
        engines: Collection[int],
        environment: Mapping[str, str],
        deadline_s: float,
        progress: Reporter = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Put new processes in the place of engines, under the same engine ids.

        A living one is killed, with all processes of its session. After any failure no engine is
        left half started, also where the change cannot be written down: `exits` lists the missing
        ones. Only for the local profile,
        where the engine's id is its rank. `check` is called often, and may raise to break off.

        Raises:
            StartError: If one does not come, with its exit code and last lines.
        """
        end_s = time.monotonic() + deadline_s
        self.processes.replaced = frozenset(engines)  # nobody has to be told that they end
        try:
            self._unregister(engines, end_s, check)
            progress("starting new processes")
            starting = self._start_again(engines, environment)
            try:
                run_in_loop(starting, max(0.0, end_s - time.monotonic()), check)
            except TimeoutError as error:
                raise StartError(
                    f"no host took {ranks_phrase(list(engines))} within {deadline_s:.0f} s "
                    "(--timeout)"
                ) from error
            self._arrivals(engines).wait(end_s, deadline_s, progress, check)
            self._note_change()
        except BaseException:
            self.processes.end_engines(engines)
            # The first error is raised. A kernel that attaches leaves out ended processes.
            with contextlib.suppress(StartError):
                self._note_change()
            raise
        finally:
            self.processes.replaced = frozenset()

    def _unregister(
        self, engines: Collection[int], end_s: float, check: Callable[[], None]
    ) -> None:
        assert self.channel is not None
        for engine in engines:
            self.processes.kill(engine)
        # `_forget` reports to the controller. It gives no engine an id that is still registered.
        while registered := sorted(set(engines).intersection(self.channel.engine_ids)):
            check()
            if time.monotonic() > end_s:
                raise StartError(f"the controller still lists {ranks_phrase(registered)}")
            time.sleep(POLL_S)

    async def _start_again(self, engines: Collection[int], environment: Mapping[str, str]) -> None:
        for engine in engines:
            run_dir.forget(self.run_dir, engine)
            await self._cluster.engine_set.start_one(engine, environment)
            self.processes.exits.pop(
                engine, None
            )  # not before: without a host it stays as ended as it was
            self._watch_engine(engine, self.engine_set.engine_launchers()[engine])

    def restart_controller(self, deadline_s: float) -> None:
        """Put a new controller in the place of one that has ended; engines keep all they have.

        The channel is a new one. Engines connect again by themselves a moment later: a message
        to one before that is lost.

        Raises:
            OptionError: If this controller cannot be started again from here.
            StartError: If the new one does not come; the engines live on.
        """
        end_s = time.monotonic() + deadline_s
        connection, old = self._connection, self._cluster.controller
        if connection is None or not is_own(old) or connection.is_encrypted:
            raise OptionError("The controller of this profile cannot be restarted from here.")
        if self.channel is not None:
            self.channel.close()
        self.processes.kill_controller()
        self._replace_controller(connection, end_s)

    def _start_missing_controller(self, end_s: float) -> None:
        """Put a new controller in the place of one that ended while no kernel held the run."""
        assert self._connection is not None
        if self._connection.is_encrypted:
            raise StartError(
                "The controller of these ranks has ended, and cannot be started again: its secret "
                "key ended with it. `nbdist stop` ends the ranks."
            )
        self.processes.kill_others()
        self._replace_controller(self._connection, end_s)

    def _replace_controller(self, connection: controller.Connection, end_s: float) -> None:
        gone = [engine for engine in self.processes.exits if engine is not None]
        connection.restore(gone)
        end = self.processes.exits.pop(None, None)
        try:
            self._run(self._start_controller_again(), end_s, "the controller", ())
            self.channel = self._connect(end_s, ())
        except BaseException:
            if end is not None:
                self.processes.exits.setdefault(None, end)
            raise

    async def _start_controller_again(self) -> None:
        args = [a for a in self._cluster.controller_args if a not in controller.AGAIN]
        self._cluster.controller_args = [*args, *controller.AGAIN]
        self._cluster.controller = None  # otherwise ipyparallel refuses
        await self._cluster.start_controller()
        self.processes.watch_controller()
        self._note_change()

    def interrupt(self, engine: int) -> None:
        """Send SIGINT to one engine."""
        if not self.processes.interrupt(engine) and self.channel is not None:
            self.channel.signal(engine, signal.SIGINT)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End every process of this run and remove its folder.

        Processes get SIGTERM first and `grace_s` to end; the guardian kills the rest.
        """
        # A forked child of the notebook that ends must not take the ranks along.
        if self._is_stopping or os.getpid() != self._owner:
            return
        self._is_stopping = True
        self.processes.on_exit = lambda _: None
        ipp_cluster.silence(self._cluster)
        try:
            # The loop may be in the middle of a start that was broken off: wait for its step.
            run_in_loop(asyncio.sleep(0), OTHER_STOP_DEADLINE_S)
            if self.channel is not None:
                self.channel.close()
            engine_set, controller = self._cluster.engine_set, self._cluster.controller
            if not self.processes.has_local_engines and ipp_launchers.has_job(engine_set):
                # A batch system's, or on other hosts: only their launcher can end them.
                self._stop_other(self._cluster.stop_engines(), "engines")
                self._promise_ending(engine_set)
            if not is_own(controller) and ipp_launchers.has_job(controller):
                self._stop_other(self._cluster.stop_controller(), "controller")
            self.processes.terminate(grace_s)
        finally:
            # Also when an interrupt comes in between: the guardian ends whatever is left.
            self._close_guard()

    def _close_guard(self) -> None:
        # A second interrupt must not break that off; it takes CLOSE_DEADLINE_S at most.
        with sigint.deferred_sigint():
            is_clean = self._guard.close()
        if command := run_dir.command(self.run_dir):  # the folder would be gone
            sys.stderr.write(
                f"nbdist: what the ranks had elsewhere may still be there; this ends it: "
                f"{shlex.join(command)}\n"
            )
        elif not is_clean:
            sys.stderr.write(f"nbdist: some processes of {self.run_dir} could not be ended\n")

    def _stop_other(self, coroutine: Any, what: str) -> None:
        """Let the launcher of another cluster end its own, or say that it did not.

        It does not raise: the caller may be about to raise the reason for the stop.
        """
        try:
            run_in_loop(coroutine, OTHER_STOP_DEADLINE_S)
        except Exception as error:  # noqa: BLE001  # whatever a launcher raises is said
            is_late = isinstance(error, TimeoutError)
            why = f"in {OTHER_STOP_DEADLINE_S:.0f} s" if is_late else ipp_launchers.explain(error)
            sys.stderr.write(
                f"nbdist: the profile's launcher did not end the {what} ({why}); end them with its "
                "own tools\n"
            )
