"""Processes with their children, and the limits under which they live."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nbdist.core import procfs
from nbdist.monitor import process_usage
from nbdist.monitor.process_usage import SLOWLY_S, Usages

MIB = 2**20
# Takes 50 MiB, then lets a child work and waits for it; then a child that only sleeps.
PARENT = """
import subprocess, sys
held = bytearray(50 * 2**20)
work = "import time\\nwhile time.process_time() < 0.5: pass"
subprocess.run([sys.executable, "-c", work])
sleep = "import time; held = bytearray(30 * 2**20); print('there', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", sleep])
input()
child.kill()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process with one child that has ended and one that lives."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "there\n"
        yield process
        process.stdin.write("\n")


def test_a_process_counts_with_its_children(parent: "subprocess.Popen[str]") -> None:
    """Time of children that have ended too, memory of those that live; strangers left out."""
    usages = Usages(psutil).read([parent.pid, 2**22 + 1])
    both = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]
    resident = sum(process.memory_info().rss for process in both)
    usage = usages[parent.pid]

    assert set(usages) == {parent.pid}
    assert usage.cpu_s >= 0.5
    assert usage.rss_bytes > 80 * MIB
    assert abs(usage.rss_bytes - resident) < 5 * MIB
    assert usage.pss_bytes is None or 80 * MIB < usage.pss_bytes <= usage.rss_bytes


def test_children_are_looked_for_now_and_then(parent: "subprocess.Popen[str]") -> None:
    """One that ends takes its memory along at once; a new one is found after some seconds."""
    clock = [100.0]
    usages = Usages(psutil, lambda: clock[0])
    (child,) = psutil.Process(parent.pid).children()
    before = usages.read([parent.pid])[parent.pid]
    child.kill()
    psutil.wait_procs([child], timeout=0.2)  # a zombie, until its parent asks for it
    after = usages.read([parent.pid])[parent.pid]
    clock[0] += SLOWLY_S
    later = usages.read([parent.pid])[parent.pid]

    assert before.rss_bytes - after.rss_bytes > 25 * MIB
    assert later.rss_bytes <= after.rss_bytes + MIB


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 1000 bytes with 300 of them used, its control groups written by the test."""
    monkeypatch.setattr(procfs, "PROC", tmp_path / "proc")
    monkeypatch.setattr(procfs, "CGROUPS", tmp_path / "cgroup")
    return tmp_path


class Played:
    """psutil as far as it is asked."""

    Error = psutil.Error

    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid

        def cpu_times(self) -> tuple[float, ...]:
            """User, system, and both of children; iowait counts for nobody."""
            return (1.0, 2.0, 4.0, 8.0, 100.0)

        def memory_info(self) -> SimpleNamespace:
            return SimpleNamespace(rss=7)

    def virtual_memory(self) -> SimpleNamespace:
        return SimpleNamespace(total=1000, available=700)

    def process_iter(self) -> list[SimpleNamespace]:
        """Process 5 is a child of 4, which is one of 3."""
        pairs = ((3, 1), (4, 3), (5, 4), (6, 1))
        return [
            SimpleNamespace(pid=pid, ppid=lambda parent=parent: parent) for pid, parent in pairs
        ]


def files(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_a_control_group_the_machine_is_the_limit(system: Path) -> None:
    """And without /proc the whole is read by psutil: three generations, no proportional sets."""
    assert Usages(Played()).read([3])[3] == process_usage.Usage(45.0, 21, None, 300, 1000)


def test_the_group_with_the_least_room_is_the_limit(system: Path) -> None:
    """Of a group and those above it; file pages that can go count as free."""
    files(system / "proc/3", cgroup="0::/outer/inner\n")
    files(system / "cgroup/outer/inner", memory__max="max\n")
    files(
        system / "cgroup/outer",
        memory__max="500\n",
        memory__current="450\n",
        memory__stat="anon 400\ninactive_file 40\n",
    )
    usage = Usages(Played()).read([3])[3]

    assert (usage.host_used_bytes, usage.host_limit_bytes, usage.is_group) == (410, 500, True)


def test_a_group_with_more_room_than_the_machine_is_no_limit(system: Path) -> None:
    """The machine runs out first. Groups of the first version are read as well."""
    files(system / "proc/3", cgroup="4:memory:/job\n0::/\n")
    files(
        system / "cgroup/memory/job",
        memory__limit_in_bytes="5000\n",
        memory__usage_in_bytes="60\n",
        memory__stat="total_inactive_file 20\n",
    )
    roomy = Usages(Played()).read([3])[3]
    files(system / "cgroup/memory/job", memory__limit_in_bytes="100\n")
    tight = Usages(Played()).read([3])[3]

    assert (roomy.host_used_bytes, roomy.host_limit_bytes, roomy.is_group) == (300, 1000, False)
    assert (tight.host_used_bytes, tight.host_limit_bytes, tight.is_group) == (40, 100, True)
