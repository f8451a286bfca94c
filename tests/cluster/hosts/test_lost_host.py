"""A host that is cut off: its ranks come back on another one, and the others keep everything."""

import json
import subprocess
import sys

from tests.support.hosts import Hosts

# Run on the head. Rank 0, whose process has the store, is on node1, which is cut off while this
# waits for a line. Prints one JSON line at its end.
SCRIPT = """
import json, os, sys, time
import nbdist
from nbdist.errors import NbdistError

began_s = time.monotonic()

def note(what):
    print(f"{time.monotonic() - began_s:.1f} s: {what}", file=sys.stderr, flush=True)

def texts(code, ranks=None):
    return [rank.text.strip() for rank in session.run(code, ranks=ranks).ranks]

session = nbdist.start(3, hosts="node1:1,node2:3", gpus="none")
texts("kept = [rank]\\npair = dist.new_group([1, 2])")
note("started")
print("up", flush=True)
sys.stdin.readline()
try:
    told = texts("dist.all_reduce(torch.ones(1))")
except NbdistError as error:
    told = str(error)
note("told")
alone = texts(
    "total = torch.ones(1) * rank\\ndist.all_reduce(total, group=pair)\\nprint(total.item(), kept)",
    [1, 2],
)
note("worked alone")
done = session.restart()
note("restarted")
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
    """Its rank is told as unreachable; ranks 1 and 2 go on alone, then all three together.

    The sums: 1 + 2 over the pair, 0 + 1 + 2 over all.
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
    assert result["alone"] == ["3.0 [1]", "3.0 [2]"]
    assert result["ranks"] == [0]
    assert result["sums"] == ["3.0"] * 3
    assert result["kept"] == ["None", "[1]", "[2]"]
    assert result["local"] == ["2 3", "0 3", "1 3"]
    assert result["hosts"] == ["node2"] * 3
