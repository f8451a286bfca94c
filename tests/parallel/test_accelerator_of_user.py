"""Whose Accelerator it is: ours, made lazily, Accelerate's own; and DeepSpeed's engine under it."""

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)  # fmt: skip
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nbdist.errors import OptionError
from nbdist.parallel.accelerator.accelerator import Accelerator, LazyAccelerator
from nbdist.parallel.base import guard
from nbdist.parallel.live import registry
from nbdist.planner.rank.describe_model import optimizer_of
from nbdist.strategy.choose import choose
from nbdist.switch.rank.switch import switch
from tests.programs.rank import everyone, n, rank, refusal, user
from tests.programs.training import make, use
from tests.support.torch_ranks import NEEDS_DEEPSPEED, on_ranks, run_ranks


@on_ranks(2)
def test_ours_accelerates_and_the_lazy_one() -> None:
    """Accelerate's own says once that it means ddp; plugins are refused; seeds of epochs hold."""
    lazy = LazyAccelerator()
    assert isinstance(lazy, accelerate.Accelerator)
    assert not vars(lazy)
    sentence = refusal(lambda: Accelerator(fsdp_plugin=object()))
    assert "Accelerator(fsdp_plugin=...)" in sentence
    assert "%dist_strategy fsdp" in sentence
    assert "--compile" in refusal(lambda: Accelerator(dynamo_backend="inductor"))
    use("fsdp")
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        mine = accelerate.Accelerator(mixed_precision="bf16")
        accelerate.Accelerator()
        accelerate.Accelerator(gradient_accumulation_steps=4)
    assert text.getvalue().count("The strategy is fsdp.") == 1
    assert "from nbdist import Accelerator" in text.getvalue()
    assert type(mine.prepare(nn.Linear(2, 2))).__name__ == "DistributedDataParallel"
    # It takes over what the user's own says, as the shared state does.
    assert type(lazy).__name__ == "LazyAccelerator"
    assert (lazy.mixed_precision, lazy.gradient_accumulation_steps) == ("bf16", 4)
    assert type(lazy).__name__ == "Accelerator"
    assert registry.current().options.precision == "bf16"

    def product_in(*handlers: Any) -> torch.dtype:
        with lazy.autocast(*handlers):
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    assert product_in() == torch.bfloat16
    assert product_in(AutocastKwargs(enabled=False)) == torch.float32
    use("ddp")
    assert product_in() == torch.float32
    seeds_of_epochs_hold()


