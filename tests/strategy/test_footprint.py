"""Bytes held and sent are the published formulas', exact for the number of ranks."""

from collections.abc import Mapping

import pytest

from nbdist.strategy.choose import choose
from nbdist.strategy.footprint import (
    CALLS,
    HELD,
    RECIPES,
    held_bytes,
    held_formula,
    recipe_of,
    sent_bytes,
    sent_phrases,
    split_axes,
)

GB = 1e9
PARAMETERS = 7e9


@pytest.mark.parametrize(
    ("name", "settings", "world_size", "recipe", "gigabytes"),
    [
        # ZeRO paper, figure 1 and section 5, at exact N: 16/(4 + 12/N), 16/(2 + 14/N), 16/N.
        ("ddp", {}, 8, "mixed", 112.0),
        ("zero1", {}, 8, "mixed", 38.5),
        ("deepspeed", {"stage": 1}, 8, "mixed", 38.5),
        ("deepspeed", {"stage": 2}, 8, "mixed", 26.25),
        ("deepspeed", {"stage": 3}, 8, "mixed", 14.0),
        ("deepspeed", {"stage": 1}, 64, "mixed", 29.3125),  # 3.82 times less, and not yet 4
        ("deepspeed", {"stage": 2}, 64, "mixed", 15.53125),  # 7.21, and not yet 8
        ("deepspeed", {"stage": 3}, 64, "mixed", 1.75),
        ("fsdp", {}, 8, "fp32", 14.0),
        ("fsdp", {"shard": "grad-op"}, 8, "fp32", 14.0),
        ("fsdp", {"shard": "hybrid"}, 8, "fp32", 28.0),
        ("zero1", {}, 8, "fp32", 63.0),
        # The 84 GB that are often printed leave the copy in fp32 out.
        ("single", {}, 1, "bf16", 84.0),
        ("single", {}, 1, "fp32", 112.0),
        ("tp", {}, 8, "fp32", 14.0),
        ("pp", {"dp": 2, "tp": 2}, 8, "fp32", 14.0),
        ("pp", {"tp": 2}, 8, "fp32", 14.0),
        ("cp", {}, 8, "fp32", 112.0),
    ],
)
def test_held_bytes_are_those_of_the_formula(
    name: str, settings: Mapping[str, object], world_size: int, recipe: str, gigabytes: float
) -> None:
    """Seven billion parameters on eight ranks take what the papers' formulas say."""
    choice = choose(name, settings, world_size)

    assert held_bytes(choice, PARAMETERS, RECIPES[recipe]) / GB == pytest.approx(gigabytes)


@pytest.mark.parametrize(
    ("name", "settings", "world_size", "gigabytes"),
    [
        ("ddp", {}, 8, 24.5),  # 2 * 7/8 * 14 GB of bf16 gradients
        ("ddp", {}, 1, 0.0),
        ("single", {}, 8, 0.0),
        ("deepspeed", {"stage": 2}, 8, 24.5),  # as ddp
        ("deepspeed", {"stage": 3}, 8, 36.75),  # 1.5 x ddp
        ("fsdp", {}, 8, 36.75),
        ("fsdp", {"shard": "grad-op"}, 8, 24.5),
        ("zero1", {}, 8, 36.75),  # DDP's all-reduce stays
        # Within 4 ranks 2 * 3/4 * 14 + 3/4 * 14, between 2 copies of quarters 2 * 1/2 * 3.5.
        ("fsdp", {"shard": "hybrid"}, 8, 35.0),
        ("fsdp", {"tp": 2}, 8, 15.75),  # 3 * 3/4 of what tp leaves, 7 GB
        ("cp", {"dp": 2}, 8, 24.5),
        ("tp", {}, 8, 0.0),
    ],
)
def test_sent_bytes_are_those_of_a_ring(
    name: str, settings: Mapping[str, object], world_size: int, gigabytes: float
) -> None:
    """Parameters and gradients in bf16 cross the wire as often as the papers say."""
    choice = choose(name, settings, world_size)
    sent = sent_bytes(choice, PARAMETERS, parameter_bytes=2, gradient_bytes=2)

    assert sent / GB == pytest.approx(gigabytes)


@pytest.mark.parametrize(
    ("name", "settings", "formula"),
    [
        ("ddp", {}, "p + g + o"),
        ("zero1", {}, "p + g + o/dp"),
        ("deepspeed", {}, "p + (g + o)/dp"),
        ("fsdp", {}, "(p + g + o)/dp"),
        ("fsdp", {"shard": "hybrid"}, "(p + g + o)/shard"),
        ("pp", {"dp": 2, "tp": 2}, "(p + g + o)/(pp * dp * tp)"),
    ],
)
def test_the_formula_in_letters_gives_the_same_number(
    name: str, settings: Mapping[str, object], formula: str
) -> None:
    """What is shown to people is what is counted."""
    choice = choose(name, settings, 8)
    recipe, degrees = RECIPES["mixed"], choice.degrees
    values = {what[0]: getattr(recipe, what) for what in HELD}
    values |= {"pp": degrees.pp, "dp": degrees.dp, "tp": degrees.tp, "shard": degrees.dp_shard}

    assert held_formula(choice) == formula
    assert eval(formula, {}, values) == pytest.approx(held_bytes(choice, 1, recipe))


def test_the_shares_of_collectives_in_letters_give_the_same_numbers() -> None:
    """What is shown of a collective is what is counted."""
    for call in CALLS.values():
        for n in (2, 3, 8):
            text = call.text.replace("2 (", "2 * (").replace("^", "**")

            assert eval(text, {}, {"n": n}) == pytest.approx(call.share(n))


def test_recipes_are_named_and_add_up() -> None:
    """No number stands without what it is made of; three come to 16 bytes."""
    assert [recipe.total for recipe in RECIPES.values()] == [16, 16, 16, 12]
    assert recipe_of(choose("ddp", {"bf16": True}, 2)) == RECIPES["autocast"]
    assert recipe_of(choose("deepspeed", {"bf16": True}, 2)) == RECIPES["mixed"]
    assert recipe_of(choose("fsdp", {}, 2)) == RECIPES["fp32"]


def test_only_axes_with_ranks_count() -> None:
    """A degree of 1 splits nothing and sends nothing."""
    alone = choose("fsdp", {}, 1)

    assert split_axes(alone, "parameters") == ()
    assert sent_phrases(alone) == ()
    assert held_formula(alone) == "p + g + o"


def test_phrases_name_collective_axis_and_times() -> None:
    """What is sent is described in the words in which degrees are typed."""
    assert sent_phrases(choose("pp", {"dp": 2, "tp": 2}, 8)) == (
        "send boundary 2 x over pp, per stage",
        "all-gather parameters 2 x over dp",
        "reduce-scatter gradients over dp",
        "all-reduce activations 4 x over tp, per block",
    )
    assert sent_phrases(choose("cp", {"dp": 2}, 4))[1] == "all-reduce gradients over dp x cp"
