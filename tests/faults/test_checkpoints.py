"""A save is broken off: the checkpoint before it is whole and loads, and nothing is left behind."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.checkpoint import folder as checkpoint_folder
from nbdist.checkpoint import manifest
from tests.faults.test_resources import _own_mount
from tests.support.cells import Handle
from tests.support.faults import BACK_S, DEATH_TOLD_S, GONE_S, Measured, Ranks, record
from tests.support.ranks import until

long = pytest.mark.faults
_MODEL = """%%distributed
import gc, resource
from nbdist.checkpoint.rank import write as writing
plain_write = getattr(writing._Stream, 'plain_write', writing._Stream.write)
writing._Stream.plain_write = plain_write

def slow(self, data):
    "As on a disk that hardly moves."
    open(f'writing{rank}', 'w').close()
    while not os.path.exists('end') and not self._meter._stop.is_set():
        time.sleep(0.01)
    return plain_write(self, data)

def stuck(self, data):
    "As on a disk that does not answer; nothing ends such a call."
    open(f'writing{rank}', 'w').close()
    while not os.path.exists('end'):
        time.sleep(0.01)
    return plain_write(self, data)

def train():
    trained(torch.ones(2, 256)).sum().backward()
    steps.step()
    steps.zero_grad()

def total():
    return sum(p.detach().double().abs().sum().item() for p in trained.parameters())

