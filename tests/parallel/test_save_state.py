"""A state saved under one strategy is loaded under another, on other numbers of ranks too."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nbdist.errors import NbdistError
from nbdist.parallel.accelerator import save_state
from nbdist.parallel.accelerator.accelerator import Accelerator
from tests.programs.rank import rank, refusal
from tests.programs.saving import Curves, accelerator, goes_on, is_same, on, steps, values
from tests.programs.training import BATCH, Net, groups, tokens, use
from tests.support.torch_ranks import on_ranks, run_ranks


def batches_after(path: str, loader: Any) -> Any:
    """The loader begins anew, so it is the user who leaves out what was trained on."""
    accelerator().load_state(path)
    return accelerator().skip_first_batches(loader, 3)


def saves_and_loads(**given: Any) -> Curves:
    return goes_on(**given, save=accelerator().save_state, load=batches_after)


def also_misfits(folder: str, **given: Any) -> None:
    """A state of a smaller model, and none, are refused and change nothing."""
    saves_and_loads(folder=folder, **given)
    use("ddp")
    model = accelerator().prepare(Net(width=32))
    before = values(model)

    def refused(source: str) -> str:
        kinds = NbdistError, ValueError
        return refusal(lambda: accelerator().load_state(f"{folder}/{source}"), *kinds)

    misfit = refused("fsdpNet")
    assert "does not fit Net: embed.weight has shape (24, 16) there and (24, 32) here" in misfit
    assert "and 29 more" in misfit
    assert "nowhere" in refused("nowhere")
    assert is_same(model, before)


def test_a_state_goes_on_under_another_strategy(tmp_path: Path) -> None:
    """Weights, moments, groups, rate, order of the data, own objects; tied weights."""
    saved = [("fsdp", {}, "Net"), ("pp", {}, "Tied")]
    loaded = [("zero1", {}, "Net", "fsdp"), ("pp", {}, "Net", "fsdp"), ("fsdp", {}, "Tied", "pp")]
    on(tmp_path, 2, also_misfits, saved, loaded, BLOCKS="2")

    tensors = load_file(tmp_path / "ppTied" / "model.safetensors")
    assert ("embed.weight" in tensors) != ("head.weight" in tensors)
    assert "scale" in tensors
    assert "spare" not in tensors
    optimizer = torch.load(tmp_path / "fsdpNet" / "optimizer.bin")
    assert optimizer["state"]["embed.weight"]["exp_avg"].shape == (24, 16)


def test_a_state_goes_from_fsdp1_and_to_it(tmp_path: Path) -> None:
    """The way round that a refused switch names; FSDP1 keeps all values in flat parameters."""
    saved = [("fsdp1", {"shard": "grad-op"}, "Tied"), ("zero1", {}, "Net")]
    loaded = [("ddp", {}, "Tied", "fsdp1"), ("fsdp1", {}, "Net", "zero1")]
    on(tmp_path, 2, saves_and_loads, saved, loaded, BLOCKS="2")

    tensors = load_file(tmp_path / "fsdp1Tied" / "model.safetensors")
    assert tensors["blocks.0.mlp.up_proj.weight"].shape == (32, 16)
    assert "spare" not in tensors


@pytest.mark.parity
def test_a_state_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Saved on 4 ranks, by fsdp x tp and by 4 stages; loaded there otherwise, on 2 and on 1."""
    saved = [("fsdp", {"tp": 2}, "Net"), ("pp", {}, "Tied")]
    loaded = [("pp", {"tp": 2}, "Net", "fsdp"), ("zero1", {}, "Tied", "pp")]
    curves = on(tmp_path, 4, saves_and_loads, saved, loaded)
    for size, name, other in ((2, "ddp", "fsdp"), (1, "single", "ddp")):
        loaded = [(name, {}, "Net", "fsdp"), (other, {}, "Tied", "pp")]
        on(tmp_path, size, saves_and_loads, [], loaded, curves=curves)


def reads_accelerates_own(folder: str) -> None:
    torch.manual_seed(0)
    plain = accelerate.Accelerator()
    net = Net()
    model, optimizer = plain.prepare(net, torch.optim.AdamW(groups(net), lr=1e-2))
    steps(plain, model, optimizer)
    for is_safe in (True, False):
        plain.save_state(f"{folder}/{is_safe}", safe_serialization=is_safe)
    dist.barrier()
    curve = steps(plain, model, optimizer)
    for name, is_safe in (("fsdp", True), ("zero1", False)):
        use(name)
        accelerator = Accelerator()
        net = Net()
        parts = accelerator.prepare(net, torch.optim.AdamW(groups(net), lr=1e-2))
        accelerator.load_state(f"{folder}/{is_safe}")
        assert steps(accelerator, *parts) == pytest.approx(curve, abs=2e-6), name


def test_a_state_of_accelerates_own_is_read(tmp_path: Path) -> None:
    """Saved by plain Accelerate under DDP, in both of its formats, gone on with here."""
    given = {"folder": str(tmp_path)}
    run_ranks(tmp_path / "run", 2, reads_accelerates_own, arguments=given, BLOCKS="2")


@on_ranks(2)
def test_what_a_new_rank_prepares_is_what_the_others_prepare() -> None:
    """Its counts begin with 0: nothing is left out of a state, and no older one is taken for it."""
    use("ddp")
    accelerator = Accelerator()
    older = [torch.optim.SGD(Net().parameters(), lr=0.1) for _ in range(3 * (rank == 0))]
    accelerator._optimizers.extend(older)
    accelerator._optimizers.clear()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(tokens, batch_size=BATCH)
    parts = accelerator.prepare(model, optimizer, scheduler, loader)

    def kept() -> list[int]:
        lists = accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders
        return [len(weak_list) for weak_list in lists]

    save_state.agree(accelerator)
    assert kept() == [1, 1, 1]
    if rank == 0:  # a cell that failed here has left one more
        accelerator._optimizers.extend(older[:1])
    save_state.agree(accelerator)
    assert kept() == [1, 1, 1]
    assert parts
