"""The local engines' launcher: it gives every engine its rank before anything reports."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher
from traitlets import Dict, Unicode

ENGINE_PROGRAM = Path(__file__).resolve().parent.parent / "engine" / "__main__.py"


class RankEngineLauncher(LocalEngineLauncher):  # type: ignore[misc]
    """Starts the engine of one rank; its identifier is the rank."""

    def get_env(self) -> dict[str, str]:
        """The notebook's environment plus what torchrun would set for this rank."""
        env: dict[str, str] = super().get_env()
        env.update(self.parent.common_environment)
        env.update(self.parent.rank_environment.get(self.identifier, {}))
        return env

    def find_args(self) -> list[str]:
        """The command, with the rank as the engine id that it asks for."""
        url_file = self.connection_files["engine"]
        return [
            *super().find_args(),
            f"--IPEngine.id={self.identifier}",
            f"--IPEngine.url_file={url_file}",
        ]


class RankEngineSetLauncher(LocalEngineSetLauncher):  # type: ignore[misc]
    """Starts one engine per rank on this machine; engine id = rank."""

    launcher_class = RankEngineLauncher

    common_environment = Dict(help="Variables of every engine.").tag(config=True)
    rank_environment = Dict(help="{rank as text: {name: value}}.").tag(config=True)
    engine_program = Unicode(str(ENGINE_PROGRAM), help="The engines' program.").tag(config=True)

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        # Run by its path and without a folder of its own in front (-P): the engine then
        # takes the notebook's sys.path as it is, also where nbdist is not installed.
        self.engine_cmd = [sys.executable, "-P", self.engine_program]
        # The key is in the connection file, which only this user can read. In the
        # environment user code would hand it to every child process.
        self.environment.pop("IPP_CONNECTION_INFO", None)


def local_environment(run_dir: Path, world_size: int, threads: int) -> dict[str, str]:
    """What all ranks of one machine share.

    OMP_NUM_THREADS of the notebook wins. Gloo's sockets stay on the loopback interface:
    they have no authentication.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    env = {
        "NBDIST_RUN": str(run_dir),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }
    if "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(threads)
    return env


def rank_environment(rank: int) -> dict[str, str]:
    """What torchrun would set for one rank of this machine."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
