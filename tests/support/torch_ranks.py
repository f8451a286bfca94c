"""Plain processes that are ranks: they join over a file as engines do, and run a program.

A program is a function of a test's file, which each rank executes as `__main__`, as a notebook's
names lie there. Ranks are forks of a process that has imported torch, which costs two seconds.
"""

from __future__ import annotations

import ast
import atexit
import functools
import inspect
import json
import marshal
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

from tests.support.forks import Forked, ForkServer
from tests.support.kernel import notebook_env

# Asked without an import of it, which takes seconds in each process that collects tests.
NEEDS_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="needs PEFT")
NEEDS_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed (the extra `deepspeed`)"
)

# Ranks end by themselves after LIMIT_S, with all threads' stacks; the test waits a little longer.
LIMIT_S = 200.0
MORE_S = 10.0
POLL_S = 0.01
# What forks have imported: programs need it, torch imports torch._dynamo for DDP, and models of
# libraries cost each rank half as much as torch.
_OF_LIBRARIES = (
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "peft",
)
IMPORTED = (
    "nbdist.engine.join",
    "nbdist.hang.rank.process_groups",
    "nbdist.hang.rank.reset_models",
    "nbdist.parallel.accelerator.accelerator",
    "nbdist.parallel.reshard.sync_model",
    "nbdist.switch.rank.switch",
    "nbdist.verification.rank.verify",
    "tests.support.torch_ranks",
    "torch._dynamo",
    *(name for name in _OF_LIBRARIES if find_spec(name.partition(".")[0])),
)
ENV = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

RUN = "__import__('tests.programs.rank', fromlist=['run']).run()"

Program = Callable[..., dict[str, Any] | None]


