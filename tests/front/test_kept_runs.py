"""What is kept is seen, looked on from a terminal, saved and ended; and who may hold it."""

import fcntl
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.core.versions import VERSION
from tests.front.conftest import START_TIMEOUT_S, Shared, freed
from tests.support import processes
from tests.support.kernel import Kernel
from tests.support.ranks import until
from tests.support.terminal import TIMEOUT_S, begun, environment, nbdist

MODEL = "%%distributed\nmodel = accelerator.prepare(torch.nn.Linear(2, 2))"
# More than the 500 that are shown.
N_LINES = 700
# Prints, and then waits at a line that the test decides on: a file that appears.
WAITS = """%%distributed
import pathlib, time
# what comes first is no line of it
for step in range({lines}):
    print('step', step, rank if step % 100 == 0 else '')
while not pathlib.Path('go').exists():
    time.sleep(0.01)
print('past')
"""


@pytest.fixture(scope="module")
def folder(shared_folder: Path) -> Path:
    """Where both kernels work, with the folder of their runs in it."""
    return shared_folder


@pytest.fixture
def go(folder: Path) -> Iterator[Path]:
    """The file that the cells of WAITS wait for."""
    path = folder / "go"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def first(_shared_kernel: Shared) -> Iterator[Kernel]:
    """The shared kernel, which has no ranks at first."""
    with freed(_shared_kernel) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def second(folder: Path) -> Iterator[Kernel]:
    """It only attaches, so it needs nobody who forks ranks."""
    with Kernel(cwd=folder, env=environment(folder)) as kernel:
        ok(kernel, "%load_ext nbdist")
        yield kernel


def ok(kernel: Kernel, code: str) -> str:
    """What a cell shows that must not fail."""
    cell = kernel.run(code, START_TIMEOUT_S)
    assert cell.status == "ok", cell.visible
    return cell.visible


def failure(kernel: Kernel, code: str) -> str:
    """The error of a cell that must fail."""
    cell = kernel.run(code, START_TIMEOUT_S)
    assert cell.status == "error", cell.visible
    return f"{cell.failure.ename}: {cell.failure.evalue}"


def start(kernel: Kernel, options: str = "-n 2 --keep 10m") -> None:
    """Ranks, unless the test before has left some."""
    running = kernel.run("%dist_attach")
    if running.status == "error":
        kernel.run(f"%dist_init {options}", START_TIMEOUT_S)
    ok(kernel, "%dist_status")


def only_run(folder: Path) -> Path:
    [run] = processes.open_run_dirs(folder / "tmp", "nbdist-*/run-*")
    return run


def kill(*pids: int) -> None:
    """SIGKILL processes, and wait until they have ended."""
    for pid in pids:
        psutil.Process(pid).kill()

    assert processes.wait_gone(pids) == []


def rank_pids(kernel: Kernel) -> list[int]:
    text = ok(kernel, "%%distributed\nimport os; os.getpid()")
    return [int(pid) for pid in re.findall(r"\] (\d+)", text)]


def lines_of(steps: int) -> list[str]:
    """What a cell of WAITS prints, merged over two ranks, before it waits."""
    return [
        line
        for n in range(steps)
        for line in (
            [f"[{rank}] step {n} {rank}" for rank in (0, 1)]
            if n % 100 == 0
            else [f"[0-1] step {n} "]
        )
    ]


def test_the_newest_cell_is_listed_and_its_text_shown(
    first: Kernel, folder: Path, go: Path
) -> None:
    """While the notebook holds the run and the cell runs; nothing of either is disturbed."""
    start(first)
    name = only_run(folder).name
    running = first.start(WAITS.format(lines=N_LINES))
    first.wait_output(running, "more than 500 lines")
    listed = nbdist("status", folder=folder)
    # The notebook shows 500 lines of them, and the ranks may still print the others.
    last = lines_of(N_LINES)[-1]
    assert until(lambda: last in nbdist("logs", folder=folder).stdout.splitlines(), TIMEOUT_S)
    logs = nbdist("logs", folder=folder)
    go.touch()
    ended = first.finish(running)

    cell = r"10 min from the notebook's end +\[\d+\] import pathlib, time, running for \d+ s$"
    assert f"{name}  held by kernel {first.pid}" in listed.stdout
    assert re.search(cell, listed.stdout, re.MULTILINE), listed.stdout
    assert logs.returncode == 0, logs.stderr
    assert logs.stdout.splitlines() == lines_of(N_LINES)
    assert re.fullmatch(rf"{name}, cell \[\d+\] on ranks 0-1: import pathlib, time\n", logs.stderr)
    assert ended.status == "ok", ended.visible


