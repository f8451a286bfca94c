"""The local processes' launchers: the ranks' gives each its rank before anything reports."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import (
    LocalControllerLauncher,
    LocalEngineLauncher,
    LocalEngineSetLauncher,
    LocalProcessLauncher,
    ipengine_cmd_argv,
)
from traitlets import Dict, Unicode

from nbdist.cluster import nccl_env
from nbdist.cluster.kernel import rank_server
from nbdist.cluster.kernel.ipp_launchers import KeptOutput
from nbdist.cluster.kernel.launchers.rank_set import LOCAL, RankSet
from nbdist.cluster.kernel.rank_server import RankServer, ServerError
from nbdist.errors import StartError

# An engine runs this as soon as the controller knows of it, before any request.
JOIN = "__import__('nbdist.engine.early_join', fromlist=['join_when_ready']).join_when_ready()"
ENGINE_PROGRAM = Path(__file__).resolve().parents[2] / "engine" / "__main__.py"
CONTROLLER_PROGRAM = Path(__file__).resolve().parents[1] / "controller" / "hub.py"


def _fork(launcher: LocalProcessLauncher, server: RankServer, who: str) -> int:
    """Let the server fork what a launcher would start; its process id.

    Raises:
        StartError: If the server does not fork, or the system refuses another process.
    """
    env = {**os.environ, **launcher.get_env()}
    # The controller's launcher makes this folder, and may still wait for a new server.
    Path(launcher.output_file).parent.mkdir(parents=True, exist_ok=True)
    try:
        launcher.process = server.fork(launcher.args, env, launcher.work_dir, launcher.output_file)
    except ServerError as error:
        raise StartError(f"{who} could not be forked: {error}") from error
    launcher.pid = launcher.process.pid
    launcher.notify_start(launcher.pid)
    # ipyparallel 9.2's start does the same after Popen: it calls notify_stop in the loop.
    launcher._start_waiting()  # noqa: SLF001
    return int(launcher.pid)


class ForkedControllerLauncher(LocalControllerLauncher):  # type: ignore[misc]
    """Starts our controller as a fork where that waits for no import, else as a process."""

    async def start(self) -> Any:
        """Start it.

        Raises:
            StartError: If the system refuses another process.
        """
        server = None
        if rank_server.is_ready() and str(CONTROLLER_PROGRAM) in self.args:
            env = {**os.environ, **self.get_env()}
            server = await rank_server.obtain(env, rank_server.text_path())
        return super().start() if server is None else _fork(self, server, "the controller")


class ForkedEngineLauncher(LocalEngineLauncher):  # type: ignore[misc]
    """Starts one engine as a fork of its set's server."""

    def start(self) -> Any:
        """Let the server fork the engine; without one, start its process as ipyparallel does.

        Raises:
            StartError: If the server does not fork, or the system refuses another process.
        """
        server: RankServer | None = self.parent.server
        if server is None:
            return super().start()
        return _fork(self, server, f"{self.parent.member} {self.identifier}")


class ForkedEngineSetLauncher(LocalEngineSetLauncher):  # type: ignore[misc]
    """Starts plain engines of any ipyparallel cluster, by the name "nbdist", without a session."""

    launcher_class = ForkedEngineLauncher
    member = "engine"
    # What forks engines; None where each is a process that imports everything itself.
    server: RankServer | None = None

    async def start(self, n: int) -> Any:
        """Start n engines, as forks where they can be; else it logs why, and starts processes.

        Raises:
            StartError: If a fork fails, or the system refuses another process.
        """
        if self.engine_cmd == ipengine_cmd_argv:
            env = {**os.environ, **self.get_env()}
            self.server = await rank_server.obtain(env, ["", *rank_server.text_path()])
            if self.server is None:
                self.log.warning("Engines are not forked: %s", rank_server.why_not())
        return super().start(n)

    def notify_stop(self, data: Any) -> Any:
        """Take note that the last engine has ended, and let the server end."""
        self._release()
        return super().notify_stop(data)

    async def stop(self) -> None:
        """Stop the engines, and let the server end.

        Here too: a program whose event loop does not run does not hear of its engines' ends.
        """
        await super().stop()
        self._release()

    def _release(self) -> None:
        if self.server is not None:
            rank_server.release(self.server)


class RankEngineLauncher(KeptOutput, ForkedEngineLauncher):
    """Starts the engine of one rank; its identifier is the rank."""

    def get_env(self) -> dict[str, str]:
        """The notebook's environment plus what torchrun would set for this rank."""
        env: dict[str, str] = super().get_env()
        env.update(self.parent.common_environment)
        env.update(self.parent.rank_environment.get(self.identifier, {}))
        env.update(self.parent.again_environment)
        return env

    def find_args(self) -> list[str]:
        """The command, with the rank as the engine id that it asks for."""
        url_file = self.connection_files["engine"]
        return [
            *super().find_args(),
            f"--IPEngine.id={self.identifier}",
            f"--IPEngine.url_file={url_file}",
            # Otherwise it would end some time after the controller has. The guardian ends it.
            "--IPEngine.max_heartbeat_misses=0",
            # A process that would only report the engine's end to the controller: Cluster does.
            "--IPEngine.enable_nanny=False",
            f"--IPEngine.startup_command={JOIN}",
        ]


