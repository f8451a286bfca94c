"""Ranks started in this process, in a run folder of the test's own."""

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbdist
from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.cells.outputs import CellResult, Event
from nbdist.cluster.kernel import rank_server, run_dir, start
from nbdist.cluster.kernel.start import StartOptions
from nbdist.hang.kernel.restart import names as names_on
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.session import Session
from nbdist.notebook.session import start as start_session
from tests.support import processes

SEED = 7
SUM = "total = torch.ones(1) * (rank + 1); dist.all_reduce(total); print(total.item())"
RESTART_S = 60.0


class Silent:
    """A sink that shows nothing."""

    def draw(self, events: Sequence[Event]) -> None:
        """Show nothing: these tests read the result."""

    def close(self, result: CellResult) -> None:
        """Show nothing: these tests read the result."""


def silent(_request: CellRequest) -> Silent:
    return Silent()


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Let runs of this process live under `path`, and yield the folder that holds them."""
    before = tempfile.tempdir
    path.mkdir(exist_ok=True)
    tempfile.tempdir = str(path)
    try:
        yield path / run_dir.base().name
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def started(n: int, **options: Any) -> Iterator[Session]:
    """Ranks that a user's notebook has started, for as long as the block."""
    try:
        yield nbdist.start(n, **options)
    finally:
        if NOTEBOOK.is_running:
            NOTEBOOK.stop()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """The folder that will hold the runs; when the test ends nothing of them may be left."""
    with temporary_folder(tmp_path / "tmp") as base:
        yield base
        remaining = processes_under(base)
        for process in remaining:
            process.kill()

        assert remaining == []
        assert processes.open_run_dirs(base) == []


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What forks a test's ranks is its own, not that which others share; nothing is left of it."""
    monkeypatch.setattr(rank_server, "_server", None)
    yield
    rank_server._discard(rank_server._server)


@pytest.fixture(scope="session")
def _two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    preload()
    with temporary_folder(tmp_path_factory.mktemp("two") / "tmp") as base:
        options = StartOptions(world_size=2, gpus="none", seed=SEED)
        session = start_session(options, silent, lambda _: None).session
    yield session
    session.stop()

    assert processes_under(base) == []
    assert processes.open_run_dirs(base) == []


@pytest.fixture
def pair(_two_ranks: Session) -> Session:
    """The same two ranks for each test, whole and without the names of the tests before."""
    session = _two_ranks
    session.maintenance.reconnect()
    if session.health.dead:
        session.restart(deadline_s=RESTART_S)
    session.grace_s = start.DEFAULT_GRACE_S
    assert until(lambda: not session.busy_ranks)
    clear_names(session)
    return session


def clear_names(session: Session) -> None:
    """Let go of all names that cells have bound on the ranks."""
    names_by_rank = [names_on(session.call, rank).result(RESTART_S) for rank in session.ranks]
    names = sorted(set(itertools.chain(*names_by_rank)))
    session.run(f"[globals().pop(name, None) for name in {names}];")


def texts(session: Session, code: str, ranks: str | None = None) -> list[str]:
    """What a cell printed on each rank."""
    return [result.text for result in session.run(code, ranks=ranks).ranks]


def processes_under(base: Path) -> list[psutil.Process]:
    """Processes of any run under the folder, guardians too."""
    mine = [
        p
        for p in processes.processes_of_run()
        if processes.environment(p).get("NBDIST_RUN", "").startswith(str(base))
    ]
    return mine + [p for p in psutil.Process().children() if str(base) in " ".join(_command(p))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def preload() -> None:
    """Wait until ranks are forked with all imports; else each imports the rest when it is idle."""
    if os.environ.get(rank_server.PRELOAD) != "0" and not rank_server.obstacle():
        rank_server.preload()
        until(rank_server.is_ready, RESTART_S)


@contextlib.contextmanager
def session_of(options: StartOptions) -> Iterator[Session]:
    if options.profile == "local":
        preload()
    session = start_session(options, silent, lambda _: None).session
    try:
        yield session
    finally:
        session.stop()


def until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Whether it became true in time."""
    end_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True
