"""What the system's files say, of both versions of control groups."""

import signal
from pathlib import Path

import pytest

from nbdist.core import procfs
from nbdist.core.procfs import MemoryGroup


def test_counts_of_all_kinds_of_files() -> None:
    """cgroup v2, v1, the whole machine; a kernel too old to count, and an empty file."""
    v2 = "low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n"
    v1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"
    vmstat = "nr_free_pages 1\noom_kill 7\nnuma_hit 2\n"

    assert [procfs.oom_kills(text) for text in (v2, v1, vmstat)] == [3, 5, 7]
    assert procfs.oom_kills("oom_kill_disable 0\nunder_oom 0\n") is None
    assert procfs.oom_kills("") is None


@pytest.mark.parametrize(
    ("text", "limit"),
    [("2147483648\n", 2**31), ("max\n", None), ("9223372036854771712\n", None), ("", None)],
)
def test_limits_of_both_kinds(tmp_path: Path, text: str, limit: int | None) -> None:
    """ "max" and v1's largest number are no limits."""
    for name, version in (("memory.max", "v2"), ("memory.limit_in_bytes", "v1")):
        (tmp_path / name).write_text(text)

        assert MemoryGroup(tmp_path, version).limit_bytes() == limit


def test_the_control_group_of_a_process() -> None:
    """v1 has a line for memory, v2 the one without controllers; both may be there."""
    assert procfs.parse_cgroups("0::/user.slice/a.scope\n") == {"v2": "/user.slice/a.scope"}
    assert procfs.parse_cgroups("4:memory:/jobs/7\n1:cpu,cpuacct:/jobs/7\n") == {"v1": "/jobs/7"}
    assert procfs.parse_cgroups("4:cpu,memory:/jobs/7\n0::/\n") == {"v1": "/jobs/7", "v2": "/"}
    assert procfs.lineage("/jobs/7") == ["jobs/7", "jobs", ""]
    assert procfs.lineage("/") == [""]


def test_the_state_of_a_process_with_an_awkward_name() -> None:
    """The name may contain what follows it."""
    assert procfs.parse_stat("123 (a b) T 9) R 1 123 123 0 -1")[:2] == ["R", "1"]
    assert procfs.parse_stat("123 (python) T 1 123")[0] == "T"
    assert procfs.parse_stat("") == []


def test_whether_a_signal_is_caught() -> None:
    """Bit number - 1 of the mask, as the system writes it."""
    status = "Name:\tpython\nSigIgn:\t0000000001001000\nSigCgt:\t0000040180000002\n"

    assert procfs.catches(status, signal.SIGINT)
    assert procfs.catches(status, 43)
    assert not procfs.catches(status, signal.SIGTERM)
    assert not procfs.catches("", signal.SIGINT)


def test_a_control_groups_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the machine's memory is not what a rank may take; of all limits the least.

    Files that were read once are given back before anything is killed.
    """
    files = {
        "/proc/self/cgroup": "0::/pod/box\n",
        "/sys/fs/cgroup/pod/box/memory.max": "max\n",
        "/sys/fs/cgroup/pod/box/memory.current": "100\n",
        "/sys/fs/cgroup/pod/memory.max": "1000000\n",
        "/sys/fs/cgroup/pod/memory.current": "300000\n",
    }
    monkeypatch.setattr(procfs, "text", lambda path: files.get(str(path), ""))
    free = procfs.below_limits("self")
    files["/sys/fs/cgroup/pod/memory.stat"] = "anon 5\ninactive_file 20000\n"
    with_files = procfs.below_limits("self")
    files["/sys/fs/cgroup/pod/memory.current"] = "2000000\n"

    assert free == [700_000]
    assert with_files == [720_000]
    assert procfs.below_limits("self") == [0]
