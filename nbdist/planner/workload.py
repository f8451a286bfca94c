"""The load of a plan: batch, optimizer and recipe, and the bytes of numbers that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nbdist.errors import OptionError, no_such
from nbdist.planner.models import ModelShape
from nbdist.planner.shape.transformer import Transformer
from nbdist.strategy import footprint
from nbdist.strategy.choice import Strategy, steps_of
from nbdist.strategy.footprint import Recipe


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """The memory of an optimizer between steps, and during one.

    Attributes:
        state_bytes: Per parameter, besides a copy in fp32.
        step_bytes: Per parameter, while it steps: torch's foreach implementation makes a whole
            list at once; 0 with --fused.
    """

    title: str
    state_bytes: int
    step_bytes: int = 0


# Source: torch.optim's implementations; Adafactor keeps a row and a column of each matrix, and
# https://arxiv.org/abs/2110.02861 for the 8-bit one.
OPTIMIZERS: Mapping[str, OptimizerCost] = {
    "adamw": OptimizerCost("Adam 8", 8, 4),
    "adam": OptimizerCost("Adam 8", 8, 4),
    "adamw8bit": OptimizerCost("Adam in 8 bits 2", 2),
    "rmsprop": OptimizerCost("RMSprop 4", 4, 4),
    "adagrad": OptimizerCost("Adagrad 4", 4, 4),
    "momentum": OptimizerCost("momentum 4", 4),
    # What it makes of a matrix is of one at a time.
    "muon": OptimizerCost("Muon 4", 4),
    "adafactor": OptimizerCost("Adafactor under 0.1, counted as 0", 0, 4),
    "sgd": OptimizerCost("SGD 0", 0),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """The batch and the optimizer of a step.

    Attributes:
        batch: Samples that a data-parallel rank computes at once.
        sequence: Tokens of each.
        optimizer: A key of OPTIMIZERS.
        recipe: A key of footprint.RECIPES; empty for what nbdist stores under the strategy.
        samples: The effective batch of all ranks, which sets how many backwards are accumulated;
            0 where that is left to the strategy's options.
        has_gpu: Whether ranks compute on GPUs: on CPUs there is no CUDA context, and torch's
            optimizers go parameter by parameter.
        imbalance: Rows of the rank that gets most of those that share experts, by their mean.
    """

    batch: int = 1
    sequence: int = 2048
    optimizer: str = "adamw"
    recipe: str = ""
    samples: int = 0
    has_gpu: bool = True
    imbalance: float = 1.0


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of one number, by what it is.

    Attributes:
        compute: Of activations inside a block.
        residual: Of what flows from block to block.
        cast: Of the copy that autocast makes of each parameter; 0 where it makes none.
        gathered: Of a parameter that is gathered from ranks.
        reduced: Of a gradient on the wire.
        frozen: Of a parameter beside adapters, as it is stored; 0 where there are none.
    """

    compute: int
    residual: int
    cast: int
    gathered: int
    reduced: int
    frozen: int = 0


def recipe_for(choice: Strategy, load: Workload) -> Recipe:
    """Choose the recipe of a parameter: the choice's or the one asked for, by optimizer."""
    recipe = footprint.RECIPES[load.recipe] if load.recipe else footprint.recipe_of(choice)
    optimizer, adam = OPTIMIZERS[load.optimizer], OPTIMIZERS["adamw"]
    return replace(
        recipe,
        name=recipe.name.replace("Adam's moments in fp32, ", "").replace(
            adam.title, optimizer.title
        ),
        optimizer=recipe.optimizer - adam.state_bytes + optimizer.state_bytes,
    )


def is_megatron(choice: Strategy, load: Workload) -> bool:
    """Whether this is Megatron's training: tp, pp or ep with `--recipe mixed`, and dp as copies.

    nbdist stores nothing so. Megatron computes the loss of each tp rank's part of the vocabulary
    (https://arxiv.org/abs/1909.08053, section 3), adds bias, dropout and residual in one kernel
    (https://arxiv.org/abs/2104.04473, section 4.2), and sends each tp rank's part of what goes
    between stages, gathered in the host (section 4.1); so does DeepSpeed's pipeline.
    """
    is_split = choice.name in {"tp", "pp", "ep"} and choice.degrees.dp_shard == 1
    return is_split and load.recipe == "mixed"


def widths_of(choice: Strategy, recipe: Recipe) -> Widths:
    """Bytes of numbers under a choice. FSDP gathers in the type that forward computes in."""
    if recipe.parameters == 2:
        return Widths(2, 2, 0, 2, recipe.gradients)
    if choice.options.precision == "fp32":
        return Widths(4, 4, 0, 4, 4)
    if {"fsdp", "fsdp1"} & {*steps_of(choice)}:
        return Widths(2, 2, 0, 2, 4)
    return Widths(2, 4, 2, 4, 2 if choice.options.hook in {"fp16", "bf16"} else 4)


def widths_for(model: ModelShape, choice: Strategy, load: Workload) -> Widths:
    """The same with what is frozen beside adapters: it flows on in the type that it is stored in.

    That is what is computed in, as people load it, unless a recipe says what is stored. Adapters
    are in fp32, as PEFT makes them (`autocast_adapter_dtype` of get_peft_model).
    """
    widths, lora = widths_of(choice, recipe_for(choice, load)), model.lora
    if lora is None:
        return widths
    half = 4 if choice.options.precision == "fp32" else 2
    frozen = lora.stored or (recipe_for(choice, load).parameters if load.recipe else half)
    if frozen == 4:
        return replace(widths, frozen=4)
    is_gathered = {"fsdp", "fsdp1"} & {*steps_of(choice)}
    gathered = 2 if is_gathered else widths.gathered
    return replace(widths, compute=2, residual=2, gathered=gathered, frozen=2)


def rows_each(shape: Transformer, choice: Strategy, load: Workload) -> float:
    """Rows of experts for each token of a rank: on the one that gets most, where ranks share them.

    It cannot get more than all.
    """
    if shape.experts is None:
        return 0
    return shape.experts.chosen * max(1.0, min(load.imbalance, choice.degrees.ep))


def is_alone(choice: Strategy) -> bool:
    """Whether no other rank has the experts of this one: all that see different data share them."""
    return choice.degrees.ep > 1 and choice.degrees.ep == choice.degrees.dp


def check_load(load: Workload) -> None:
    """Refuse a load that is wrong whatever the model and the strategy.

    Raises:
        OptionError: If it trains on nothing, or its recipe or optimizer does not exist.
    """
    counts = {"--batch": load.batch, "--seq": load.sequence, "--samples": load.samples or 1}
    for flag, count in counts.items():
        if type(count) is not int or count < 1:
            raise OptionError(f"{flag} {count} is nothing to train on. Use a number, 1 or more.")
    if not 1 <= load.imbalance < math.inf:
        raise OptionError(
            f"--imbalance {load.imbalance:g} is less than even. It is the tokens of the rank that "
            "gets most by the mean of all: 1 or more, such as 1.5."
        )
    for flag, word, words in (
        ("--recipe", load.recipe or "fp32", footprint.RECIPES),
        ("--optimizer", load.optimizer, OPTIMIZERS),
    ):
        if word not in words:
            raise no_such(flag, word, words)


def micro_batches(choice: Strategy, load: Workload) -> int:
    """Pieces of a batch: as asked for, or the most, up to two per stage, that divide it."""
    stages = choice.degrees.pp
    if stages == 1:
        return 1
    if choice.options.microbatches:
        return choice.options.microbatches
    return max(n for n in range(1, 2 * stages + 1) if load.batch % n == 0)
