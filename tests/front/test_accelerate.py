"""Ordinary Accelerate code runs unchanged on the ranks, and torch stays out of the kernel."""

import pytest

from tests.front.conftest import start_ranks
from tests.support.kernel import Kernel

_DATA = """%%distributed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

generator = torch.Generator().manual_seed(1)
x = torch.randn(32, 4, generator=generator)
y = x.sum(1, keepdim=True)
"""
# One step on the whole batch in one process, from the same start.
_ALONE = """%%distributed
alone = network()
nn.functional.mse_loss(alone(x), y).backward()
"""
_TOGETHER = """%%distributed
shared, shards = accelerator.prepare(
    network(), DataLoader(TensorDataset(x, y), batch_size=16)
)
for inputs, targets in shards:
    accelerator.backward(nn.functional.mse_loss(shared(inputs), targets))
rows = accelerator.gather(torch.tensor([len(inputs)])).tolist()
apart = max(
    (a.grad - b.grad).abs().max().item()
    for a, b in zip(alone.parameters(), shared.parameters(), strict=True)
)
"""


@pytest.fixture
def ready(kernel: Kernel) -> Kernel:
    """The shared kernel with data and a network on each rank."""
    cell = kernel.run(_DATA)

    assert cell.status == "ok", cell.visible
    return kernel


def test_every_rank_has_the_promised_names(kernel: Kernel) -> None:
    """rank, world_size, local_rank, device, gpu_id, torch, dist, accelerator agree."""
    cell = kernel.run(
        "%%distributed\nimport torch as t, torch.distributed as d, accelerate\n"
        "(dist.get_rank() == rank == local_rank == accelerator.process_index,\n"
        " world_size == dist.get_world_size() == accelerator.num_processes,\n"
        " device.type == accelerator.device.type == 'cpu', gpu_id is None, torch is t, dist is d,\n"
        " isinstance(accelerator, accelerate.Accelerator), str(accelerator.distributed_type))"
    )

    assert cell.visible == (
        "[0-1] (True, True, True, True, True, True, True, 'DistributedType.MULTI_CPU')\n"
    )


def test_gradients_are_those_of_the_whole_batch(ready: Kernel) -> None:
    """Two half batches give the gradient that one process gets from the whole, within 1e-6."""
    for code in (_ALONE, _TOGETHER):
        cell = ready.run(code)
        assert cell.status == "ok", cell.visible
    rows = ready.run("%%distributed\nrows")
    close = ready.run("%%distributed\napart < 1e-6")

    assert rows.text == "[0-1] [16, 16]\n"
    assert close.text == "[0-1] True\n"


def test_an_accelerator_made_by_the_user_works(ready: Kernel) -> None:
    """`Accelerator()` as in every example joins the same ranks and prepares a model."""
    cell = ready.run(
        "%%distributed\nfrom accelerate import Accelerator\nown = Accelerator()\n"
        "wrapped = own.prepare(network())\n"
        "own.process_index == rank, own.num_processes, type(wrapped).__name__, own.device.type"
    )

    assert cell.visible == "[0-1] (True, 2, 'DistributedDataParallel', 'cpu')\n"


def test_accelerates_helpers_work(ready: Kernel) -> None:
    """print, is_main_process, gather and wait_for_everyone do what their page says."""
    cell = ready.run(
        "%%distributed\naccelerator.print('once')\naccelerator.wait_for_everyone()\n"
        "(accelerator.gather(torch.tensor([rank])).tolist(), accelerator.is_main_process)"
    )

    assert cell.text == "[0] once\n[1] ([0, 1], False)\n[0] ([0, 1], True)\n"


def test_the_kernel_never_imports_torch(ready: Kernel) -> None:
    """After starting, running and training, neither torch nor accelerate is in the kernel."""
    for code in ("%dist_status", "%sync", "%%distributed --tabs\n1", "%%rank[1]\nrank"):
        assert ready.run(code).status == "ok"
    cell = ready.run("import sys\n[m for m in ('torch', 'accelerate') if m in sys.modules]")

    assert cell.plain == ["[]"]


def test_a_seed_and_an_accelerator_with_settings_of_the_users_own(without_ranks: Kernel) -> None:
    """%dist_init --seed sets torch, numpy and random alike on all ranks.

    And the usual first line of a script works: `accelerator` goes by its settings then.
    """
    kernel = without_ranks
    start_ranks(kernel, "-n 2 --seed 11")
    drawn = kernel.run(
        "%%distributed\nimport random, numpy\n"
        "print(torch.rand(1).item(), numpy.random.rand(), random.random())"
    )
    made = kernel.run(
        "%%distributed\nfrom accelerate import Accelerator\n"
        "mine = Accelerator(mixed_precision='bf16', gradient_accumulation_steps=4)\n"
        "print(mine.mixed_precision, mine.num_processes, isinstance(accelerator, Accelerator))"
    )
    used = kernel.run("%%distributed\nprint(accelerator.mixed_precision, accelerator.device)")

    assert drawn.text.startswith("[0-1] ")
    assert made.text == "[0-1] bf16 2 True\n"
    # A rank may come a second later than the other: its line is its own then.
    said = {line.partition("] ")[2] for line in used.text.splitlines() if line.startswith("[")}
    assert {line.partition(":")[0] for line in said} == {"bf16 cpu"}


@pytest.mark.parametrize(
    "use",
    [
        "wait_for_everyone()",
        pytest.param("print('')", marks=pytest.mark.parity),
        pytest.param("is_main_process", marks=pytest.mark.parity),
    ],
)
def test_the_first_use_may_be_a_method(fresh: Kernel, use: str) -> None:
    """Whatever is used first, the accelerator then knows both ranks and waits for them.

    Accelerate refuses a second set of settings in a process from then on; the way out is told.
    """
    fresh.run(f"%%distributed\naccelerator.{use}")
    cell = fresh.run(
        "%%distributed\naccelerator.wait_for_everyone()\n"
        "print(accelerator.num_processes, accelerator.process_index, type(accelerator).__name__)"
    )

    refused = fresh.run(
        "%%distributed\nfrom accelerate import Accelerator\nAccelerator(mixed_precision='bf16')"
    )

    assert cell.text == "[0] 2 0 Accelerator\n[1] 2 1 Accelerator\n"
    assert "create yours before anything uses `accelerator`" in refused.failure.evalue
