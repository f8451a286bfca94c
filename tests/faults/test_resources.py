"""Something runs out: memory, the run folder's disk, /dev/shm."""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.faults import ABORT_S, DEATH_TOLD_S, GRACE_S, TOLD_S, Measured, Ranks, record
from tests.support.kernel import Kernel

pytestmark = pytest.mark.faults

_CGROUP = Path("/sys/fs/cgroup")
_LIMIT_BYTES = 64 << 20
# The kernel and all that it starts get a mount of their own over a folder; the machine keeps its.
_OWN_MOUNT = """
import ctypes, os, subprocess
assert ctypes.CDLL(None, use_errno=True).unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())
subprocess.run(['mount', '--make-rprivate', '/'], check=True)
subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size={size}', 'nbdist-test', {folder!r}], check=True)
"""


def _own_mount(folder: Path | str, size: str) -> str:
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip(f"no mounts allowed here: {tried.stderr.strip()}")
    return _OWN_MOUNT.format(size=size, folder=str(folder))


@contextlib.contextmanager
def _memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group of the test's own; what is put into it cannot use more memory."""
    is_v1 = (_CGROUP / "memory").is_dir()
    group = (_CGROUP / "memory" if is_v1 else _CGROUP) / f"nbdist-test-{os.getpid()}"
    names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if is_v1 else (
        "memory.max", "memory.swap.max")  # fmt: skip
    try:
        group.mkdir()
        (group / names[0]).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    with contextlib.suppress(OSError):  # without swap there is no such limit
        (group / names[1]).write_text(str(limit_bytes) if is_v1 else "0")
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):  # busy until its last process has been reaped
            group.rmdir()


@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_is_killed_for_its_memory(n: int, ranks: Ranks) -> None:
    """The kernel's out-of-memory kill is told as such; the others keep all, a restart heals."""
    resident = ranks.engines[1].memory_info().rss
    with _memory_group(resident + _LIMIT_BYTES) as group:
        (group / "cgroup.procs").write_text(str(ranks.engines[1].pid))
        cell, back_s = ranks.run_fault(
            "%%distributed\ngo()\n"
            f"hog = bytearray({2 * (resident + _LIMIT_BYTES)}) if rank == 1 else None\n"
            "if rank == 1: hog[::4096] = b'1' * len(hog[::4096])\n"
            "dist.all_reduce(x)",
            n - 1,  # the killed rank's own line may go with it
        )
        ranks.revive([1])

    cell.check_failure("DistributedError", r"rank 1 ended \(signal SIGKILL", "memory")
    assert back_s < 10 + DEATH_TOLD_S + ABORT_S + ranks.load_s  # the first is for the filling
    ranks.conclude("memory limit of a control group", "resource", None, back_s)


@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_cannot_allocate(n: int, ranks: Ranks) -> None:
    """An allocation that fails on one rank while others wait for it costs no variable."""
    cell, back_s = ranks.run_fault(
        "%%distributed\ngo()\n"
        "hog = torch.empty(2**60 if rank == 1 else 1, dtype=torch.uint8)\ndist.all_reduce(x)",
        n,
    )

    cell.check_failure("DistributedError", "rank 1 raised RuntimeError")
    assert back_s < TOLD_S + GRACE_S + ABORT_S + ranks.load_s
    ranks.conclude("allocation fails", "resource", None, back_s)


def test_no_disk_for_the_start(tmp_path: Path) -> None:
    """A run folder on a full disk fails the start with a sentence, and nothing is left."""
    with Kernel(cwd=tmp_path, env={"TMPDIR": str(tmp_path)}) as kernel:
        assert kernel.run(_own_mount(tmp_path, "64k")).status == "ok"
        assert kernel.run("%load_ext nbdist").status == "ok"
        kernel.run(f"!dd if=/dev/zero of={tmp_path}/full bs=1k 2>/dev/null")
        cell = kernel.run("%dist_init -n 2", 60)
        folders = kernel.run(f"!ls {tmp_path}")

    record(Measured("disk full at the start", "resource", 2, cell.seconds, cell.seconds))
    cell.check_failure("StartError", "space|disk")
    assert "nbdist" not in folders.text


@pytest.mark.parametrize("n", [2, 4])
def test_the_disk_fills_while_ranks_run(n: int, own_ranks: Callable[..., Ranks]) -> None:
    """Cells go on without a byte of disk, a hang is told and ended, and no rank dies of it."""
    ranks = own_ranks(n, lambda folder: _own_mount(folder, "16m"))
    ranks.ok("!dd if=/dev/zero of=$TMPDIR/full bs=4k 2>/dev/null; df $TMPDIR | tail -1")
    output = ranks.ok("%%distributed\nfor i in range(3000): print('line', i)")
    handle = ranks.kernel.start("%%distributed\nif rank != 1:\n    go()\n    dist.all_reduce(x)")
    began_s = ranks.begin_s(handle)
    ranks.kernel.wait_output(handle, "in all_reduce", 20)
    told_s = time.monotonic() - began_s
    cell = ranks.finish(handle)
    back_s = time.monotonic() - began_s
    assert ranks.are_kept(range(n))
    ranks.ok("import os; os.unlink(os.environ['TMPDIR'] + '/full')")

    assert "line 2999" in output.text
    cell.check_failure("Deadlock")
    assert told_s < TOLD_S + ranks.load_s
    ranks.conclude("disk full while ranks run", "resource", told_s, back_s)


def test_no_shared_memory_for_the_start(tmp_path: Path) -> None:
    """A full /dev/shm fails the start with its size and the remedy."""
    with Kernel(cwd=tmp_path) as kernel:
        assert kernel.run(_own_mount("/dev/shm", "1m")).status == "ok"
        kernel.run("%load_ext nbdist")
        cell = kernel.run("%dist_init -n 2", 60)

    record(Measured("/dev/shm full at the start", "resource", 2, cell.seconds, cell.seconds))
    cell.check_failure("StartError", "/dev/shm has 1 MiB free", "--shm-size")


@pytest.mark.parametrize("n", [2, 4])
def test_shared_memory_fills_while_ranks_run(n: int, own_ranks: Callable[..., Ranks]) -> None:
    """A loader's worker that dies of it fails its rank's cell; the others come back."""
    ranks = own_ranks(n, lambda _: _own_mount("/dev/shm", "32m"))
    ranks.ok("!dd if=/dev/zero of=/dev/shm/full bs=64k 2>/dev/null; df /dev/shm | tail -1")
    cell, back_s = ranks.run_fault(
        "%%distributed\ngo()\nif rank == 1:\n"
        "    next(iter(DataLoader(torch.ones(64, 10**6), batch_size=8, num_workers=1)))\n"
        "dist.all_reduce(x)",
        n,
    )
    ranks.ok("import os; os.unlink('/dev/shm/full')")

    cell.check_failure("DistributedError", "rank 1 raised (RuntimeError|OSError)")
    assert re.search(r"shared memory|shm|No space left", cell.visible), cell.visible
    ranks.conclude("/dev/shm full while ranks run", "resource", None, back_s)
