"""Ranks are forked by a process that has imported torch, and are what started ranks would be."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from traitlets.config import Config

from nbdist.cluster.kernel import rank_server
from nbdist.cluster.kernel.launcher import (
    CONTROLLER_PROGRAM,
    RankEngineLauncher,
    RankEngineSetLauncher,
)
from nbdist.cluster.kernel.rank_server import PROGRAM, RankServer
from nbdist.cluster.kernel.start import StartOptions
from nbdist.errors import StartError
from nbdist.hang.kernel import restart
from tests.support import processes
from tests.support.kernel import IMPORTED as ALL_IMPORTED
from tests.support.kernel import Kernel
from tests.support.ranks import session_of, texts, until

START_S = 90.0
EARLY = {"NBDIST_PRELOAD": "1"}
END_S = 10.0
# After the server has started: nothing of this is what it had.
CHANGE = """
import os, sys
os.environ["NBDIST_SEEN"] = "at the start of the ranks"
del os.environ["NBDIST_GONE"]
os.umask(0o27)
os.mkdir("inner")
os.chdir("inner")
sys.path.insert(0, os.path.abspath("../lib"))
"""
# What a process has; the modules first that one of the two may have imported later.
LOOK = """%%distributed
import accelerate, torch._dynamo
import atexit, ctypes, faulthandler, gc, json, logging, multiprocessing, random, subprocess
import warnings
from pathlib import Path
import numpy as np

def library(word):
    lines = Path("/proc/self/maps").read_text().splitlines()
    return ctypes.CDLL(next(line.split()[-1] for line in lines if word in line and ".so" in line))

def links(pid):
    return {os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir() if p.is_symlink()}

def entries(text):
    return dict(entry.split("=", 1) for entry in text.split(chr(0)) if entry)

import os, sys, threading
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
named = {n: logger for n, logger in logging.root.manager.loggerDict.items()
         if isinstance(logger, logging.Logger)}
