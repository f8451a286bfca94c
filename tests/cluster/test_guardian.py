"""The guardian ends what the kernel has started, and nothing else."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.cluster import shm
from nbdist.cluster.agent import guardian
from nbdist.cluster.kernel import run_dir as cluster_run_dir
from nbdist.cluster.kernel.guard import Guard
from nbdist.cluster.run_owner import Keep
from tests.support import processes
from tests.support.ranks import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SLEEP = ["sleep", "300"]
Started = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def started() -> Iterator[Started]:
    """Starts sessions of their own, and ends them after the test."""
    all_started: list[subprocess.Popen[bytes]] = []

    def start(*command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command or SLEEP,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        all_started.append(process)
        return process

    yield start
    for process in all_started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with process:
            process.kill()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's folder with a file in it."""
    path = tmp_path / "base" / "run-x"
    path.mkdir(parents=True)
    (path / "file").touch()
    return path


def ended(*those: subprocess.Popen[bytes]) -> bool:
    return until(lambda: all(process.poll() is not None for process in those), 5)


def test_it_ends_sessions_and_marked_processes_and_no_stranger(
    started: Started, run_dir: Path
) -> None:
    """Told sessions and processes with the run's mark end; all others live on."""
    process = started("sh", "-c", "sleep 300 & echo $!; wait")
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    marked = started(env={"NBDIST_RUN": str(run_dir)})
    strangers = [
        started(),
        started(env={"NBDIST_RUN": f"{run_dir}2"}),
        started(env={"NBDIST_RUN": str(run_dir.parent)}),
        started(env={"OTHER": f"NBDIST_RUN={run_dir}"}),
        started("sh", "-c", "sleep 300; exit", f"NBDIST_RUN={run_dir}"),
    ]
    guard = Guard(run_dir)
    guard.watch(process.pid)
    is_clean = guard.close()

    assert is_clean
    assert ended(process, marked)
    assert processes.wait_gone([child], 5) == []
    assert [process.poll() for process in strangers] == [None] * len(strangers)
    assert not run_dir.exists()
    assert not run_dir.parent.exists()


