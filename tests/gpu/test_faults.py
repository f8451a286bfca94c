"""What goes wrong in a cell is told, ends in time, and costs no variable: on GPUs as on CPUs.

All of it goes through cells of a session, its watchdog and its recovery, as a user's would.
"""

from __future__ import annotations

import os
import signal
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nbdist.errors import Deadlock, DistributedError, Interrupted, NbdistError
from nbdist.notebook.session import Session
from tests.gpu.places import GRACE_S, device_type, on
from tests.support.ranks import until

# A certain deadlock is told within 2 s of its look (docs/reliability.md), aborted after the grace
# time, and NCCL may take 10 s for that; a new communicator of a few ranks takes a second or two.
TOLD_S, ABORT_S = 3.0, 15.0
BACK_S = TOLD_S + GRACE_S + ABORT_S
RESTART_S = 90.0
KEEP = "kept = torch.full((4,), rank + 1.0, device=device)"
SUM = "y = kept.clone(); dist.all_reduce(y); print(y.tolist())"
# A wait for the device that ends by itself after some 3 s: on a GPU in one kernel.
SPIN = {
    "cuda": "torch.cuda._sleep(5_000_000_000)",
    "cpu": "import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass",
}
FILL = {
    "cuda": "def fill():\n    parts = [torch.ones(2**28, device=device)]  # 1 GiB each\n"
    "    while True:\n        parts.append(parts[0] * 2)\nfill()",
    "cpu": "torch.empty(10**15)",
}
# After a device assert nothing works on the GPU for the rest of the process' life.
LOSE = {
    "cuda": "torch.ones(3, device=device)[torch.tensor([99], device=device)]\n"
    "torch.cuda.synchronize()",
    "cpu": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}


def printed(session: Session, code: str) -> list[str]:
    return [rank.text.strip() for rank in session.run(code).ranks]


def kept_and_right(session: Session) -> bool:
    """Whether all ranks have their `kept`, and the next all_reduce of it is right."""
    n = session.topology.world_size
    return printed(session, SUM) == [str([n * (n + 1) / 2.0] * 4)] * n


def indented(code: str) -> str:
    return textwrap.indent(code, "    ")


def last(code: str) -> str:
    """The code, on the last rank alone."""
    return f"if rank == world_size - 1:\n{indented(code)}\n"


@pytest.mark.parametrize("where", ["default group", "new group"])
@on("cpu", "shared", "own", "all")
def test_a_hang_is_told_and_aborted(ranks: Session, where: str, measured: Any) -> None:
    """The last rank never calls: the others are named, come back, and can make meshes after it."""
    n = ranks.topology.world_size
    ranks.run(f"{KEEP}\nlater = dist.new_group(list(range(world_size)))")
    group = ", group=later" if where == "new group" else ""
    began_s = time.monotonic()
    with pytest.raises(Deadlock) as caught:
        ranks.run(
            "if rank < world_size - 1:\n"
            f"    dist.all_reduce(kept{group})\n    v = kept.sum().item()"
        )
    back_s = time.monotonic() - began_s
    ranks.run(KEEP)  # what was reduced in place is void
    is_right = kept_and_right(ranks)
    measured("back after, s", round(back_s, 1))
    in_groups = printed(
        ranks,
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=('dp', 'tp'))\n"
        "for group in (later, mesh.get_group('dp')):\n"
        "    x = torch.ones(1, device=device); dist.all_reduce(x, group=group); print(x.item())",
    )

    assert "all_reduce" in str(caught.value)
    assert f"rank {n - 1}" in str(caught.value)
    assert back_s < BACK_S
    assert is_right
    assert printed(ranks, "print('v' in globals())") == ["False"] * n
    assert in_groups == [f"{float(n)}\n{float(n)}"] * n


@on("cpu", "shared", "own", "all")
def test_unmatched_calls_do_not_end_well(ranks: Session) -> None:
    """A cell in which one rank calls once more than the others fails, wherever its call waits."""
    ranks.run(KEEP)
    with pytest.raises(Deadlock, match="all_reduce"):
        ranks.run(
            "x = torch.ones(1, device=device)\ndist.all_reduce(x)\n"
            "if rank == 0:\n    dist.all_reduce(x)"
        )

    assert kept_and_right(ranks)


@on("cpu", "shared", "one", "own")
def test_a_busy_device_is_no_deadlock(ranks: Session, measured: Any) -> None:
    """A rank that computes for seconds before its call is waited for, and nothing is aborted."""
    began_s = time.monotonic()
    sums = printed(
        ranks,
        last(SPIN[device_type(ranks)])
        + "x = torch.ones(1, device=device); dist.all_reduce(x); print(x.item())",
    )
    measured("s", round(time.monotonic() - began_s, 1))

    assert sums == [f"{float(ranks.topology.world_size)}"] * ranks.topology.world_size


@on("cpu", "shared", "one", "own", "all")
def test_the_stop_button(ranks: Session, tmp_path: Path, measured: Any) -> None:
    """It ends a cell whose ranks wait for one that computes; nothing is lost by it."""
    ranks.run(KEEP)
    mark = tmp_path / "begun"
    pressed_s: list[float] = []

    def press() -> None:
        if until(mark.exists, 30):
            pressed_s.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    turn = f"{SPIN[device_type(ranks)]}\ntorch.ones(1, device=device).sum().item()"
    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(Interrupted):
        ranks.run(
            "import pathlib\nx = torch.ones(1, device=device)\n"
            + last(f"pathlib.Path({str(mark)!r}).touch()\nfor _ in range(5):\n{indented(turn)}")
            + "dist.all_reduce(x)\nx.item()"
        )
    pressing.join()
    back_s = time.monotonic() - pressed_s[0]
    measured("back after, s", round(back_s, 1))

    assert back_s < BACK_S
    assert kept_and_right(ranks)


@on("cpu", "shared", "one", "own")
def test_running_out_of_memory(ranks: Session) -> None:
    """The rank that ran out is named, not those that wait for it; then all of it is free again."""
    n = ranks.topology.world_size
    ranks.run(KEEP)
    with pytest.raises(DistributedError, match="memory") as caught:
        ranks.run(last(FILL[device_type(ranks)]) + SUM)
    is_free = printed(
        ranks, "import gc; gc.collect(); print(torch.cuda.memory_allocated() < 2**30)"
    )

    assert caught.value.ranks == (n - 1,)
    assert is_free == ["True"] * n
    assert kept_and_right(ranks)


@on("cpu", "shared", "one", "own", "all")
def test_a_lost_rank_is_replaced(ranks: Session, measured: Any) -> None:
    """A broken device, or a dead process: the next cell says so, %dist_restart replaces the rank.

    The others keep what they have.
    """
    n = ranks.topology.world_size
    ranks.run(KEEP)
    with pytest.raises(NbdistError):
        ranks.run(last(LOSE[device_type(ranks)]))
    with pytest.raises(NbdistError, match=r"No process comes back|%dist_restart") as caught:
        ranks.run("x = torch.ones(1, device=device); dist.all_reduce(x); x.item()")
    began_s = time.monotonic()
    ranks.restart([n - 1], RESTART_S)
    measured("restart, s", round(time.monotonic() - began_s, 1))

    assert str(n - 1) in str(caught.value)
    values = printed(ranks, "print(kept.tolist() if 'kept' in globals() else None)")
    assert values == [str([rank + 1.0] * 4) for rank in range(n - 1)] + ["None"]
    ranks.run(KEEP, ranks=[n - 1])
    assert kept_and_right(ranks)
