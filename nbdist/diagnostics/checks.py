"""Is this machine fit for ranks: facts in, findings out; each check is one function of the table.

The facts are collected elsewhere. A check says what was found, whether that is wise, why, and what
to do; it reads no clock, no file and no environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from nbdist.cluster import capacity, run_owner, shm
from nbdist.cluster.run_owner import Run
from nbdist.core import units, versions
from nbdist.core.finding import BAD, OK, WARN, Finding
from nbdist.core.gpus import GpuReading
from nbdist.diagnostics.environment import HostContext, settings
from nbdist.diagnostics.facts import UNLIMITED, Facts
from nbdist.diagnostics.topology import LINKS
from nbdist.errors import StartError

# As in pyproject.toml; tests/test_packaging.py compares them. torch is judged by core.versions.
OLDEST = {
    "accelerate": "1.15",
    "cloudpickle": "3.1",
    "ipykernel": "6.29",
    "ipyparallel": "9.2",
    "ipython": "8.20",
    "ipywidgets": "8",
    "matplotlib": "3.8",
    "ml-dtypes": "0.5",
    "numpy": "1.26",
    "nvidia-ml-py": "12.535",
    "psutil": "5.9",
    "pyyaml": "6.0",
    "pyzmq": "25",
    "safetensors": "0.4.3",
    "torch": "2.11",
    "traitlets": "5.14",
}
OLDEST_PYTHON = "3.11"
# Each DataLoader worker, each connection and each tensor that is handed over takes some files.
ENOUGH_FILES = 4096
ENOUGH_PROCESSES = 4096
# What a run writes at its start is below 2 MB; long outputs and logs come on top.
LITTLE_DISK_BYTES = 100_000_000
# A GPU of which others hold so much leaves too little for most models.
BUSY_GPU = 0.1


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Every check's findings, in the order of the table."""
    return tuple(finding for check in CHECKS for finding in check(facts))


def system(facts: Facts) -> Iterator[Finding]:
    """Whether nbdist runs on this operating system, and with which limits."""
    yield _as_at_start("system", facts.platform, lambda: versions.check_system(facts.platform))


def _as_at_start(name: str, value: str, check: Callable[[], str | None]) -> Finding:
    """Finding from a check made at each start: refused, with a note, or nothing."""
    try:
        note = check()
    except StartError as error:
        return Finding(name, value, BAD, str(error))
    return Finding(name, value, WARN if note else OK, note or "")


def python(facts: Facts) -> Iterator[Finding]:
    """The interpreter, which the ranks use as well."""
    if _older(facts.python, OLDEST_PYTHON):
        why = f"nbdist needs {OLDEST_PYTHON} or newer"
        what = f"make an environment with a newer one: python{OLDEST_PYTHON} -m venv .venv"
        yield Finding("Python", facts.python, BAD, why, what)
    else:
        yield Finding("Python", facts.python)


def packages(facts: Facts) -> Iterator[Finding]:
    """Check the versions of the packages that nbdist needs, by their metadata."""
    for name, version in sorted(facts.packages.items()):
        oldest = OLDEST.get(name, "0")
        install = f"{facts.executable} -m pip install '{name}>={oldest}'"
        if version is None:
            yield Finding(name, "not installed", BAD, f"nbdist needs {oldest} or newer", install)
        elif _older(version, oldest):
            yield Finding(name, version, BAD, f"nbdist needs {oldest} or newer", install)
        elif name == "torch" and "+cpu" in version and (count := len(facts.readings.gpus)):
            gpus = "1 GPU is" if count == 1 else f"{count} GPUs are"
            why = f"this torch is built for the CPU only, and {gpus} there"
            what = "install a build with CUDA: https://pytorch.org/get-started"
            yield Finding(name, version, BAD, why, what)
        else:
            yield Finding(name, version)


def devices(facts: Facts) -> Iterator[Finding]:
    """The GPUs, and whether processes may share them."""
    readings = facts.readings
    for problem in readings.problems:
        why = "ranks will not find what the driver does not report"
        what = (
            "run nvidia-smi in a terminal; after an update of the driver the machine has to restart"
        )
        yield Finding("GPUs", problem, BAD, why, what)
    if not readings.gpus and not readings.problems:
        yield Finding("GPUs", "none", OK, "ranks run on the CPU, with Gloo")
    for gpu in readings.gpus:
        yield _gpu(gpu)
    if readings.driver:
        yield Finding("driver", readings.driver)


