"""64 ranks on one machine: a hang is told as soon as that of two, and all ranks come back."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.faults import ABORT_S, GRACE_S, LOAD_S, Measured, Ranks, record
from tests.support.kernel import Kernel

pytestmark = pytest.mark.faults

N = 64
# Ranks are forks: one takes about as much of its own.
RANK_BYTES = 130 << 20
START_S = 180.0
# 64 ranks take longer to be looked at than two. What waits shares no core: LOAD_S is added once.
TOLD_S = 3.0
# Otherwise each rank imports, once it is idle, what its server has not yet.
ALL_IMPORTED = """
import time
from nbdist.cluster.kernel import rank_server
while not rank_server.is_ready():
    time.sleep(0.01)
"""
LEFT_OUT = """%%distributed
import time
print('all')
print('but 7' if rank != 7 else 'seven')
print('go', time.monotonic(), flush=True)
if rank != 7:
    dist.all_reduce(x)
"""


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """Short, so that sockets fit."""
    folder = Path(tempfile.mkdtemp(prefix="many-"))
    (folder / "tmp").mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _environment(folder: Path) -> dict[str, str]:
    return {"TMPDIR": str(folder / "tmp"), "NBDIST_PRELOAD": "1"}


@pytest.mark.skipif(
    psutil.virtual_memory().available < N * RANK_BYTES,
    reason=f"{N} ranks need {N * RANK_BYTES >> 30} GiB of free memory",
)
@pytest.mark.timeout(400)
def test_a_hang_of_64_ranks_is_told_and_all_come_back(own_folder: Path) -> None:
    """Rank 7 leaves out a call; lines name the 63 others as one range around it."""
    with Kernel(cwd=own_folder, env=_environment(own_folder)) as kernel:
        ranks = Ranks(kernel, N, own_folder)
        ranks.ok("%load_ext nbdist")
        ranks.ok(ALL_IMPORTED, START_S)
        ranks.ok(f"%dist_init -n {N} --grace {GRACE_S:g}", START_S)
        ranks.ok("%%distributed\nx = torch.ones(3)\ndist.all_reduce(x)", START_S)
        ranks.set_kept()
        handle = kernel.start(LEFT_OUT)
        began_s = ranks.begin_s(handle, N, 60)
        kernel.wait_output(handle, "in all_reduce", 60)
        told_s = time.monotonic() - began_s
        cell = ranks.finish(handle, 60)
        back_s = time.monotonic() - began_s
        is_kept = ranks.are_kept(range(N))
        total = ranks.ok("%%distributed\nx.fill_(rank)\ndist.all_reduce(x)\nprint(x.tolist())", 60)
        is_right = f"[0-63] {[N * (N - 1) / 2] * 3}\n" in total.text
        assert ranks.look()[1].keys() == ranks.engines.keys()
        leftovers = ranks.end()
    case = "one of 64 leaves out a call"
    record(Measured(case, "hang", N, told_s, back_s, is_kept, is_right, len(leftovers)))

    cell.check_failure("Deadlock")
    assert "[0-63] all\n" in cell.text
    assert "[0-6,8-63] but 7\n" in cell.text
    assert "0-6,8-63" in cell.stderr
    assert is_kept
    assert is_right, total.visible
    assert leftovers == []
    assert told_s < TOLD_S + LOAD_S
    # All 64 connect to each other anew, on shared cores.
    assert back_s < TOLD_S + GRACE_S + ABORT_S + ranks.load_s