def test_a_terminal_follows_cells_until_it_leaves(first: Kernel, folder: Path, go: Path) -> None:
    """attach: the end of what was said, then all of it live; logs: all. The ranks go on."""
    start(first)
    name = only_run(folder).name
    running = first.start(WAITS.format(lines=N_LINES))
    first.wait_output(running, "more than 500 lines")
    with begun("attach", folder=folder) as attached, begun("logs", "-f", folder=folder) as follows:
        assert attached.stdout is not None
        assert follows.stdout is not None
        begin = [process.stdout.readline() for process in (attached, follows) if process.stdout]
        go.touch()
        first.finish(running)
        first.run("%%distributed\nprint('next')\nif rank: raise ValueError('of rank 1')")
        rest, whole = (
            [line.rstrip("\n") for line in iter(process.stdout.readline, "[0-1] next\n")]
            for process in (attached, follows)
            if process.stdout
        )
        problems = [
            [*iter(process.stderr.readline, "rank 1 raised ValueError: of rank 1\n")]
            for process in (attached, follows)
            if process.stderr
        ]
        for process in (attached, follows):
            process.send_signal(signal.SIGINT)
        said = [process.communicate(timeout=TIMEOUT_S) for process in (attached, follows)]

    assert [line.rstrip("\n") for line in begin] == [lines_of(N_LINES)[-500], "[0] step 0 0"]
    assert rest == [*lines_of(N_LINES)[-499:], "[0-1] past"]
    assert whole == [*lines_of(N_LINES)[1:], "[0-1] past"]
    assert [process.returncode for process in (attached, follows)] == [0, 0]
    assert "... 207 lines before these; `nbdist logs` shows all\n" in problems[0]
    assert said == [(f"\n{name} goes on\n", "")] * 2
    assert "[0] 0\n[1] 1" in ok(first, "%%distributed\nrank")


def test_a_second_notebook_is_told_who_holds_it_and_may_take_it(
    first: Kernel, second: Kernel, folder: Path, go: Path
) -> None:
    """The first one's cell ends at once with that sentence, its next cell too; the cell goes on."""
    start(first)
    name = only_run(folder).name
    ok(first, "%%distributed\nvalue = rank + 40")
    held = failure(second, "%dist_attach")
    running = first.start(WAITS.format(lines=2))
    first.wait_output(running, "[1] step 0 1")
    taking = second.start(f"%dist_attach {name} --take")
    outcome = first.finish(running)
    second.wait_output(taking, "[0-1] step 1")
    go.touch()
    taken = second.finish(taking)
    after = failure(first, "%%distributed\nvalue")
    has_own = first.run("1 + 1").plain

    assert held.startswith(
        f"AlreadyRunning: {name} is held by the kernel {first.pid} ({folder}) since "
    )
    assert f"take it with %dist_attach {name} --take" in held
    who = f"The kernel {second.pid} ({folder}) has taken these ranks"
    assert outcome.failure.evalue.startswith(f"{who} while this cell ran. The ranks go on")
    assert after.startswith(f"NotRunning: {who}.")
    assert has_own == ["2"]
    assert taken.status == "ok", taken.visible
    assert "[0-1] past" in taken.visible
    assert ok(second, "%%distributed\nvalue") == "[0] 40\n[1] 41\n"
    ok(second, "%dist_detach 10m")


def test_of_two_that_attach_at_the_same_moment_one_has_it(
    first: Kernel, second: Kernel, folder: Path
) -> None:
    """The other one is told."""
    ok(first, "%dist_attach")
    ok(first, "%dist_detach 10m")
    both = [(kernel, kernel.start("%dist_attach")) for kernel in (first, second)]
    cells = [kernel.finish(handle) for kernel, handle in both]
    [holder] = [
        kernel for (kernel, _), cell in zip(both, cells, strict=True) if cell.status == "ok"
    ]
    [refused] = [cell for cell in cells if cell.status == "error"]

    assert refused.failure.ename == "AlreadyRunning"
    assert "[0] 0\n[1] 1" in ok(holder, "%%distributed\nrank")
    ok(holder, "%dist_detach 10m")


