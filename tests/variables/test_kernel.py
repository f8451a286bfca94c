"""push and pull of a session whose ranks are busy, gone, elsewhere, or short of shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nbdist.cells.kernel import wait
from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.errors import RankBusy, RankGone
from nbdist.notebook.session import Session
from nbdist.variables import kernel as variables_kernel
from nbdist.variables import pack
from tests.support.ranks import until

LARGE = np.arange(500_000)


def left(session: Session) -> list[Path]:
    """Files and folders on their way."""
    run = session.cluster.run_dir
    folders = [place.glob(f"nbdist-{os.getuid()}-*") for place in (Path("/dev/shm"), run)]
    return [path for each in folders for path in each if run.name in path.name]


def test_what_does_not_fit_into_shared_memory_goes_over_the_disk(
    pair: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so; of ranks too, which look for themselves."""

    def usage(folder: str | Path) -> Any:
        is_shm = str(folder).startswith("/dev/shm")
        return SimpleNamespace(free=1_000_000 if is_shm else 10**12)

    monkeypatch.setattr(pack.shutil, "disk_usage", usage)
    pushed = pair.push({"large": LARGE})
    pair.run(
        "import shutil\nkept = shutil.disk_usage\nfrom types import SimpleNamespace\n"
        "shutil.disk_usage = lambda f: SimpleNamespace(free=10**(6 if '/shm' in str(f) else 12))"
    )
    pulled = pair.variables.pull(["large"])
    pair.run("shutil.disk_usage = kept")
    remark = "it was sent through a file on disk: 4.0 MB needed, 1.0 MB free in /dev/shm"

    assert pushed.remarks == pulled.remarks == (remark,)
    assert all(np.array_equal(array, LARGE) for array in pulled.values["large"])
    assert left(pair) == []


def test_ranks_elsewhere_get_large_values_over_the_wire(
    pair: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They see no file of this host: none is made."""
    away = tuple(replace(place, host="elsewhere") for place in pair.topology.ranks)
    monkeypatch.setattr(pair, "topology", replace(pair.topology, ranks=away))
    monkeypatch.setattr(variables_kernel.tempfile, "mkdtemp", None)
    pair.push({"far": LARGE})

    assert all(np.array_equal(array, LARGE) for array in pair.pull("far"))


def test_a_busy_rank_is_refused_before_anything_is_copied(
    pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others can be reached meanwhile."""
    code = f"open('{tmp_path}/runs', 'w')\nimport time\ntime.sleep(60)"
    call = pair.begin(CellRequest(code, (1,)))
    with contextlib.closing(call):
        assert until((tmp_path / "runs").exists)
        with monkeypatch.context() as patched:
            patched.setattr(pack, "pack", None)
            with pytest.raises(RankBusy, match="rank 1 is still running"):
                pair.push({"a": LARGE})
        with pytest.raises(RankBusy, match="rank 1 is still running"):
            pair.pull("a")
        pair.push({"a": "new"}, ranks="0")
        pulled = pair.pull("a", ranks="0")
        pair.interrupt(1)
        with pytest.raises(BaseException, match="KeyboardInterrupt"):
            wait.wait(lambda: call)

    assert pulled == "new"


def test_a_rank_that_ends_meanwhile_is_told_and_no_file_stays(pair: Session) -> None:
    """It dies while it makes the value; the other rank goes on, with its old value."""
    pair.push({"a": "old"})
    with pytest.raises(RankGone, match="rank 1 has ended"):
        pair.push({"a": [_Deadly(), LARGE]})
    with pytest.raises(RankGone, match="rank 1 has ended"):
        pair.push({"a": 1})
    alone = pair.pull("a", ranks=[0])
    files = left(pair)
    pair.restart([1])

    assert (alone, files) == ("old", [])


class _Deadly:
    """Ends rank 1 when it is made there."""

    def __reduce__(self) -> tuple[Any, ...]:
        kill = f"__import__('os').kill(__import__('os').getpid(), {int(signal.SIGKILL)})"
        return eval, (f"__import__('os').environ['RANK'] == '1' and {kill}",)
