"""Sockets of a rank's child processes are in the run folder, and are gone with it."""

import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import stat
import tempfile
from pathlib import Path

import pytest

from nbdist.engine import child_sockets


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What multiprocessing knows of this process, as in one that has no children yet."""
    config: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.setitem(config, "tempdir", None)
    return config


@pytest.mark.usefixtures("config")
def test_multiprocessing_takes_the_folder() -> None:
    """The private place that is written to is the one that its own function reads."""
    with tempfile.TemporaryDirectory(prefix="n-") as run_dir:
        assert child_sockets.use(Path(run_dir), 3)
        folder = Path(multiprocessing.util.get_temp_dir())

        assert folder == Path(run_dir) / "mp.3"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not child_sockets.use(Path(run_dir), 4)  # children know of the first


def test_a_path_too_long_for_a_socket_is_not_used(config: dict[str, object]) -> None:
    """The longest that is used makes an address of 103 bytes, one more is left alone."""
    with tempfile.TemporaryDirectory(prefix="n-") as base:
        fits = 103 - len("/mp.0/listener-12345678") - len(base) - 1
        long, fit = Path(base) / ("x" * (fits + 1)), Path(base) / ("y" * fits)
        long.mkdir()
        fit.mkdir()

        assert not child_sockets.use(long, 0)
        assert (config["tempdir"], list(long.iterdir())) == (None, [])
        assert child_sockets.use(fit, 0)
        with multiprocessing.connection.Listener(family="AF_UNIX") as listener:
            assert len(str(listener.address)) == 103


def test_where_it_cannot_be_made_all_stays_as_it_was(config: dict[str, object]) -> None:
    """A full disk, or a run folder that is gone, must not keep a rank from starting."""
    assert not child_sockets.use(Path("/nowhere"), 0)
    assert config["tempdir"] is None
