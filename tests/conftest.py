"""What every test shares: folders of its own, one thread, markers, and no process left behind."""

import atexit
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.gpu.assumptions import gpu_count
from tests.support import lab, processes

pytest_plugins = ["tests.support.ranks"]

_SESSION_VARIABLE = "NBDIST_TEST_SESSION"
_SESSION = uuid.uuid4().hex  # tells our processes from those of a test session beside us
_HOME = Path(tempfile.mkdtemp(prefix="nbdist-tests-"))
# Modules of tests.support that start ranks, kernels, hosts or browsers; and fixtures with ranks.
_STARTERS = {"faults", "hosts", "kernel", "lab", "ranks", "terminal", "torch_ranks"}
_FIXTURES = {"_sessions_kernel", "_two_ranks", "bare_kernel", "runs"}
_END_TIMEOUT_S = float(os.environ.get("NBDIST_TEST_END_S", "10"))

# A shell's background job (`make test &`, nohup) ignores SIGINT, and so would every child.
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ.update({name: str(_HOME / name.lower()) for name in (*lab.DIRS, "MPLCONFIGDIR")})
os.environ.update({"OMP_NUM_THREADS": "1", _SESSION_VARIABLE: _SESSION})
os.environ.pop("NBDIST_TEST", None)  # outputs are stored only where a test says so


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts ranks, and skip what this machine cannot run, with the reason.

    Files that start ranks come first: several workers end together if what is left is short.
    """
    for item in items:
        if isinstance(item, pytest.Function) and _starts_ranks(item):
            item.add_marker(pytest.mark.ranks)
        if reason := _skip_reason(item):
            item.add_marker(pytest.mark.skip(reason=reason))
    with_ranks = {item.path for item in items if item.get_closest_marker("ranks")}
    items.sort(key=lambda item: item.path not in with_ranks)


def pytest_collection_finish() -> None:
    """Keep the collector from half a million objects that stay: product and tests call it often."""
    _freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_process_left() -> Iterator[None]:
    """Fail the session if a process of an nbdist run that it started outlives it."""
    before = set(_processes_of_this_session())
    yield
    started = [p for p in _processes_of_this_session() if p not in before]
    left = processes.wait_gone(started, _END_TIMEOUT_S)
    lines = [processes.describe(process) for process in left]
    for process in left:
        process.kill()
    if left:
        pytest.fail(
            f"{len(left)} processes with NBDIST_RUN were left running (killed now):\n"
            + "\n".join(lines),
            pytrace=False,
        )


@pytest.fixture(scope="module", autouse=True)
def _shell_of_this_module_alone() -> Iterator[None]:
    """IPython's shell is one per process, and ipykernel's changes the environment (colours)."""
    before = dict(os.environ)
    if (
        "nbdist.hang.rank.rendezvous" in sys.modules
    ):  # an abort without its recovery refuses all calls
        sys.modules["nbdist.hang.rank.rendezvous"].forget_meetings()
    yield
    if InteractiveShell.initialized():
        type(InteractiveShell.instance()).clear_instance()
    os.environ.clear()
    os.environ.update(before)
    _freeze()


def _freeze() -> None:
    """Take what is still referenced out of the collector's sight."""
    gc.collect()
    gc.freeze()


def _processes_of_this_session() -> list[psutil.Process]:
    left = processes.processes_of_run()
    return [p for p in left if processes.environment(p).get(_SESSION_VARIABLE) == _SESSION]


def _starts_ranks(item: pytest.Function) -> bool:
    return not _FIXTURES.isdisjoint(item.fixturenames) or _uses_starter(item.module.__name__)


@functools.cache
def _uses_starter(module: str) -> bool:
    """Whether a module has a name of one that starts ranks, or of another test's that has."""
    if module.startswith("tests.support.") and module.split(".")[2] in _STARTERS:
        return True
    values = vars(sys.modules[module]).values()
    origins = {
        getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in values
    }
    return any(
        _uses_starter(origin)
        for origin in origins - {module}
        if isinstance(origin, str) and origin.startswith("tests.") and origin in sys.modules
    )


def _skip_reason(item: pytest.Item) -> str | None:
    needed = max((_gpus_of(marker) for marker in item.iter_markers("gpu")), default=0)
    if needed and needed > (present := gpu_count()):
        return f"needs {needed} GPU{'s' if needed > 1 else ''}, this machine has {present}"
    return lab.browser_skip_reason() if item.get_closest_marker("browser") else None


def _gpus_of(marker: pytest.Mark) -> int:
    return int(marker.args[0]) if marker.args else 1
