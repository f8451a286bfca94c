"""Groups of processes that do what they are told, one thing at a time, all ranks together."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

DEADLINE_S = 300.0
# Before an answer: whatever else a rank prints is no answer.
_MARK = "answer: "


class Ranks:
    """Processes of one module of this folder, started at once. A context manager: it ends them.

    Each runs `python -m benchmarks.MODULE SIDE RANK SIZE FOLDER`, and there `obey`. Between two
    requests they sleep, so that two groups can take turns on the same cores.
    """

    def __init__(self, module: str, side: str, size: int, folder: Path) -> None:
        """Start them.

        Args:
            module: Of this folder.
            side: Its first argument.
            size: How many.
            folder: A new one of their own: for their store and their logs.
        """
        folder.mkdir(parents=True)
        self._folder = folder
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "NBDIST_RUN": str(folder),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        program = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{module}", side]
        self._processes = []
        for rank in range(size):
            rank_env = env | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
            }
            with (folder / f"log.{rank}").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*program, str(rank), str(size), str(folder)],
                        env=rank_env,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def ask(self, what: str, *args: Any) -> list[Any]:
        """Let every rank do something, and return their answers, in order."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # then there is no answer, but a log
                process.stdin.write(json.dumps([what, *args]) + "\n")
                process.stdin.flush()
        return [self._answer(rank) for rank in range(len(self._processes))]

    def end(self) -> None:
        """Let them end by themselves, and wait for it."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(DEADLINE_S)

    def _answer(self, rank: int) -> Any:
        stream = self._processes[rank].stdout
        assert stream is not None
        for line in stream:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        log = (self._folder / f"log.{rank}").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"rank {rank} has ended:\n{log}")


def obey(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Do what is asked for, by name, until nothing more comes. Then the process ends."""
    for line in sys.stdin:
        what, *args = json.loads(line)
        print(f"{_MARK}{json.dumps(functions[what](*args))}", flush=True)
    os._exit(0)


def join(rank: int, size: int, folder: Path) -> None:
    """A group as in a script of one's own."""
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def join_nbdist(size: int, folder: Path) -> None:
    """A group as engines join it: with the black box, and what is loaded by then left frozen."""
    from nbdist.engine import join as engine_join
    from nbdist.parallel.accelerator import accelerator

    start = {"world_size": size, "backend": "auto", "deadline_s": 60.0, "gpus": []}
    engine_join.join_at_start(folder, start)
    assert accelerator
    gc.freeze()  # as engines do before the first cell


def elapsed_s(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s
