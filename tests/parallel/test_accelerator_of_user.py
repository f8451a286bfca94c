"""Whose Accelerator it is: ours, made lazily, Accelerate's own; and DeepSpeed's engine under it."""

import json
import re
from pathlib import Path

import pytest
from accelerate import ParallelismConfig

from nbdist.errors import OptionError
from nbdist.parallel.accelerator import guard
from tests.support.torch_ranks import run_ranks
from tests.support.training import MODEL, needs_deepspeed

OWN = """
    import contextlib, io
    import accelerate
    from accelerate.utils import AutocastKwargs
    from nbdist.parallel.accelerator.accelerator import LazyAccelerator

    lazy = LazyAccelerator()
    is_lazy = isinstance(lazy, accelerate.Accelerator) and not vars(lazy)
    refused = [
        refusal(lambda: Accelerator(fsdp_plugin=object())),
        refusal(lambda: Accelerator(dynamo_backend="inductor")),
    ]
    use("fsdp")
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        mine = accelerate.Accelerator(mixed_precision="bf16")
        accelerate.Accelerator()
        inner = accelerate.Accelerator(gradient_accumulation_steps=4)
    plain = type(mine.prepare(torch.nn.Linear(2, 2))).__name__
    names = [type(lazy).__name__, lazy.mixed_precision, lazy.gradient_accumulation_steps,
             type(lazy).__name__, registry.current().options.precision]
    a = torch.ones(2, 2)
    with lazy.autocast():
        kinds = [str((a @ a).dtype)]
    with lazy.autocast(AutocastKwargs(enabled=False)):
        kinds.append(str((a @ a).dtype))
    use("ddp")
    with lazy.autocast():
        kinds.append(str((a @ a).dtype))

    seeded = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7))
    class Set(torch.utils.data.Dataset):
        epochs = []
        def __len__(self): return 16
        def __getitem__(self, index): return torch.tensor(index)
        def set_epoch(self, epoch): self.epochs.append(epoch)
    loader = seeded.prepare(DataLoader(Set(), batch_size=2, shuffle=True))
    def order(epoch):
        loader.set_epoch(epoch)
        return [x for batch in loader for x in seeded.gather(batch).tolist()]
    orders = [order(0), order(3), order(0)]
    none = refusal(lambda: seeded.prepare(DataLoader(Set(), batch_size=None)))
    done(is_lazy=is_lazy, refused=refused, text=text.getvalue(), plain=plain, names=names,
         kinds=kinds, orders=orders, is_loader=isinstance(loader, DataLoader), none=none)
"""


def test_ours_accelerates_and_the_lazy_one(tmp_path: Path) -> None:
    """Accelerate's own says once that it means ddp; plugins are refused; seeds of epochs hold."""
    results = run_ranks(tmp_path, 2, MODEL + OWN)

    for result in results:
        assert result["is_lazy"]
        assert "Accelerator(fsdp_plugin=...)" in result["refused"][0]
        assert "%dist_strategy fsdp" in result["refused"][0]
        assert "--compile" in result["refused"][1]
        assert result["text"].count("The strategy is fsdp.") == 1
        assert "from nbdist import Accelerator" in result["text"]
        assert result["plain"] == "DistributedDataParallel"
        # It takes over what the user's own says, as the shared state does.
        assert result["names"] == ["LazyAccelerator", "bf16", 4, "Accelerator", "bf16"]
        assert result["kinds"] == ["torch.bfloat16", "torch.float32", "torch.float32"]
        assert result["orders"][0] == result["orders"][2] != result["orders"][1]
        assert sorted(result["orders"][0]) == list(range(16))
        assert result["is_loader"]
        assert "batch_size=None" in result["none"]
    assert results[0]["orders"] == results[1]["orders"]


