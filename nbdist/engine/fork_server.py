"""A process that imports once the modules of every rank, and becomes a rank in each of its forks.

Run by its path, as engine/__main__.py: `python -P fork_server.py KERNEL_PID ROOM`. The kernel
(cluster/kernel/rank_server.py) asks by lines of its input, and reads its output. ROOM and the
variable of the same name are spaces: the text of a fork in /proc is written over them.

A fork equals a started rank: it has its own environment, files, session, signals, seeds and
thread counts. Where one of these cannot be, the fork is refused, and the kernel starts the rank.
"""

from __future__ import annotations

import sys

# The modules of an interpreter before it has a rank's sys.path.
AT_START = frozenset(sys.modules)

import atexit  # noqa: E402
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import site  # noqa: E402
import socket  # noqa: E402
import sysconfig  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Iterable, Mapping, Sequence  # noqa: E402
from importlib.machinery import PathFinder  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

# A message begins so, as cluster/agent/agent.py has it.
MARK = "nbdist-agent "
# Variable of the server's environment, and last word of its command line.
ROOM = "NBDIST_ROOM"
# A rank's imports before it is ready; with a colon, a module's tuple of more modules. The last
# imports nothing more: modules behind it in sys.modules were imported by the rank itself.
FIRST = (
    "torch",
    "numpy.random",
    "nbdist.engine.join",
    "nbdist.lints.rank.watch:PARTS",
    "nbdist.engine.early_join",
    "ipyparallel.engine.app",
    "ipykernel.debugger",
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "tornado.platform.asyncio",
    "nbdist.engine.__main__",
)
# The controller's, and what cells use sooner or later; nothing where PRELOAD is 0.
LATER = ("ipyparallel.controller.app", "nbdist.parallel.accelerator.lazy:MODULES")
PRELOAD = "NBDIST_PRELOAD"
NICENESS = 10
IDLE_END_S = 600.0
# After %load_ext: a start that comes at once has its imports at normal priority.
NORMAL_S = 1.0
# Seconds after the last request: imports that are left wait for a start to be over.
RESUME_S = 3.0
FORK_DEADLINE_S = 20.0
# The system still shows the thread of the imports for a moment after its end.
THREAD_END_S = 1.0
# Variables that libraries read when they are loaded. With another value: another server.
READ_AT_IMPORT = (
    "ACCELERATE_", "ATEN_", "BLIS_", "COVERAGE_", "GLIBC_TUNABLES", "GOMP_", "GOTO_", "HF_", "HOME",
    "HUGGINGFACE_", "IPYTHON", "JUPYTER", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_",
    "NUMEXPR_", "NUMPY_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH", "TRANSFORMERS_",
    "TRITON_", "VECLIB_", "XDG_",
)  # fmt: skip
# A fork sets these variables anew, or they are read later.
TAKEN_OVER = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHELASTIC_", "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_FR_", "TORCH_GLOO_", "TORCH_NCCL_",
)  # fmt: skip
# The name in numpy's wheels, with and without 64-bit numbers, and in OpenBLAS itself.
SET_BLAS_THREADS = (
    "scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_", "openblas_set_num_threads",
)  # fmt: skip


