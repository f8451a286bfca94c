"""A host that is cut off: its ranks come back on another one, and the others keep everything."""

import json
import subprocess
import sys

import pytest

from tests.support.hosts import Hosts

pytestmark = [pytest.mark.cluster, pytest.mark.engine]

# Run on the head. Ranks 0 and 1 are on node1, which is cut off while it waits for a line; rank 0's
# process had the store. Prints one JSON line at its end.
SCRIPT = """
import json, os, sys
import nbdist
from nbdist.errors import NbdistError

def texts(code, ranks=None):
    return [rank.text.strip() for rank in session.run(code, ranks=ranks).ranks]

session = nbdist.start(4, hosts="node1:2,node2:4", gpus="none")
texts("kept = [rank]\\npair = dist.new_group([2, 3])")
print("up", flush=True)
sys.stdin.readline()
try:
    told = texts("dist.all_reduce(torch.ones(1))")
except NbdistError as error:
    told = str(error)
alone = texts(
    "total = torch.ones(1) * rank\\ndist.all_reduce(total, group=pair)\\nprint(total.item(), kept)",
    [2, 3],
)
done = session.restart()
result = {
    "told": told,
    "alone": alone,
    "ranks": done.ranks,
    "notes": done.notes,
    "sums": texts("total = torch.ones(1) * rank\\ndist.all_reduce(total)\\nprint(total.item())"),
    "kept": texts("print(globals().get('kept'))"),
    "local": texts("import os; print(os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])"),
    "hosts": [place.host for place in session.topology.ranks],
}
print(json.dumps(result), flush=True)
session.stop()
"""


def test_ranks_of_a_host_that_is_cut_off_come_back_on_another(hosts: Hosts) -> None:
    """Told as unreachable, not as ended; ranks 2 and 3 live on alone, then all four together.

    The sums: 2 + 3 over the pair, 0 + 1 + 2 + 3 over all.
    """
    python = hosts.popen(
        hosts.head, [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert python.stdin is not None
    assert python.stdout is not None
    try:
        lines = iter(python.stdout.readline, "")
        assert "up\n" in lines
        hosts.cut("node1")
        python.stdin.write("\n")
        python.stdin.flush()
        printed = list(lines)
    finally:
        hosts.heal("node1")
    assert printed, "the script ended without a result"
    result = json.loads(printed[-1])

    assert "node1 cannot be reached" in result["told"]
    assert result["alone"] == ["5.0 [2]", "5.0 [3]"]
    assert result["ranks"] == [0, 1]
    assert result["sums"] == ["6.0"] * 4
    assert result["kept"] == ["None", "None", "[2]", "[3]"]
    assert result["local"] == ["2 4", "3 4", "0 4", "1 4"]
    assert result["hosts"] == ["node2"] * 4
