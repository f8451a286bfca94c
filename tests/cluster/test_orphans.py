"""What a dead run has left is found and removed; a living one is never touched."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.cluster import run_owner as states
from nbdist.cluster.agent import guardian
from nbdist.cluster.kernel import orphans, run_dir, runs
from nbdist.cluster.kernel.guard import Guard
from nbdist.cluster.kernel.start import StartOptions
from nbdist.cluster.run_owner import Process, Run
from nbdist.diagnostics import kernel as diagnostics_kernel
from nbdist.errors import NbdistError, NotRunning, StartError
from tests.support import processes
from tests.support.kernel import notebook_env
from tests.support.ranks import session_of, temporary_folder, until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

LONGER_THAN_THE_TEST_S = 1000.0
ONE = StartOptions(world_size=1, gpus="none")
# A rank's child in a session of its own, a file that the rank uses, and one that torch named.
NOTEBOOK = """
    import json, time
    import nbdist
    session = nbdist.start(1, gpus="none")
    cell = '''
    import os, subprocess
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    shm_file = open("/dev/shm/{name}", "w")
    open(f"/dev/shm/torch_{{os.getpid()}}_{name}", "w").close()
    print(os.getpid(), child.pid)
    '''
    import textwrap
    pids = session.run(textwrap.dedent(cell))[0].text.split()
    cluster = session.cluster
    controller = cluster.processes.controller_pid()
    pids_of_run = [str(cluster.run_dir), cluster._guard.pid, controller, *pids]
    print("RUN", json.dumps(pids_of_run), flush=True)
    time.sleep(300)
"""


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """The folder of this test's runs; nothing of them may be left at its end."""
    with temporary_folder(tmp_path / "tmp") as folder:
        yield folder


@pytest.fixture
def name() -> Iterator[str]:
    """A name for files in /dev/shm, which are removed at the end."""
    unique = f"nbdist-test-{uuid.uuid4().hex[:8]}"
    yield unique
    for path in Path("/dev/shm").glob(f"*{unique}"):
        path.unlink()