SHARED = """
    from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
    from nbdist.parallel.accelerator.accelerator import LazyAccelerator
    from nbdist.planner.rank.describe_model import optimizer_of
    from nbdist.switch.rank.switch import switch

    def settings(own):
        return [dict(own.gradient_state.plugin_kwargs), own.mixed_precision,
                str(own.dataloader_config), own.scaler_handler.init_scale,
                own.project_dir, own.step_scheduler_with_optimizer]
    def steps(own):
        loader = DataLoader(TensorDataset(torch.arange(16.).view(16, 1)), batch_size=1)
        net = nn.Linear(1, 1)
        net, optimizer, loader = own.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader)
        count = 0
        for (x,) in loader:
            with own.accumulate(net):
                own.backward(net(x).mean())
                optimizer.step()
                count += own.sync_gradients
        return count
    before, after = LazyAccelerator(), LazyAccelerator()
    is_one = before.is_main_process == (rank == 0)
    mine = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=4, sync_with_dataloader=False, adjust_scheduler=False),
        dataloader_config=DataLoaderConfiguration(even_batches=False, use_seedable_sampler=True),
        kwargs_handlers=[GradScalerKwargs(init_scale=8.0)], project_dir="runs",
        step_scheduler_with_optimizer=False)
    first = settings(mine)
    mine_net = nn.Linear(1, 1)
    sgd = torch.optim.SGD(mine_net.parameters(), 0.1)
    looked_at = optimizer_of(mine_net, None) is sgd, type(after).__name__
    counts = [steps(mine)]
    is_one = is_one and after.is_main_process == (rank == 0)
    counts += [steps(mine), steps(after), steps(before)]
    second = settings(mine)
    switch(choose("ddp", {"accumulate": 2}, n))
    late = LazyAccelerator()
    during = late.gradient_accumulation_steps
    switch(choose("ddp", {}, n))
    mine.gradient_accumulation_steps = 8
    switch(choose("ddp", {"accumulate": 2}, n))
    switch(choose("ddp", {}, n))
    done(is_one=is_one, first=first, second=second, looked_at=looked_at, counts=counts,
         during=during, end=mine.gradient_state.plugin_kwargs)
"""


def test_the_lazy_one_leaves_the_users_settings(tmp_path: Path) -> None:
    """Set up before or after, 8 batches are 2 steps of 4 each, also after switches."""
    for result in run_ranks(tmp_path, 2, MODEL + SHARED):
        assert result["is_one"]
        assert result["looked_at"] == [True, "LazyAccelerator"]
        assert result["counts"] == [2, 2, 2, 2]
        assert result["first"] == result["second"]
        assert result["first"][0] == {
            "num_steps": 4, "sync_with_dataloader": False, "adjust_scheduler": False
        }  # fmt: skip
        assert result["during"] == 2
        assert result["end"] == {**result["first"][0], "num_steps": 8}


DEEPSPEED = """
    folder = os.environ["FOLDER"]
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    use("deepspeed", stage=3)
    net, optimizer, scheduler = make(0)
    text = refusal(lambda: accelerator.prepare(net))
    model, optimizer = accelerator.prepare(net, optimizer)
    accelerator.save_state(folder)
    whole = accelerator.get_state_dict(model)
    base = accelerator.unwrap_model(model) is net
    del model, optimizer, net
    use("ddp")
    net, optimizer, scheduler = make(5)
    model, optimizer = accelerator.prepare(net, optimizer)
    accelerator.load_state(folder)
    same = all(torch.equal(v, whole[k]) for k, v in accelerator.get_state_dict(model).items())
    done(text=text, same=same, base=base)
"""


@needs_deepspeed
def test_what_deepspeed_saves_is_loaded_under_ddp(tmp_path: Path) -> None:
    """But for moments; model and optimizer are prepared in one call."""
    results = run_ranks(tmp_path / "run", 2, MODEL + DEEPSPEED, FOLDER=str(tmp_path))

    for result in results:
        assert "Give both in one call" in result["text"]
        assert result["same"]
        assert result["base"]


def test_wiring_is_listed() -> None:
    """What Accelerate would take for a strategy is refused by name: each is an argument of it."""
    import inspect

    import accelerate

    from nbdist.parallel.accelerator.guard import _PLUGINS

    accepted = set(inspect.signature(accelerate.Accelerator).parameters)

    assert set(_PLUGINS) <= accepted, json.dumps(sorted(set(_PLUGINS) - accepted))


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