same = dict(
    environ=dict(os.environ),
    environ_of_c=entries(subprocess.run(["env", "-0"], capture_output=True, text=True).stdout),
    environ_shown=entries(Path("/proc/self/environ").read_text()),
    words=[word.strip() for word in Path("/proc/self/cmdline").read_text().split(chr(0)) if word],
    argv=[sys.argv, sys.orig_argv],
    folder=os.getcwd(),
    path=sys.path,
    umask=status["Umask"],
    signals=[status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
    threads=[
        torch.get_num_threads(),
        library("libgomp").omp_get_max_threads(),
        library("openblas").scipy_openblas_get_num_threads64_(),
    ],
    python_threads=sorted(thread.name for thread in threading.enumerate()),
    loggers={n: [l.level, [type(h).__name__ for h in l.handlers]] for n, l in named.items()
             if l.level or l.handlers},
    root=[logging.root.level, [type(h).__name__ for h in logging.root.handlers]],
    files=sorted({path.split("[")[0] for path in links("self")}),
    shared=[p for p in links("self") & links(os.getppid()) if p.startswith(("socket:", "pipe:"))],
    collector=[gc.isenabled(), gc.get_threshold()],
    at_exit=atexit._ncallbacks(),
    niceness=[os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
    is_leader=os.getsid(0) == os.getpgid(0) == os.getpid(),
    faults=faulthandler.is_enabled(),
    warned=len(warnings.filters),
    begins=[sys.getrecursionlimit(), sys.displayhook.__class__.__name__],
)
own = dict(
    parent=os.getppid(),
    python=random.random(),
    numpy=np.random.rand(),
    torch=torch.rand(1).item(),
    seed=torch.initial_seed(),
    key=multiprocessing.current_process().authkey.hex(),
)
Path(os.environ["NBDIST_SEEN_AT"], f"{rank}.json").write_text(json.dumps([same, own]))
"""
# Differ between any two runs, and between one rank and two; and what torch._dynamo sets at its
# import, wherever that is, and again where it is missing.
OF_A_RUN = {
    "TORCHINDUCTOR_CACHE_DIR",
    "IPP_CLUSTER_ID", "IPP_PROFILE_DIR", "MASTER_PORT", "NBDIST_FORK", "NBDIST_RUN",
    "NBDIST_SEEN_AT", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE",
}  # fmt: skip
# A server that is made from now on imports what ranks need to be ready, and nothing more.
NO_MORE = "import os\nos.environ['NBDIST_PRELOAD'] = '0'"
# Returns once the kernel knows of the end.
NOTICED = """
import time
from nbdist.cluster.kernel import rank_server
while not rank_server._server.lost:
    time.sleep(0.01)
"""
LAST_WORDS = """%%distributed
import atexit, concurrent.futures, pathlib, threading
def say(word):
    with open(f"{rank}.txt", "a") as file:
        file.write(word + " ")
executor = concurrent.futures.ThreadPoolExecutor(1)
executor.submit(say, "task").result()
def wait():
    threading.main_thread().join()
    say("thread")
threading.Thread(target=wait).start()
atexit.register(say, "exit")
"""
EDIT = """%%distributed
%load_ext autoreload
%autoreload 2
import edited
before = edited.value()
"""


@contextlib.contextmanager
def changed(folder: Path, fork: str, n: int) -> Iterator[Kernel]:
    """A kernel with n ranks, changed after %load_ext and before they started."""
    for path in (folder / "lib", folder / "seen"):
        path.mkdir(parents=True)
    env = {"NBDIST_FORK": fork, "NBDIST_GONE": "", "NBDIST_SEEN_AT": str(folder / "seen")}
    with Kernel(cwd=folder, env={**EARLY, **env, "OMP_NUM_THREADS": "2"}) as kernel:
        # Imported once, not by each rank when it is idle.
        kernel.run(f"%load_ext nbdist\n{ALL_IMPORTED if fork == '1' else ''}")
        cell = kernel.run(CHANGE)
        assert cell.status == "ok", cell.visible
        start(kernel, f"-n {n}")
        yield kernel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forked")


@pytest.fixture(scope="module")
def forked(folder: Path) -> Iterator[Kernel]:
    """A kernel whose two ranks are forks, which each test leaves with two."""
    with changed(folder, "1", 2) as kernel:
        yield kernel


def start(kernel: Kernel, options: str = "-n 2") -> None:
    cell = kernel.run(f"%dist_init {options}", START_S)

    assert cell.status == "ok", cell.visible


def servers(kernel_pid: int) -> list[psutil.Process]:
    """The servers of one kernel."""
    children = psutil.Process(kernel_pid).children()
    return [p for p in children if str(PROGRAM) in p.cmdline() and processes.is_alive(p)]


def look(kernel: Kernel, folder: Path) -> list[Any]:
    """What ranks see of themselves."""
    cell = kernel.run(LOOK, START_S)
    assert cell.status == "ok", cell.visible
    texts = [path.read_text() for path in sorted((folder / "seen").iterdir())]
    return [json.loads(text.replace(str(folder), "FOLDER")) for text in texts]


def without_run(same: dict[str, Any]) -> dict[str, Any]:
    run = same["environ"]["NBDIST_RUN"]
    cluster = same["environ"]["IPP_CLUSTER_ID"]
    text = json.dumps(same).replace(run, "RUN").replace(cluster, "CLUSTER")
    text = re.sub(r"ipengine-CLUSTER-\d+-", "ipengine-CLUSTER-SET-", text)
    cleaned: dict[str, Any] = json.loads(text)
    for name in ("environ", "environ_of_c", "environ_shown"):
        cleaned[name] = {n: v for n, v in cleaned[name].items() if n not in OF_A_RUN}
    return cleaned


def test_a_fork_is_what_a_started_rank_is(folder: Path, forked: Kernel, tmp_path: Path) -> None:
    """Environment, /proc, files, signals, threads and hooks are those of a rank that imports all.

    Of the notebook it has what is set at %dist_init; seeds and keys are its own; autoreload works.
    """
    (fork, first), (_, second) = look(forked, folder)
    with changed(tmp_path, "0", 1) as kernel:
        [(started, plain)] = look(kernel, tmp_path)
    environment = fork["environ"]
    edited = folder / "lib" / "edited.py"
    edited.write_text("def value():\n    return 1\n")
    forked.run(EDIT)
    edited.write_text("def value():\n    return 'changed'\n")
    cell = forked.run("%%distributed\nprint(before, edited.value())")

    assert cell.text == "[0-1] 1 changed\n", cell.visible
    assert first["parent"] == second["parent"] != plain["parent"]
    assert without_run(fork) == without_run(started)
    assert fork["environ_shown"]["NBDIST_RUN"] == environment["NBDIST_RUN"]
    assert environment["NBDIST_SEEN"] == "at the start of the ranks"
    assert "NBDIST_GONE" not in environment
    assert fork["folder"] == "FOLDER/inner"
    assert fork["threads"] == [2, 2, 2]
    differ = [name for name in first if name != "parent" and first[name] != second[name]]
    assert differ == ["python", "numpy", "torch", "seed", "key"]


def test_a_fork_that_ends_waits_for_threads_and_runs_exit_functions(
    folder: Path, forked: Kernel
) -> None:
    """As an interpreter does that is taken down: executors and threads of the user's end first."""
    cell = forked.run(LAST_WORDS)
    assert cell.status == "ok", cell.visible
    assert forked.run("%dist_reset", START_S).status == "ok"

    texts = [(folder / "inner" / f"{rank}.txt").read_text() for rank in range(2)]
    assert texts == ["task thread exit " for _ in range(2)]


@pytest.mark.faults
def test_two_notebooks_have_a_server_each_that_ends_with_its_kernel(
    forked: Kernel, tmp_path: Path
) -> None:
    """One kernel is killed twice, which has no guardian before its ranks; the other goes on.

    Two restarts within seconds leave one server.
    """
    with Kernel(cwd=tmp_path, env=EARLY) as kernel:
        kernel.run("%load_ext nbdist")
        [of_other], seen = servers(forked.pid), servers(kernel.pid)
        for _ in range(2):
            kernel.restart(now=True)
            kernel.run("%load_ext nbdist")
            seen += servers(kernel.pid)

        assert processes.wait_gone(seen[:-1], END_S) == []
        assert servers(kernel.pid) == seen[-1:]
        assert len(seen) == 3
        assert forked.run("%%distributed\nprint(rank // 2)").text == "[0-1] 0\n"
    assert processes.wait_gone(seen, END_S) == []
    assert servers(forked.pid) == [of_other]


def test_a_killed_server_is_told_once_and_the_next_start_makes_a_new_one(forked: Kernel) -> None:
    """Ranks keep their variables; %dist_restart has another server, and so has a new %dist_init.

    Of a rank whose parent has gone the end is still seen.
    """
    forked.run("%%distributed\nkept = rank // 2")
    [server] = servers(forked.pid)
    server.kill()
    forked.run(f"{NO_MORE}\n{NOTICED}")
    printed = forked.run("%%distributed\nprint(kept)")
    again = forked.run("%%distributed\nprint(kept)")
    forked.run("%%rank [1]\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    restarted = forked.run("%dist_restart 1", START_S)
    alive = forked.run("%%distributed\nprint(dist.get_world_size())")
    [new] = servers(forked.pid)
    forked.run("%dist_shutdown")
    start(forked)
    [same] = servers(forked.pid)

    assert (
        printed.visible.count("The process that has forked the ranks ended (signal SIGKILL)") == 1
    )
    assert "[0-1] 0" in printed.visible
    assert "ended" not in again.visible
    assert restarted.status == "ok", restarted.visible
    assert alive.text.startswith("[0-1] 2\n")  # then the times, where they differ
    assert server.pid != new.pid == same.pid


def obtain(
    env: dict[str, str] | None = None, path: list[str] | None = None
) -> tuple[RankServer | None, str]:
    """The server for ranks with more variables and another path, and why there is none."""
    wanted = {**os.environ, **(env or {})}
    server = asyncio.run(
        rank_server.obtain(wanted, rank_server.text_path() if path is None else path)
    )
    return server, rank_server.why_not()


def test_what_no_fork_could_have_is_another_servers_or_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_server: None
) -> None:
    """A variable that is read at an import, and a file that has changed: another server.

    A module of the notebook that shadows one that is there: no fork, and why.
    """
    folder, library = tmp_path / "shadows", altered(tmp_path, monkeypatch, **LITTLE)
    folder.mkdir()
    (library / "preloaded.py").write_text(NO_TORCH)
    first, _ = obtain()
    assert first is not None
    (folder / "psutil.py").write_text("")
    shadowed, why = obtain(path=[str(folder), *rank_server.text_path()])
    same, _ = obtain({"NBDIST_SEEN": "any other variable"})
    second, _ = obtain({"OMP_PROC_BIND": "true"})
    (library / "preloaded.py").write_text(f"{NO_TORCH}VERSION = 2\n")
    third, _ = obtain({"OMP_PROC_BIND": "true"})

    assert shadowed is None
    assert why.startswith(f"{folder}/psutil.py shadows ")
    assert same is first
    assert len({server.pid for server in (first, second, third) if server is not None}) == 3
    assert until(lambda: bool(first.lost))
    assert first.end == ""  # as it was asked to
    (folder / "sitecustomize.py").touch()
    customized, why = obtain({"PYTHONPATH": str(folder)})
    assert customized is rank_server._server is None  # it does not go on to import torch
    assert why == f"{folder}/sitecustomize.py runs at every start of Python"


def test_forks_are_measured_by_coverage(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, own_server: None
) -> None:
    """Of each rank's lines a file of its own is written, as of a process that was started."""
    coverage = pytest.importorskip("coverage")
    (tmp_path / "lib").mkdir()
    module = tmp_path / "lib" / "measured.py"
    module.write_text("def run():\n    return 1\n")
    data = tmp_path / "data"
    data.mkdir()
    settings = f"[run]\nparallel = true\nsigterm = true\ndata_file = {data}/c\ninclude = {module}\n"
    (tmp_path / "rc").write_text(settings)
    monkeypatch.setenv("NBDIST_PRELOAD", "0")
    monkeypatch.setenv("COVERAGE_PROCESS_START", str(tmp_path / "rc"))
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    with session_of(StartOptions(1, gpus="none")) as session:
        session.run("import measured\nmeasured.run()")
        assert rank_server.why_not() == ""
    parts = []
    for path in data.iterdir():
        part = coverage.CoverageData(str(path))
        with contextlib.suppress(coverage.CoverageException):  # of a process that was killed
            part.read()
            parts.append(part.lines(str(module)))

    assert parts.count([1, 2]) == 1


def altered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **values: str) -> Path:
    """Let servers run their program with other values of its names; a folder of their path."""
    text = PROGRAM.read_text()
    for name, value in values.items():
        pattern = rf"(?m)^{name} = (\(\n(?s:.*?)^\)|.*$)"
        text, count = re.subn(pattern, f"{name} = {value}", text)
        assert count == 1
    (tmp_path / "server.py").write_text(text)
    monkeypatch.setattr(rank_server, "PROGRAM", tmp_path / "server.py")
    library = tmp_path / "lib"
    library.mkdir()
    monkeypatch.syspath_prepend(str(library))
    return library


# What a server looks at before it forks, and a module of the test's own, in place of torch.
LITTLE = {"FIRST": '("zmq", "psutil", "preloaded")', "LATER": "()"}
NO_TORCH = """
import sys, types
sys.modules["torch.cuda"] = types.SimpleNamespace(is_initialized=lambda: False)
"""
THREAD = (
    "import threading, time; threading.Thread(target=time.sleep, args=(999,), name='mine').start()"
)
CONTEXT = "import zmq; zmq.Context.instance()"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("raise RuntimeError('no such luck')", ["an import failed", "RuntimeError: no such luck"]),
        (THREAD, ["an import has started a thread (mine)"]),
        (CONTEXT, ["an import has"]),
        ("import os; os._exit(5)", ["ended (exit code 5)"]),
    ],
    ids=["raises", "thread", "context", "ends"],
)
def test_a_preload_that_goes_wrong_leaves_the_other_way(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_server: None,
    module: str,
    words: list[str],
) -> None:
    """Nothing is forked, %dist_doctor can say why, and the next start tries again."""
    library = altered(tmp_path, monkeypatch, **LITTLE)
    (library / "preloaded.py").write_text(f"{NO_TORCH}{module}")
    server, why = obtain()

    assert server is None
    assert [word for word in words if word not in why] == []