@contextlib.contextmanager
def dead_run(base: Path, name: str) -> Iterator[tuple[Path, list[psutil.Process]]]:
    """(folder, living processes) of a run whose kernel and guardian were killed."""
    program = textwrap.dedent(NOTEBOOK.format(name=name))
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=notebook_env({"TMPDIR": str(base.parent)}),
        stdout=subprocess.PIPE,
        text=True,
    ) as kernel:
        assert kernel.stdout is not None
        line = next(line for line in kernel.stdout if line.startswith("RUN "))
        folder, guardian_pid, *pids = json.loads(line.removeprefix("RUN "))
        left_behind = [psutil.Process(int(pid)) for pid in pids]
        psutil.Process(kernel.pid).suspend()  # it would start another guardian
        run_guardian = psutil.Process(guardian_pid)
        run_guardian.kill()
        kernel.kill()
        assert processes.wait_gone([run_guardian]) == []
    yield Path(folder), left_behind
    for process in (*left_behind, *processes.processes_of_run(folder)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def run_in(folder: Path) -> Run:
    return next(run for run in runs.find_runs() if run.folder == str(folder))


def test_a_dead_run_is_removed_and_a_living_one_left_alone(base: Path, name: str) -> None:
    """Processes, folder and shared memory of the dead run go; the other's rank computes on."""
    stranger = Path(f"/dev/shm/torch_{os.getpid()}_{name}")
    stranger.touch()
    with session_of(ONE) as living, dead_run(base, name) as (folder, left_behind):
        run = run_in(folder)
        other = run_in(living.cluster.run_dir)
        rank_file = Path(f"/dev/shm/torch_{left_behind[1].pid}_{name}")
        before = {process.pid for process in processes.processes_of_run(str(folder))}
        done = orphans.clean()

        assert (run.state, other.state) == (states.DEAD, states.RUNNING)
        assert {process.pid for process in left_behind} <= before
        assert before == {process.pid for process in run.processes}
        assert run.shm_files == tuple(sorted([f"/dev/shm/{name}", str(rank_file)]))
        assert processes.wait_gone(left_behind, 5) == []
        assert not folder.exists()
        assert done == (
            f"ended {len(before)} processes ({', '.join(map(str, sorted(before)))}) of {folder}",
            *(f"removed {path}" for path in run.shm_files),
            f"removed {folder}",
        )
        assert stranger.exists()
        assert living.run("print(6 * 7)")[0].text == "42\n"
        assert orphans.clean() == ()
    assert not base.exists()


def test_what_a_run_has_elsewhere_is_ended_by_its_own_command(base: Path) -> None:
    """Of a dead run on cleaning up, of a living one on `nbdist stop`; a failure is told."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    folders = [run_dir.create() for _ in range(3)]
    owner = json.loads((folders[0] / "owner.json").read_text())
    for folder in folders[:2]:
        (folder / "owner.json").write_text(json.dumps({**owner, "pid": ended.pid, "start": "1"}))
    said = [base.parent / f"said{number}" for number in range(3)]
    run_dir.note_command(folders[0], ["touch", str(said[0])])
    run_dir.note_command(folders[1], ["/nonexistent/scancel", "--name=x y"])
    run_dir.note_command(folders[2], ["touch", str(said[2])])
    lines = orphans.clean()

    assert f"ended what it had elsewhere: touch {said[0]}" in lines
    assert (
        f"could not end what {folders[1]} has elsewhere: /nonexistent/scancel '--name=x y' failed"
    ) in lines
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert [path.exists() for path in said] == [True, False, False]
    orphans.stop(run_in(folders[2]))
    assert said[2].exists()
    run_dir.note_command(folders[2], ["false"])
    with pytest.raises(NbdistError, match="has elsewhere could not be ended: this failed: false"):
        orphans.stop(run_in(folders[2]))


def test_after_one_kernel_its_own_runs_are_removed_alone(base: Path) -> None:
    """Those of a kernel that has ended, once its guardian had its time; another's stay."""
    with contextlib.ExitStack() as stack:
        ended = stack.enter_context(subprocess.Popen(["true"]))
        folders, children = [], []
        for start in "12":
            folders.append(run_dir.create())
            written = json.loads((folders[-1] / "owner.json").read_text())
            owner = json.dumps({**written, "pid": ended.pid, "start": start})
            (folders[-1] / "owner.json").write_text(owner)
            environment = {"NBDIST_RUN": str(folders[-1])}
            child = stack.enter_context(subprocess.Popen(["sleep", "300"], env=environment))
            stack.callback(child.kill)
            children.append(child)
        ended.wait()
        began_s = time.monotonic()
        done = orphans.clean_after(Process(ended.pid, "1"), 0.2)
        waited_s = time.monotonic() - began_s
        nothing = orphans.clean_after(Process(ended.pid, "3"), 60.0)
        other = children[1].poll()

    assert done == (f"ended 1 process ({children[0].pid}) of {folders[0]}", f"removed {folders[0]}")
    assert waited_s >= 0.2
    assert nothing == ()
    assert other is None
    assert [folder.is_dir() for folder in folders] == [False, True]


def test_the_folder_of_an_agent_is_no_run(base: Path) -> None:
    """It lies beside the runs' on the host of its ranks, which may be this machine."""
    run = run_dir.create()
    (base / f"{guardian.RANKS}{run.name}-abc").mkdir()

    assert [run_there.folder for run_there in runs.find_runs()] == [str(run)]


@pytest.mark.parametrize("has_folder", [True, False])
def test_what_nobody_is_known_to_own_is_shown_and_left_alone(
    base: Path, *, has_folder: bool
) -> None:
    """Where no owner is written down; a folder that is gone may be a living notebook's."""
    folder = base / "run-unknown"
    if has_folder:
        folder.mkdir(parents=True, mode=0o700)
    with subprocess.Popen(["sleep", "300"], env={"NBDIST_RUN": str(folder)}) as process:
        run = run_in(folder)
        done = orphans.clean()
        code = process.poll()
        process.kill()

    assert (run.state, run.has_folder) == (states.UNKNOWN, has_folder)
    assert [process.pid for process in run.processes] == [process.pid]
    assert (done, code) == ((), None)
    assert folder.is_dir() == has_folder


def test_a_run_whose_guardian_lives_is_running(base: Path) -> None:
    """A folder that lost its owner's name is not taken for nobody's while it is guarded."""
    folder = base / "run-damaged"
    folder.mkdir(parents=True, mode=0o700)
    guard = Guard(folder)
    is_running = until(lambda: run_in(folder).state == states.RUNNING)
    done = orphans.clean()
    is_there = folder.is_dir()

    assert guard.close()
    assert is_running
    assert (done, is_there) == ((), True)


def test_a_living_kernel_with_a_dead_runs_mark_is_spared(base: Path) -> None:
    """A notebook that was started in a cell inherits that run's mark, and outlives it."""
    dead = base / "run-dead"
    dead.mkdir(parents=True, mode=0o700)
    program = (
        "import sys, time; from nbdist.cluster.kernel import run_dir; "
        "print(run_dir.create(), flush=True); "
        "time.sleep(300)"
    )
    with (
        subprocess.Popen(["true"]) as ended,
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "NBDIST_RUN": str(dead), "TMPDIR": str(base.parent)},
            stdout=subprocess.PIPE,
            text=True,
        ) as kernel,
    ):
        assert kernel.stdout is not None
        run_folder = Path(kernel.stdout.readline().strip())
        written = json.loads((run_folder / "owner.json").read_text())
        (dead / "owner.json").write_text(json.dumps({**written, "pid": ended.pid, "start": "1"}))
        run_states = {run.folder: run.state for run in runs.find_runs()}
        done = orphans.clean()
        code = kernel.poll()
        kernel.kill()

    assert run_states == {str(dead): states.DEAD, str(run_folder): states.RUNNING}
    assert done == (f"removed {dead}",)
    assert code is None