class Imports:
    """The imports: in a thread, soon at low priority, and the first when it is needed.

    A thread, because an ordinary user's process cannot take its niceness back, and a thread of
    Linux has its own.
    """

    def __init__(self) -> None:
        self.error = ""
        self._first = [*FIRST]
        self._later = [] if os.environ.get(PRELOAD) == "0" else [*LATER]
        self._is_needed = False
        self._thread: threading.Thread | None = None
        self.is_running = self.is_low = False

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be imported."""
        return bool(self.error) or not (self._first or self._later)

    def begin(self, then: Callable[[], None]) -> None:
        """Import in the background; `then` is called in that thread at the end."""
        self._is_needed, self.is_running, self.is_low = False, True, False

        def run() -> None:
            while not self.is_done and not self._is_needed:
                self._import_next()
            self.is_running = False
            then()

        self._thread = threading.Thread(target=run, name="nbdist-imports")
        self._thread.start()

    def lower(self) -> None:
        """Let the thread give way to everything else from now on."""
        self.is_low = True
        self._set_niceness(NICENESS)

    def finish_first(self) -> None:
        """Return once all of FIRST is there; the thread has ended then."""
        self._is_needed = True
        if self._thread is not None:
            self._set_niceness(0)
            self._thread.join()
        while self._first and not self.error:
            self._import_next()

    def _set_niceness(self, more: int) -> None:
        assert self._thread is not None
        with contextlib.suppress(OSError):  # an ordinary user's may not go back, or it has ended
            niceness = os.getpriority(os.PRIO_PROCESS, 0) + more
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, niceness)

    def _import_next(self) -> None:
        waiting = self._first or self._later
        name, _, more = waiting[0].partition(":")
        try:
            module = importlib.import_module(name)
            waiting[:1] = getattr(module, more) if more else ()
        except BaseException:  # noqa: BLE001  # SystemExit too: any is the kernel's to tell
            self.error = traceback.format_exc()


class ShownByProc:
    """The bytes of this process that /proc/PID/cmdline and /proc/PID/environ show."""

    def __init__(self) -> None:
        """Find them.

        Raises:
            OSError: If they are not where the system says; nothing can be written there.
        """
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        # proc(5): fields 48 to 51, and the first after the name is the third.
        places = [int(field) for field in fields[45:49]]
        self._args, self._env = tuple(places[:2]), tuple(places[2:])
        for (start, end), name in ((self._args, "cmdline"), (self._env, "environ")):
            shown = Path(f"/proc/self/{name}").read_bytes()
            if not shown or ctypes.string_at(start, end - start) != shown:
                raise OSError(f"/proc/self/{name} cannot be changed here")

    def write(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        """Show these. The run's mark comes first: of what finds no room the end is left out.

        Only once nothing refers to the old environment any more (os.environ.clear).
        """
        start, end = self._args
        room = end - start - 1
        line = b"\0".join(map(os.fsencode, args))[:room]
        ctypes.memmove(start, line.ljust(room) + b"\0", room + 1)
        start, end = self._env
        names = sorted(env, key=lambda name: (name != "NBDIST_RUN", len(env[name])))
        block = bytearray()
        for name in names:
            entry = os.fsencode(f"{name}={env[name]}") + b"\0"
            if len(block) + len(entry) < end - start:
                block += entry
        ctypes.memmove(start, bytes(block).ljust(end - start, b"\0"), end - start)


class Server:
    """Answers the kernel's requests one after the other, and reports how forks end."""

    def __init__(self, kernel: int) -> None:
        """`kernel` is the process at the other end of standard input and output."""
        self._requests, self._half = os.dup(0), b""  # the half of a request that has come
        self._answers = os.fdopen(os.dup(1), "w")
        _redirect(os.devnull)  # what libraries print is no answer
        self._kernel = _Kernel(kernel)
        self._imports = Imports()
        self._environ: dict[str, str] = {}
        self._files: dict[str, tuple[int, int]] = {}
        self._shown: ShownByProc | None = None
        self._forks: set[int] = set()
        self._is_frozen = False
        self._is_ready = False  # nothing is left to import, and the kernel has been told
        self._is_closing = False
        self._asked_s = time.monotonic()
        self._wake = socket.socketpair()

    def serve(self) -> list[str]:
        """Serve until the kernel ends, which ends this process; in a fork: its arguments."""
        for end in self._wake:
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)
        with contextlib.suppress(OSError, ValueError, IndexError):
            self._shown = ShownByProc()
        poller = select.poll()
        for descriptor in (self._requests, self._wake[0].fileno()):
            poller.register(descriptor, select.POLLIN | select.POLLHUP)
        self._kernel.register(poller)
        while True:
            if self._is_closing and not self._forks:
                os._exit(0)
            ready = {descriptor for descriptor, _ in poller.poll(self._pause_ms())}
            if self._kernel.has_ended():
                os._exit(0)
            with contextlib.suppress(BlockingIOError):
                self._wake[0].recv(4096)
            self._reap()
            if self._requests not in ready:
                self._use_idle_time()
            elif (argv := self._answer_all()) is not None:
                return argv

    def _begin(self, request: Mapping[str, Any]) -> None:
        self._environ = dict(request["env"])
        sys.path[:] = request["sys_path"]
        # Imports read the ranks' environment; BLAS alone must not start threads.
        os.environ.pop(ROOM, None)
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        # torch asks NVML then, and not CUDA, which a process must not touch before it forks.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        gc.disable()  # nothing of what is imported goes away again
        self._imports.begin(self._wake_up)

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake[1].send(b"i")

    def _pause_ms(self) -> float | None:
        if self._imports.is_running and self._imports.is_low:
            return None  # its end wakes
        if self._imports.is_running:
            return max(0.0, self._asked_s + NORMAL_S - time.monotonic()) * 1e3 + 1
        if not self._is_ready:
            return max(0.0, self._asked_s + RESUME_S - time.monotonic()) * 1e3 + 1
        if self._forks:
            return None
        return max(0.0, self._asked_s + IDLE_END_S - time.monotonic()) * 1e3 + 1

    def _use_idle_time(self) -> None:
        idle_s = time.monotonic() - self._asked_s
        if self._imports.is_running:
            if not self._imports.is_low and idle_s > NORMAL_S:
                self._imports.lower()
            return
        if self._imports.is_done and not self._is_ready:
            self._is_ready = True
            gc.collect()
            self._freeze()
            self._send("ready", is_ready=not self._imports.error)
        if not self._imports.is_done and idle_s > RESUME_S:
            self._is_frozen = False
            self._imports.begin(self._wake_up)
        elif not self._forks and idle_s > IDLE_END_S:
            os._exit(0)

    def _freeze(self) -> None:
        """Set all objects aside: a collection in a fork would write to each, and so copy it."""
        if self._is_frozen:
            return
        gc.freeze()
        self._files = {**_stamps(sys.modules.values()), **self._files}  # as first seen
        self._is_frozen = True

    def _reap(self) -> None:
        for pid in tuple(self._forks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._forks.discard(pid)
                self._send("exit", pid=pid, code=os.waitstatus_to_exitcode(status))

    def _send(self, event: str, **content: Any) -> None:
        try:
            self._answers.write(MARK + json.dumps({"event": event, **content}) + "\n")
            self._answers.flush()
        except OSError:
            os._exit(0)  # the kernel has ended

    def _answer_all(self) -> list[str] | None:
        """Answer the requests that have come whole; in a fork its arguments."""
        if not (text := os.read(self._requests, 1 << 16)):
            os._exit(0)
        self._asked_s = time.monotonic()
        *lines, self._half = (self._half + text).split(b"\n")
        for request in map(json.loads, lines):
            value = self._answer(request)
            if "argv" in value:
                return list(value["argv"])
            self._send("answer", id=request["id"], value=value)
        return None

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to a request; in a fork the request."""
        match request["do"]:
            case "fork":
                return self._fork(request)
            case "check":
                return self._judge(request)
            case "begin":
                self._begin(request)
            case "end":
                self._is_closing = True
        return {}

    def _judge(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Why no fork would be what a started rank is; empty where it would."""
        if changed := _changed_variable(self._environ, request["env"]):
            return {"outdated": f"{changed} has another value than at the import"}
        if why := _customized():  # before anybody waits for the imports
            return {"cannot": why, "failed": "whatever is imported"}
        self._imports.finish_first()
        if self._imports.error:
            why = f"an import failed:\n{self._imports.error}"
            return {"cannot": why, "failed": "here, not on another start"}
        self._freeze()
        if changed := _changed_file(self._files):
            return {"outdated": f"{changed} has changed since it was imported"}
        places = [os.path.normpath(Path(request["cwd"], place)) for place in request["sys_path"]]
        why = _shadow(places) or self._unsafe()
        return {"cannot": why} if why else {}

    def _unsafe(self) -> str:
        """Why this process must not fork; "" where it may."""
        if self._shown is None:
            return "the system does not let a process change what /proc shows of it"
        if threads := _other_threads():
            return f"an import has started a thread ({threads})"
        cuda, zmq = sys.modules["torch.cuda"], sys.modules["zmq"]
        if cuda.is_initialized() or _gpu_files():
            return "an import has initialised CUDA"
        # The class's own: `instance` would make one (pyzmq 25 to 27).
        if getattr(zmq.Context, "_instance", None) is not None:
            return "an import has made a ZMQ context"
        return ""

    def _fork(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fork: the answer to that; in the fork the request, once the kernel knows of it."""
        self._imports.finish_first()
        if why := self._unsafe():
            return {"cannot": why}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                pid = os.fork()
            except OSError as error:
                return {"cannot": str(error), "errno": error.errno}
            if pid == 0:
                ours.close()
                self._become(request, theirs)
                return request
            theirs.close()
            ours.settimeout(FORK_DEADLINE_S)
            try:
                said = ours.recv(1 << 16)
            except TimeoutError:
                said = f"it was not ready within {FORK_DEADLINE_S:.0f} s".encode()
            if said != b"+":
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return {"cannot": said.decode(errors="replace") or "the fork has ended"}
            self._forks.add(pid)
            self._send("fork", pid=pid)
            with contextlib.suppress(OSError):  # it has been killed just now
                ours.send(b"+")
        return {"pid": pid}

    def _become(self, request: Mapping[str, Any], parent: socket.socket) -> None:
        """Make this fork what a started process is, or end it."""
        try:
            os.environ.clear()
            assert self._shown is not None
            # First of all: from here on a sweep for the run's processes finds it.
            self._shown.write(request["argv"], request["env"])
            os.environ.update(request["env"])
            os.setsid()
            os.close(self._requests)
            self._answers.close()
            _reset_signals()
            for end in self._wake:
                end.close()
            _redirect(request["output_file"])
            _inherit(request["inherited"])
            os.chdir(request["cwd"])
            sys.path[:] = request["sys_path"]
            _renew_libraries()
            parent.sendall(b"+")
            is_known = parent.recv(1) == b"+"
        except BaseException as error:  # noqa: BLE001  # any reason is the kernel's to tell
            with contextlib.suppress(OSError):
                parent.sendall(f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        # Otherwise this process would not be ended: the guardian looked before it had its mark.
        if not is_known or self._kernel.has_ended():
            os._exit(1)
        self._kernel.close()
        sys.argv[:] = request["argv"][2:]
        sys.orig_argv[:] = request["argv"]
        gc.enable()


class _Kernel:
    """The notebook's kernel, whose end is seen also where its descendants hold its sockets."""

    def __init__(self, pid: int) -> None:
        self._descriptor = -1
        self._parent = pid
        with contextlib.suppress(OSError, AttributeError):  # refused by a sandbox
            self._descriptor = os.pidfd_open(pid)
        self._server = os.getpid()

    def register(self, poller: select.poll) -> None:
        if self._descriptor >= 0:
            poller.register(self._descriptor, select.POLLIN)

    def has_ended(self) -> bool:
        if self._descriptor < 0:
            return os.getpid() == self._server and os.getppid() != self._parent
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _redirect(output_file: str) -> None:
    log = os.open(output_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((null, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, place)
        os.set_inheritable(place, True)
    os.close(log)
    os.close(null)


def _inherit(inherited: Mapping[str, Any]) -> None:
    """Take what a child process has from its parent, the kernel: as it is now."""
    import resource

    os.umask(inherited["umask"])
    os.sched_setaffinity(0, inherited["cores"])
    for name, limits in inherited["limits"].items():
        resource.setrlimit(int(name), tuple(limits))
    if inherited["niceness"] > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, inherited["niceness"])


def _renew_libraries() -> None:
    """Seeds, keys and thread counts as in a process that has just imported all this.

    random has been seeded by a hook of its own.
    """
    import multiprocessing

    import numpy as np
    import torch

    time.tzset()
    tempfile.tempdir = None  # else the TMPDIR of the import
    importlib.invalidate_caches()
    np.random.seed()  # noqa: NPY002  # the generator that old code uses
    torch.default_generator.seed()  # the CPU's; a GPU's is made when it is first used
    multiprocessing.current_process().authkey = os.urandom(32)
    torch.distributed.set_debug_level_from_env()
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(os.environ.get("MKL_NUM_THREADS") or threads))
    blas = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("GOTO_NUM_THREADS") or threads
    _set_blas_threads(int(blas) if blas.isdigit() else len(os.sched_getaffinity(0)))
    # Asked by torch itself before it touches CUDA (2.11 to 2.13); tests/test_private_names.py.
    if getattr(torch.cuda, "_is_in_bad_fork", lambda: False)():
        raise RuntimeError("an import has asked CUDA for its devices")


def _set_blas_threads(count: int) -> None:
    """Set the number of threads of every OpenBLAS that is loaded."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    for path in {line.split()[-1] for line in lines if "openblas" in line and ".so" in line}:
        library = ctypes.CDLL(path)
        for function in [f for name in SET_BLAS_THREADS if (f := getattr(library, name, None))][:1]:
            function(ctypes.c_int(count))


def _other_threads() -> str:
    """Names of the threads of this process beside the one that asks; "" without any."""
    end_s = time.monotonic() + THREAD_END_S
    me = str(threading.get_native_id())
    while True:
        names = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                names += [(task / "comm").read_text().strip()] if task.name != me else []
        if not names or time.monotonic() > end_s or threading.active_count() > 1:
            python = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
            return ", ".join(python or names)
        time.sleep(0.001)


def _gpu_files() -> list[str]:
    """The devices of GPUs that this process has open."""
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            paths.append(str(link.readlink()))
    return [path for path in paths if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dxg"))]


def _changed_variable(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """A variable that libraries read at their import, and that is another one now."""
    names = {name for name in (*before, *now) if name.startswith(READ_AT_IMPORT)}
    read_once = sorted(name for name in names if not name.startswith(TAKEN_OVER))
    return next((name for name in read_once if before.get(name) != now.get(name)), "")


def _stamps(modules: Iterable[Any]) -> dict[str, tuple[int, int]]:
    """Path of each module's file -> when it was changed, and its size."""
    paths = {path for m in tuple(modules) if (path := getattr(m, "__file__", None))}
    return {path: stamp for path in paths if (stamp := _stamp(path))}


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116  # of thousands, at every start
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _changed_file(stamps: Mapping[str, tuple[int, int]]) -> str:
    return next((path for path, stamp in stamps.items() if _stamp(path) != stamp), "")


def _customized() -> str:
    """Why it is not known what happens when a rank's Python starts; "" where it is."""
    stdlib = os.path.realpath(sysconfig.get_paths()["stdlib"])
    for name in ("sitecustomize", "usercustomize"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and os.path.realpath(Path(path).parent) != stdlib:  # a distribution's own
            return f"{path} runs at every start of Python"
    return ""


def _shadow(sys_path: Sequence[str]) -> str:
    """Why a rank with this path would import something else; "" if it would not."""
    installed = _installed_places()
    tail = [entry for entry in sys_path if os.path.realpath(entry) in installed]
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if "." in name or name in AT_START or not path:
            continue
        for places in (sys_path, tail):
            spec = PathFinder.find_spec(name, places)
            origin = None if spec is None else spec.origin
            if origin is not None and not _is_same(origin, path):
                first, second = (origin, path) if places is sys_path else (path, origin)
                return f"{first} shadows {second}"
    return ""


def _is_same(path: str, other: str) -> bool:
    return path == other or os.path.realpath(path) == os.path.realpath(other)


def _installed_places() -> set[str]:
    """Folders of Python's own modules and of installed packages."""
    paths = sysconfig.get_paths()
    entries = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    entries += [str(Path(paths["platstdlib"]) / "lib-dynload"), site.getusersitepackages()]
    return {os.path.realpath(entry) for entry in [*entries, *site.getsitepackages()]}


def _leave(code: int) -> None:
    """End as multiprocessing's children do, without taking the interpreter down.

    Taking it down touches all memory that a rank shares with the server: up to half a second each.
    """
    # Private: what Py_Finalize calls first in CPython 3.11 to 3.14. Executors end their threads by
    # it, and threads that wait for the main thread's end go on.
    steps: list[Any] = [
        getattr(threading, "_shutdown", None),
        getattr(atexit, "_run_exitfuncs", None),
    ]
    if None in steps:
        return  # the usual end
    for step in steps:
        step()
    for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed one
            stream.flush()
    os._exit(code)


def main() -> None:
    """Serve; in a fork be the rank, the controller or the plain engine that was asked for."""
    _, option, program, *_ = Server(int(sys.argv[1])).serve()
    if option == "-m":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109  # a string
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    from nbdist.engine.__main__ import __file__ as rank_program
    from nbdist.engine.__main__ import main as be_rank

    if _is_same(program, str(rank_program)):
        try:
            be_rank()
        except Exception:  # as the interpreter does; ipyparallel's end raises too
            traceback.print_exc()
            _leave(1)
            raise
        _leave(0)
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