# What a rank has imported by itself: behind the last module of the server's.
IMPORTED = """
import sys
names = [*sys.modules]
names = names[names.index("nbdist.engine.__main__") + 1:]
print([n for n in names if n.partition(".")[0] not in sys.stdlib_module_names])
"""
LOADS = """
import sys
from IPython.core.interactiveshell import InteractiveShell
import nbdist
from nbdist.cluster.kernel import rank_server
rank_server.preload = lambda: print("nbdist.commands" in sys.modules)
nbdist.load_ipython_extension(InteractiveShell.instance())
print("nbdist.commands" in sys.modules)
"""


def test_the_server_starts_before_the_notebook_imports_the_verbs(tmp_path: Path) -> None:
    """Both import side by side."""
    env = {**os.environ, "IPYTHONDIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LOADS],
        env=env, capture_output=True, text=True, timeout=START_S, check=True,
    )  # fmt: skip

    assert done.stdout.split() == ["False", "True"]


def test_a_server_with_all_its_imports_forks_the_controller_too(runs: Path) -> None:
    """One that ends is told with its signal, and the next one is a fork again."""
    server, _ = obtain()
    assert server is not None
    assert until(rank_server.is_ready, START_S)
    with session_of(StartOptions(1, gpus="none")) as session:
        cluster = session.cluster.processes
        controllers = []
        for _ in range(2):
            controller = psutil.Process(cluster.controller_pid())
            controllers.append((controller.ppid(), str(CONTROLLER_PROGRAM) in controller.cmdline()))
            controller.kill()
            assert until(lambda: None in cluster.exits)
            assert cluster.exits[None].how == "signal SIGKILL"
            restart.reconnect(session)
        assert session.run("print(rank)").ranks[0].text == "0\n"

    assert controllers == [(server.pid, True)] * 2


