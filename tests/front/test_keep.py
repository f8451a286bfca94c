"""Kept ranks outlive their kernel, and another one goes on with them and with the cell they run."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.front.conftest import START_TIMEOUT_S, Shared, freed
from tests.front.test_strategy import _MODEL, _STEPS
from tests.support import processes
from tests.support.cells import Handle
from tests.support.kernel import Kernel
from tests.support.terminal import environment

LINES = 4000
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
    """Two notebooks with the same ranks, which are kept.

    Attributes:
        first: Has them when a test begins; its kernel may be killed.
        second: Goes on with them. It has started them, and can start others.
    """

    def __init__(self, folder: Path, second: Kernel):
        self.folder, self.go = folder, folder / "go"
        self.second = second
        self._first: Kernel | None = None

    @property
    def first(self) -> Kernel:
        assert self._first is not None
        return self._first

    def hand_to_first(self) -> None:
        """Let the first notebook have idle ranks, in a new kernel if the one before is gone."""
        if self._first is None:
            self._first = Kernel(cwd=self.folder, env=environment(self.folder)).__enter__()
            ok(self._first, "%load_ext nbdist")
        self.second.run("%dist_detach")
        self._first.run("%dist_attach")
        ok(self._first, "%dist_status")

    def kill_first(self) -> None:
        self.first.kill()
        self.close()

    def close(self) -> None:
        """End the first kernel, if there is one."""
        if self._first is not None:
            self._first.shutdown(now=True)
            self._first = None

    def take(self) -> Handle:
        """The cell in which the second notebook takes the ranks from the first."""
        return self.second.start("%dist_attach --take")


@pytest.fixture(scope="module")
def _desk(_shared_kernel: Shared, shared_folder: Path) -> Iterator[Desk]:
    with freed(_shared_kernel) as second:
        ok(second, "%dist_init -n 2 --keep 10m --grace 0.5")
        desk = Desk(shared_folder, second)
        yield desk
        second.run("%dist_attach --take")
        desk.close()
        ok(second, "%dist_shutdown")


@pytest.fixture
def desk(_desk: Desk) -> Iterator[Desk]:
    """Two notebooks, of which the first has two idle ranks."""
    _desk.hand_to_first()
    yield _desk
    _desk.go.unlink(missing_ok=True)


@pytest.fixture
def kept(_desk: Desk) -> Kernel:
    """A notebook that has two idle ranks, which are kept."""
    _desk.second.run("%dist_attach --take")
    ok(_desk.second, "%dist_status")
    return _desk.second


def ok(kernel: Kernel, code: str, timeout_s: float = START_TIMEOUT_S) -> str:
    """What a cell shows that must not fail."""
    cell = kernel.run(code, timeout_s)
    assert cell.status == "ok", cell.visible
    return cell.visible


def lines_of(text: str, rank: int) -> list[str]:
    """A rank's lines in merged output, in order."""
    labels = {f"[{rank}]", "[0-1]"}
    pairs = (line.partition(" ") for line in text.splitlines())
    return [rest.strip() for label, _, rest in pairs if label in labels]


def test_a_cell_that_prints_loses_no_line_with_its_kernel(desk: Desk) -> None:
    """Killed in the middle: every line of each rank is there once, in order, in the file of all."""
    desk.first.wait_output(desk.first.start(PRINTS), "line 20 ")
    desk.kill_first()
    handle = desk.second.start("%dist_attach")
    desk.second.wait_output(handle, " running cell [")
    desk.go.touch()
    attached = desk.second.finish(handle)
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
    ok(desk.first, _MODEL)
    ok(desk.first, "%dist_strategy fsdp")
    losses = ok(desk.first, _STEPS)
    ok(desk.first, "%dist_save one")
    next_losses = ok(desk.first, _STEPS)
    attached = desk.second.finish(desk.take())
    strategy = ok(desk.second, "%dist_strategy")
    ok(desk.second, "%dist_load one")

    assert attached.status == "ok", attached.visible
    assert next_losses not in attached.visible  # of a cell whose end was shown
    assert "fsdp" in strategy
    assert losses != next_losses == ok(desk.second, _STEPS)
    ok(desk.second, "%dist_strategy ddp")
    ok(desk.second, "%dist_load one")
    assert ok(desk.second, _STEPS) == next_losses