def _gpu(gpu: GpuReading) -> Finding:
    name, state = f"GPU {gpu.index}", gpu.name
    used, total = gpu.used_bytes or 0, gpu.total_bytes  # a machine's own memory is not told
    if total is not None:
        state += f", {used / 1e9:.1f} of {total / 1e9:.1f} GB used"
    if gpu.compute_mode not in {"Default", None}:
        state += f", compute mode {gpu.compute_mode}"
        what = f"sudo nvidia-smi -i {gpu.index} -c DEFAULT, or another GPU with --gpus"
        if gpu.compute_mode == "Prohibited":
            return Finding(name, state, BAD, "no process may use it", what)
        why = "only one process may use it: two ranks cannot share it"
        return Finding(name, state, WARN, why, what)
    if total and used > BUSY_GPU * total:
        why = "processes use memory there; they may be your own ranks"
        what = "nvidia-smi lists them; choose other GPUs with --gpus"
        return Finding(name, state, WARN, why, what)
    return Finding(name, state)


def topology(facts: Facts) -> Iterator[Finding]:
    """The slowest way between any two GPUs, which a collective of all of them has to take."""
    links = facts.readings.links
    if not links:
        return
    order = list(LINKS)
    first, second, kind = max(links, key=lambda link: order.index(link[2]))
    slowest = f"slowest: {kind} between GPUs {first} and {second} ({LINKS[kind]})"
    if kind != "SYS":
        yield Finding("GPU links", slowest)
        return
    why = "a collective of all GPUs is as slow as the link between the CPUs"
    what = (
        "choose GPUs of one CPU with --gpus (nvidia-smi topo -m shows which), or keep tensor "
        "parallelism within them"
    )
    yield Finding("GPU links", slowest, WARN, why, what)


def machine(facts: Facts) -> Iterator[Finding]:
    """Cores and memory for the ranks of this machine."""
    n, cores = facts.world_size, facts.cores
    if facts.rank_hosts:
        hosts = units.one_line(", ".join(facts.rank_hosts))
        yield Finding("hosts", f"ranks run on {hosts}", OK, "what stands here is of this machine")
    if n > cores:
        why = "ranks take turns on a core, so every collective waits for the slowest"
        what = f"start {cores} or fewer (-n {cores})"
        yield Finding("cores", f"{cores} for {_ranks(n)}", WARN, why, what)
    else:
        yield Finding("cores", f"{cores} for {_ranks(n)}")
    available = f"{facts.available_bytes / 1e9:.1f} GB available"
    yield _as_at_start("memory", available, lambda: capacity.check(facts.available_bytes, n, cores))


def start(facts: Facts) -> Iterator[Finding]:
    """Whether ranks of this machine are forks of a process that has torch, or import it each."""
    if not facts.why_no_fork:
        yield Finding("start of ranks", "forked from a process that has torch")
        return
    is_meant = facts.platform != "linux" or facts.environ.get("NBDIST_FORK") == "0"
    yield Finding(
        "start of ranks",
        "each imports torch itself",
        OK if is_meant else WARN,
        f"{facts.why_no_fork}: a start takes seconds more, and each rank 0.15 GB",
        "" if is_meant else "%dist_reset, once the reason is gone",
    )


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Whether /dev/shm has enough room for tensors that processes share."""
    if facts.shm is None:
        yield Finding(shm.SHM, "none", OK, "this system has none; torch uses other means")
        return
    free, total = facts.shm.free_bytes, facts.shm.total_bytes
    free_text = f"{free / shm.MIB:.0f} of {total / shm.MIB:.0f} MiB free"
    n, uses_nccl = facts.world_size, bool(facts.readings.gpus)
    yield _as_at_start(shm.SHM, free_text, lambda: shm.check(free, total, n, uses_nccl=uses_nccl))


def disk(facts: Facts) -> Iterator[Finding]:
    """Room where the runs' folders are."""
    if facts.disk is None:
        return
    free_text = f"{units.size(facts.disk.free_bytes)} free in {facts.disk.path}"
    if facts.disk.free_bytes < LITTLE_DISK_BYTES:
        why = "a start fails where nothing can be written, and long outputs are cut"
        what = "free some space there, or point TMPDIR elsewhere and restart the kernel"
        yield Finding("temporary files", free_text, WARN, why, what)
    else:
        yield Finding("temporary files", free_text)


