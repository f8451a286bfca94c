"""One kernel with two ranks for all tests that leave both as they found them."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.kernel import IMPORTED, Kernel
from tests.support.terminal import environment

START_TIMEOUT_S = 120.0
# Of two idle ranks and their notebook all that cells have made, then how many models are left.
_CLEAR = """
def _clear():
    import gc, nbdist
    from nbdist.hang.kernel.restart import names
    session, user_ns = nbdist.session(), get_ipython().user_ns
    session.maintenance.reconnect()
    if session.strategy.current().name != "ddp":
        session.strategy.switch("ddp")
    bound = {name for rank in session.ranks for name in names(session.call, rank).result(60)}
    for name in [name for name in user_ns if name not in _kept and name[0] != "_"]:
        del user_ns[name]
    code = f'''
import gc as _gc, sys as _sys
[globals().pop(_name, None) for _name in {sorted(bound)}]
_shell = get_ipython()
_shell.last_execution_result = None
_results = dict.fromkeys(('_', '__', '___'), '')
_shell.push(_results, interactive=False)
vars(_shell.displayhook).update(_results)
_sys.last_value = _sys.last_traceback = _sys.last_exc = None
accelerator.free_memory()
_gc.collect()
from nbdist.parallel.live import registry as _registry
from nbdist.parallel.accelerator import loader_state as _loaders
_loaders._last_batch = (), ''
print(len(_registry.prepared()))'''
    return [result.text for result in session.run(code).ranks]
_clear()
"""
_CLEARED = ["['0\\n', '0\\n']"]
# To draw takes half a second of each picture, which is for the tests that look at one.
_UNDRAWN = """
from matplotlib.figure import Figure as _Figure
_draw, _Figure.savefig = _Figure.savefig, lambda _figure, file, **_given: file.write(b"no picture")
"""


@pytest.fixture(scope="session")
def shared_folder() -> Iterator[Path]:
    """The folder that the shared kernel runs in, with its runs in `tmp`.

    Short, so that messages do not wrap, and sockets fit.
    """
    folder = Path(tempfile.mkdtemp(prefix="front-"))
    (folder / "tmp").mkdir()
    yield folder
    left = processes.open_run_dirs(folder / "tmp", "nbdist-*/*")
    shutil.rmtree(folder)

    assert left == []


class Shared(Kernel):
    """The kernel of all tests; whether it has ranks that are as new."""

    is_clear = False


@pytest.fixture(scope="session")
def _sessions_kernel(shared_folder: Path) -> Iterator[Shared]:
    env = {**environment(shared_folder), "NBDIST_PRELOAD": "1"}
    with Shared(cwd=shared_folder, env=env) as shared:
        for code in ("%load_ext nbdist", IMPORTED):
            cell = shared.run(code, START_TIMEOUT_S)

            assert cell.status == "ok", cell.visible
        start_ranks(shared)
        shared.run(_UNDRAWN)
        shared.run("_kept = {*get_ipython().user_ns}")
        yield shared


@pytest.fixture(scope="module")
def _shared_kernel(_sessions_kernel: Shared) -> Shared:
    """One for all files, with nothing in it of the files before."""
    clear(_sessions_kernel)
    return _sessions_kernel


@pytest.fixture
def kernel(_shared_kernel: Shared) -> Kernel:
    """The shared kernel with ranks 0 and 1, idle; plain cells run in the notebook."""
    local = _shared_kernel.run("%dist_mode local")
    assert local.status == "ok", local.visible
    if not _shared_kernel.is_clear:
        clear(_shared_kernel)
    return _shared_kernel


@pytest.fixture
def drawn(kernel: Kernel) -> Iterator[None]:
    """Pictures in the shared kernel are drawn, which are left out elsewhere."""
    kernel.run("_undrawn, _Figure.savefig = _Figure.savefig, _draw")
    yield
    kernel.run("_Figure.savefig = _undrawn")


@pytest.fixture
def impatient(kernel: Kernel) -> Iterator[Kernel]:
    """The shared kernel; a certain deadlock is aborted after 0.5 s, not 5 s."""
    grace = kernel.run("import nbdist\nsession = nbdist.session()\nprint(session.grace_s)").text
    kernel.run("session.grace_s = 0.5")
    yield kernel
    kernel.run(f"session.grace_s = {grace}\ndel session")


@pytest.fixture
def without_ranks(_shared_kernel: Shared) -> Iterator[Kernel]:
    """The shared kernel without ranks; what a test starts in it is ended."""
    with freed(_shared_kernel) as kernel:
        yield kernel


@pytest.fixture
def fresh(without_ranks: Kernel) -> Kernel:
    """The shared kernel with new ranks for one test alone."""
    start_ranks(without_ranks)
    return without_ranks


@pytest.fixture
def bare_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel for one test alone in which nothing has been loaded."""
    with Kernel(cwd=tmp_path, env={"NBDIST_PRELOAD": "0"}) as kernel:
        yield kernel


@contextlib.contextmanager
def freed(shared: Shared) -> Iterator[Kernel]:
    """The shared kernel without ranks; what is started in it is ended."""
    for code in ("%dist_mode local", "%dist_shutdown"):
        shared.run(code)
    shared.is_clear = False
    yield shared
    shared.run("%dist_shutdown")


def start_ranks(kernel: Kernel, options: str = "-n 2") -> None:
    for code in ("%load_ext nbdist", f"%dist_init {options}"):
        cell = kernel.run(code, START_TIMEOUT_S)

        assert cell.status == "ok", cell.visible


def reset(kernel: Kernel, options: str = "-n 2") -> None:
    """New ranks, whether there are any or not."""
    for code in ("%dist_shutdown", f"%dist_init {options}"):
        cell = kernel.run(code, START_TIMEOUT_S)

    assert cell.status == "ok", cell.visible


def clear(shared: Shared) -> None:
    """Let go of what cells have made; ranks that cannot be cleared are replaced."""
    shared.run("%dist_mode local")
    if shared.run(_CLEAR).plain != _CLEARED:
        reset(shared)
    shared.is_clear = True