def test_a_cell_that_ends_meanwhile_is_shown_with_how_it_ended(desk: Desk) -> None:
    """Its output and its error come with the attach; the next one shows neither again."""
    code = WAITS + "print('past', rank, flush=True)\nif rank:\n    raise ValueError('of rank 1')"
    desk.first.wait_output(desk.first.start(code), "begun")
    desk.kill_first()
    desk.go.touch()
    attached = desk.second.run("%dist_attach")

    assert attached.status == "error", attached.visible
    assert "[0-1] begun" in attached.visible
    assert "[0] past 0" in attached.visible
    assert attached.error is not None
    assert "ValueError: of rank 1" in attached.error.evalue, attached.error
    ok(desk.second, "%dist_detach")
    assert "past" not in ok(desk.second, "%dist_attach")


def test_damaged_files_are_told_and_the_ranks_are_kept(desk: Desk) -> None:
    """The other rank's output is shown; of the damaged one it says what is lost."""
    code = WAITS + "mine = rank + 1\nprint('past', rank, flush=True)"
    desk.first.wait_output(desk.first.start(code), "begun")
    desk.kill_first()
    [written] = (desk.folder / "tmp").rglob("journal/1")
    for path in (written, written.parents[1] / "keep.json"):
        with path.open("r+b") as file:
            file.write(b"\xf8" * 400)
    desk.go.touch()
    attached = desk.second.run("%dist_attach")

    assert "[0] past 0" in attached.visible
    assert "the file with the output of rank 1 is damaged" in attached.visible
    assert attached.error is not None
    assert "Unicode" not in attached.visible
    assert "[1] 2" in ok(desk.second, "%%distributed\nprint(mine)")


def test_a_hang_is_told_after_an_attach_and_ends(desk: Desk) -> None:
    """A rank that waits in vain is named in the notebook that attaches; its groups come back."""
    ok(desk.first, "import nbdist\nnbdist.session().grace_s = 100.0")
    running = desk.first.start("%%distributed\nprint('in')\nif rank: dist.barrier()")
    desk.first.wait_output(running, "[0-1] in")
    attached = desk.second.finish(desk.take())

    assert attached.status == "error", attached.visible
    assert "[0-1] in" in attached.visible
    assert "rank 1" in attached.visible
    assert attached.error is not None
    assert attached.error.ename == "Deadlock"
    assert "[0-1] 2\n" in ok(
        desk.second, "%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(int(t))"
    )


def test_an_attached_cell_is_interrupted(desk: Desk) -> None:
    """The stop button reaches ranks that another kernel has started."""
    desk.first.wait_output(desk.first.start(WAITS), "begun")
    handle = desk.take()
    desk.second.wait_output(handle, "begun")
    desk.second.interrupt()
    cell = desk.second.finish(handle)

    assert cell.status == "error"
    assert "[0-1] idle\n" in ok(desk.second, "%%distributed\nprint('idle')")


def test_a_rank_that_died_meanwhile_comes_back(desk: Desk) -> None:
    """A rank that was killed while no kernel held it is told; a restart brings it, journal too."""
    pids = ok(desk.first, "%%distributed\nimport os\nprint(os.getpid())")
    match = re.search(r"\[1\] (\d+)", pids)
    assert match is not None
    ok(desk.first, "%%distributed\nvalue = 40 + rank")
    ok(desk.first, "%dist_detach")
    victim = psutil.Process(int(match[1]))
    victim.send_signal(signal.SIGKILL)
    assert processes.wait_gone([victim], 5) == []
    attached = ok(desk.second, "%dist_attach")
    restarted = ok(desk.second, "%dist_restart", RESTART_S)
    desk.hand_to_first()
    running = desk.first.start(WAITS + "print('value' in globals())")
    desk.first.wait_output(running, "begun")
    handle = desk.take()
    desk.second.wait_output(handle, "begun")
    desk.go.touch()
    again = desk.second.finish(handle)

    assert re.search(r"1 .* ended", attached), attached
    assert "rank 1 is back" in restarted
    assert "[0-1] begun\n[0] True\n[1] False\n" in again.visible


