"""Ends and stacks of real processes, as the kernel tells them."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from nbdist.cluster.kernel import postmortem
from nbdist.cluster.kernel.postmortem import Postmortem
from nbdist.core import procfs
from nbdist.core.exit_cause import CRASH_FILE, DUMP_SIGNAL
from nbdist.errors import NbdistError
from nbdist.notebook.session import Session
from nbdist.rpc.wire import CELL_NUMBER
from tests.support.ranks import until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
cluster = [linux_only]

DEADLINE_S = 20.0
ARM = (
    "import sys, pathlib; from nbdist.rpc.rank import crash_files as crashes; "
    "crashes.arm(pathlib.Path(sys.argv[1]), 0); "
)


@contextlib.contextmanager
def rank_process(folder: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is prepared as a rank is and has run the code up to a line of input."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{ARM}print('ready', flush=True); input(); {code}", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def end(process: subprocess.Popen[str]) -> int:
    """Let the process run its code; its exit code."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.wait(DEADLINE_S)


@linux_only
def test_a_segmentation_fault_tells_its_line(tmp_path: Path) -> None:
    """The function in which it happened, without a cell."""
    with rank_process(tmp_path, "import ctypes; ctypes.string_at(0)") as process:
        watched = Postmortem(tmp_path, 0, process.pid)
        code = end(process)

    assert watched.cause(code).startswith("signal SIGSEGV in ctypes/__init__.py, line ")
    assert watched.cause(code).endswith("in string_at")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with 64 MB of memory, where this machine lets one be made."""
    name = f"nbdist-test-{uuid.uuid4().hex}"
    for mount, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        folder = Path("/sys/fs/cgroup") / mount / name
        if not (folder.parent / "cgroup.procs").exists():
            continue
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text("64000000")
        except OSError:
            folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here")


@linux_only
def test_a_kill_for_memory_is_told(tmp_path: Path, small_group: Path) -> None:
    """A process that outgrows its control group: the limit, and the count before and after."""
    code = "x = bytearray(400_000_000); x[::4096] = bytes(len(x[::4096]))"
    with rank_process(tmp_path, code) as process:
        (small_group / "cgroup.procs").write_text(str(process.pid))
        watched = Postmortem(tmp_path, 0, process.pid)
        exit_code = end(process)

    assert exit_code == -signal.SIGKILL
    # The system rounds the limit to whole pages.
    assert watched.cause(exit_code) == (
        "signal SIGKILL: the system killed it for memory (cgroup limit 64.0 MB; oom_kill rose "
        "from 0 to 1)"
    )


@linux_only
def test_the_state_of_a_process() -> None:
    """Stopped, going on, and gone."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process.send_signal(signal.SIGSTOP)
        assert until(lambda: procfs.state(process.pid) == "T")
        process.send_signal(signal.SIGCONT)
        assert until(lambda: procfs.state(process.pid) in {"S", "R", "D"})
    finally:
        process.kill()
        process.wait()

    assert procfs.state(process.pid) == ""