def test_an_idle_server_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_server: None
) -> None:
    """After its time without ranks, which is nothing to be told; one that was not asked at all."""
    library = altered(tmp_path, monkeypatch, **LITTLE, IDLE_END_S="0.1")
    (library / "preloaded.py").touch()
    rank_server.preload()
    server = rank_server._server
    assert server is not None
    assert until(lambda: bool(server.lost), START_S)
    assert server.end == ""


def test_a_fork_is_watched_by_its_pid_too(runs: Path) -> None:
    """Whoever has a launcher's record alone, as ipyparallel keeps it, sees the engine's end."""

    async def watch(record: dict[str, Any]) -> dict[str, Any]:
        ended: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        parent = RankEngineSetLauncher(config=Config())
        launcher = RankEngineLauncher.from_dict(record, parent=parent, identifier="0")
        launcher.on_stop(ended.set_result)
        os.kill(record["pid"], signal.SIGKILL)
        return await asyncio.wait_for(ended, END_S)

    with session_of(StartOptions(1, gpus="none")) as session:
        [launcher] = session.cluster.engine_set.engine_launchers().values()
        record = launcher.to_dict()
        assert asyncio.run(watch(record))["pid"] == record["pid"]
        assert until(lambda: 0 in session.cluster.processes.exits)
        assert session.cluster.processes.exits[0].code == -signal.SIGKILL  # of its own launcher