def test_ranks_that_another_kernel_has_taken_get_no_more_cells(desk: Desk) -> None:
    """Not even until the guardian has looked who holds them."""
    take = (
        "from nbdist.cluster.kernel import run_dir\nrun_dir.take(nbdist.session().cluster.run_dir)"
    )
    too_late = desk.first.run(f"{take}\nnbdist.session().run('print(1)')")
    ok(desk.first, "%dist_attach --take")

    assert too_late.error is not None, too_late.visible
    assert too_late.error.ename == "NotRunning"
    assert "has taken these ranks" in too_late.error.evalue


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
    handle = desk.first.start(STUCK)
    desk.first.wait_output(handle, "stuck")
    desk.first.interrupt()
    given_back = desk.first.finish(handle)
    waits = desk.first.start(WAITS.replace("%%distributed", "%%rank [1]"))
    desk.first.wait_output(waits, "begun")
    taking = desk.take()
    desk.second.wait_output(taking, "begun")
    desk.go.touch()
    attached = desk.second.finish(taking)
    busy = desk.second.run("%%rank [0]\npass")
    free.touch()
    # Busy for a moment, until the end has been heard of.
    ok(desk.second, "%%rank [0]\nprint('idle')")

    assert given_back.status == "error"
    assert attached.status == "ok", attached.visible
    assert "[1] begun" in attached.visible
    assert "stuck" not in attached.visible
    assert busy.error is not None
    assert busy.error.ename == "RankBusy"


def test_a_restart_of_the_kernel_does_not_interrupt_the_cell(desk: Desk) -> None:
    """Jupyter interrupts a busy kernel before it ends it: the ranks go on all the same."""
    desk.first.wait_output(desk.first.start(WAITS + "print('to the end')"), "begun")
    desk.first.restart()
    desk.go.touch()

    assert "[0-1] begun\n[0-1] to the end\n" in ok(desk.second, "%dist_attach")
    ok(desk.first, "%load_ext nbdist")


def test_ranks_are_let_go_of_and_held_again(desk: Desk) -> None:
    """Within one kernel, which then has none; a kernel that ends in order keeps them too."""
    detached = ok(desk.first, "%dist_detach 5m")
    none = desk.first.run("%%distributed\npass")
    missing = desk.first.run("%dist_detach")
    attached = ok(desk.first, "%dist_attach")
    desk.first.shutdown()
    desk.close()
    again = ok(desk.second, "%dist_attach")

    assert detached.startswith("ranks 0-1 are kept for 5 min. %dist_attach in any notebook")
    assert none.error is not None
    assert none.error.ename == "NotRunning"
    assert "has let go of its ranks, and %dist_attach holds them again" in none.error.evalue
    assert missing.error is not None
    assert missing.error.ename == "NotRunning"
    assert "attached in" in attached
    assert "attached in" in again
    assert "[0] 0\n[1] 1\n" in ok(desk.second, "%%distributed\nprint(rank)")


def test_a_save_beside_training_ends_before_the_ranks_are_let_go_of(kept: Kernel) -> None:
    """The checkpoint is whole, and both notebooks know of it."""
    ok(kept, _MODEL)
    ok(kept, "%dist_save beside --async")
    detached = ok(kept, "%dist_detach")
    ok(kept, "%dist_attach")
    loaded = ok(kept, "%dist_load beside")

    assert "ranks 0-1 are kept for 10 min." in detached
    assert "beside loaded" in loaded


def test_what_is_wrong_is_refused(kept: Kernel) -> None:
    """Times, runs and options that cannot be are named, with what can be."""
    wrong = {
        "%dist_detach soon": "'soon' is no time such as 8h, 30m, 1h30m or 90s",
        "%dist_detach 0h": "'0h' is no time",
        "%dist_detach 1h 2h": "give one time, not 1 h 2 h",
        "%dist_attach": "already running in this notebook. %dist_detach lets go of them",
        "%dist_init --save here": "--save says where",
    }
    ok(kept, "%dist_detach")
    after = {
        "%dist_attach nowhere": "There is no run 'nowhere'. Name one of: run-",
        "%dist_attach a b": "name one run, not a b",
        "%dist_attach /etc": "is not the folder of ranks that are kept",
        "%dist_attach ./none": "There is no run in",
    }
    cells = {code: kept.run(code) for code in after}
    ok(kept, "%dist_attach")
    cells |= {code: kept.run(code) for code in wrong if "init" not in code}

    for code, cell in cells.items():
        assert cell.status == "error", code
        assert (wrong | after)[code] in cell.visible, cell.visible
