"""Training under every strategy beside one process; plans and checkpoints beside the device."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from nbdist.commands.plan import check_step
from nbdist.notebook.session import Session
from nbdist.planner.view.check_view import PlanCheckView
from nbdist.planner.workload import Workload
from tests.gpu.places import device_type, on, strategy_of
from tests.support.training import MODEL

pytestmark = [pytest.mark.cluster, pytest.mark.engine]

STRATEGIES = ("ddp", "zero1", "fsdp", "tp", "ulysses", "pp", "cp")
# Losses of six steps in fp32: what orders of additions differ by, on a GPU as on a CPU.
CLOSE = 1e-4
# The same steps on the same batches: by plain torch alone, and by the same cell under a strategy.
_BOTH = (
    "n = world_size\n"
    + textwrap.dedent(MODEL)
    + """
import time

def alone():
    net, optimizer, scheduler = make(0)
    net.to(device)
    losses = []
    for x, y in DataLoader(data, batch_size=BATCH):
        loss = net(x.to(device), labels=y.to(device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def under():
    split = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    loader = DataLoader(data, batch_size=BATCH)
    model, optimizer, scheduler, loader = split.prepare(*make(0), loader)
    losses, times = [], []
    for x, y in loader:
        began_s = time.perf_counter()
        loss = model(x, labels=y)
        split.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(split.reduce(loss.detach(), "mean").item())
        times.append(time.perf_counter() - began_s)
    return losses, sorted(times)[len(times) // 2]
"""
)
_LAYERS = """
torch.manual_seed(0)
big = torch.nn.Sequential(*[torch.nn.Linear({width}, {width}) for _ in range({layers})])
big_optimizer = torch.optim.AdamW(big.parameters(), lr=1e-3)
big, big_optimizer = accelerator.prepare(big, big_optimizer)
def step():
    accelerator.backward(big(torch.ones(8, {width}, device=device)).square().mean())
    big_optimizer.step()
    big_optimizer.zero_grad()
def check():
    return sum(p.double().sum() for p in big.parameters()).item()
step(); step()
print(check())
"""
# Width and layers: 1.2 GB with AdamW's state on a GPU, 12 MB on a CPU.
_SIZES = {"cuda": (4096, 6), "cpu": (512, 4)}
_LLAMA = """
from transformers import AutoModelForCausalLM, LlamaConfig
torch.manual_seed(0)
lm = AutoModelForCausalLM.from_config(LlamaConfig(
    hidden_size={width}, num_attention_heads=8, num_key_value_heads=8,
    intermediate_size={inner}, vocab_size=4000, num_hidden_layers=6))
lm_optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3)
lm, lm_optimizer = accelerator.prepare(lm, lm_optimizer)
"""
_WIDTHS = {"cuda": (512, 1280), "cpu": (128, 320)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@on("cpu", "shared", "own")
def test_losses_are_those_of_one_process(ranks: Session, strategy: str, measured: Any) -> None:
    """The same cell under each strategy trains as plain torch does on all of the batch."""
    ranks.run(_BOTH)
    with strategy_of(ranks, strategy):
        result = ranks.run("import json; print(json.dumps([alone(), *under()]))")
    for rank in result.ranks:
        alone, under, step_s = json.loads(rank.text.splitlines()[-1])
        far = max(abs(a - b) for a, b in zip(alone, under, strict=True))
        measured("largest difference", f"{far:.1e}")
        measured("step, ms", round(1e3 * step_s, 1))

        assert far < CLOSE, (alone, under)
        assert under[-1] < under[0]


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@on("cpu", "shared", "own")
def test_a_plan_is_what_a_step_takes(ranks: Session, strategy: str, measured: Any) -> None:
    """States exactly, the peak closely: on a GPU by its allocator, in rooms of 512 bytes."""
    width, inner = _WIDTHS[device_type(ranks)]
    with strategy_of(ranks, strategy):
        ranks.run(_LLAMA.format(width=width, inner=inner))
        view = check_step("lm", "", Workload(batch=2, sequence=256))

    assert isinstance(view, PlanCheckView)
    rows = {check.what: check for check in view.checks}
    assert view.measured is not None
    measured("peak, MB", round(view.measured.peak / 1e6, 1))
    measured("predicted", f"{100 * (rows['peak'].error or 0):+.1f} %")
    assert view.measured.is_device == (device_type(ranks) == "cuda")
    assert all(check.predicted == check.measured for check in rows.values() if check.is_exact)
    assert rows["peak"].error == pytest.approx(0, abs=0.10)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on("cpu", "shared", "one", "own")
def test_a_checkpoint_beside_training(
    ranks: Session, strategy: str, tmp_path: Path, measured: Any
) -> None:
    """It pauses training for the copy to the host alone; loaded, parameters are those saved."""
    width, layers = _SIZES[device_type(ranks)]
    if strategy == "fsdp" and ranks.topology.world_size == 1:
        pytest.skip("one rank has no parts of parameters")
    with strategy_of(ranks, strategy):
        sums = [rank.text for rank in ranks.run(_LAYERS.format(width=width, layers=layers)).ranks]
        began = ranks.save(tmp_path / "saved", asynchronous=True)
        ranks.run("step()")
        saved = ranks.checkpoints.wait()
        other = [rank.text for rank in ranks.run("print(check())").ranks]
        began_s = time.monotonic()
        ranks.load(tmp_path / "saved")
        loaded_s = time.monotonic() - began_s
        again = [rank.text for rank in ranks.run("print(check())").ranks]
    gigabytes = began.copied_bytes / 1e9
    measured("GB", round(gigabytes, 2))
    measured("training paused, s", round(began.stall_s, 2))
    measured("saved and compared, s", round(saved.elapsed_s, 1) if saved else None)
    measured("loaded, s", round(loaded_s, 1))

    assert saved is not None
    assert saved.size_bytes > 0.9 * began.copied_bytes
    assert began.stall_s < saved.elapsed_s
    assert other != sums
    assert again == sums
