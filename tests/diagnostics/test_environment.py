"""Environment variables: where each comes from, and whether its value is wise."""

import pytest

from nbdist.cluster import nccl_env
from nbdist.core.finding import BAD, OK, WARN, Finding
from nbdist.core.topology import Gpu
from nbdist.diagnostics.environment import RULES, SHOWN_UNSET, HostContext, settings

GPUS = (Gpu(0, "GPU-aabb", "H200"), Gpu(1, "GPU-ccdd", "H200"))


def judged(
    environ: dict[str, str], launched: dict[str, str] | None = None, gpus: tuple[Gpu, ...] = GPUS
) -> dict[str, Finding]:
    """The findings on a machine with two GPUs, lo and eth0, and four cores for each rank."""
    around = HostContext(("eth0", "lo"), gpus, 4)
    return {finding.name: finding for finding in settings(environ, launched or {}, around)}


@pytest.mark.parametrize(
    ("name", "value", "verdict", "why"),
    [
        ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", OK, ""),
        ("CUDA_LAUNCH_BLOCKING", "1", WARN, "nothing overlaps"),
        ("CUDA_LAUNCH_BLOCKING", "0", OK, ""),
        ("CUDA_VISIBLE_DEVICES", "0,1", OK, ""),
        ("CUDA_VISIBLE_DEVICES", "GPU-aa", OK, ""),
        ("CUDA_VISIBLE_DEVICES", "MIG-ee", OK, ""),
        ("CUDA_VISIBLE_DEVICES", "0,5,1", BAD, "there is no GPU 5, so CUDA sees 1 of 3"),
        ("CUDA_VISIBLE_DEVICES", "", WARN, "hides all GPUs"),
        ("CUDA_VISIBLE_DEVICES", "-1", WARN, "hides all GPUs"),
        ("GLOO_SOCKET_IFNAME", "eth0", OK, ""),
        ("GLOO_SOCKET_IFNAME", "lo,eth0", OK, ""),
        ("GLOO_SOCKET_IFNAME", "ib0", WARN, "there is no interface ib0"),
        ("GLOO_SOCKET_IFNAME", "eth", WARN, "there is no interface eth"),
        ("LOCAL_RANK", "0", WARN, "torchrun"),
        ("MASTER_ADDR", "10.0.0.1", WARN, "does not use it"),
        ("MASTER_PORT", "29500", WARN, "does not use it"),
        ("MKL_NUM_THREADS", "4", OK, ""),
        ("MKL_NUM_THREADS", "5", WARN, "5 threads and has 4 cores"),
        ("NBDIST_FORK", "0", OK, ""),
        ("NBDIST_GPUS", "0,1", OK, ""),
        ("NBDIST_PRELOAD", "0", OK, ""),
        ("NBDIST_RANKS", "4", OK, ""),
        ("NBDIST_RANKS", "0", BAD, "not a number of ranks"),
        ("NBDIST_TEST", "1", WARN, "invisible marks"),
        ("NCCL_ALGO", "Ring", WARN, "one algorithm"),
        ("NCCL_BLOCKING_WAIT", "1", WARN, "cannot be aborted safely"),
        ("NCCL_BUFFSIZE", "4194304", WARN, "by itself"),
        ("NCCL_CROSS_NIC", "1", OK, ""),
        ("NCCL_DEBUG", "WARN", OK, ""),
        ("NCCL_DEBUG", "INFO", WARN, "hundreds of lines"),
        ("NCCL_DEBUG", "trace", WARN, "a line for each call"),
        ("NCCL_DEBUG_SUBSYS", "COLL", WARN, "only where NCCL_DEBUG is INFO"),
        ("NCCL_IB_DISABLE", "1", WARN, "InfiniBand"),
        ("NCCL_NTHREADS", "512", WARN, "by itself"),
        ("NCCL_P2P_DISABLE", "1", WARN, "host memory"),
        ("NCCL_P2P_DISABLE", "0", OK, ""),
        ("NCCL_P2P_LEVEL", "LOC", WARN, "host memory"),
        ("NCCL_P2P_LEVEL", "NVL", OK, ""),
        ("NCCL_PROTO", "LL", WARN, "one protocol"),
        ("NCCL_SHM_DISABLE", "1", WARN, "sockets"),
        ("NCCL_SOCKET_IFNAME", "eth", OK, ""),  # NCCL takes the beginning of a name
        ("NCCL_SOCKET_IFNAME", "=eth", WARN, "there is no interface =eth"),
        ("NCCL_SOCKET_IFNAME", "=eth0", OK, ""),
        ("NCCL_SOCKET_IFNAME", "^lo", OK, ""),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", WARN, "there is no interface"),
        ("NCCL_SOCKET_IFNAME", "ib", WARN, "there is no interface ib"),
        ("NCCL_TIMEOUT", "1800", WARN, "no such variable"),
        ("OMP_NUM_THREADS", "4", OK, ""),
        ("OMP_NUM_THREADS", "64", WARN, "64 threads and has 4 cores"),
        ("OMP_NUM_THREADS", "many", BAD, "not a number"),
        ("RANK", "3", WARN, "torchrun"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", OK, ""),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", WARN, "crashes the process"),
        ("TORCH_DISTRIBUTED_DEBUG", "YES", BAD, "refuses to start"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", WARN, "wait() raises by itself"),
        ("TORCH_NCCL_BLOCKING_WAIT", "0", OK, ""),
        ("WORLD_SIZE", "8", WARN, "torchrun"),
        ("LOCAL_WORLD_SIZE", "8", WARN, "torchrun"),
    ],
)
def test_a_value_is_judged(name: str, value: str, verdict: str, why: str) -> None:
    """Each rule has values that are wise and values that are not, with the reason."""
    finding = judged({name: value})[name]

    assert finding.verdict == verdict
    assert why in finding.why
    assert bool(finding.what) == (verdict != OK)
    assert finding.found == f"{value or 'empty'} (the notebook's environment)"


@pytest.mark.parametrize(
    ("kinds", "verdict"), [((), OK), (("NV",), OK), (("NV", "PHB", "SYS"), WARN), (("PIX",), WARN)]
)
def test_nvlink_alone_is_no_help_where_gpus_are_connected_by_pcie(
    kinds: tuple[str, ...], verdict: str
) -> None:
    """NCCL_P2P_LEVEL=NVL turns nothing on: it forbids direct copies over anything slower."""
    links = tuple((0, number, kind) for number, kind in enumerate(kinds, 1))
    around = HostContext(("eth0", "lo"), GPUS, 4, links)
    findings = {f.name: f for f in settings({"NCCL_P2P_LEVEL": "NVL"}, {}, around)}

    assert findings["NCCL_P2P_LEVEL"].verdict == verdict
    assert ("through host memory" in findings["NCCL_P2P_LEVEL"].why) == (verdict == WARN)


def test_advice_on_what_breaks_an_abort_is_a_clause() -> None:
    """It follows the variable and a colon, as all other advice does."""
    finding = judged({"NCCL_BLOCKING_WAIT": "1"})["NCCL_BLOCKING_WAIT"]

    assert finding.why.startswith("a hung NCCL call cannot be aborted safely")
    assert finding.what == "set it to 0, or remove it"


def test_the_origin_is_told() -> None:
    """Set in the notebook, by the launcher, by both, or by nobody."""
    findings = judged(
        {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "2"},
        {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"},
    )

    assert findings["OMP_NUM_THREADS"].found == "2 (the notebook's environment)"
    assert findings["NCCL_SOCKET_IFNAME"].found == "lo (nbdist's launcher)"
    assert findings["GLOO_SOCKET_IFNAME"].found == (
        "eth0 (the notebook's environment; ranks of the profile local get lo by nbdist's launcher)"
    )
    assert findings["MASTER_ADDR"].found == "unset"


def test_only_what_matters_is_listed() -> None:
    """The rest of the environment is nobody's business; rows are in order of their names."""
    findings = judged({"PATH": "/bin", "SECRET_KEY": "x", "GLOO_X": "1", "TORCH_NCCL_X": "1"})

    assert set(findings) == {"GLOO_X", "TORCH_NCCL_X", *SHOWN_UNSET}
    assert list(findings) == sorted(findings)


def test_what_the_launcher_gives_is_wise() -> None:
    """nbdist's own settings are not complained about."""
    assert {finding.verdict for finding in judged({}, nccl_env.environment({})).values()} == {OK}


def test_without_gpus_hiding_them_is_no_warning() -> None:
    """An empty CUDA_VISIBLE_DEVICES says nothing on a machine without GPUs."""
    name = "CUDA_VISIBLE_DEVICES"

    assert judged({name: ""}, gpus=())[name].verdict == OK


def test_every_rule_is_tested_here() -> None:
    """A new rule needs values in the table above."""
    marks = test_a_value_is_judged.pytestmark  # type: ignore[attr-defined]
    tested = {row[0] for mark in marks for row in mark.args[1]}

    assert set(RULES) <= tested
