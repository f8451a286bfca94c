"""Ranks live as long as their kernel, are reached by nobody else, and leave nothing behind."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from nbdist.cluster.kernel.start import StartOptions
from tests.support import processes
from tests.support.kernel import Kernel
from tests.support.ranks import processes_under, session_of

END_S = 5.0
LOOPBACK = {"127.0.0.1", "::1"}
LOOK = """
import json, nbdist
cluster = nbdist.session().cluster
print(json.dumps({
    "run_dir": str(cluster.run_dir),
    "guardian": cluster._guard.pid,
    "controller": cluster.processes.controller_pid(),
    "engines": list(cluster.processes.pids().values()),
}))
"""
CHILDREN = """%%distributed
import subprocess
from torch.utils.data import DataLoader
subprocess.Popen(["sleep", "301"])
subprocess.Popen(["sleep", "302"], start_new_session=True)
subprocess.Popen(["env", "-i", "sleep", "303"])
batches = iter(DataLoader(range(10**9), num_workers=1))
next(batches)
print("children of rank", rank, flush=True)
for _ in batches:
    pass
"""


class Run(NamedTuple):
    """What was started, while it runs."""

    run_dir: Path
    guardian: psutil.Process
    controller: psutil.Process
    engines: list[psutil.Process]

    @property
    def everything(self) -> list[psutil.Process]:
        run_processes = {self.guardian, *processes.processes_of_run(str(self.run_dir))}
        for process in (self.controller, *self.engines):
            run_processes.update([process, *processes.descendants(process.pid)])
        return list(run_processes)


def look(kernel: Kernel) -> Run:
    cell = kernel.run(LOOK)
    assert cell.status == "ok", cell.visible
    pids = json.loads(cell.text)
    return Run(
        Path(pids["run_dir"]),
        psutil.Process(pids["guardian"]),
        psutil.Process(pids["controller"]),
        [psutil.Process(pid) for pid in pids["engines"]],
    )


def started(kernel: Kernel, n: int) -> Run:
    cell = kernel.run(f"%load_ext nbdist\n%dist_init -n {n}")
    assert cell.status == "ok", cell.visible
    return look(kernel)


def torch_files(owners: list[psutil.Process]) -> list[Path]:
    """Shared memory of torch that these made; other tests beside this one have theirs."""
    return [path for p in owners for path in Path("/dev/shm").glob(f"torch_{p.pid}_*")]


def kernel_in(folder: Path) -> Kernel:
    (folder / "tmp").mkdir(exist_ok=True)
    return Kernel(cwd=folder, env={"TMPDIR": str(folder / "tmp"), "NBDIST_SEEN": "before"})


def assert_nothing_left(run: Run, everything: list[psutil.Process]) -> None:
    remaining = processes.wait_gone(everything, END_S)
    marked = processes.processes_of_run(str(run.run_dir))

    assert [processes.describe(process) for process in [*remaining, *marked]] == []
    assert not run.run_dir.exists()
    assert not run.run_dir.parent.exists()


@pytest.fixture
def stranger() -> Iterator[psutil.Popen]:
    """Somebody else's process, which has to live on."""
    with psutil.Popen(["sleep", "300"], start_new_session=True) as process:
        yield process
        is_alive = processes.is_alive(process)
        process.kill()

        assert is_alive


def test_an_idle_run_ends_with_its_kernel(tmp_path: Path, stranger: psutil.Popen) -> None:
    """Within 5 s no process and no file of its ranks is left; faults/test_ends.py has all ways."""
    with kernel_in(tmp_path) as kernel:
        run = started(kernel, 1)
        everything = run.everything
        kernel.kill()

        assert len(everything) >= 4  # guardian, controller and its child, engine
        assert_nothing_left(run, everything)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A loader's worker sends tensors over a socket below it, whose path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="nbdist-") as folder:
        yield Path(folder)


def test_a_busy_run_whose_guardian_was_killed_ends_with_its_kernel(
    short_path: Path, stranger: psutil.Popen
) -> None:
    """A killed guardian is replaced; the new one ends ranks in a cell and children of every kind.

    Also the workers of a loader of each rank.
    """
    with kernel_in(short_path) as kernel:
        first = started(kernel, 2)
        first.guardian.kill()
        kernel.run(
            "import time\nend_s = time.monotonic() + 5\n"
            f"while cluster._guard.pid == {first.guardian.pid} and time.monotonic() < end_s:\n"
            "    time.sleep(0.01)"
        )
        run = look(kernel)
        handle = kernel.start(CHILDREN)
        for rank in range(2):
            kernel.wait_output(handle, f"children of rank {rank}")
        everything = run.everything
        sleeping = [p for p in everything if p.name() == "sleep"]
        workers = [p for e in run.engines for p in e.children() if p.name() != "sleep"]
        kernel.kill()

        assert run.guardian.pid != first.guardian.pid
        assert len(sleeping) == 6
        assert len(workers) >= 2  # one of each rank
        assert_nothing_left(run, everything)
        assert torch_files(everything) == []