def test_what_only_training_needs_is_left_to_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_server: None
) -> None:
    """With NBDIST_PRELOAD=0 a server is ready without it."""
    library = altered(tmp_path, monkeypatch, FIRST=LITTLE["FIRST"], LATER='("later",)')
    (library / "preloaded.py").write_text(NO_TORCH)
    (library / "later.py").write_text(f"open({str(library / 'imported')!r}, 'w')")
    monkeypatch.setenv("NBDIST_PRELOAD", "0")
    obtain()

    assert until(rank_server.is_ready)
    assert not (library / "imported").exists()


def test_a_server_that_ends_while_it_forks_leaves_nothing(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, own_server: None
) -> None:
    """The start says how it ended; the next one has a new server."""
    library = altered(tmp_path, monkeypatch, **LITTLE)
    (library / "preloaded.py").write_text(NO_TORCH)
    first, _ = obtain()
    fork = RankServer.fork

    def killed(self: RankServer, argv: list[str], *args: Any) -> Any:
        if str(CONTROLLER_PROGRAM) not in argv:
            os.kill(self.pid, signal.SIGKILL)
        return fork(self, argv, *args)

    monkeypatch.setattr(RankServer, "fork", killed)
    with (
        pytest.raises(StartError, match=r"could not be forked: .* ended \(signal SIGKILL\)"),
        session_of(StartOptions(2, gpus="none")),
    ):
        pass
    second, _ = obtain()

    assert first is not None
    assert second is not None
    assert first.lost
    assert not second.lost


