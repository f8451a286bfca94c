"""A run's kernel is told from one that has ended, and from a stranger with its pid."""

from dataclasses import replace

import pytest

from nbdist.cluster import run_owner
from nbdist.cluster.run_owner import Run, RunOwner, state
from nbdist.core.host import Machine

HERE = Machine("box", "boot-1", "pid:[1]")
OWNER = RunOwner(100, "777", HERE, 0.0, "/notebooks")


@pytest.mark.parametrize(
    ("machine", "start_now", "expected"),
    [
        (HERE, "777", run_owner.RUNNING),
        (HERE, "778", run_owner.DEAD),  # another process got the pid
        (HERE, None, run_owner.DEAD),
        (replace(HERE, boot="boot-0"), "777", run_owner.DEAD),  # the machine was started again
        (replace(HERE, host="other"), "777", run_owner.ELSEWHERE),
        (replace(HERE, host="other"), None, run_owner.ELSEWHERE),
        (replace(HERE, host="other", boot="boot-0"), None, run_owner.ELSEWHERE),
        (replace(HERE, pid_space="pid:[2]"), None, run_owner.ELSEWHERE),  # another container
        (replace(HERE, boot=""), None, run_owner.ELSEWHERE),
    ],
)
def test_only_a_kernel_that_has_certainly_ended_is_dead(
    machine: Machine, start_now: str | None, expected: str
) -> None:
    """Dead is what has another start time or none on the same machine, or is of an earlier boot."""
    assert state(replace(OWNER, machine=machine), HERE, start_now) == expected


def test_a_system_without_start_times_goes_by_the_pid() -> None:
    """On macOS, where no ticks are told, a pid that is there counts as the kernel."""
    owner = replace(OWNER, start="")

    assert state(owner, HERE, "") == run_owner.RUNNING
    assert state(owner, HERE, None) == run_owner.DEAD


def test_nobody_written_down_is_unknown() -> None:
    """Without an owner nothing is known."""
    assert state(None, HERE, "777") == run_owner.UNKNOWN


def test_a_runs_name_is_its_folders() -> None:
    """The last part of the path names it."""
    assert Run("/tmp/nbdist-1/run-x", run_owner.DEAD).name == "run-x"
