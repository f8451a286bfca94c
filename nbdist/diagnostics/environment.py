"""Environment variables that change what ranks do: where each comes from, and whether it is wise.

NCCL's are judged from its documentation; what breaks an abort stands in `cluster.nccl_env`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbdist.cluster import nccl_env
from nbdist.core.finding import BAD, OK, WARN, Finding
from nbdist.core.topology import Gpu, filter_visible

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_", "TORCH_DIST_")
NOTEBOOK = "the notebook's environment"
LAUNCHER = "nbdist's launcher"
UNSET = "unset"
EMPTY = "empty"
_LESS = "NCCL_DEBUG=WARN reports only errors"
_REMOVE = "remove it from the environment and restart the kernel"


@dataclass(frozen=True, slots=True)
class HostContext:
    """Facts of the host that a variable's value is judged against.

    Attributes:
        gpus: All of the machine.
        threads_per_rank: Cores that each rank has for itself.
        links: Between its GPUs, as in GpuReadings.
    """

    interfaces: Sequence[str]
    gpus: tuple[Gpu, ...]
    threads_per_rank: int
    links: tuple[tuple[int, int, str], ...] = ()


# (verdict, why, what to do) of a value.
Judged = tuple[str, str, str]
Judge = Callable[[str, HostContext], Judged]
FINE: Judged = (OK, "", "")


def settings(
    environ: Mapping[str, str], launched: Mapping[str, str], around: HostContext
) -> Iterator[Finding]:
    """A finding for each variable of the notebook that is set, and for those of SHOWN_UNSET.

    `launched` is what nbdist's launcher gives local ranks beside or instead of that.
    """
    listed = {n for n in (*environ, *launched) if n in RULES or n.startswith(PREFIXES)}
    for name in sorted(listed | SHOWN_UNSET):
        yield _finding(name, environ.get(name), launched.get(name), around)


def _finding(name: str, typed: str | None, launched: str | None, around: HostContext) -> Finding:
    if typed is None:
        return Finding(name, UNSET if launched is None else f"{launched or EMPTY} ({LAUNCHER})")
    value_text = f"{typed or EMPTY} ({NOTEBOOK})"
    if launched is not None and launched != typed:
        value_text = (
            f"{value_text[:-1]}; ranks of the profile local get {launched or EMPTY} by {LAUNCHER})"
        )
    if name in RULES:
        return Finding(name, value_text, *RULES[name](typed, around))
    conflicts = nccl_env.conflicts({name: typed})
    if not conflicts:
        return Finding(name, value_text)
    # `NAME=1 was kept. With it ... . Set it to 0, or remove it.`
    why, _, what = conflicts[0].partition(" was kept. With it ")[2].rpartition(". Set ")
    return Finding(name, value_text, WARN, why, f"set {what.rstrip('.')}")


def switch(why: str) -> Judge:
    """A rule for what should not be on."""

    def judge(value: str, _around: HostContext) -> Judged:
        is_on = value.strip().lower() not in {"", "0", "false", "no", "n", "off"}
        return (WARN, why, _REMOVE) if is_on else FINE

    return judge


def always(why: str) -> Judge:
    """A rule for what should not be there at all."""
    return lambda _value, _around: (WARN, why, _REMOVE)


def nccl_debug(value: str, _around: HostContext) -> Judged:
    """How much NCCL writes into every cell's output."""
    if value.strip().upper() == "TRACE":
        return WARN, "NCCL writes a line for each call, which is slow and fills outputs", _LESS
    if value.strip().upper() in {"INFO", "ABORT"}:
        return WARN, "NCCL writes hundreds of lines into the output of cells", _LESS
    return FINE


def gloo_interfaces(value: str, around: HostContext) -> Judged:
    """Whether the interfaces exist that Gloo is told to use: exact names, separated by commas."""
    names = [name.strip() for name in value.split(",")]
    missing = [name for name in names if name not in around.interfaces]
    return _no_interface("Gloo", ", ".join(missing), around.interfaces) if missing else FINE


def nccl_interfaces(value: str, around: HostContext) -> Judged:
    """Whether NCCL's list leaves any interface: prefixes, `=` for exact names, `^` for all but."""
    text = value.strip()
    is_excluded, is_exact = text.startswith("^"), "=" in text[:2]
    names = [entry.strip() for entry in text.lstrip("^=").split(",") if entry.strip()]

    def fits(interface: str, name: str) -> bool:
        return interface == name if is_exact else interface.startswith(name)

    usable = [i for i in around.interfaces if any(fits(i, n) for n in names) != is_excluded]
    return FINE if usable else _no_interface("NCCL", value, around.interfaces)


def _no_interface(who: str, value: str, interfaces: Sequence[str]) -> Judged:
    why = f"there is no interface {value} here: where {who} is given it, no group can be formed"
    return WARN, why, f"choose one of {', '.join(sorted(interfaces))}, or remove it"


def rank_count(value: str, _around: HostContext) -> Judged:
    """Whether it is a number of ranks; %dist_init refuses anything else."""
    if value.isascii() and value.isdigit() and int(value) > 0:
        return FINE
    return BAD, "this is not a number of ranks", "set it to 1 or more, or remove it"