@linux_only
def test_a_process_that_is_not_prepared_survives(tmp_path: Path) -> None:
    """The signal ends a process without a handler, so such a one gets none."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (tmp_path / "stacks.0").touch()
    try:
        assert postmortem.dump_stack(tmp_path, 0, process.pid, 1.0) == ""
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()

    assert postmortem.dump_stack(tmp_path, 0, process.pid, 1.0) == ""


@linux_only
def test_a_stopped_process_costs_the_deadline_only(tmp_path: Path) -> None:
    """It cannot write its stack; nothing is told, and the wait has an end."""
    with rank_process(tmp_path, "") as process:
        process.send_signal(signal.SIGSTOP)
        assert until(lambda: procfs.state(process.pid) == "T")
        text = postmortem.dump_stack(tmp_path, 0, process.pid, 0.2)
        process.send_signal(signal.SIGCONT)

    assert text == ""


class Cells:
    """Cells on the engines of a session, each with its number."""

    def __init__(self, session: Session) -> None:
        assert session.cluster.channel is not None
        self.session, self.channel = session, session.cluster.channel

    def run(self, engine: int, code: str, number: int) -> "SimpleQueue[Any]":
        done: SimpleQueue[Any] = SimpleQueue()
        self.channel.execute(engine, code, {CELL_NUMBER: number}, lambda _: None, done.put)
        return done

    def watched(self, rank: int) -> Postmortem:
        cluster = self.session.cluster
        return Postmortem(cluster.run_dir, rank, cluster.processes.pids()[rank])

    def ended(self, rank: int) -> int | None:
        end = self.session.cluster.processes.exit_of(rank, DEADLINE_S)
        assert end is not None
        return end.code


@pytest.fixture
def cells(pair: Session) -> Cells:
    return Cells(pair)


@pytest.mark.usefixtures("cells")
class TestRanks:
    """Ends of real ranks, in cells."""

    pytestmark = cluster

    def test_crashes_name_the_cell_in_which_the_line_is(self, cells: Cells) -> None:
        """A function of an earlier cell, called in a later one; the other rank just exits."""
        watched = [cells.watched(rank) for rank in (0, 1)]
        cells.run(0, "import ctypes\ndef f(p):\n    return ctypes.string_at(p)", 41).get(
            timeout=DEADLINE_S
        )
        cells.run(0, "\nf(0)", 42)
        code = cells.ended(0)
        crash = watched[0].cause(code)
        cells.run(1, "import os\nos._exit(7)", 43)

        assert crash.startswith("signal SIGSEGV in string_at (ctypes/__init__.py, line ")
        assert crash.endswith("), called at line 3 of cell [41]")
        assert watched[1].cause(cells.ended(1)).startswith("exit code 7")

    def test_a_thread_of_c_code_ends_the_process(self, cells: Cells) -> None:
        """As Gloo's own does where shapes differ much; what the cell was doing is told."""
        watched, cluster = cells.watched(0), cells.session.cluster
        pid = cluster.processes.pids()[0]
        cells.run(0, "x = torch.ones(10)\ndist.all_reduce(x)", 12)
        assert until(lambda: "all_reduce" in postmortem.dump_stack(cluster.run_dir, 0, pid, 1.0))
        tasks = Path(f"/proc/{pid}/task").iterdir()
        gloo = next(int(task.name) for task in tasks if "gloo" in (task / "comm").read_text())
        assert ctypes.CDLL(None).tgkill(pid, gloo, signal.SIGABRT) == 0
        cause = watched.cause(cells.ended(0))

        assert cause.startswith("signal SIGABRT in a thread of C code, while Python was in all_")
        assert cause.endswith("called at line 2 of cell [12]")

    def test_a_rank_that_holds_the_gil_is_seen_from_outside(self, cells: Cells) -> None:
        """It does not answer, its stack is there by signal, and it goes on unharmed."""
        code = "# no pause in C code\ndef f():\n    return sum(range(10**8))\nf()"
        done = cells.run(0, code, 12)
        cluster = cells.session.cluster
        asked: list[Future[Any]] = []
        stacks: list[str] = []

        def is_in_c_code() -> bool:
            asked.append(cells.channel.ask(0, "ping"))
            try:
                asked[-1].result(0.3)
            except TimeoutError:
                stacks.append(
                    postmortem.dump_stack(cluster.run_dir, 0, cluster.processes.pids()[0], 1.0)
                )
            return bool(stacks)

        assert until(is_in_c_code)
        is_silent = not asked[-1].done()
        reply = done.get(timeout=DEADLINE_S)

        # The thread of the answers may be held up in the middle of one.
        main_thread = stacks[-1].partition("\nthread ")[0]
        assert main_thread == "MainThread:\n  cell [12], line 4\n  cell [12], line 3, in f"
        assert is_silent
        assert asked[-1].result(DEADLINE_S) == "Control"
        assert not isinstance(reply, BaseException)

    def test_a_question_to_a_rank_that_ends_is_answered(self, cells: Cells) -> None:
        """No silence: an error when it is gone, and at once for one that was gone before."""
        os.kill(cells.session.cluster.processes.pids()[1], signal.SIGSTOP)
        asked = cells.channel.ask(1, "ping")
        os.kill(cells.session.cluster.processes.pids()[1], signal.SIGKILL)
        with pytest.raises(NbdistError, match="engine 1 ended before it answered"):
            asked.result(DEADLINE_S)
        with pytest.raises(NbdistError, match="engine 1 is not registered"):
            cells.channel.ask(1, "ping").result(0)

        assert cells.channel.ask(0, "ping").result(DEADLINE_S) == "Control"


def test_the_signal_is_nobodys() -> None:
    """Jobs use SIGUSR1 and SIGUSR2 themselves; the crash file's name has the rank."""
    if hasattr(signal, "SIGRTMIN"):
        assert DUMP_SIGNAL not in {signal.SIGUSR1, signal.SIGUSR2}
        assert signal.SIGRTMIN < DUMP_SIGNAL < signal.SIGRTMAX
    assert CRASH_FILE.format(rank=3) == "crash.3"
