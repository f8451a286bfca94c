"""Scripts of torch's own form, started as torchrun does, or as plain python."""

import atexit
import functools
import os
import re
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.forks import Forked, ForkServer
from tests.support.kernel import notebook_env

_TIMEOUT_S = 100.0
_BEHIND_S = 15.0  # no rank is so long behind one that has ended: they meet in each step
# torch 2.13 aborts now and then at the very end, where a DDP model holds a group that has been
# destroyed (1 of 14 on a busy machine), or waits there for ever (1 of 4, when the other rank had
# ended). Each rank has printed all by then, which is compared.
ABORTED = -6
ENDED = {0, ABORTED}
# What scripts import, which takes seconds.
_IMPORTED = (
    "torch", "accelerate", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.pipelining",
)  # fmt: skip
_AS_MAIN = """
import faulthandler, os, runpy, sys
faulthandler.enable()
os.chdir({folder!r})
sys.modules[{without!r}], sys.path[0], sys.argv[:] = None, {folder!r}, {words!r}
sys.stdout = open({out!r}, "w", buffering=1)
runpy.run_path({script!r}, run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class Started:
    """Ranks of a script that ends, each with its lines and what it wrote to stderr."""

    lines: list[list[str]]
    errors: list[str]
    codes: list[int]


def started(
    script: Path, ranks: int = 2, without: str = "nbdist", arguments: Sequence[str] = ()
) -> Started:
    """Run a script where a package cannot be imported, to its end."""
    port = free_port()
    forks = []
    for rank in range(ranks):
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "localhost", "MASTER_PORT": port,
        } if ranks > 1 else {}  # fmt: skip
        text = _AS_MAIN.format(
            folder=str(script.parent), script=str(script), without=without,
            words=[str(script), *arguments], out=str(script.parent / f"{rank}.out"),
        )  # fmt: skip
        env = notebook_env({name: str(value) for name, value in variables.items()})
        log = script.with_name(f"{rank}.err")
        log.unlink(missing_ok=True)
        forks.append((_server().fork(text, env, log), log))
    codes: list[int] = []
    try:
        for fork, log in forks:
            has_ended = bool(codes) and {*codes} <= ENDED
            codes.append(_code_of(fork, log, script, others_ended=has_ended))
    except subprocess.TimeoutExpired:
        for fork, _ in forks:
            fork.kill()
        raise
    texts = [script.with_name(f"{rank}.out").read_text() for rank in range(ranks)]
    errors = [log.read_text() for _, log in forks]
    return Started([unlabelled(text) for text in texts], errors, codes)


def _code_of(fork: Forked, log: Path, script: Path, *, others_ended: bool) -> int:
    try:
        return fork.wait(_BEHIND_S if others_ended else _TIMEOUT_S)
    except subprocess.TimeoutExpired:
        fork.send_signal(signal.SIGABRT)  # faulthandler tells where it is
        code = fork.wait(_TIMEOUT_S)
        innermost = re.search(r'first\):\n  File "(.*)", line \d+ in (.*)', log.read_text())
        # In a call of torch or anything else it waits for more than torch's end.
        is_at_end = innermost is not None and (
            innermost[1] == str(script) or innermost[2] == "destroy_process_group"
        )
        if not (others_ended and is_at_end):
            raise
        return code


def lines_of(
    script: Path, ranks: int = 2, without: str = "nbdist", arguments: Sequence[str] = ()
) -> list[list[str]]:
    """Each rank's lines of a script that goes well."""
    ended = started(script, ranks, without, arguments)

    assert set(ended.codes) <= ENDED, ended.errors
    return ended.lines


@functools.cache
def _server() -> ForkServer:
    # pytest's processes of one run (-n 2) share it.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    env = notebook_env({"CUDA_VISIBLE_DEVICES": ""})
    server = ForkServer(_IMPORTED, env, f"{run}-scripts")
    atexit.register(server.stop)
    return server


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
    return port


def unlabelled(text: str) -> list[str]:
    """Lines without the rank that a shown value begins with."""
    return re.sub(r"(?m)^\[\d\] ", "", text).splitlines()