def test_a_stranger_that_got_the_pid_again_is_spared(started: Started) -> None:
    """A leader that did not start when the told one did is somebody else, with its session."""
    process = started()
    start = guardian.start_ticks(process.pid)
    assert start is not None

    assert guardian.members({process.pid: start}) == {process.pid: start}
    assert guardian.members({process.pid: "1"}) == {}
    # Told when it was gone already: nothing is known of it, so whoever has the pid is spared.
    assert guardian.members({process.pid: None}) == {}
    assert not guardian.send(process.pid, str(int(start) - 1), signal.SIGKILL)
    assert process.poll() is None
    assert guardian.send(process.pid, start, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not guardian.send(process.pid, start, signal.SIGKILL)


def test_a_session_without_its_leader_is_still_ended(started: Started) -> None:
    """Children are found by their session when the leader has ended before them."""
    leader = started("sh", "-c", "sleep 300 & echo $!; exec 1>&-; wait")
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    start = guardian.start_ticks(leader.pid)
    leader.kill()
    leader.wait()

    assert [*guardian.members({leader.pid: start})] == [child]
    assert guardian.end_all({leader.pid: start}) == ({child}, set())
    assert processes.wait_gone([child], 5) == []


def test_it_acts_when_the_kernel_is_killed_though_the_pipe_stays_open(
    started: Started, run_dir: Path
) -> None:
    """A child that the user's code has forked holds the pipe; the kernel's end is seen anyway.

    What is elsewhere is ended too, by the newest command, with its words as they are.
    """
    process, said = started(), run_dir.parent / "said"
    tell = f"import sys; print(1, flush=True); open({str(said)!r}, 'a').write(str(sys.argv[1:]))"
    code = f"""
        import os, sys, time
        from pathlib import Path
        from nbdist.cluster.kernel.guard import Guard
        guard = Guard(Path({str(run_dir)!r}))
        guard.watch({process.pid})
        guard.promise(["false"])
        guard.promise([sys.executable, "-c", {tell!r}, "two words", "--x=1"])
        if os.fork() == 0:
            print(os.getpid(), guard.pid, flush=True)
            time.sleep(300)
        os.wait()
    """
    kernel = started(sys.executable, "-c", textwrap.dedent(code))
    assert kernel.stdout is not None
    child, guard = (psutil.Process(int(pid)) for pid in kernel.stdout.readline().split())
    kernel.kill()
    kernel.wait()

    assert processes.wait_gone([guard], 10) == []
    assert said.read_text() == "['two words', '--x=1']"
    assert ended(process)
    assert processes.is_alive(child)
    assert not run_dir.exists()
    child.kill()


def test_what_a_kernel_said_before_its_end_is_heard_after_it(
    started: Started, run_dir: Path
) -> None:
    """A guardian that comes up after the kernel has died still knows of its processes."""
    process = started()
    kernel = started("true")
    kernel.wait()
    reading, writing = os.pipe()
    sessions = {process.pid: guardian.start_ticks(process.pid)}
    orders = {"sessions": sessions, "command": [], "keep_s": 0.0, "hold": ""}
    os.write(writing, json.dumps(orders).encode() + b"\n")
    subprocess.run(
        [sys.executable, "-I", "-S", guardian.__file__, str(kernel.pid), str(run_dir)],
        stdin=reading,
        timeout=10,
        check=True,
    )
    os.close(reading)
    os.close(writing)

    assert ended(process)
    assert not run_dir.exists()


def test_what_a_killed_agent_of_this_machine_leaves_goes_too(
    started: Started, run_dir: Path
) -> None:
    """Its folder, and what its ranks had started in sessions of their own; another run's stays."""
    folders = [run_dir.with_name(f"ranks-{name}-abc") for name in ("run-x", "run-xy")]
    marked = [started(env={"NBDIST_RUN": str(folder)}) for folder in folders]
    for folder in folders:
        (folder / "profile").mkdir(parents=True)

    assert Guard(run_dir).close()
    assert [folder.exists() for folder in folders] == [False, True]
    assert ended(marked[0])
    assert marked[1].poll() is None


def test_a_forked_child_does_not_hold_up_the_close(run_dir: Path) -> None:
    """The pipe's end may be held open elsewhere: the guardian is told to stop in words."""
    guard = Guard(run_dir)
    assert guard._guardian._process.stdin is not None
    copy = os.dup(guard._guardian._process.stdin.fileno())
    is_clean = guard.close()
    os.close(copy)

    assert is_clean
    assert not run_dir.exists()


def test_a_killed_guardian_is_replaced_and_told_again(started: Started, run_dir: Path) -> None:
    """The new guardian knows the processes and the command of before."""
    process, said = started(), run_dir.parent / "said"
    guard = Guard(run_dir)
    guard.watch(process.pid)
    guard.promise(["touch", str(said)])
    first = psutil.Process(guard.pid)
    first.kill()

    assert until(lambda: guard.pid != first.pid)
    assert guard.close()
    assert ended(process)
    assert said.exists()
    assert not run_dir.exists()


def test_a_guardian_that_is_killed_just_before_the_close_does_its_work_anyway(
    monkeypatch: pytest.MonkeyPatch, started: Started, run_dir: Path
) -> None:
    """Closing does not take a killed guardian for one that has finished."""
    monkeypatch.setattr(Guard, "_take_end", lambda *_: None)
    process = started()
    guard = Guard(run_dir)
    guard.watch(process.pid)
    psutil.Process(guard.pid).kill()
    guard._guardian._process.wait()
    guard.watch(process.pid)  # into a broken pipe

    assert guard.close()
    assert ended(process)
    assert not run_dir.exists()


def test_signals_that_end_a_terminals_processes_are_not_for_the_guardian(run_dir: Path) -> None:
    """It has a session of its own, and goes on after SIGINT, SIGTERM and SIGHUP."""
    guard = Guard(run_dir)
    assert until(lambda: ignores(guard.pid, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}))
    assert os.getsid(guard.pid) == guard.pid
    assert guard.close()


def ignores(pid: int, numbers: set[signal.Signals]) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = int(next(line.split()[1] for line in lines if line.startswith("SigIgn")), 16)
    return all(mask >> (number - 1) & 1 for number in numbers)


def test_folders_of_the_run_in_shared_memory_are_removed(run_dir: Path, tmp_path: Path) -> None:
    """What a killed kernel or rank had on its way; those of other runs stay.

    Torch's files too, of a loader's worker that was killed just after it had made one.
    """
    shared = tmp_path / "shm"
    mine, others = (
        f"{shm.folder_prefix(os.getuid(), run_dir.name)}a",
        f"nbdist-{os.getuid()}-run-y-a",
    )
    for name in (mine, others):
        (shared / name).mkdir(parents=True)
        (shared / name / "file").write_text("large")
    for name in ("torch_12_345_0", "torch_123_4_0", "torch_13_5_1", "other_12_1"):
        (shared / name).touch()
    guardian.sweep_shm(str(run_dir), {12, 13}, str(shared))
    guardian.sweep_shm(str(run_dir), set(), str(tmp_path / "none"))

    assert {path.name for path in shared.iterdir()} == {others, "torch_123_4_0", "other_12_1"}