def threads(value: str, around: HostContext) -> Judged:
    """Whether the ranks' threads have cores of their own."""
    text = value.strip().split(",", maxsplit=1)[0]
    if not text.isdigit() or int(text) < 1:
        return BAD, "this is not a number of threads", "set it to 1 or more, or remove it"
    if int(text) > around.threads_per_rank:
        why = (
            f"each rank starts {text} threads and has {around.threads_per_rank} cores: ranks take "
            "turns, and every collective waits for the slowest"
        )
        what = (
            f"set it to {around.threads_per_rank}, or remove it: nbdist then shares the cores out"
        )
        return WARN, why, what
    return FINE


def visible_gpus(value: str, around: HostContext) -> Judged:
    """Whether CUDA_VISIBLE_DEVICES names GPUs that exist; CUDA ends the list at the first other."""
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    if not entries or entries[0] == "-1":
        why = "ranks run on the CPU: it hides all GPUs" if around.gpus else ""
        return (WARN, why, "remove it, or name some (0,1)") if around.gpus else FINE
    for number, entry in enumerate(entries):
        if not filter_visible(around.gpus, entry):
            visible = f"CUDA sees {number} of {len(entries)}"
            there = ", ".join(dict.fromkeys(str(gpu.index) for gpu in around.gpus)) or "none"
            return BAD, f"there is no GPU {entry}, so {visible}", f"name GPUs that exist: {there}"
    return FINE


def p2p_level(value: str, around: HostContext) -> Judged:
    """Whether GPUs may copy directly: NVL turns nothing on, it forbids all but NVLink."""
    level = value.strip().upper()
    if level in {"LOC", "0"}:
        return WARN, _NO_P2P, _REMOVE
    if level == "NVL" and any(kind != "NV" for *_, kind in around.links):
        return WARN, f"where NVLink does not connect them, {_NO_P2P}", _REMOVE
    return FINE


def debug_level(value: str, _around: HostContext) -> Judged:
    """How often torch checks collectives itself."""
    level = value.strip().upper()
    if level not in {"OFF", "INFO", "DETAIL"}:
        why = "torch refuses to start with this value"
        return BAD, why, "use OFF, INFO or DETAIL, or remove it"
    if level == "DETAIL":
        why = "it is slow, and DDP crashes the process with it (torch 2.11, 2.13)"
        return WARN, why, "remove it; %dist_init --debug detail does the checks another way"
    return FINE


_LAUNCHED = (
    "left over from a torchrun job; nbdist gives its ranks their own, but code in the notebook "
    "takes itself for a rank"
)
_MEETING = "nbdist does not use it: ranks of one machine meet in a file, others find rank 0"
_FOR_DEBUGGING = (
    "NCCL chooses it by itself, and its documentation warns that a fixed value can make it slower, "
    "crash or hang"
)
_NO_P2P = "GPUs exchange through host memory, several times slower"

RULES: Mapping[str, Judge] = {
    # Numbers in --gpus and CUDA_VISIBLE_DEVICES are then nvidia-smi's.
    "CUDA_DEVICE_ORDER": lambda _value, _around: FINE,
    "CUDA_LAUNCH_BLOCKING": switch("each kernel is waited for, so nothing overlaps"),
    "CUDA_VISIBLE_DEVICES": visible_gpus,
    "GLOO_SOCKET_IFNAME": gloo_interfaces,
    "LOCAL_RANK": always(_LAUNCHED),
    "LOCAL_WORLD_SIZE": always(_LAUNCHED),
    "MASTER_ADDR": always(_MEETING),
    "MASTER_PORT": always(_MEETING),
    "MKL_NUM_THREADS": threads,
    "NBDIST_FORK": lambda _value, _around: FINE,
    "NBDIST_GPUS": lambda _value, _around: FINE,
    "NBDIST_PRELOAD": lambda _value, _around: FINE,
    "NBDIST_RANKS": rank_count,
    "NBDIST_TEST": switch("times, sizes and hosts have invisible marks, for stored outputs"),
    "NCCL_ALGO": always("it forces one algorithm on messages of every size"),
    "NCCL_BUFFSIZE": always(_FOR_DEBUGGING),
    "NCCL_DEBUG": nccl_debug,
    "NCCL_DEBUG_SUBSYS": always("it has an effect only where NCCL_DEBUG is INFO or TRACE"),
    "NCCL_IB_DISABLE": switch("between hosts InfiniBand is not used"),
    "NCCL_NTHREADS": always(_FOR_DEBUGGING),
    "NCCL_P2P_DISABLE": switch(_NO_P2P),
    "NCCL_P2P_LEVEL": p2p_level,
    "NCCL_PROTO": always("it forces one protocol on messages of every size"),
    "NCCL_SHM_DISABLE": switch("ranks of one machine exchange through sockets, much slower"),
    "NCCL_SOCKET_IFNAME": nccl_interfaces,
    "NCCL_TIMEOUT": always("NCCL has no such variable, so it has no effect"),
    "OMP_NUM_THREADS": threads,
    "RANK": always(_LAUNCHED),
    "TORCH_DISTRIBUTED_DEBUG": debug_level,
    "WORLD_SIZE": always(_LAUNCHED),
}
# Shown although nobody has set them: their absence is an answer too.
SHOWN_UNSET = frozenset(
    {"CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS"}
)
