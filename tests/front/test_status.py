"""%dist_status says who waits for whom, with stacks, while a cell hangs and afterwards."""

import re
from pathlib import Path

from tests.support.kernel import Kernel

# Asked from another thread of the notebook, as a panel would: the cell below runs meanwhile.
_ASK_WHILE_IT_HANGS = """
import threading, time, nbdist
from nbdist.cluster import view as ranks
seen = []
def ask():
    session = nbdist.session()
    while not any("finished" in line for line in session.status().waits):
        time.sleep(0.05)
    status = session.status(wants_stacks=True)
    seen.append(ranks.status(session.topology, status, 1.0, "in the notebook").text)
asking = threading.Thread(target=ask)
asking.start()
"""
_HANG = """%%distributed
def deep(x):
    dist.all_reduce(x)
if rank == 0:
    deep(torch.ones(3))
"""


def test_status_tells_who_waits_and_shows_the_stack_of_a_rank_blocked_in_cxx(
    kernel: Kernel,
) -> None:
    """State, line and stack, while the main thread of the rank is inside Gloo; nothing later."""
    kernel.run(_ASK_WHILE_IT_HANGS)
    hang = kernel.run(_HANG)
    shown = kernel.run("asking.join(10); print(seen[0])").text
    later = kernel.run("%dist_status --stacks").plain[0]

    hang.check_failure("Deadlock")
    assert hang.stderr.count("\n") == 1  # told once
    assert "Traceback" not in hang.failure.traceback
    line = next(line for line in shown.splitlines() if line.startswith("rank 0 waits in "))
    assert line.startswith("rank 0 waits in all_reduce(float32[3]) at line 3 of cell [")
    assert line.endswith("dist.all_reduce(x); rank 1 finished without calling it")
    row = next(line for line in shown.splitlines() if line.lstrip().startswith("0 "))
    assert ", waiting in all_reduce(float32[3]) at line 3 of cell [" in row
    stack = shown.split("\nrank 0\n")[1]
    assert "deep(torch.ones(3))" in stack
    assert "dist.all_reduce(x)" in stack
    assert "/nbdist/" not in stack
    assert "IPython" not in stack
    assert " waits in " not in later
    assert "waiting in" not in later
    assert later.count(" idle ") == 2


def test_an_idle_rank_whose_main_thread_is_busy_answers(kernel: Kernel, tmp_path: Path) -> None:
    """As while it imports what later cells use: nothing of the user's runs there."""
    gate = str(tmp_path / "gate")
    kernel.run(f"import os; os.mkfifo({gate!r})")
    kernel.run(
        "%%rank 1\nimport asyncio\n"
        f"asyncio.get_running_loop().call_soon(lambda: open({gate!r}).close())"
    )

    shown = kernel.run("%dist_status").plain[0]
    kernel.run(f"open({gate!r}, 'w').close()")

    assert len(re.findall(r"\bidle +[\d.]+ MB host", shown)) == 2, shown


def test_a_call_that_nobody_waits_for_fails_its_cell(kernel: Kernel) -> None:
    """Otherwise it pairs with the next cell's first call, whose sum is wrong without a word."""
    cell = kernel.run(
        "%%distributed\nhandle = None\n"
        "if rank == 0: handle = dist.all_reduce(torch.full((1,), 100.0), async_op=True)"
    )
    after = kernel.run("%%distributed\nx = torch.ones(1); dist.all_reduce(x); print(x.item())")
    begun = kernel.run("%%distributed\nhandle = dist.all_reduce(x, async_op=True)")
    waited = kernel.run("%%distributed\nhandle.wait(); print(x.item())")

    cell.check_failure(
        "Deadlock",
        r"^rank 0 called all_reduce\(float32\[1\]\) at line 3 of .* and has not waited for it; "
        r"rank 1 finished without calling it",
    )
    assert after.text == "[0-1] 2.0\n"
    assert begun.status == "ok", begun.visible
    assert waited.text == "[0-1] 4.0\n"


def test_a_hang_in_two_groups_names_them(impatient: Kernel) -> None:
    """All ranks are in the same line; what differs is the group."""
    cell = impatient.run(
        "%%distributed\npair = [dist.new_group([0, 1], group_desc=name) for name in ('tp', 'dp')]\n"
        "dist.all_reduce(torch.ones(4), group=pair[rank])"
    )
    impatient.run("%%distributed\nfor group in pair: dist.destroy_process_group(group)\ndel pair")

    cell.check_failure(
        "Deadlock",
        r"^rank 0 waits in all_reduce\(float32\[4\]\) in group tp at line 3 of cell ",
        r"; rank 1 waits in all_reduce\(float32\[4\]\) in group dp at .*; they wait for each other",
    )


def test_an_error_of_all_ranks_recovers_nothing(kernel: Kernel) -> None:
    """Their calls are in step: nothing is touched, nothing said."""
    kernel.run(
        "%%distributed\nlayer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))"
    )
    kernel.run("%%distributed\nlayer(torch.ones(1, 2)).sum().backward()")
    cell = kernel.run("%%distributed\n1 / 0")
    left = kernel.run("%%distributed\nprint(layer.module.weight.grad is not None)\ndel layer")

    assert cell.failure.evalue == "ranks 0-1 raised ZeroDivisionError: division by zero"
    assert cell.stderr == ""
    assert left.text == "[0-1] True\n"