def test_what_is_kept_is_told_and_listed(first: Kernel, folder: Path) -> None:
    """At each %load_ext, by status and the doctor, and in the error of an unclear attach."""
    ok(first, "%dist_attach")
    status = ok(first, "%dist_status")
    first.run("%%distributed\n# a comment\nprint('the newest')\n1 / (1 - rank)")
    ok(first, f"%dist_detach 2h --save {folder}/at_the_end")
    name = only_run(folder).name
    text = ok(first, "%reload_ext nbdist")
    in_a_test = "import os; os.environ['NBDIST_TEST'] = '1'\n%reload_ext nbdist"
    assert ok(first, f"{in_a_test}\ndel os.environ['NBDIST_TEST']") == ""
    ok(first, "%dist_init -n 1 --keep 1h")
    listed = nbdist("status", folder=folder)
    doctor = nbdist("doctor", folder=folder)
    both = ok(first, "%dist_detach\n%reload_ext nbdist")
    unclear = failure(first, "%dist_attach")
    stopped = nbdist("stop", name, folder=folder)

    row = (
        rf"{name} +kept +2 +none +(\d+ s|1 min) +(2 h|1 h 59 min), then saved to "
        rf"{folder}/at_the_end +\[\d+\] print\('the newest'\), ended \d+ s ago, failed on rank 1"
    )
    assert "kept for 10 min after this notebook ends" in status
    left = "(2 h|1 h 59 min)"
    line = rf"{name}: ranks 0-1 are kept for {left} more\. %dist_attach brings them back here\.\n?"
    assert re.fullmatch(line, text), text
    assert re.search(row, listed.stdout), listed.stdout
    assert f"held by kernel {first.pid}" in listed.stdout
    row_of_doctor = (
        rf"ok +run {name} +kept, time left .*, then saved to .*failed on rank 1, \d+ pro"
    )
    assert re.search(row_of_doctor, doctor.stdout), doctor.stdout
    assert unclear.startswith("OptionError: 2 runs are kept. Name one of: run-")
    assert re.search(row, unclear), unclear
    assert len(re.findall(r"^run-\w+: .* kept for .* more", both, re.MULTILINE)) == 2
    assert f"%dist_attach {name} brings them back here." in both
    assert (stopped.returncode, stopped.stdout) == (0, f"{name}: ranks 0-1 stopped\n")
    assert nbdist("stop", folder=folder).returncode == 0


def test_a_run_that_is_not_kept_has_nothing_to_look_on(first: Kernel, folder: Path) -> None:
    """Each verb says what is kept, and how; nothing of the run is touched."""
    none = [nbdist(word, folder=folder) for word in ("attach", "logs")]
    ok(first, "%dist_init -n 1")
    name = only_run(folder).name
    named = [nbdist(word, name, folder=folder) for word in ("attach", "logs")]
    saved = nbdist("stop", name, "--save", "here", folder=folder)
    other = failure(first, f"%dist_attach {name}")
    left = ok(first, "%%distributed\nrank")
    ok(first, "%dist_shutdown")

    for done in none:
        assert done.returncode == 1
        assert done.stderr.startswith("No ranks of yours are kept on this machine. ")
    for done in named:
        assert done.returncode == 2
        assert done.stderr.startswith(f"{name} is not kept: its ranks end with their notebook")
    assert saved.returncode == 1
    assert f"{name} is not kept, so only its notebook can save it, with %dist_save." in saved.stderr
    assert "already running in this notebook" in other
    assert left == "[0] 0\n"


def test_ranks_that_run_a_cell_are_saved_and_ended(
    first: Kernel, second: Kernel, folder: Path
) -> None:
    """Their cell is interrupted and named; a save that fails leaves the ranks as they were."""
    start(first)
    name = only_run(folder).name
    ok(first, MODEL)
    held = nbdist("stop", "--save", "held", folder=folder)
    ok(first, "%dist_detach 10m")
    ok(second, "%dist_attach")
    running = second.start(WAITS.format(lines=2))
    second.wait_output(running, "[0-1] step 1")
    second.kill()
    assert until((only_run(folder) / "detached.json").exists)
    before = json.loads((only_run(folder) / "detached.json").read_text())
    wrong = nbdist("stop", name, "--save", "tmp", folder=folder)
    after = json.loads((only_run(folder) / "detached.json").read_text())
    done = nbdist("stop", name, "--save", "at_once", folder=folder)
    second.restart()
    ok(second, "%load_ext nbdist")

    assert held.returncode == 1
    assert "is held by the kernel" in held.stderr
    assert wrong.returncode == 1
    assert re.match(
        r"Cell \[\d+\] was still running and was interrupted: .*\n"
        r"(.*\n)*\[0(-1)?\] at line [67] of cell",
        wrong.stderr,
    ), wrong.stderr
    assert "tmp" in wrong.stderr.splitlines()[-1]
    assert abs(before["until_s"] - after["until_s"]) < 5
    assert (done.returncode, done.stderr) == (0, "")
    assert "at_once saved at step 0" in done.stdout
    assert done.stdout.endswith(f"{name}: ranks 0-1 stopped\n")
    assert (folder / "at_once" / "nbdist.json").is_file()
    assert processes.open_run_dirs(folder / "tmp", "nbdist-*/run-*") == []


