"""Each check of %dist_doctor with made-up machines: what is well, what is not, and why."""

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nbdist.cluster import run_owner
from nbdist.cluster.run_owner import Process, Run, RunOwner
from nbdist.core.finding import BAD, OK, WARN, Finding
from nbdist.core.gpus import GpuReading, GpuReadings
from nbdist.core.host import Machine
from nbdist.diagnostics import checks
from nbdist.diagnostics.checks import OLDEST, examine
from nbdist.diagnostics.facts import UNLIMITED, Facts, Space
from nbdist.diagnostics.kernel import collect

GIB = 2**30
GPU = GpuReading(0, "GPU-aa", "H200", 10**9, 140 * 10**9, compute_mode="Default")
OTHER = replace(GPU, index=1, uuid="GPU-bb")


def reported(*gpus: GpuReading, links: tuple[tuple[int, int, str], ...] = ()) -> dict[str, Any]:
    """What a driver reports."""
    return {"readings": GpuReadings(gpus, (), "570.1", links)}


OWNER = RunOwner(41, "7", Machine("box", "b", "p"), 0.0, "/notebooks/a.ipynb")
WELL = Facts(
    python="3.11.7",
    packages={name: f"{oldest}.0" for name, oldest in OLDEST.items()},
    cores=8,
    available_bytes=16 * 10**9,
    shm=Space("/dev/shm", 8 * GIB, 8 * GIB),
    disk=Space("/tmp", 10**10, 10**11),
    limits={
        "files": (65536, 65536),
        "processes": (UNLIMITED, UNLIMITED),
        "locked memory": (UNLIMITED, UNLIMITED),
    },
    interfaces=("eth0", "lo"),
)
Check = Callable[[Facts], Iterator[Finding]]


def of(check: Check, **changes: Any) -> dict[str, Finding]:
    """What one check finds on a machine that is well but for these, by name."""
    return {finding.name: finding for finding in check(replace(WELL, **changes))}


def test_a_machine_that_is_well() -> None:
    """Nothing is complained about, and every check has something to say."""
    findings = examine(WELL)

    assert {finding.verdict for finding in findings} == {OK}
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    assert names[:2] == ["system", "Python"]
    assert names[-1] == "leftovers"


def test_findings_come_in_the_same_order() -> None:
    """Whatever order facts have, rows stand as before."""
    mixed = replace(WELL, packages=dict(reversed(WELL.packages.items())))

    assert examine(mixed) == examine(WELL)