def limits(facts: Facts) -> Iterator[Finding]:
    """Check the system's limits for one process; ranks inherit them from the notebook."""
    files, processes = facts.limits.get("files"), facts.limits.get("processes")
    locked = facts.limits.get("locked memory")
    if files is not None:
        why = "DataLoader workers hand tensors over as open files: 'Too many open files'"
        yield _limit("open files", files, ENOUGH_FILES, why, "ulimit -n")
    if processes is not None:
        why = "threads count too, and each rank has dozens: 'Resource temporarily unavailable'"
        yield _limit("processes", processes, ENOUGH_PROCESSES, why, "ulimit -u")
    if locked is not None:
        yield _locked(locked[0], has_gpus=bool(facts.readings.gpus))


def _limit(name: str, limit: tuple[int, int], enough: int, why: str, command: str) -> Finding:
    soft, hard = limit
    limits = f"{_number(soft)}, up to {_number(hard)}"
    if soft == UNLIMITED or soft >= enough:
        return Finding(name, limits)
    reachable = enough if hard == UNLIMITED or hard >= enough else hard
    what = f"{command} {reachable} in the shell that starts Jupyter"
    if reachable < enough:
        what += f"; more than {hard:,} only the system's administrator can set"
    return Finding(name, limits, WARN, why, what)


def _locked(soft: int, *, has_gpus: bool) -> Finding:
    if soft == UNLIMITED:
        return Finding("locked memory", "unlimited")
    limit_text = units.size(soft)
    if not has_gpus:
        return Finding("locked memory", limit_text, OK, "only InfiniBand asks for more")
    return Finding(
        "locked memory",
        limit_text,
        WARN,
        "NCCL over InfiniBand pins more than that ('ibv_reg_mr failed'); within one machine it "
        "does not matter",
        "ulimit -l unlimited in the shell that starts Jupyter; docker run --ulimit memlock=-1",
    )


def variables(facts: Facts) -> Iterator[Finding]:
    """Environment variables that change what ranks do."""
    threads_per_rank = max(1, facts.cores // max(1, facts.world_size))
    readings = facts.readings
    around = HostContext(facts.interfaces, readings.devices, threads_per_rank, readings.links)
    yield from settings(facts.environ, facts.launched, around)


def leftovers(facts: Facts) -> Iterator[Finding]:
    """Runs: those that live, and what dead ones have left."""
    phrases = {entry.run.folder: entry.phrase(facts.now_s) for entry in facts.kept}
    for run in facts.runs:
        yield _run(run, phrases.get(run.folder, ""))
    if not any(run.state == run_owner.DEAD for run in facts.runs):
        yield Finding("leftovers", "none from dead runs")


def _run(run: Run, how_kept: str) -> Finding:
    """Describe a run; `how_kept` says how it outlives its notebook, if it does."""
    count = len(run.processes)
    state = f"{how_kept or run.state}, {count} process{'es' if count != 1 else ''}"
    if run.shm_files:
        state += f", {len(run.shm_files)} of its files in /dev/shm"
    name = f"run {run.name}"
    kernel = "" if run.owner is None else f"kernel {run.owner.pid}"
    if run.state == run_owner.RUNNING:
        whose = f"{kernel} ({run.owner.where})" if run.owner else "whose kernel is not known"
        return Finding(name, f"{state}, {whose}")
    if run.state == run_owner.KEPT:
        return Finding(name, state)
    pids = " ".join(str(process.pid) for process in run.processes)
    todo = [f"kill {pids}"] if pids else []
    todo += [f"rm -r {run.folder}"] if run.has_folder else []
    by_hand = f"if no notebook of yours uses it: {'; '.join(todo) or 'nothing is left to remove'}"
    why_left = (
        "no owner is recorded, so it is left alone"
        if run.owner is None
        else "what is written of how its ranks are kept is damaged, so it is left alone"
    )
    rows = {
        run_owner.STOPPED: (
            OK,
            "ended by nbdist stop; its notebook has not run a cell since",
            "nothing: the folder is removed when the notebook notices, or ends",
        ),
        run_owner.DEAD: (
            WARN,
            f"its notebook's {kernel} has ended, and its guardian too",
            "--clean ends and removes it",
        ),
        run_owner.ELSEWHERE: (
            OK,
            "it belongs to another host or container, so it is not known whether it is alive",
            f"if it does not, remove {run.folder} by hand",
        ),
        run_owner.UNKNOWN: (WARN, why_left, by_hand),
    }
    return Finding(name, state, *rows[run.state])


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    system,
    python,
    packages,
    devices,
    topology,
    machine,
    start,
    shared_memory,
    disk,
    limits,
    variables,
    leftovers,
)


def _older(version: str, oldest: str) -> bool:
    return _numbers(version) < _numbers(oldest)


def _numbers(version: str) -> tuple[int, ...]:
    # The local part (+cu128) says how it was built, not how new it is.
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _number(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else f"{limit:,}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
