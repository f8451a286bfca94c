"""Scripts of torchrun's form the group of all ranks, and end it: in cells both calls do nothing."""

import re
from pathlib import Path

import pytest

from nbdist.cluster.kernel import rank_server
from tests.front.conftest import clear
from tests.support.kernel import Kernel
from tests.support.ranks import until
from tests.support.scripts import lines_of
from tests.support.terminal import nbdist

# As published tutorials are written: the variables of torchrun, a group, a step, the group's end.
_SCRIPT = """%%distributed
import os
import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

def setup():
    assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"]) > 0
    numbers = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    init_process_group("gloo", **numbers)

def main():
    setup()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    destroy_process_group()
    return round(total.item(), 6)

print(main())
"""
# Written as torch's tutorials are: each is run as torchrun does, by `nbdist run`, and in a cell.
_SCRIPTS = sorted((Path(__file__).parents[1] / "data/scripts").glob("*.py"))
_IN_PARITY = {"fsdp2", "pipeline", "tensor_parallel"}
# What Accelerate's barrier hands to the group, as if the rank's GPU were number 5.
_BARRIER = """%%distributed
from types import SimpleNamespace
from unittest import mock
from nbdist.engine import default_group
here = SimpleNamespace(place=SimpleNamespace(device="cuda:5"))
with (mock.patch.object(default_group, "this_rank", lambda: here),
      mock.patch.object(dist.ProcessGroup, "barrier") as barrier):
    accelerator.wait_for_everyone()
print(barrier.call_args.kwargs["opts"].device.index)
accelerator.wait_for_everyone()
"""
_REFUSED = {
    'dist.rpc.init_rpc("worker")': "nbdist does not run torch.distributed.rpc on ranks",
    'dist.init_process_group("nccl")': "asks for nccl, but the ranks have gloo",
    "dist.init_process_group(world_size=5)": "got world_size=5, but it is 2 here",
    "dist.init_process_group(rank=7)": "got rank=7, but it is",
}


def test_a_script_of_torchruns_runs_again_and_again(fresh: Kernel) -> None:
    """Each time with the same result; what had no effect is said once, and the ranks stay whole."""
    kernel = fresh
    first, second = kernel.run(_SCRIPT), kernel.run(_SCRIPT)
    checked, restarted = kernel.run("%dist_check"), kernel.run("%dist_restart 1", 60)
    third = kernel.run(_SCRIPT)

    for cell in first, second, checked, restarted, third:
        assert cell.status == "ok", cell.visible
    assert first.text == second.text
    assert first.text.startswith("[0-1] ")
    assert first.stderr.count("the ranks have a group already, which is used") == 1
    assert first.stderr.count("nbdist keeps the group of all ranks") == 1
    assert second.stderr == ""
    assert third.text == first.text


def test_the_users_own_group_is_destroyed(kernel: Kernel) -> None:
    """And what has no effect on the group that is formed is named."""
    cell = kernel.run(
        "%%distributed\npair = dist.new_group([0, 1])\ndist.destroy_process_group(pair)\n"
        "print(len(dist.distributed_c10d._world.pg_map))"
    )
    named = kernel.run(
        "%%distributed\nfrom datetime import timedelta\n"
        "dist.init_process_group(init_method='env://', timeout=timedelta(seconds=5))"
    )

    assert cell.status == "ok", cell.visible
    assert cell.text == "[0-1] 1\n"
    assert "init_method, timeout had no effect" in named.stderr


@pytest.mark.parametrize("call", _REFUSED)
def test_another_group_is_refused(kernel: Kernel, call: str) -> None:
    """With what the ranks have, and how to start others."""
    cell = kernel.run(f"%%distributed\n{call}")

    assert cell.error is not None
    assert _REFUSED[call] in cell.visible


def test_accelerates_end_and_state(fresh: Kernel) -> None:
    """`end_training` can be followed by another cell; PartialState counts all ranks at once.

    `wait_for_everyone` waits on the rank's own GPU, not on that with the number LOCAL_RANK.
    """
    kernel = fresh
    state = kernel.run(
        "%%distributed\nfrom accelerate import PartialState\nstate = PartialState()\n"
        "with state.split_between_processes([1, 2, 3, 4, 5]) as part:\n"
        "    print(state.num_processes, state.process_index == rank, len(part) == 3 - rank)"
    )
    ended = kernel.run(
        "%%distributed\nfrom accelerate import Accelerator\nmine = Accelerator()\n"
        "net = mine.prepare(torch.nn.Linear(4, 4))\nmine.backward(net(torch.ones(2, 4)).sum())\n"
        "mine.end_training()"
    )
    barrier = kernel.run(_BARRIER)
    again = kernel.run("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())")

    assert state.text == "[0-1] 2 True True\n", state.visible
    assert ended.status == "ok", ended.visible
    assert barrier.text == "[0-1] 5\n", barrier.visible
    assert again.text == "[0-1] 2.0\n"


def _lines(text: str) -> set[str]:
    """What a program printed on ranks, without these in front."""
    return {re.sub(r"^\[[\d-]+\] ", "", line) for line in text.splitlines()}


@pytest.fixture(scope="module")
def _imported() -> None:
    """What forks the ranks of programs has all that these import."""
    rank_server.preload()
    assert until(rank_server.is_ready, 60)


@pytest.mark.usefixtures("_imported")
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            path, id=path.stem, marks=[pytest.mark.parity] if path.stem in _IN_PARITY else []
        )
        for path in _SCRIPTS
    ],
)
def test_a_tutorials_script_gives_what_torchrun_does(
    kernel: Kernel, script: Path, tmp_path: Path
) -> None:
    """Unchanged, as a program of its own and pasted into a cell, its main guard included."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / script.name).write_text(script.read_text())
    by_torch = lines_of(tmp_path / script.name)
    expected = {line for lines in by_torch for line in lines}
    done = nbdist("run", str(script), "-n", "2", folder=tmp_path)
    cell = kernel.run(f"%%distributed\n{script.read_text()}", 60)
    clear(kernel)

    assert done.returncode == 0, done.stderr
    assert cell.status == "ok", cell.visible
    assert len(expected) in {1, 2}
    assert _lines(done.stdout) == expected
    assert _lines(cell.text) == expected