# What is otherwise than on a machine that is well, name, verdict, part of why, of what to do.
_NOT_WELL: dict[Check, list[tuple[Mapping[str, Any], str, str, str, str]]] = {
    checks.system: [
        ({"platform": "darwin"}, "system", WARN, "less protection", ""),
        ({"platform": "win32"}, "system", BAD, "does not run on 'win32'", ""),
    ],
    checks.python: [
        ({"python": "3.10.2"}, "Python", BAD, "needs 3.11", "environment"),
    ],
    checks.packages: [
        ({"packages": {"torch": None}}, "torch", BAD, "2.11 or newer", "pip install"),
        ({"packages": {"torch": "2.9.1"}}, "torch", BAD, "2.11 or newer", "'torch>="),
        ({"packages": {"numpy": "1.25.0"}}, "numpy", BAD, "1.26", "'numpy>=1.26'"),
        (
            {"packages": {"torch": "2.13.0+cpu"}, **reported(GPU)},
            "torch",
            BAD,
            "built for the CPU only, and 1 GPU is there",
            "with CUDA",
        ),
    ],
    checks.devices: [
        (
            {"readings": GpuReadings(problems=("GPU 1 cannot be read: GPU is lost",))},
            "GPUs",
            BAD,
            "the driver does not report",
            "restart",
        ),
        (
            reported(replace(GPU, compute_mode="Exclusive_Process")),
            "GPU 0",
            WARN,
            "two ranks cannot share it",
            "-i 0 -c DEFAULT",
        ),
        (
            reported(replace(GPU, compute_mode="Prohibited")),
            "GPU 0",
            BAD,
            "no process",
            "--gpus",
        ),
        (reported(replace(GPU, used_bytes=60 * 10**9)), "GPU 0", WARN, "use memory", "--gpus"),
    ],
    checks.topology: [
        (
            reported(links=((0, 1, "NV"), (0, 2, "SYS"), (1, 2, "PIX"))),
            "GPU links",
            WARN,
            "between the CPUs",
            "--gpus",
        ),
    ],
    checks.machine: [
        ({"world_size": 9}, "cores", WARN, "take turns", "-n 8"),
        ({"available_bytes": 4 * 10**8}, "memory", BAD, "2 ranks need about 0.5 GB", ""),
    ],
    checks.start: [
        ({"why_no_fork": "psutil.py shadows"}, "start of ranks", WARN, "psutil.py", "%dist_reset"),
        (
            {"why_no_fork": "NBDIST_FORK is 0", "environ": {"NBDIST_FORK": "0"}},
            "start of ranks",
            OK,
            "NBDIST_FORK is 0",
            "",
        ),
    ],
    checks.shared_memory: [
        ({"shm": Space("/dev/shm", 60 * 2**20, 64 * 2**20)}, "/dev/shm", WARN, "only 64 MiB", ""),
        ({"shm": Space("/dev/shm", 2**20, 64 * 2**20)}, "/dev/shm", BAD, "1 MiB free of 64", ""),
    ],
    checks.disk: [
        ({"disk": Space("/tmp", 10**7, 10**9)}, "temporary files", WARN, "fails", "TMPDIR"),
    ],
    checks.limits: [
        (
            {"limits": {"files": (1024, UNLIMITED)}},
            "open files",
            WARN,
            "Too many open files",
            "ulimit -n 4096 in the shell",
        ),
        (
            {"limits": {"files": (1024, 2048)}},
            "open files",
            WARN,
            "Too many",
            "ulimit -n 2048 in the shell that starts Jupyter; more than 2,048 only",
        ),
        (
            {"limits": {"processes": (512, 512)}},
            "processes",
            WARN,
            "threads count",
            "ulimit -u 512",
        ),
        (
            {"limits": {"locked memory": (65536, 65536)}, **reported(GPU)},
            "locked memory",
            WARN,
            "InfiniBand",
            "ulimit -l unlimited",
        ),
    ],
    checks.variables: [
        (
            {"environ": {"NCCL_P2P_DISABLE": "1"}},
            "NCCL_P2P_DISABLE",
            WARN,
            "host memory",
            "remove it",
        ),
        (
            {"environ": {"OMP_NUM_THREADS": "8"}},
            "OMP_NUM_THREADS",
            WARN,
            "8 threads and has 4 cores",
            "set it to 4",
        ),
    ],
    checks.leftovers: [
        (
            {"runs": (Run("/t/run-a", run_owner.DEAD, OWNER, processes=(Process(5, "1"),)),)},
            "run run-a",
            WARN,
            "kernel 41 has ended",
            "--clean",
        ),
        (
            {
                "runs": (
                    Run(
                        "/t/run-a", run_owner.UNKNOWN, processes=(Process(5, "1"), Process(6, "1"))
                    ),
                )
            },
            "run run-a",
            WARN,
            "left alone",
            "kill 5 6; rm -r /t/run-a",
        ),
    ],
}


@pytest.mark.parametrize(
    ("check", "changes", "name", "verdict", "why", "what"),
    [(check, *row) for check, rows in _NOT_WELL.items() for row in rows],
)
def test_what_is_not_well_is_told(
    check: Check, changes: Mapping[str, Any], name: str, verdict: str, why: str, what: str
) -> None:
    """The verdict, the reason and what to do stand in the finding of that name."""
    finding = of(check, **changes)[name]

    assert finding.verdict == verdict
    assert why in finding.why
    assert len(finding.why) > 10  # none warns without saying why
    assert what in finding.what


