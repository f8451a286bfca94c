"""A run's kernel is told from one that has ended, and from a stranger with its pid."""

from dataclasses import replace

import pytest

from nbdist.cluster import run_owner
from nbdist.cluster.run_owner import Run, RunOwner, state
from nbdist.core.host import Machine

HERE = Machine("box", "boot-1", "pid:[1]")
OWNER = RunOwner(100, "777", HERE, 0.0, "/notebooks")


def on(**changes: str) -> RunOwner:
    """The same owner on another machine."""
    return replace(OWNER, machine=replace(HERE, **changes))


@pytest.mark.parametrize(
    ("owner", "start_now", "expected"),
    [
        (OWNER, "777", run_owner.RUNNING),
        (OWNER, "778", run_owner.DEAD),  # another process got the pid
        (OWNER, None, run_owner.DEAD),
        (on(boot="boot-0"), "777", run_owner.DEAD),  # the machine was started again
        (on(host="other"), "777", run_owner.ELSEWHERE),
        (on(host="other"), None, run_owner.ELSEWHERE),
        (on(host="other", boot="boot-0"), None, run_owner.ELSEWHERE),
        (on(pid_space="pid:[2]"), None, run_owner.ELSEWHERE),  # another container
        (on(boot=""), None, run_owner.ELSEWHERE),
        # On macOS, where no ticks are told, a pid that is there counts as the kernel.
        (replace(OWNER, start=""), "", run_owner.RUNNING),
        (replace(OWNER, start=""), None, run_owner.DEAD),
        (None, "777", run_owner.UNKNOWN),  # nobody is written down
    ],
)
def test_only_a_kernel_that_has_certainly_ended_is_dead(
    owner: RunOwner | None, start_now: str | None, expected: str
) -> None:
    """Dead is what has another start time or none on the same machine, or is of an earlier boot."""
    assert state(owner, HERE, start_now) == expected


def test_a_runs_name_is_its_folders() -> None:
    """The last part of the path names it."""
    assert Run("/tmp/nbdist-1/run-x", run_owner.DEAD).name == "run-x"