def test_a_start_that_is_interrupted_or_that_its_kernel_does_not_survive_leaves_nothing(
    tmp_path: Path,
) -> None:
    """The stop button ends %dist_init within 5 s, and the next one works; so does a kill."""
    with kernel_in(tmp_path) as kernel:
        kernel.run("%load_ext nbdist")
        handle = kernel.start("%dist_init -n 2")
        kernel.wait_output(handle, "waiting for the controller")
        kernel.interrupt()
        cell = kernel.finish(handle, END_S)
        remaining = processes_under(tmp_path)
        again = kernel.run("%dist_init -n 1\n%dist_shutdown")
        handle = kernel.start("%dist_init -n 2")
        kernel.wait_output(handle, "waiting for the controller")
        base = tmp_path / "tmp" / f"nbdist-{os.getuid()}"
        [run_dir] = processes.open_run_dirs(base)
        everything = processes.processes_of_run(str(run_dir)) + [
            p for p in processes.descendants(kernel.pid) if "guardian.py" in " ".join(p.cmdline())
        ]
        kernel.kill()

        assert cell.failure.ename == "KeyboardInterrupt"
        assert "everything it began was ended" in cell.failure.evalue
        assert remaining == []
        assert again.status == "ok", again.visible
        assert len(everything) >= 4
        assert processes.wait_gone(everything, END_S) == []
        assert processes.processes_of_run(str(run_dir)) == []
        assert not base.exists()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with two ranks, its sys.path and environment changed before they started."""
    with kernel_in(tmp_path_factory.mktemp("shared")) as kernel:
        kernel.run(
            "import os, sys\nsys.path.append('/nowhere/of-the-notebook')\n"
            "os.environ['NBDIST_SEEN'] = 'in the notebook'"
        )
        started(kernel, 2)
        yield kernel


def test_only_loopback_listens(shared: Kernel) -> None:
    """Every listening socket is on loopback, and no rank serves torch's store."""
    run = look(shared)
    listeners = processes.tcp_listeners(run.everything)
    stores = shared.run("%%distributed\nprint(type(dist.distributed_c10d._get_default_store()))")

    assert {listener.address for listener in listeners} <= LOOPBACK
    assert {e.pid for e in run.engines} <= {listener.pid for listener in listeners}
    assert "TCPStore" not in stores.text
    assert not [listener for listener in listeners if listener.pid == run.guardian.pid]


def test_only_the_owner_can_read_the_run(shared: Kernel) -> None:
    """Nobody else can enter the run's folder, and the keys in it are the owner's alone."""
    run = look(shared)
    shared.run("%%distributed\nprint(rank)")
    folders = [run.run_dir, run.run_dir.parent, run.run_dir / "profile" / "security"]
    keys = list(run.run_dir.rglob("ipcontroller-*.json"))

    assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [0o700] * 3
    assert len(keys) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}


def test_the_key_is_in_no_environment_and_no_command_line(shared: Kernel) -> None:
    """What user code hands to its children does not contain ipyparallel's key."""
    run = look(shared)
    [file] = run.run_dir.rglob("ipcontroller-*-client.json")
    key = json.loads(file.read_text())["key"]
    texts = [
        *(json.dumps(processes.environment(p)) for p in run.everything),
        *(" ".join(p.cmdline()) for p in run.everything),
        shared.run("%%distributed\nimport os\nprint(dict(os.environ))").text,
    ]

    assert len(texts) >= 9
    assert not [text for text in texts if key in text or "IPP_CONNECTION_INFO" in text]


def test_ranks_have_the_notebooks_folder_path_and_environment(shared: Kernel) -> None:
    """Working folder, sys.path and environment are the notebook's at the time of the start."""
    code = (
        "import os, sys\n"
        "print([os.getcwd(), sys.path, os.environ['NBDIST_SEEN'], os.environ['OMP_NUM_THREADS']])"
    )
    here = shared.run(code)
    there = shared.run(f"%%distributed\n{code}")

    assert "/nowhere/of-the-notebook" in here.text
    assert "in the notebook" in here.text
    # A rank that is late, as on a busy machine, has a line of its own.
    lines = [line for line in there.text.splitlines() if not line.startswith("elapsed: ")]
    assert {line.partition("] ")[2] for line in lines} == {here.text.rstrip("\n")}


