"""Kept ranks outlive their kernel, and another one goes on with them and with the cell they run."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.front.conftest import START_TIMEOUT_S
from tests.front.test_strategy import _MODEL, _STEPS
from tests.support import processes
from tests.support.cells import Cell, Handle
from tests.support.kernel import Kernel

LINES = 20_000
# Less than the heartbeats by which the controller alone would know of a lost rank, 30 s.
RESTART_S = 25.0
# Both ranks say the same in most lines, and each something of its own in some.
PRINTS = f"""%%distributed
import pathlib, time
for n in range({LINES}):
    print('line', n, rank if n % 100 == 0 else '')
    while n == {LINES // 2} and not pathlib.Path('go').exists():
        time.sleep(0.01)
"""
# A rank waits at a line that the test decides on: a file that appears.
WAITS = """%%distributed
import pathlib, time
print('begun', flush=True)
while not pathlib.Path('go').exists():
    time.sleep(0.01)
"""


class Desk:
    """A notebook whose ranks are kept; its kernel is killed again and again."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "tmp").mkdir()
        self.kernel = self._new()

    def _new(self) -> Kernel:
        # Most only attach, and need nobody who forks ranks.
        env = {"TMPDIR": str(self.folder / "tmp"), "NBDIST_PRELOAD": "0"}
        kernel = Kernel(cwd=self.folder, env=env)
        kernel.__enter__()
        assert kernel.run("%load_ext nbdist").status == "ok"
        return kernel

    def ok(self, code: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """What a cell shows that must not fail."""
        cell = self.kernel.run(code, timeout_s)
        assert cell.status == "ok", cell.visible
        return cell.visible

    def change(self) -> Cell:
        """Kill the kernel at this moment; the cell in a new one that attaches."""
        handle = self.attach()
        return self.kernel.finish(handle, START_TIMEOUT_S)

    def attach(self) -> Handle:
        """The same, while that cell runs."""
        old = self.kernel
        old.kill()
        old.shutdown(now=True)
        self.kernel = self._new()
        return self.kernel.start("%dist_attach")

    @property
    def go(self) -> Path:
        return self.folder / "go"


@pytest.fixture(scope="module")
def _desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    desk = Desk(tmp_path_factory.mktemp("desk"))
    try:
        desk.ok("%dist_init -n 2 --keep 10m --grace 0.5")
        yield desk
        desk.ok("%dist_shutdown")
    finally:
        desk.kernel.shutdown(now=True)
    assert not [*(desk.folder / "tmp").glob("nbdist-*")]


@pytest.fixture
def desk(_desk: Desk) -> Iterator[Desk]:
    """A notebook with two idle ranks that are kept."""
    _desk.go.unlink(missing_ok=True)
    return _desk


def lines_of(text: str, rank: int) -> list[str]:
    """A rank's lines in merged output, in order."""
    labels = {f"[{rank}]", "[0-1]"}
    pairs = (line.partition(" ") for line in text.splitlines())
    return [rest.strip() for label, _, rest in pairs if label in labels]


def test_a_cell_that_prints_loses_no_line_with_its_kernel(desk: Desk) -> None:
    """Killed in the middle: every line of each rank is there once, in order, in the file of all."""
    handle = desk.kernel.start(PRINTS)
    desk.kernel.wait_output(handle, "line 20 ")
    handle = desk.attach()
    desk.kernel.wait_output(handle, " running cell [")
    desk.go.touch()
    attached = desk.kernel.finish(handle)
    path = re.search(r"(/\S+/output/cell-\S+\.txt)", attached.visible)

    assert attached.status == "ok", attached.visible
    assert "2 ranks on 1 host, attached in" in attached.visible
    assert attached.visible.count(" running cell [") == 2  # nobody asks ranks that cannot answer
    assert path is not None, attached.visible
    text = Path(path[1]).read_text()
    for rank in (0, 1):
        expected = [f"line {n} {rank if n % 100 == 0 else ''}".strip() for n in range(LINES)]
        assert lines_of(text, rank) == expected


def test_training_goes_on_under_its_strategy(desk: Desk) -> None:
    """Variables, model, optimizer and strategy are as they were; a switch works."""
    desk.ok(_MODEL)
    desk.ok("%dist_strategy fsdp")
    first = desk.ok(_STEPS)
    desk.ok("%dist_save one")
    second = desk.ok(_STEPS)
    attached = desk.change()
    strategy = desk.ok("%dist_strategy")
    desk.ok("%dist_load one")

    assert attached.status == "ok", attached.visible
    assert "line" not in attached.visible  # of a cell whose end was shown
    assert "fsdp" in strategy
    assert first != second == desk.ok(_STEPS)
    desk.ok("%dist_strategy ddp")
    desk.ok("%dist_load one")
    assert desk.ok(_STEPS) == second


def test_a_cell_that_ends_meanwhile_is_shown_with_how_it_ended(desk: Desk) -> None:
    """Its output and its error come with the attach; the next one shows neither again."""
    code = WAITS + "print('past', rank, flush=True)\nif rank:\n    raise ValueError('of rank 1')"
    handle = desk.kernel.start(code)
    desk.kernel.wait_output(handle, "begun")
    desk.kernel.kill()
    desk.go.touch()
    attached = desk.change()

    assert attached.status == "error", attached.visible
    assert "[0-1] begun" in attached.visible
    assert "[0] past 0" in attached.visible
    assert attached.error is not None
    assert "ValueError: of rank 1" in attached.error.evalue, attached.error
    again = desk.change()
    assert again.status == "ok", again.visible
    assert "past" not in again.visible


def test_damaged_files_are_told_and_the_ranks_are_kept(desk: Desk) -> None:
    """The other rank's output is shown; of the damaged one it says what is lost."""
    handle = desk.kernel.start(WAITS + "mine = rank + 1\nprint('past', rank, flush=True)")
    desk.kernel.wait_output(handle, "begun")
    desk.kernel.kill()
    [written] = (desk.folder / "tmp").rglob("journal/1")
    for path in (written, written.parents[1] / "keep.json"):
        with path.open("r+b") as file:
            file.write(b"\xf8" * 400)
    desk.go.touch()
    attached = desk.change()

    assert "[0] past 0" in attached.visible
    assert "the file with the output of rank 1 is damaged" in attached.visible
    assert attached.error is not None
    assert "Unicode" not in attached.visible
    assert "[1] 2" in desk.ok("%%distributed\nprint(mine)")


def test_a_hang_is_told_after_an_attach_and_ends(desk: Desk) -> None:
    """A rank that waits in vain is named in the notebook that attaches; its groups come back."""
    handle = desk.kernel.start("%%distributed\nprint('in')\nif rank: dist.barrier()")
    desk.kernel.wait_output(handle, "[0-1] in")
    attached = desk.change()

    assert attached.status == "error", attached.visible
    assert "[0-1] in" in attached.visible
    assert "rank 1" in attached.visible
    assert attached.error is not None
    assert attached.error.ename == "Deadlock"
    assert "[0-1] 2\n" in desk.ok(
        "%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(int(t))"
    )


def test_an_attached_cell_is_interrupted(desk: Desk) -> None:
    """The stop button reaches ranks that another kernel has started."""
    desk.kernel.wait_output(desk.kernel.start(WAITS), "begun")
    handle = desk.attach()
    desk.kernel.wait_output(handle, "begun")
    desk.kernel.interrupt()
    cell = desk.kernel.finish(handle)

    assert cell.status == "error"
    assert "[0-1] idle\n" in desk.ok("%%distributed\nprint('idle')")


def test_a_rank_that_died_meanwhile_comes_back(desk: Desk) -> None:
    """A rank that was killed while no kernel held it is told; a restart brings it, journal too."""
    pids = desk.ok("%%distributed\nimport os\nprint(os.getpid())")
    match = re.search(r"\[1\] (\d+)", pids)
    assert match is not None
    desk.ok("%%distributed\nvalue = 40 + rank")
    desk.kernel.kill()
    victim = psutil.Process(int(match[1]))
    victim.send_signal(signal.SIGKILL)
    assert processes.wait_gone([victim], 5) == []
    attached = desk.change()
    restarted = desk.ok("%dist_restart", RESTART_S)
    desk.kernel.wait_output(desk.kernel.start(WAITS + "print('value' in globals())"), "begun")
    desk.kernel.kill()
    desk.go.touch()
    again = desk.change()

    assert attached.status == "ok", attached.visible
    assert re.search(r"1 .* ended", attached.visible), attached.visible
    assert "rank 1 is back" in restarted
    assert "[0-1] begun\n[0] True\n[1] False\n" in again.visible


def test_a_restart_of_the_kernel_does_not_interrupt_the_cell(desk: Desk) -> None:
    """Jupyter interrupts a busy kernel before it ends it: the ranks go on all the same."""
    handle = desk.kernel.start(WAITS + "print('to the end')")
    desk.kernel.wait_output(handle, "begun")
    desk.kernel.restart()
    desk.ok("%load_ext nbdist")
    desk.go.touch()

    assert "[0-1] begun\n[0-1] to the end\n" in desk.ok("%dist_attach")


def test_ranks_are_let_go_of_and_held_again(desk: Desk) -> None:
    """Within one kernel, which then has none; a kernel that ends in order keeps them too."""
    detached = desk.ok("%dist_detach 5m")
    none = desk.kernel.run("%%distributed\npass")
    missing = desk.kernel.run("%dist_detach")
    attached = desk.ok("%dist_attach")
    desk.kernel.restart()
    desk.ok("%load_ext nbdist")
    again = desk.ok("%dist_attach")

    assert detached.startswith("ranks 0-1 are kept for 5 min. %dist_attach in any notebook")
    assert none.error is not None
    assert none.error.ename == "NotRunning"
    assert "has let go of its ranks, and %dist_attach holds them again" in none.error.evalue
    assert missing.error is not None
    assert missing.error.ename == "NotRunning"
    assert "attached in" in attached
    assert "attached in" in again
    assert "[0] 0\n[1] 1\n" in desk.ok("%%distributed\nprint(rank)")


# Takes no interrupt until a file is there.
STUCK = """%%rank [0]
import pathlib, time
print('stuck', flush=True)
while not pathlib.Path('free').exists():
    try:
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
"""


def test_ranks_that_run_different_cells_count_as_busy_with_theirs(desk: Desk) -> None:
    """A rank that an earlier cell was given up on is no idle rank after an attach."""
    free = desk.folder / "free"
    handle = desk.kernel.start(STUCK)
    desk.kernel.wait_output(handle, "stuck")
    desk.kernel.interrupt()
    given_back = desk.kernel.finish(handle)
    waits = desk.kernel.start(WAITS.replace("%%distributed", "%%rank [1]"))
    desk.kernel.wait_output(waits, "begun")
    desk.kernel.kill()
    desk.go.touch()
    attached = desk.change()
    busy = desk.kernel.run("%%rank [0]\npass")
    free.touch()
    # Busy for a moment, until the end has been heard of.
    desk.ok("%%rank [0]\nprint('idle')")

    assert given_back.status == "error"
    assert attached.status == "ok", attached.visible
    assert "[1] begun" in attached.visible
    assert "stuck" not in attached.visible
    assert busy.error is not None
    assert busy.error.ename == "RankBusy"


def test_a_save_beside_training_ends_before_the_ranks_are_let_go_of(desk: Desk) -> None:
    """The checkpoint is whole, and both notebooks know of it."""
    desk.ok(_MODEL)
    desk.ok("%dist_save beside --async")
    detached = desk.ok("%dist_detach")
    desk.ok("%dist_attach")
    loaded = desk.ok("%dist_load beside")

    assert "ranks 0-1 are kept for 10 min." in detached
    assert "beside loaded" in loaded


def test_what_is_wrong_is_refused(desk: Desk) -> None:
    """Times, runs and options that cannot be are named, with what can be."""
    wrong = {
        "%dist_detach soon": "'soon' is no time such as 8h, 30m, 1h30m or 90s",
        "%dist_detach 0h": "'0h' is no time",
        "%dist_detach 1h 2h": "give one time, not 1 h 2 h",
        "%dist_attach": "already running in this notebook. %dist_detach lets go of them",
        "%dist_init --save here": "--save says where",
    }
    desk.ok("%dist_detach")
    after = {
        "%dist_attach nowhere": "There is no run 'nowhere'. Name one of: run-",
        "%dist_attach a b": "name one run, not a b",
        "%dist_attach /etc": "is not the folder of ranks that are kept",
        "%dist_attach ./none": "There is no run in",
    }
    cells = {code: desk.kernel.run(code) for code in after}
    desk.ok("%dist_attach")
    cells |= {code: desk.kernel.run(code) for code in wrong if "init" not in code}

    for code, cell in cells.items():
        assert cell.status == "error", code
        assert (wrong | after)[code] in cell.visible, cell.visible
