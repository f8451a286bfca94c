"""What the panel says of a strategy before it is applied: the numbers of a plan, and a verdict."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from nbdist.panel.plan import Limit, fitting, plan_of_models, planned_memory
from nbdist.planner.devices import DEVICES
from nbdist.planner.live_model import LiveModel, ParameterKind, by_kinds, load_of, shape_of
from nbdist.planner.plan import SearchSpace, plan
from nbdist.planner.workload import Workload
from nbdist.strategy.choose import choose

_CONFIG = {
    "model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 320, "vocab_size": 200, "num_hidden_layers": 3,
}  # fmt: skip
_COUNT = 568_192
# A transformer with a config that formulas know, and a net of somebody's own.
KNOWN = LiveModel(
    "lm", "Llama",
    (ParameterKind("float32", is_trained=True, count=_COUNT, size_bytes=4 * _COUNT),),
    config=_CONFIG, optimizer="AdamW", optimizer_word="adamw", is_language_model=True,
)  # fmt: skip
OWN = LiveModel(
    "net", "Net", (ParameterKind("float32", is_trained=True, count=12_480, size_bytes=4 * 12_480),),
    optimizer="AdamW", optimizer_word="adamw",
)  # fmt: skip
FSDP = choose("fsdp", {}, 2)
DDP = choose("ddp", {}, 2)
H100 = Limit(DEVICES["h100"].memory_bytes, has_gpu=True)


@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp", "tp", "pp"])
def test_numbers_are_those_of_a_plan(name: str) -> None:
    """Of %dist_plan with formulas, for the same batch and device."""
    load = load_of(KNOWN, Workload())
    engine = functools.partial(by_kinds, KNOWN)
    (row,) = plan(SearchSpace(
        shape_of(KNOWN), DEVICES["h100"], 2, load, strategy=name, engine=engine
    )).rows  # fmt: skip
    planned = planned_memory(choose(name, {}, 2), [KNOWN], H100)
    shown = plan_of_models(choose(name, {}, 2), [KNOWN], H100)

    assert planned == row.memory
    assert planned.activations > 0
    assert (shown.verdict, shown.share) == (row.verdict, row.share)


def test_it_says_what_stands_in_a_step_beside_the_limit() -> None:
    """States, then what comes in a step, its part of the device, the verdict, and the batch."""
    plan = plan_of_models(FSDP, [KNOWN], Limit(4e9, has_gpu=True), DDP)

    assert plan.text.startswith("each rank holds 4.5 MB between steps, now 9.1 MB: parameters ")
    assert " of 4.0 GB: 27%, safe (+ activations " in plan.text
    assert plan.text.endswith(
        "; assumed: batch 1 x 2,048 tokens (no prepared data loader has yielded a batch yet)"
    )


@pytest.mark.parametrize(("limit_bytes", "word"), [(4e9, "safe"), (1.2e9, "risky"), (1e9, "no")])
def test_the_verdict_is_a_plans(limit_bytes: float, word: str) -> None:
    """Safe below 80 % of the device."""
    assert plan_of_models(FSDP, [KNOWN], Limit(limit_bytes, has_gpu=True)).verdict == word


def test_without_a_limit_there_is_no_verdict() -> None:
    """Before the first sample nobody knows what there is."""
    plan = plan_of_models(FSDP, [KNOWN], Limit())

    assert (plan.verdict, plan.share) == ("", None)
    assert "in a step up to" in plan.text


def test_a_batch_that_was_seen_is_the_batch() -> None:
    """As the data loader gave it, of which there is less than of the assumed one."""
    seen = replace(KNOWN, inputs_shape=(8, 64))

    assert plan_of_models(FSDP, [seen], H100).text.endswith(
        "batch 8 x 64 tokens, from the data loader"
    )
    assert (
        planned_memory(FSDP, [seen], H100).activations
        < planned_memory(FSDP, [KNOWN], H100).activations
    )


def test_of_a_model_that_no_formula_knows_it_says_states_only() -> None:
    """And what the rest depends on; the verdict is open, unless states alone are too much."""
    plan = plan_of_models(FSDP, [OWN], H100)

    assert plan.text.startswith("each rank holds 99.8 kB between steps: parameters 25.0 kB + ")
    assert "states only: activations depend on the batch and on what net (Net) keeps" in plan.text
    assert "%dist_plan net --inputs NAME measures them in a run" in plan.text
    assert plan.verdict == "?"
    assert plan_of_models(FSDP, [OWN], Limit(90e3)).verdict == "no"


def test_what_fits_is_offered_for_a_comparison() -> None:
    """Not the current one, nor what the ranks or the model cannot have, nor what is too large."""
    on = (2, "cpu", "gloo", ())
    roomy, tight = Limit(4e9), Limit(planned_memory(FSDP, [KNOWN], Limit()).peak * 1.01)
    four = fitting([KNOWN], roomy, choose("ddp", {}, 4), (4, "cpu", "gloo", ()))
    short = fitting([KNOWN], roomy, choose("ddp", {"bf16": True}, 2), on)

    assert {"zero1", "fsdp", "tp"} <= {*fitting([KNOWN], roomy, DDP, on)}
    # A live model cannot be switched to fsdp1.
    assert not {"ddp", "single", "deepspeed", "fsdp1"} & {*fitting([KNOWN], roomy, DDP, on)}
    assert "tp" not in four  # two heads of keys and values
    assert "fsdp" in fitting([KNOWN], tight, DDP, on)
    assert "zero1" not in fitting([KNOWN], tight, DDP, on)
    assert "fsdp --bf16" in short
    assert "fsdp" in fitting([], Limit(), DDP, on)


def test_several_models_are_together_in_a_step() -> None:
    """One context of CUDA's for all of them."""
    single, two = (planned_memory(FSDP, models, H100) for models in ([KNOWN], [KNOWN, KNOWN]))

    assert two.states == 2 * single.states
    assert two.peak - two.overhead == pytest.approx(2 * (single.peak - single.overhead))


def test_what_does_not_go_with_the_model_is_said() -> None:
    """In the words of the plan; the strategy's own checks decide whether it can be applied."""
    plan = plan_of_models(choose("tp", {}, 4), [KNOWN], H100)

    assert plan.text.startswith("not planned: tp over 4 ranks does not divide")
    assert plan.is_possible