class Told(Dataset):
    """Is told the epoch."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor(index)

    def set_epoch(self, epoch):
        pass


def seeds_of_epochs_hold() -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    seeded = Accelerator(dataloader_config=config)
    loader = seeded.prepare(DataLoader(Told(), batch_size=2, shuffle=True))
    assert isinstance(loader, DataLoader)

    def order(epoch: int) -> list[int]:
        loader.set_epoch(epoch)
        return [x for batch in loader for x in seeded.gather(batch).tolist()]

    orders = [order(0), order(3), order(0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == list(range(16))
    assert everyone(orders) == [orders] * n
    none = refusal(lambda: seeded.prepare(DataLoader(Told(), batch_size=None)))
    assert "batch_size=None" in none


def settings(own: Any) -> list[Any]:
    words = ("mixed_precision", "project_dir", "step_scheduler_with_optimizer")
    values = [getattr(own, word) for word in words]
    scale = own.scaler_handler.init_scale
    return [dict(own.gradient_state.plugin_kwargs), str(own.dataloader_config), scale, *values]


def steps(own: Any) -> int:
    """Of 8 batches for each rank."""
    loader = DataLoader(TensorDataset(torch.arange(16.0).view(16, 1)), batch_size=1)
    net: Any = nn.Linear(1, 1)
    net, optimizer, loader = own.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader)
    count = 0
    for (x,) in loader:
        with own.accumulate(net):
            own.backward(net(x).mean())
            optimizer.step()
            count += own.sync_gradients
    return count


@on_ranks(2)
def test_the_lazy_one_leaves_the_users_settings() -> None:
    """Set up before or after, 8 batches are 2 steps of 4 each, also after switches."""
    before, after = LazyAccelerator(), LazyAccelerator()
    assert before.is_main_process == (rank == 0)
    every_4 = {"num_steps": 4, "sync_with_dataloader": False, "adjust_scheduler": False}
    mine = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(**every_4),
        dataloader_config=DataLoaderConfiguration(even_batches=False, use_seedable_sampler=True),
        kwargs_handlers=[GradScalerKwargs(init_scale=8.0)],
        project_dir="runs",
        step_scheduler_with_optimizer=False,
    )
    first = settings(mine)
    assert first[0] == every_4
    net = nn.Linear(1, 1)
    user.sgd = torch.optim.SGD(net.parameters(), 0.1)
    assert optimizer_of(net, None) is user.sgd
    assert type(after).__name__ == "LazyAccelerator"
    assert steps(mine) == 2
    assert after.is_main_process == (rank == 0)
    assert [steps(mine), steps(after), steps(before)] == [2] * 3
    assert settings(mine) == first
    switch(choose("ddp", {"accumulate": 2}, n))
    late = LazyAccelerator()
    assert late.gradient_accumulation_steps == 2
    switch(choose("ddp", {}, n))
    mine.gradient_accumulation_steps = 8
    switch(choose("ddp", {"accumulate": 2}, n))
    switch(choose("ddp", {}, n))
    assert mine.gradient_state.plugin_kwargs == {**every_4, "num_steps": 8}


def saves_and_loads(folder: str) -> None:
    config = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(dataloader_config=config)
    use("deepspeed", stage=3)
    net, optimizer, _ = make(0)
    assert "Give both in one call" in refusal(lambda: accelerator.prepare(net))
    model, optimizer = accelerator.prepare(net, optimizer)
    accelerator.save_state(folder)
    whole = accelerator.get_state_dict(model)
    assert accelerator.unwrap_model(model) is net
    del model, optimizer, net
    use("ddp")
    net, optimizer, _ = make(5)
    model, optimizer = accelerator.prepare(net, optimizer)
    accelerator.load_state(folder)
    assert all(torch.equal(v, whole[k]) for k, v in accelerator.get_state_dict(model).items())


@NEEDS_DEEPSPEED
def test_what_deepspeed_saves_is_loaded_under_ddp(tmp_path: Path) -> None:
    """But for moments; model and optimizer are prepared in one call."""
    run_ranks(tmp_path / "run", 2, saves_and_loads, arguments={"folder": str(tmp_path)})


def test_wiring_is_listed() -> None:
    """What Accelerate would take for a strategy is refused by name: each is an argument of it."""
    assert {*guard._PLUGINS} <= {*inspect.signature(accelerate.Accelerator).parameters}


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"tp_size": 2, "dp_shard_size": 4}, "%dist_strategy fsdp --dp 4 --tp 2"),
        (
            {"dp_replicate_size": 2, "dp_shard_size": 4},
            "%dist_strategy fsdp --shard hybrid --replicas 2 --dp 8",
        ),
        ({"tp_size": 4}, "%dist_strategy --tp 4"),
        ({"dp_shard_size": 2, "cp_size": 2}, "%dist_strategy cp --dp 2 --cp 2"),
        ({"sp_size": 2}, "%dist_strategy ulysses --cp 2"),
        ({}, "%dist_strategy ddp"),
    ],
)
def test_a_parallelism_config_is_refused_with_its_own_line(
    sizes: dict[str, int], line: str
) -> None:
    """The sizes are those that were typed."""
    with pytest.raises(OptionError, match=f"use, for example, {re.escape(line)}$"):
        guard.refuse_strategies({"parallelism_config": ParallelismConfig(**sizes)})