def test_reset_gives_new_processes_and_fresh_variables(shared: Kernel) -> None:
    """%dist_reset ends every process of the old run and starts as many ranks anew."""
    before = look(shared)
    old = before.everything
    shared.run("%%distributed\nkept = 1")
    reset = shared.run("%dist_reset")
    after = look(shared)
    variable = shared.run("%%distributed\nprint('kept' in globals())")

    assert reset.status == "ok", reset.visible
    assert processes.wait_gone(old, 0.0) == []
    assert len(after.engines) == 2
    assert not before.run_dir.exists()
    assert "[0-1] False" in variable.text


def test_a_forked_child_of_the_notebook_does_not_end_the_ranks(shared: Kernel) -> None:
    """What a child inherits runs at its end too: a stop from there does nothing."""
    forked = shared.run(
        "import os, nbdist\nif not (child := os.fork()):\n    nbdist.session().stop()\n"
        "    os._exit(0)\nprint(os.waitpid(child, 0)[1])"
    )
    works = shared.run("%%distributed\nprint(world_size)")

    assert forked.text == "0\n"
    assert works.text == "[0-1] 2\n"


def test_no_profile_is_made_in_the_ipython_folder(shared: Kernel) -> None:
    """Starting ranks leaves nothing in the user's IPython folder but IPython's own."""
    cell = shared.run(
        "from IPython.paths import get_ipython_dir\nfrom pathlib import Path\n"
        "print(sorted(p.name for p in Path(get_ipython_dir()).glob('profile_*')))"
    )

    assert cell.text == "['profile_default']\n"


def test_two_notebooks_do_not_disturb_each_other(
    shared: Kernel, tmp_path: Path, stranger: psutil.Popen
) -> None:
    """Stopping one notebook's ranks, once and again, leaves another's at work.

    So does a restart of its kernel, which leaves nothing of the ranks that were idle there.
    """
    with kernel_in(tmp_path) as first:
        stopped, running = started(first, 1), look(shared)
        everything = stopped.everything
        # A child of the kernel's own must neither be ended nor hold up the stop.
        first.run(
            "import os\nif not (child := os.fork()):\n    os.execvp('sleep', ['sleep', '300'])"
        )
        first.run(
            "import multiprocessing, time\nm = multiprocessing.get_context('fork')\n"
            "p = m.Process(target=time.sleep, args=(300,), daemon=True)\np.start()"
        )
        stop = first.run("%dist_shutdown")
        again = first.run("%dist_shutdown")
        works = shared.run("%%distributed\nprint(rank // 2 + world_size)")
        children = first.run("print(p.is_alive())\np.kill()\nos.kill(child, 9)")
        idle = started(first, 1)
        everything_idle = idle.everything
        first.restart()

        assert stop.status == "ok"
        assert stop.seconds < END_S
        assert "rank 0 stopped" in stop.visible
        assert again.failure.ename == "NotRunning"
        assert "%dist_init -n 2" in again.failure.evalue
        assert processes.wait_gone(everything, 0.0) == []
        assert not stopped.run_dir.exists()
        assert running.run_dir.exists()
        assert "[0-1] 2" in works.text
        assert children.text == "True\n"
        assert len(everything_idle) >= 4  # guardian, controller and its child, engine
        assert_nothing_left(idle, everything_idle)
        assert [process for process in running.engines if not processes.is_alive(process)] == []


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=90
    )


@pytest.mark.faults
def test_many_starts_leave_no_descriptor_and_no_thread() -> None:
    """After the first start and stop, more of them take no more descriptors or threads."""
    program = (
        "import os, threading, nbdist\n"
        "from nbdist.notebook.notebook import NOTEBOOK\n"
        "for _ in range(3):\n"
        "    nbdist.start(1).run('1')\n"
        "    NOTEBOOK.stop()\n"
        "    print('used', len(os.listdir('/proc/self/fd')), threading.active_count())\n"
    )
    done = run_program(program)
    used = [line for line in done.stdout.splitlines() if line.startswith("used")]

    assert len(used) == 3
    assert used[1] == used[2]


def test_what_is_noticed_after_a_stop_leaves_nothing(
    runs: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """An end that ipyparallel notices late is told nobody, and does not bring the folder back."""
    with session_of(StartOptions(1, gpus="none")) as session:
        cluster = session.cluster
    processes_of_ipp = cluster._cluster
    assert processes_of_ipp is not None
    processes_of_ipp.controller.state = "running"
    processes_of_ipp._engines_stopped("late", {"exit_code": -15})

    assert (capfd.readouterr().err, caplog.text) == ("", "")
    assert not cluster.run_dir.exists()