def test_an_ended_process_is_not_waited_for_where_its_parent_takes_no_note() -> None:
    """As in a container whose first process takes none of its orphans, kept ranks among them."""
    with subprocess.Popen(["sleep", "300"]) as process:
        start = guardian.start_ticks(process.pid)
        assert start is not None
        orphans.terminate({process.pid: start}, LONGER_THAN_THE_TEST_S)

        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


def test_a_run_that_is_stopped_from_outside(base: Path) -> None:
    """All its processes end, its kernel is told, and what that kernel lets go of is removed.

    Until then it tells its kernel, since when it runs, where, and each rank.
    """
    with session_of(ONE) as session:
        run = run_in(session.cluster.run_dir)
        assert run.owner is not None
        assert (run.owner.pid, run.owner.start) == (os.getpid(), guardian.start_ticks(os.getpid()))
        assert abs(run.owner.since_s - session.started_s) < 60
        assert run.hosts == (session.topology.ranks[0].host,)
        assert os.getpid() not in {process.pid for process in runs.processes_of(run)}
        assert {*session.cluster.processes.pids().values()} <= {p.pid for p in run.processes}
        pids = [
            *session.cluster.processes.pids().values(),
            session.cluster.processes.controller_pid(),
        ]
        rank_processes = [psutil.Process(pid) for pid in pids]
        orphans.stop(run_in(session.cluster.run_dir))

        assert until(lambda: not any(processes.is_alive(process) for process in rank_processes))
        assert run_in(session.cluster.run_dir).state == states.STOPPED
        assert session.is_stopped
        with pytest.raises(NotRunning, match=r"gone: `nbdist stop` in a terminal ended them at .*"):
            session.run("1")
        with pytest.raises(NotRunning, match=r"\. %dist_init starts new ones\."):
            session.sync()
    assert not base.exists()


def test_a_run_without_its_owner_is_never_seen(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the owner cannot be written down, on a full disk, no folder is left of the start."""
    write_bytes = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.name == f"{states.FILE}.new":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StartError, match="No space left on device"):
        run_dir.create()

    assert not base.exists()


def test_options_of_the_running_ranks_are_among_the_launchers_variables(base: Path) -> None:
    """--debug and --gpus of the ranks that run are among what the launcher has set."""
    ranks = [socket.gethostname()] * 2
    launched = diagnostics_kernel.collect(ranks).launched
    with_options = diagnostics_kernel.collect(ranks, "detail", "none").launched
    changed = {name: value for name, value in with_options.items() if launched.get(name) != value}

    assert changed == {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "CUDA_VISIBLE_DEVICES": ""}
    chosen = diagnostics_kernel.collect(ranks, "off", "0,1").launched
    assert chosen["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_the_facts_are_this_machines(base: Path) -> None:
    """Versions, cores, limits and interfaces are found without loading torch."""
    program = (
        "import socket, sys; from nbdist.diagnostics import kernel; "
        "from nbdist.diagnostics import checks; "
        "f = kernel.collect([socket.gethostname()] * 3); checks.examine(f); "
        "print(f.world_size, f.packages['torch'] is not None, 'lo' in f.interfaces, "
        "f.launched['GLOO_SOCKET_IFNAME'], 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.split() == ["3", "True", "True", "lo", "False"]