_ALL_WELL: dict[Check, list[tuple[Mapping[str, Any], str, str]]] = {
    checks.packages: [
        ({"packages": {"torch": "2.11.0+cu128"}}, "torch", "2.11.0+cu128"),
        ({"packages": {"torch": "2.13.0+cpu"}}, "torch", "2.13.0+cpu"),
        ({"packages": {"ipykernel": "10.0"}}, "ipykernel", "10.0"),
    ],
    checks.devices: [
        ({}, "GPUs", "none"),
        (reported(GPU, OTHER), "GPU 1", "H200, 1.0 of 140.0 GB used"),
        (reported(GpuReading(0, "GPU-cc", "GB10")), "GPU 0", "GB10"),
        (reported(GPU, OTHER), "driver", "570.1"),
    ],
    checks.topology: [
        (reported(links=((0, 1, "NV"), (0, 2, "PIX"))), "GPU links", "slowest: PIX"),
    ],
    checks.machine: [
        ({"world_size": 8}, "cores", "8 for 8 ranks"),
        ({"world_size": 2, "rank_hosts": ("n2", "n3")}, "hosts", "ranks run on n2, n3"),
        ({"world_size": 0, "rank_hosts": ("n2",)}, "cores", "8 for 0 ranks"),
    ],
    checks.shared_memory: [
        ({"shm": None}, "/dev/shm", "none"),
    ],
    checks.limits: [
        ({"limits": {"files": (UNLIMITED, UNLIMITED)}}, "open files", "unlimited"),
        ({"limits": {"locked memory": (65536, 65536)}}, "locked memory", "65.5 kB"),
    ],
    checks.leftovers: [
        ({}, "leftovers", "none from dead runs"),
        (
            {"runs": (Run("/t/run-a", run_owner.RUNNING, OWNER),)},
            "run run-a",
            "running, 0 processes, kernel 41 (/notebooks/a.ipynb)",
        ),
        (
            {"runs": (Run("/t/run-a", run_owner.RUNNING),)},
            "run run-a",
            "running, 0 processes, whose kernel is not known",
        ),
        ({"runs": (Run("/t/run-a", run_owner.STOPPED, OWNER),)}, "run run-a", "stopped"),
        ({"runs": (Run("/t/run-a", run_owner.ELSEWHERE, OWNER),)}, "run run-a", "else"),
    ],
}


@pytest.mark.parametrize(
    ("check", "changes", "name", "expected"),
    [(check, *row) for check, rows in _ALL_WELL.items() for row in rows],
)
def test_what_is_well_is_left_alone(
    check: Check, changes: Mapping[str, Any], name: str, expected: str
) -> None:
    """What was found is shown, and counts as well."""
    finding = of(check, **changes)[name]

    assert finding.verdict == OK
    assert expected in finding.found


def test_one_gpu_has_no_links() -> None:
    """Without a pair of GPUs there is nothing to say of links."""
    assert of(checks.topology, **reported(GPU)) == {}


def test_every_check_is_tested_here() -> None:
    """A new check needs a machine in the table above on which it complains."""
    assert set(_NOT_WELL) == set(checks.CHECKS)


def test_only_ranks_of_this_machine_count_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores, memory and shared memory are judged for them; the others' hosts are named."""
    here = socket.gethostname()

    facts = collect([here, here, "n3", "n2", "n2"])

    assert (facts.world_size, facts.rank_hosts) == (2, ("n2", "n3"))
    assert facts.launched == {}
    assert collect(["n2", "n2"]).world_size == 0
    monkeypatch.setattr("nbdist.core.units._made_up_hosts", {"a"})
    assert collect(["a", "a"]).world_size == 2  # a pretended host is this machine
    assert "CUDA_DEVICE_ORDER" in collect([here, here]).launched