def test_a_command_that_fails_is_repeated_once_and_the_folder_stays(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    """What may still be there elsewhere is known to whoever cleans up later."""
    monkeypatch.setattr(guardian, "COMMAND_PAUSE_S", 0.0)
    tries = run_dir.parent / "tries"
    fails_once = ["sh", "-c", f"echo x >> {tries}; test $(wc -l < {tries}) = 2"]

    assert guardian.run_command(fails_once)
    assert tries.read_text().split() == ["x", "x"]
    assert not guardian.run_command(["false"])
    assert not guardian.run_command(["/nonexistent/scancel"])
    guard = Guard(run_dir)
    guard.promise(["false"])
    assert guard.close()
    assert cluster_run_dir.command(run_dir) == ["false"]


def test_a_command_that_was_taken_back_is_not_run(run_dir: Path) -> None:
    """The kernel has ended it itself: nothing is left to be done, also for a later guardian."""
    guard = Guard(run_dir)
    said = run_dir.parent / "said"
    guard.promise(["touch", str(said)])
    guard.promise([])
    psutil.Process(guard.pid).kill()
    assert guard.close()

    assert not said.exists()
    assert not run_dir.exists()


def hold(run_dir: Path, mark: str) -> None:
    """Write down who holds the run."""
    (run_dir / "owner.json").write_text(f'{{"hold": "{mark}"}}')


def kept_guard(run_dir: Path, process: subprocess.Popen[bytes], keep_s: float) -> Guard:
    """A guard of a run that is kept, held by this process, with one process to end."""
    hold(run_dir, "mine")
    guard = Guard(run_dir)
    guard.watch(process.pid)
    guard.keep(keep_s)
    return guard


def test_kept_processes_go_on_without_a_kernel_until_their_time_is_over(
    started: Started, run_dir: Path
) -> None:
    """Since when and until when is written down; then all of it ends as ever.

    Before that the command of the run's folder has run; its output stays.
    """
    process, saved = started(), run_dir.parent / "new" / "saved"
    code = f"import os; os.kill({process.pid}, 0); open({str(saved)!r}, 'x'); print('said')"
    keep = Keep(1.0, str(saved), (sys.executable, "-c", code), "0", sys.executable)
    cluster_run_dir.write_keep(run_dir, keep)
    kept_guard(run_dir, process, 1.0).leave()
    assert until(lambda: cluster_run_dir.read_detachment(run_dir) is not None, 5)
    detachment = cluster_run_dir.read_detachment(run_dir)

    assert detachment is not None
    assert detachment.until_s - detachment.since_s == pytest.approx(1.0, abs=0.01)
    assert process.poll() is None
    assert ended(process)
    assert saved.with_suffix(guardian.LOG).read_text() == "said\n"
    assert until(lambda: not run_dir.exists(), 5)


def test_a_stop_ends_kept_processes_at_once(started: Started, run_dir: Path) -> None:
    """To keep is for a kernel that goes, not for one that ends its ranks."""
    process = started()
    guard = kept_guard(run_dir, process, 600)

    assert guard.close()
    assert ended(process)
    assert not run_dir.exists()


def test_the_guardian_leaves_kept_processes_to_another_holder(
    started: Started, run_dir: Path
) -> None:
    """Detached or not, it ends without ending them, and a kernel that lives is told."""
    process = started()
    first = kept_guard(run_dir, process, 600)
    is_told = threading.Event()
    first.on_taken = is_told.set
    hold(run_dir, "another")
    assert is_told.wait(5)
    second = Guard(run_dir)
    second.keep(600)
    second.leave()
    guardian_process = psutil.Process(second.pid)
    assert until(lambda: cluster_run_dir.read_detachment(run_dir) is not None, 5)
    hold(run_dir, "a third")

    assert processes.wait_gone([guardian_process], 5) == []
    assert process.poll() is None
    assert first.close()
    assert process.poll() is None
    third = Guard(run_dir)  # told of the process by the run's folder
    assert third.close()
    assert ended(process)


def test_kept_processes_end_when_their_folder_is_removed(started: Started, run_dir: Path) -> None:
    """Nobody could attach to them any more."""
    process = started()
    kept_guard(run_dir, process, 600).leave()
    assert until(lambda: cluster_run_dir.read_detachment(run_dir) is not None, 5)
    shutil.rmtree(run_dir)

    assert ended(process)