GROUPS = Path("/sys/fs/cgroup/pids")


def own_group() -> Path:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return GROUPS / next(path for _, kind, path in lines if kind == "pids").lstrip("/")


@pytest.mark.skipif(not os.access(GROUPS, os.W_OK), reason="needs a pids group of cgroup v1")
def test_a_control_group_that_is_full_is_told(runs: Path) -> None:
    """The second fork finds no room: an error with the number, and nothing of the first is left."""
    server, _ = obtain()
    assert server is not None
    group = GROUPS / f"nbdist-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(server.pid))
        (group / "pids.max").write_text("2")
        with (
            pytest.raises(StartError, match=r"no process could be forked .*\(pids.max\)"),
            session_of(StartOptions(2, gpus="none")),
        ):
            pass
    finally:
        (own_group() / "cgroup.procs").write_text(str(server.pid))
        group.rmdir()


def test_controller_and_ranks_take_one_new_server_for_an_outdated_one(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, own_server: None
) -> None:
    """Both ask at once, and whoever is second must not end what the first has made.

    Nor does a fork import a package before its first cell: what a rank needs to be ready is there
    once for all of them, and none needs Accelerate. What it imports when it is idle is left out.
    """
    with monkeypatch.context() as patch:
        library = altered(tmp_path, patch, **LITTLE)
        (library / "preloaded.py").write_text(NO_TORCH)
        outdated, _ = obtain()
    monkeypatch.setenv("NBDIST_PRELOAD", "0")
    monkeypatch.setenv("HF_HOME", str(runs))
    with session_of(StartOptions(2, gpus="none")) as session:
        assert texts(session, IMPORTED) == ["[]\n"] * 2
        assert rank_server._server is not outdated
        assert rank_server.why_not() == ""


# Run by an ordinary user: niceness, and limits that do not hold root.
ORDINARY = """
import asyncio, json, os, resource, sys, time, psutil
import nbdist
from nbdist.cluster.kernel import rank_server
from nbdist.errors import StartError
rank_server.preload()
server = psutil.Process(rank_server._server.pid)
levels = set()
while len(levels) < 2 and server.is_running():
    for task in os.listdir(f"/proc/{server.pid}/task"):
        try:
            fields = open(f"/proc/{server.pid}/task/{task}/stat").read().rpartition(")")[2].split()
        except OSError:
            continue
        levels.add(int(fields[16]))
    time.sleep(0.01)
session = nbdist.start(1)
session.run("import os; print('niceness', os.getpriority(os.PRIO_PROCESS, 0))")
nbdist.notebook.notebook.NOTEBOOK.stop()
resource.prlimit(server.pid, resource.RLIMIT_NPROC, (3, 3))
try:
    nbdist.start(2)
except StartError as error:
    print("refused:", error)
print("levels", sorted(levels), os.getuid(), os.listdir(os.environ["TMPDIR"]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be another user")
def test_an_ordinary_user_has_ranks_of_normal_priority_and_is_told_a_limit(tmp_path: Path) -> None:
    """Imports run at low priority and ranks do not; a fork beyond `ulimit -u` is named by it."""
    home = tmp_path / "home"
    home.mkdir()
    for path in (home, *home.parents):
        if path.owner() == "root" and path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)
    home.chmod(0o777)
    # Python may be in a folder of root's: to read is all that this user may more than others.
    may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *may_read]
    names = ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
    env = {**os.environ, **{name: str(home / name) for name in (*names, "MPLCONFIGDIR")}}
    env |= {"HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": str(PROGRAM.parents[2])}
    done = subprocess.run(
        [*user, sys.executable, "-c", ORDINARY],
        env=env, cwd=home, capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    niceness = os.getpriority(os.PRIO_PROCESS, 0)

    assert done.returncode == 0, done.stderr
    assert f"[0] niceness {niceness}" in done.stdout
    refused = next(line for line in done.stdout.splitlines() if line.startswith("refused:"))
    assert "no process could be forked" in refused
    assert "`ulimit -u` is 3" in refused
    assert f"levels [{niceness}, {min(19, niceness + 10)}] 65534" in done.stdout
    assert "nbdist-65534" not in done.stdout.rpartition("levels")[2]
