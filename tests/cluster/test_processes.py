"""How processes of a run are ended."""

import subprocess
import sys

import psutil

from nbdist.cluster.kernel.processes import terminate

# Starts a process, and never takes note of its end.
NEGLIGENT = """
import subprocess, sys
print(subprocess.Popen(["sleep", "300"]).pid, flush=True)
sys.stdin.read()
"""
LONGER_THAN_THE_TEST_S = 1000.0


def test_an_ended_process_is_not_waited_for_where_its_parent_takes_no_note() -> None:
    """As in a container whose first process takes none of its orphans, kept ranks among them."""
    parent = subprocess.Popen(
        [sys.executable, "-c", NEGLIGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        terminate([pid], LONGER_THAN_THE_TEST_S)

        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        parent.communicate()