def test_at_the_end_of_their_time_ranks_are_saved_and_end(first: Kernel, folder: Path) -> None:
    """The file beside the checkpoint says how that went."""
    ok(first, "%dist_init -n 2")
    ok(first, MODEL)
    pids = rank_pids(first)
    detached = ok(first, f"%dist_detach 1s --save {folder}/ended")
    log = folder / "ended.log"
    has_ended = until(lambda: log.exists() and "stopped" in log.read_text(), TIMEOUT_S)
    none = failure(first, "%dist_attach")

    assert f"kept for 1 s, then saved to {folder}/ended (.log beside it says how)" in detached
    assert has_ended
    assert processes.wait_gone(pids) == []
    assert none.startswith("NotRunning: No ranks of yours are kept on this machine.")
    assert (folder / "ended" / "nbdist.json").is_file()
    assert "ended saved at step 0" in log.read_text()
    assert re.search(r"^run-\w+: ranks 0-1 stopped$", log.read_text(), re.MULTILINE)
    assert processes.open_run_dirs(folder / "tmp", "nbdist-*/run-*") == []


@pytest.mark.faults
def test_at_the_end_of_their_time_ranks_end_where_nothing_can_be_saved(
    first: Kernel, folder: Path
) -> None:
    """The file beside where the checkpoint would be says why there is none."""
    ok(first, "%dist_init -n 1")
    ok(first, "%dist_detach 1s --save new/failed")

    log = folder / "new" / "failed.log"
    assert until(lambda: log.exists() and "stopped" in log.read_text(), TIMEOUT_S)
    assert not (folder / "new" / "failed").exists()
    assert "No model is prepared" in log.read_text()
    assert processes.open_run_dirs(folder / "tmp", "nbdist-*/run-*") == []


def test_what_cannot_be_attached_to_is_refused(first: Kernel, folder: Path) -> None:
    """A run of another version, one of another user, and one that is being attached to."""
    start(first)
    run = only_run(folder)
    ok(first, "%dist_detach 10m")
    keep = json.loads((run / "keep.json").read_text())
    (run / "keep.json").write_text(json.dumps({**keep, "version": "0.0.1", "more": 1}))
    other_version = failure(first, "%dist_attach")
    (run / "keep.json").write_text(json.dumps(keep))
    strangers = folder / "strangers"
    strangers.mkdir()
    is_root = os.getuid() == 0
    if is_root:
        os.chown(strangers, 12345, -1)
    others = failure(first, f"%dist_attach {strangers if is_root else '/etc'}")
    with (run / "attach.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        locked = failure(first, "%dist_attach")

    assert other_version.startswith(
        f"StartError: {run.name} was started by nbdist 0.0.1, and this is {VERSION}. Attach in a "
        f"kernel of {sys.executable}, or end its ranks there: {sys.executable} -m nbdist stop"
    )
    assert f"belongs to another user (number {12345 if is_root else 0})" in others
    assert locked == f"AlreadyRunning: Another kernel is attaching to {run.name} just now."


def test_ranks_that_lost_guardian_and_controller_are_held_again(
    first: Kernel, folder: Path
) -> None:
    """Both killed while no notebook holds the ranks; once the ranks are killed too, nothing is."""
    start(first)
    run = only_run(folder)
    ok(first, "%%distributed\nvalue = rank + 40")
    pids = rank_pids(first)
    controller = int(
        ok(first, "import nbdist; nbdist.session().cluster.processes.controller_pid()")
    )
    ok(first, "%dist_detach 10m")
    assert until(lambda: json.loads((run / "detached.json").read_text())["pid"] > 0)
    victims = [json.loads((run / "detached.json").read_text())["pid"], controller]
    kill(*victims)
    listed = nbdist("status", folder=folder)
    attached = ok(first, "%dist_attach")
    values = ok(first, "%%distributed\nvalue")
    ok(first, "%dist_detach 10m")
    kill(*pids)
    all_gone = failure(first, "%dist_attach")
    stopped = nbdist("stop", folder=folder)

    assert "until `nbdist stop`: its guardian was killed" in listed.stdout
    assert "2 ranks on 1 host, attached in" in attached
    assert values == "[0] 40\n[1] 41\n"
    assert all_gone.startswith(f"StartError: All ranks of {run.name} have ended")
    assert stopped.returncode == 0, stopped.stderr
    assert not run.exists()


def test_ranks_whose_folder_is_removed_end(first: Kernel, folder: Path) -> None:
    """Nobody could attach to them any more: their guardian ends them within a second."""
    ok(first, "%dist_init -n 1 --keep 10m")
    [pid] = rank_pids(first)
    run = only_run(folder)
    ok(first, "%dist_detach")
    assert until(lambda: json.loads((run / "detached.json").read_text())["pid"] > 0)
    shutil.rmtree(run)

    assert processes.wait_gone([pid], 10) == []
    gone = failure(first, f"%dist_attach {run}")
    assert gone == f"OptionError: There is no run in {run} (No such file or directory)."
