"""`nbdist VERB` as typed in a terminal: in this process, or in one of its own, which imports it."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from nbdist.cluster.kernel import rank_server
from nbdist.frontend import cli
from tests.support.kernel import notebook_env
from tests.support.ranks import until

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0


def nbdist(*words: str, folder: Path, press_at: str = "") -> subprocess.CompletedProcess[str]:
    """What a command comes to that is typed in a folder, whose runs are in its `tmp`.

    With Ctrl-C as soon as the text `press_at` has been printed.
    """
    if words[0] in {"run", "bench"}:
        # What forks their ranks outlives the folder; ipyparallel keeps the one of its import.
        rank_server.preload()
    out, err = io.StringIO(), io.StringIO()
    with (
        _working_in(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _ctrl_c(out, press_at),
    ):
        code = cli.main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _ctrl_c(out: io.StringIO, at: str) -> Iterator[None]:
    has_ended = threading.Event()

    def press() -> None:
        until(lambda: has_ended.is_set() or (at and at in out.getvalue()), TIMEOUT_S)
        if not has_ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        yield
    finally:
        has_ended.set()
        pressing.join()


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    runs = str(folder / "tmp")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": runs}
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, hidden),
        mock.patch.object(tempfile, "tempdir", runs),
        mock.patch.object(sys, "path", [*sys.path]),
    ):
        yield


def begun(*words: str, folder: Path | None = None) -> subprocess.Popen[str]:
    """A process of its own, which runs."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "nbdist", *words],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def environment(folder: Path | None) -> dict[str, str]:
    """Of a process or kernel whose runs are in the folder's `tmp`."""
    runs = {} if folder is None else {"TMPDIR": str(folder / "tmp")}
    return notebook_env({"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **runs})