net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
trained, steps = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
train()
"""
_SLOW = "%%distributed\nwriting._Stream.write = {}"
_END = "%%distributed\nwriting._Stream.write = plain_write"
_FREE = "%%distributed\ndel net, trained, steps\ngc.collect();"


def _begun(ranks: Ranks, path: str = "one") -> float:
    """A checkpoint at `one`, whole, and training goes on; what its weights came to."""
    ranks.ok(_MODEL)
    ranks.ok(f"%dist_save {path}")
    total = _total(ranks)
    ranks.ok("%%distributed\ntrain()")
    return total


def _total(ranks: Ranks) -> float:
    return float(ranks.values("total()", [0])[0])


def _writing(ranks: Ranks, line: str = "%dist_save one") -> Handle:
    """Start a save, and wait until every rank is in the middle of it."""
    for path in _marks(ranks):
        path.unlink(missing_ok=True)
    handle = ranks.kernel.start(line)
    has_begun = until(lambda: all(path.exists() for path in _marks(ranks)), 20)
    assert has_begun, ranks.kernel.so_far(handle).visible
    ranks.kernel.wait_output(handle, "writing", 20)
    return handle


def _is_whole(folder: Path) -> None:
    """Every byte is as its manifest says."""
    checkpoint_folder.recover(folder)
    manifest.check_files(folder, manifest.read(folder), reads_all=True)


def _goes_on(ranks: Ranks, total: float, case: str, back_s: float, told_s: float | None) -> None:
    """The checkpoint loads as it was saved; the next save leaves its own folder alone."""
    _is_whole(ranks.folder / "one")
    (ranks.folder / "end").touch()
    ranks.ok("%dist_load one")
    assert _total(ranks) == total
    ranks.ok("%dist_save one")
    assert [path.name for path in ranks.folder.glob(".one*")] == []
    ranks.ok(_FREE)
    ranks.conclude(case, "checkpoint", told_s, back_s)


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=long)])
def test_a_rank_may_write_no_more(n: int, ranks: Ranks) -> None:
    """A limit of one rank's file size is told with rank and numbers; no rank's file is left."""
    total = _begun(ranks)
    limit = "%%rank[1]\nresource.setrlimit(resource.RLIMIT_FSIZE, ({}, -1))"
    ranks.ok(limit.format(100_000))
    cell = ranks.kernel.run("%dist_save one")
    ranks.ok(limit.format(-1))

    cell.check_failure("CheckpointError", "rank 1", r"ulimit -f", r"had written [\d,]+ bytes")
    assert [path.name for path in ranks.folder.glob(".one*")] == []
    _goes_on(ranks, total, "a rank may not write while it saves", cell.seconds, None)


def _small_disk(folder: Path) -> str:
    """One checkpoint of the model has room there, and two have not."""
    disk = folder.parent / "disk"
    disk.mkdir()
    return _own_mount(disk, "5m")


@long
@pytest.mark.parametrize("n", [2, 4])
def test_the_disk_is_full(n: int, own_ranks: Callable[..., Ranks]) -> None:
    """A second checkpoint does not fit beside the first, which stays; then there is room again."""
    ranks = own_ranks(n, _small_disk)
    total = _begun(ranks, "disk/one")
    cell = ranks.kernel.run("%dist_save disk/one")
    names = ranks.ok("import os, shutil\nprint(os.listdir('disk'))")
    ranks.ok("%dist_load disk/one")
    assert _total(ranks) == total
    ranks.ok("shutil.rmtree('disk/one')")
    ranks.ok("%dist_save disk/one")
    ranks.ok(_FREE)

    cell.check_failure("CheckpointError", "the disk is full", r"[\d,]+ of [\d,]+ bytes are free")
    assert names.text.strip() == "['one']"
    ranks.conclude("disk full while it is saved to", "checkpoint", None, cell.seconds)


@pytest.mark.parametrize(
    ("n", "dead"),
    [(2, 1), *(pytest.param(n, dead, marks=long) for n, dead in ((2, 0), (4, 0), (4, 3)))],
)
def test_a_rank_is_killed_while_it_saves(n: int, dead: int, ranks: Ranks) -> None:
    """Told with the rank at once; after its restart the checkpoint before it goes on."""
    total = _begun(ranks)
    ranks.ok(_SLOW.format("slow"))
    handle = _writing(ranks)
    killed_s = time.monotonic()
    ranks.engines[dead].send_signal(signal.SIGKILL)
    cell = ranks.finish(handle)
    back_s = time.monotonic() - killed_s

    cell.check_failure(
        "CheckpointError", rf"rank {dead}.* ended", "What was at that path is unchanged"
    )
    assert back_s < DEATH_TOLD_S + 2 + ranks.load_s
    _is_whole(ranks.folder / "one")
    ranks.ok(
        _END.replace("distributed", f"rank[{','.join(str(r) for r in range(n) if r != dead)}]")
    )
    ranks.revive([dead])
    ranks.ok(_MODEL)
    _goes_on(ranks, total, f"rank {dead} killed while it saves", back_s, back_s)


@long
@pytest.mark.parametrize(("n", "dead"), [(2, 0), (2, 1)])
def test_a_rank_is_killed_before_it_writes(n: int, dead: int, ranks: Ranks) -> None:
    """While all ranks agree on what is saved: the others do not wait for it."""
    total = _begun(ranks)
    ranks.ok(
        f"%%rank[{dead}]\nfrom nbdist.checkpoint.rank import save as saving\n"
        "saving._take = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)"
    )
    cell = ranks.kernel.run("%dist_save one")

    cell.check_failure("RankGone", "one was not saved", rf"rank {dead} has ended")
    ranks.revive([dead])
    ranks.ok(_MODEL)
    _goes_on(ranks, total, f"rank {dead} killed before it saves", cell.seconds, cell.seconds)


@pytest.mark.parametrize(
    ("n", "how"), [(2, "slow"), *(pytest.param(n, "stuck", marks=long) for n in (2, 4))]
)
def test_a_save_is_interrupted(n: int, how: str, ranks: Ranks) -> None:
    """The notebook is back within 5 s, also where the disk does not answer at all."""
    total = _begun(ranks)
    ranks.ok(_SLOW.format(how))
    handle = _writing(ranks)
    pressed_s = time.monotonic()
    ranks.kernel.interrupt()
    cell = ranks.finish(handle)
    back_s = time.monotonic() - pressed_s
    (ranks.folder / "end").touch()
    ranks.ok(_END)

    cell.check_failure("KeyboardInterrupt", "was not saved")
    assert back_s < BACK_S + ranks.load_s
    _goes_on(ranks, total, f"interrupt while it saves, disk {how}", back_s, None)


@long
@pytest.mark.parametrize(("n", "more"), [(2, ""), (2, " --async"), (4, "")])
def test_the_kernel_is_killed_while_it_saves(
    n: int, more: str, own_ranks: Callable[..., Ranks]
) -> None:
    """The ranks end with it; the checkpoint before it is whole, what was begun goes."""
    ranks = own_ranks(n)
    _begun(ranks)
    ranks.ok(_SLOW.format("slow"))
    if more:
        ranks.ok("%dist_save one --async")
        assert until(lambda: all(path.exists() for path in _marks(ranks)), 20)
    else:
        _writing(ranks)
    path, everything = ranks.folder / "one", ranks.everything()
    began_s = time.monotonic()
    ranks.kernel.kill()
    for process in everything:
        process.wait(GONE_S + ranks.load_s)
    gone_s = time.monotonic() - began_s

    record(Measured(f"kernel killed while it saves{more}", "checkpoint", n, None, gone_s))
    assert (ranks.folder / ".one.nbdist-new").is_dir()
    _is_whole(path)
    checkpoint_folder.prepare(path)
    checkpoint_folder.abandon(path)
    assert [path.name for path in ranks.folder.glob(".one*")] == []
    _is_whole(path)


def _marks(ranks: Ranks) -> list[Path]:
    """What each rank makes when it begins to write."""
    return [ranks.folder / f"writing{rank}" for rank in range(ranks.n)]