class RankEngineSetLauncher(LocalEngineSetLauncher, RankSet):  # type: ignore[misc]
    """Starts one engine per rank on this machine; engine id = rank."""

    launcher_class = RankEngineLauncher
    member = "rank"
    kind = LOCAL
    is_on_this_machine = True

    common_environment = Dict(help="Environment variables of every engine.").tag(config=True)
    rank_environment = Dict(help="Per rank: {rank as text: {name: value}}.").tag(config=True)
    engine_program = Unicode(str(ENGINE_PROGRAM), help="The engines' program.").tag(config=True)

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # Run by its path and without a folder of its own in front (-P): the engine then
        # takes the notebook's sys.path as it is, also where nbdist is not installed.
        self.engine_cmd = [sys.executable, "-P", self.engine_program]
        # The key is in the connection file, which only this user can read. In the
        # environment user code would hand it to every child process.
        self.environment.pop("IPP_CONNECTION_INFO", None)
        # Variables of engines that are started now in the place of others.
        self.again_environment: Mapping[str, str] = {}
        # What forks engines; None where each is a process that imports everything itself.
        self.server: RankServer | None = None

    async def start(self, n: int) -> Any:
        """Start n engines, as forks where they can be (rank_server.why_not)."""
        await self._obtain_server()
        return super().start(n)

    def take_notes(self) -> list[str]:
        """Report an end of the process that has forked the ranks, once."""
        end = "" if self.server is None else self.server.end
        if not end:
            return []
        self.server = None
        what = "The ranks go on and keep their variables; the next start makes another one."
        return [f"The process that has forked the ranks ended ({end}). {what}"]

    async def _obtain_server(self) -> None:
        self.server = None
        if self.engine_cmd == [sys.executable, "-P", str(ENGINE_PROGRAM)]:
            env = {**os.environ, **self.get_env(), **self.common_environment}
            self.server = await rank_server.obtain(env, self._sys_path())

    def _sys_path(self) -> list[str]:
        """Return the ranks' sys.path: the notebook's when they were first started."""
        notebook = Path(self.common_environment["NBDIST_RUN"], "notebook.json")
        return [str(entry) for entry in json.loads(notebook.read_text())["sys_path"]]

    async def start_one(self, rank: int, environment: Mapping[str, str]) -> RankEngineLauncher:
        """Start again one rank's engine, whose process has ended, with more variables.

        Only in the loop in which the others were started: the end of a process is noticed there.
        """
        await self._obtain_server()
        identifier = str(rank)
        self.stop_data.get("engines", {}).pop(identifier, None)
        self.outputs.pop(identifier, None)
        engine = self.launcher_class(
            work_dir=self.work_dir,
            parent=self,
            log=self.log,
            profile_dir=self.profile_dir,
            cluster_id=self.cluster_id,
            environment=self.environment,
            identifier=identifier,
            output_file=str(
                Path(self.profile_dir)
                / "log"
                / f"ipengine-{self.cluster_id}-{self.engine_set_id}-{rank}.log"
            ),
        )
        engine.engine_cmd, engine.engine_args = list(self.engine_cmd), list(self.engine_args)
        engine.on_stop(self._notice_engine_stopped)
        self.launchers[identifier] = engine
        self.again_environment = environment
        try:
            self.notify_start(engine.start())
        except BaseException:
            del self.launchers[identifier]
            raise
        finally:
            self.again_environment = {}
        return engine


# torch's names for the levels of its checks; "off" leaves the notebook's environment alone.
DEBUG_LEVELS = {"off": "", "info": "INFO", "detail": "DETAIL"}


def local_environment(
    run_dir: Path, world_size: int, threads: int, debug: str = "off"
) -> dict[str, str]:
    """The variables that all ranks of one machine share; `debug` is a key of DEBUG_LEVELS.

    OMP_NUM_THREADS and NCCL's variables of the notebook win. Gloo's sockets stay on the loopback
    interface: they have no authentication.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    env = {
        "NBDIST_RUN": str(run_dir),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        # GPUs by nvidia-smi's numbers, also where their kinds differ: CUDA begins with the fastest.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        **nccl_env.environment(os.environ),
    }
    if DEBUG_LEVELS[debug]:
        env["TORCH_DISTRIBUTED_DEBUG"] = DEBUG_LEVELS[debug]
    if "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(threads)
    return env