class TorchRanks:
    """Ranks 0 to n-1, each running the same program. A context manager.

    A program returns what its rank ends with, `limit_s` after its start at the latest. Ranks join
    over a file; with TEST_ADDRESS over a port there. TEST_NETWORKS has a network namespace for
    each, as a file below /proc.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        program: Program,
        limit_s: float = LIMIT_S,
        *,
        arguments: Mapping[str, Any] | None = None,
        is_new: bool = False,
        **env: str,
    ) -> None:
        """Start the ranks.

        Args:
            folder: For their files.
            size: How many.
            program: What each runs.
            limit_s: After which they end by themselves.
            arguments: Of the program.
            is_new: Processes that have imported nothing. So too where an environment variable of
                torch's is given, which may be read by the import; TORCH_DISTRIBUTED_DEBUG can be
                read again.
            env: Variables beside those of a rank.
        """
        self.folder = folder
        self.size = size
        self.limit_s = limit_s
        self._env = env
        self._is_new = is_new or any(
            name.startswith("TORCH") and name != "TORCH_DISTRIBUTED_DEBUG" for name in env
        )
        self._processes: dict[int, subprocess.Popen[bytes] | Forked] = {}
        folder.mkdir(parents=True, exist_ok=True)
        start = {"world_size": size, "backend": "auto", "deadline_s": 60.0, "gpus": []}
        (folder / "start.json").write_text(json.dumps(start))
        path = inspect.getfile(inspect.unwrap(program))
        parts = compiled(path), path, program.__name__, arguments or {}
        (folder / "program").write_bytes(pickle.dumps(parts))
        if not self._is_new:
            [_server(rank) for rank in range(size)]  # they import side by side
        for rank in range(size):
            self._start(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def wait_for(self, name: str, rank: int) -> bytes:
        """What a rank said under a name."""
        path = self.folder / f"{name}.{rank}"
        until_s = time.monotonic() + self.limit_s + MORE_S
        while not path.exists():
            if self._processes[rank].poll() is not None or time.monotonic() > until_s:
                raise AssertionError(self.report())
            time.sleep(POLL_S)
        return path.read_bytes()

    def replace(self, rank: int, *rejoin: Any, **env: str) -> None:
        """Kill a rank and start a process in its place, which joins with the arguments."""
        self.kill(rank)
        path = self.folder / f"rejoin.{rank}.pickle"
        path.write_bytes(pickle.dumps(rejoin))
        self._start(rank, TEST_REJOIN=str(path), **env)

    def interrupt(self, rank: int) -> None:
        self._processes[rank].send_signal(signal.SIGINT)

    def kill(self, rank: int) -> None:
        """Kill a rank; the others are told with `dead`."""
        self._processes[rank].kill()
        self._processes[rank].wait()
        self.tell("dead", rank)

    def tell(self, name: str, rank: int | str = "test") -> None:
        """Let ranks go on that wait for a word of a rank or of the test."""
        (self.folder / f"{name}.{rank}").touch()

    def results(self, *ranks: int) -> list[dict[str, Any]]:
        """What the ranks ended with; of all ranks if none is named."""
        results = []
        for rank in ranks or range(self.size):
            try:
                self._processes[rank].wait(self.limit_s + MORE_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} did not end\n{self.report()}") from None
            path = self.folder / f"result.{rank}"
            if not path.exists():
                raise AssertionError(f"rank {rank} ended without a result\n{self.report()}")
            results.append(json.loads(path.read_text()))
        return results

    def report(self) -> str:
        """What all ranks have printed, and how they ended."""
        return "\n".join(
            f"--- rank {rank}, {process.poll()}:\n"
            + (self.folder / f"log.{rank}").read_text(errors="replace")[-3000:]
            for rank, process in self._processes.items()
        )

    def _start(self, rank: int, **env: str) -> None:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size)}
        run = {"TEST_RUN_DIR": str(self.folder), "TEST_LIMIT_S": str(self.limit_s)}
        environment = notebook_env({**place, **run, **ENV, **self._env, **env})
        path = self.folder / f"log.{rank}"
        if not self._is_new:
            self._processes[rank] = _server(rank).fork(RUN, environment, path)
            return
        with path.open("ab") as log:
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", RUN],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def run_ranks(
    folder: Path, size: int, program: Program, limit_s: float = LIMIT_S, **more: Any
) -> list[dict[str, Any]]:
    """What ranks have ended with that ran a program, as `TorchRanks` has it."""
    with TorchRanks(folder, size, program, limit_s, **more) as ranks:
        return ranks.results()


def on_ranks(
    *sizes: int, limit_s: float = LIMIT_S, **env: str
) -> Callable[[Program], Callable[..., None]]:
    """Make a test of a program: it passes if no rank raises. Its parameters come along.

    Args:
        sizes: With how many ranks; those behind the first belong to `make parity`.
        limit_s: After which ranks end by themselves.
        env: Variables beside those of a rank.
    """

    def test_of(program: Program) -> Callable[..., None]:
        @functools.wraps(program)
        def test(tmp_path: Path, size: int, **arguments: Any) -> None:
            run_ranks(tmp_path, size, program, limit_s, arguments=arguments, **env)

        names = ("tmp_path", "size", *inspect.signature(program).parameters)
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        vars(test)["__signature__"] = inspect.Signature(parameters)
        first, *others = sizes
        more = [pytest.param(size, marks=pytest.mark.parity) for size in others]
        return pytest.mark.parametrize("size", [first, *more])(test)

    return test_of


@functools.cache
def compiled(path: str) -> bytes:
    """A file's code, whose asserts tell values as pytest has them do."""
    source = Path(path).read_bytes()
    tree = ast.parse(source)
    rewrite_asserts(tree, source)
    return marshal.dumps(compile(tree, path, "exec", dont_inherit=True))


def _server(rank: int) -> ForkServer:
    """Strings hash differently in two ranks whose numbers differ in one bit, neighbours in a mesh.

    As in ranks that are started; two servers are enough for that.
    """
    return _one_of_two(rank.bit_count() % 2)


@functools.cache
def _one_of_two(number: int) -> ForkServer:
    # pytest's processes of one run (-n 2) share it.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    server = ForkServer(IMPORTED, notebook_env(ENV), f"{run}-{number}")
    atexit.register(server.stop)
    return server
