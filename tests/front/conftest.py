"""One kernel with two ranks for all tests that leave both as they found them."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel

START_TIMEOUT_S = 120.0
# A rank imports torch._dynamo once it is idle, for seconds; a test that times cells waits for it.
_WARM = "%%distributed\nimport torch._dynamo"


@pytest.fixture(scope="session")
def shared_folder() -> Iterator[Path]:
    """The folder that the shared kernel runs in; short, so that messages do not wrap."""
    folder = Path(tempfile.mkdtemp(prefix="front-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def _shared_kernel(shared_folder: Path) -> Iterator[Kernel]:
    with Kernel(cwd=shared_folder) as shared:
        start_ranks(shared)
        warm(shared)
        yield shared


@pytest.fixture
def kernel(_shared_kernel: Kernel) -> Iterator[Kernel]:
    """The shared kernel with ranks 0 and 1, idle; plain cells run in the notebook."""
    yield _shared_kernel
    ended = _shared_kernel.run("%dist_mode local")

    assert ended.status == "ok", ended.visible


@pytest.fixture
def impatient(kernel: Kernel) -> Iterator[Kernel]:
    """The shared kernel; a certain deadlock is aborted after 0.5 s, not 5 s."""
    grace = kernel.run("import nbdist\nsession = nbdist.session()\nprint(session.grace_s)").text
    kernel.run("session.grace_s = 0.5")
    yield kernel
    kernel.run(f"session.grace_s = {grace}\ndel session")


@pytest.fixture
def mortal(kernel: Kernel) -> Iterator[Kernel]:
    """The shared kernel for a test in which ranks end: they are started again afterwards."""
    yield kernel
    kernel.run("%dist_restart", START_TIMEOUT_S)
    warm(kernel)


@pytest.fixture
def own_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel for one test alone, with ranks 0 and 1."""
    with Kernel(cwd=tmp_path) as kernel:
        start_ranks(kernel)
        yield kernel


@pytest.fixture
def bare_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel for one test alone in which nothing has been loaded."""
    with Kernel(cwd=tmp_path) as kernel:
        yield kernel


def start_ranks(kernel: Kernel, options: str = "-n 2") -> None:
    for code in ("%load_ext nbdist", f"%dist_init {options}"):
        cell = kernel.run(code, START_TIMEOUT_S)

        assert cell.status == "ok", cell.visible


def warm(kernel: Kernel) -> None:
    """Wait until all ranks run and have imported what they import while they are idle."""
    cell = kernel.run(_WARM, START_TIMEOUT_S)

    assert cell.status == "ok", cell.visible
