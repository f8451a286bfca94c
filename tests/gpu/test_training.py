"""Training under every strategy beside one process; plans and checkpoints beside the device."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from nbdist.commands.plan import check_step, make_plan
from nbdist.notebook.session import Session
from nbdist.planner.models import CONFIGS
from nbdist.planner.request import PlanRequest
from nbdist.planner.view.check_view import PlanCheckView
from tests.gpu.places import device_type, on, strategy_of

STRATEGIES = ("ddp", "zero1", "fsdp", "tp", "ulysses", "pp", "cp")
# Losses of six steps in fp32: what orders of additions differ by, on a GPU as on a CPU.
CLOSE = 1e-4
_BOTH = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from tests.gpu import programs
print(json.dumps([programs.trained_alone(), *programs.trained_under()]))
"""
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


# Options of strategies, and how far losses of six steps may be from those in fp32.
_HALF = 0.05
OPTIONS: dict[str, tuple[str, dict[str, object], float]] = {
    "ddp in bf16": ("ddp", {"bf16": True}, _HALF),
    "ddp in fp16": ("ddp", {"fp16": True}, _HALF),
    "fsdp in bf16": ("fsdp", {"bf16": True}, _HALF),
    "tp in bf16": ("tp", {"bf16": True}, _HALF),
    "pp in bf16": ("pp", {"bf16": True}, _HALF),
    "cp in bf16": ("cp", {"bf16": True}, _HALF),
    "fused ddp": ("ddp", {"fused": True}, CLOSE),
    "compiled ddp": ("ddp", {"compile": True}, CLOSE),
    "recomputed fsdp": ("fsdp", {"checkpoint": "full"}, CLOSE),
    "offloaded fsdp": ("fsdp", {"offload": "cpu"}, CLOSE),
}


def assert_trains_as_alone(
    ranks: Session, case: tuple[str, dict[str, object], float], measured: Any
) -> None:
    """Losses under a strategy with its options are, within a limit, those of plain torch."""
    strategy, options, limit = case
    with strategy_of(ranks, strategy, **options):
        result = ranks.run(_BOTH)
    for rank in result.ranks:
        alone, under, step_s = json.loads(rank.text.splitlines()[-1])
        far = max(abs(a - b) for a, b in zip(alone, under, strict=True))
        measured("largest difference", f"{far:.1e}")
        measured("step, ms", round(1e3 * step_s, 1))

        assert far < limit, (alone, under)
        assert under[-1] < under[0]


@pytest.mark.parametrize("name", OPTIONS)
@on("cpu", "shared", "own")
def test_options_train_as_fp32_does(ranks: Session, name: str, measured: Any) -> None:
    """In half precision nearly, else as closely as a strategy without options."""
    if name == "offloaded fsdp" and device_type(ranks) == "cpu":
        pytest.skip("a CPU rank has nowhere to offload to")
    assert_trains_as_alone(ranks, OPTIONS[name], measured)


_TIMED = """
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model(**{config!r})
with device:
    timed = AutoModelForCausalLM.from_config(config)
timed_optimizer = torch.optim.AdamW(timed.parameters(), lr=1e-5)
timed, timed_optimizer = accelerator.prepare(timed, timed_optimizer)
ids = torch.randint(0, config.vocab_size, ({batch}, {sequence}), device=device)

def step():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    accelerator.backward(timed(input_ids=ids, labels=ids).loss)
    timed_optimizer.step()
    timed_optimizer.zero_grad()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)

for _ in range(3):
    step()
torch.cuda.reset_peak_memory_stats()
times = sorted(step() for _ in range(10))
peak = torch.cuda.max_memory_allocated()

import json, re
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CUDA]) as recorded:
    step()
GROUPS = {{"products": "gemm|nvjet|cutlass|xmma|splitK", "attention": "flash|fmha|attention",
          "optimizer": "multi_tensor|adam"}}
kernels = {{"launches": 0}}
for event in recorded.key_averages():
    group = next((g for g, names in GROUPS.items() if re.search(names, event.key, re.I)), "others")
    kernels[group] = kernels.get(group, 0) + event.self_device_time_total / 1e3
    kernels["launches"] += event.count
print(json.dumps([times[5], peak, kernels]))
"""
# Model, batch, tokens of a sample, options.
TIMES: dict[str, tuple[str, int, int, dict[str, object]]] = {
    "gpt2, 8 x 1024, bf16": ("gpt2", 8, 1024, {"precision": "bf16"}),
    "gpt2, 8 x 1024, fp32": ("gpt2", 8, 1024, {"precision": "fp32"}),
    "gpt2-large, 4 x 1024, bf16": ("gpt2-large", 4, 1024, {"precision": "bf16"}),
    "llama-3.2-1b, 2 x 2048, bf16": ("llama-3.2-1b", 2, 2048, {"precision": "bf16"}),
    "llama-3.2-1b, 2 x 2048, bf16, recomputed": (
        "llama-3.2-1b", 2, 2048, {"precision": "bf16", "checkpoint": "full"},
    ),
    "llama-3.2-1b, 2 x 2048, bf16, fused": (
        "llama-3.2-1b", 2, 2048, {"precision": "bf16", "fused": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TIMES)
@on("one")
def test_a_step_beside_its_plan(ranks: Session, name: str, measured: Any) -> None:
    """The memory is as planned; the times of both go on the page, whatever they are."""
    model, batch, sequence, options = TIMES[name]
    request = PlanRequest("single", 1, batch=batch, sequence=sequence)
    plan = make_plan(model, request, options).plan
    assert plan is not None
    (row,) = plan.rows
    with strategy_of(ranks, "single", **options):
        code = _TIMED.format(config=dict(CONFIGS[model]), batch=batch, sequence=sequence)
        milliseconds, peak, kernels = json.loads(ranks.run(code)[0].text.splitlines()[-1])
    assert row.time is not None
    assert row.memory is not None

    planned = 1e3 * row.time.step_s
    # The allocator counts nothing of what CUDA itself takes.
    peak_error = (row.memory.peak - row.memory.overhead) / peak - 1
    measured("step, ms", round(milliseconds, 1))
    measured("planned, ms", round(planned, 1))
    measured("error", f"{100 * (planned / milliseconds - 1):+.0f} %")
    measured("launches", kernels.pop("launches"))
    for group, group_ms in kernels.items():
        measured(f"{group}, ms", round(group_ms, 1))
    measured("peak, GB", round(peak / 1e9, 2))
    measured("error of the peak", f"{100 * peak_error:+.0f} %")


@pytest.mark.parametrize("strategy", STRATEGIES)
@on("cpu", "shared", "own")
def test_losses_are_those_of_one_process(ranks: Session, strategy: str, measured: Any) -> None:
    """The same cell under each strategy trains as plain torch does on all of the batch."""
    assert_trains_as_alone(ranks, (strategy, {}, CLOSE), measured)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@on("cpu", "shared", "own")
def test_a_plan_is_what_a_step_takes(ranks: Session, strategy: str, measured: Any) -> None:
    """States exactly, the peak closely: on a GPU by its allocator, in rooms of 512 bytes."""
    width, inner = _WIDTHS[device_type(ranks)]
    with strategy_of(ranks, strategy):
        ranks.run(_LLAMA.format(width=width, inner=inner))
        view = check_step("lm", PlanRequest(batch=2, sequence=256))

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
