"""Memory of one rank in a step of training, by closed formulas: states, activations, buffers.

What a rank holds between steps is core.footprint's. docs/plan.md has every formula with its source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nbdist.core import footprint
from nbdist.core.footprint import Recipe
from nbdist.core.plan_models import ModelShape, Transformer
from nbdist.core.strategy import Choice, steps_of
from nbdist.errors import OptionError

# CUDA's context, workspaces of cuBLAS and buffers of NCCL: an assumption, between what one process
# takes on an idle GPU (about 0.5 GB) and with NCCL's channels to seven others.
OVERHEAD_BYTES = 1e9
# DeepSpeed's defaults reduce_bucket_size and stage3_max_live_parameters, in elements.
# Source: https://www.deepspeed.ai/docs/config-json/
_BUCKET = 5e8
_LIVE = 1e9
# Model chunks of each rank under --schedule interleaved.
CHUNKS = 2


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps, and what it needs while it steps.

    Attributes:
        title: In words.
        state_bytes: Per parameter, besides a copy in fp32.
        step_bytes: Per parameter, while it steps: torch's foreach implementation makes a whole
            list at once; 0 with --fused.
    """

    title: str
    state_bytes: int
    step_bytes: int = 0


# Source: torch.optim's implementations; Adafactor keeps a row and a column of each matrix, and
# https://arxiv.org/abs/2110.02861 for the 8-bit one.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer("Adam 8", 8, 4),
    "adam": Optimizer("Adam 8", 8, 4),
    "adamw8bit": Optimizer("Adam in 8 bits 2", 2),
    "rmsprop": Optimizer("RMSprop 4", 4, 4),
    "adagrad": Optimizer("Adagrad 4", 4, 4),
    "momentum": Optimizer("momentum 4", 4),
    "adafactor": Optimizer("Adafactor under 0.1, counted as 0", 0, 4),
    "sgd": Optimizer("SGD 0", 0),
}


@dataclass(frozen=True, slots=True)
class Load:
    """What is trained with in a step.

    Attributes:
        batch: Samples that a data-parallel rank computes at once.
        sequence: Tokens of each.
        optimizer: A key of OPTIMIZERS.
        recipe: A key of footprint.RECIPES; empty for what nbdist stores under the strategy.
        samples: The effective batch of all ranks, which sets how many backwards are accumulated;
            0 where that is left to the strategy's options.
    """

    batch: int = 1
    sequence: int = 2048
    optimizer: str = "adamw"
    recipe: str = ""
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device of the rank that needs most.

    Attributes:
        parameters, gradients, optimizer: Held between steps.
        activations: Kept for backward, with copies in bf16 that autocast keeps and the logits.
        buffers: What is gathered, and what is reduced.
        step: The optimizer needs it while it steps, when activations are gone.
        overhead: CUDA's context and libraries.
        host: In the CPU's memory; no part of the sum.
        engine: What the numbers come from.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    step: float = 0.0
    overhead: float = OVERHEAD_BYTES
    host: float = 0.0
    engine: str = "formulas"

    @property
    def states(self) -> float:
        """Parameters, gradients and the optimizer's state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> float:
        """The most at one time."""
        return self.states + self.buffers + max(self.activations, self.step) + self.overhead


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of one number, by what it is.

    Attributes:
        compute: Of activations inside a block.
        residual: Of what flows from block to block.
        cast: Of the copy that autocast makes of each parameter; 0 where it makes none.
        gathered: Of a parameter that is gathered from ranks.
        reduced: Of a gradient on the wire.
    """

    compute: int
    residual: int
    cast: int
    gathered: int
    reduced: int


def recipe_for(choice: Choice, load: Load) -> Recipe:
    """What is stored for a parameter: that of the choice or the one asked for, by optimizer.

    Raises:
        OptionError: If there is no such recipe or optimizer.
    """
    if load.recipe and load.recipe not in footprint.RECIPES:
        raise OptionError(
            f"There is no --recipe {load.recipe}. Choose one of {', '.join(footprint.RECIPES)}."
        )
    if load.optimizer not in OPTIMIZERS:
        raise OptionError(
            f"There is no --optimizer {load.optimizer}. Choose one of {', '.join(OPTIMIZERS)}."
        )
    recipe = footprint.RECIPES[load.recipe] if load.recipe else footprint.recipe_of(choice)
    optimizer, adam = OPTIMIZERS[load.optimizer], OPTIMIZERS["adamw"]
    return replace(
        recipe,
        name=recipe.name.replace("Adam's moments in fp32, ", "").replace(
            adam.title, optimizer.title
        ),
        optimizer=recipe.optimizer - adam.state_bytes + optimizer.state_bytes,
    )


def widths_of(choice: Choice, recipe: Recipe) -> Widths:
    """Bytes of numbers under a choice. FSDP gathers in the type that forward computes in."""
    if recipe.parameters == 2:
        return Widths(2, 2, 0, 2, recipe.gradients)
    if choice.options.precision == "fp32":
        return Widths(4, 4, 0, 4, 4)
    if {"fsdp", "fsdp1"} & {*steps_of(choice)}:
        return Widths(2, 2, 0, 2, 4)
    return Widths(2, 4, 2, 4, 2 if choice.options.hook in {"fp16", "bf16"} else 4)


def memory_of(model: ModelShape, choice: Choice, load: Load) -> Memory:
    """The memory of the rank that needs most.

    Raises:
        OptionError: If a degree does not divide what it has to, or a word does not exist.
    """
    check_fits(model, choice, load)
    recipe = recipe_for(choice, load)
    widths = widths_of(choice, recipe)
    # As if all stages were as large as the largest.
    parameters = model.stage_parameters(choice.degrees.pp) * choice.degrees.pp
    held = footprint.held_parts(choice, parameters, recipe)
    stepped = parameters / footprint.axes_size(choice, footprint.split_axes(choice, "optimizer"))
    needs = 0 if choice.options.is_fused else OPTIMIZERS[load.optimizer].step_bytes
    memory = Memory(
        parameters=held["parameters"],
        gradients=held["gradients"],
        optimizer=held["optimizer"],
        activations=_activations(model, choice, load, widths),
        buffers=_buffers(model, choice, load, widths, recipe),
        step=stepped * needs,
    )
    return _offloaded(memory, choice)


def _offloaded(memory: Memory, choice: Choice) -> Memory:
    """With what --offload moves to the host: all states, or what DeepSpeed's stage splits."""
    if not choice.options.offload:
        return memory
    stage = 3 if choice.name != "deepspeed" else choice.options.stage
    moved = ("optimizer", "gradients", "parameters")[:stage]
    host = sum(getattr(memory, what) for what in moved)
    on_host = 0.0 if choice.options.offload == "nvme" else host
    rest: dict[str, float] = dict.fromkeys((*moved, "step"), 0.0)
    return replace(memory, host=on_host, **rest)  # type: ignore[arg-type]  # names of numbers


def check_fits(model: ModelShape, choice: Choice, load: Load) -> None:
    """Refuse degrees that do not divide heads, blocks or the batch.

    Raises:
        OptionError: With the number and what it has to divide.
    """
    if load.batch < 1 or load.sequence < 1:
        raise OptionError(
            f"--batch {load.batch} --seq {load.sequence} trains on nothing. Use 1 or more."
        )
    degrees = choice.degrees
    if degrees.pp > model.shape.layers:
        raise OptionError(f"pp={degrees.pp}: {model.name} has {model.shape.layers} blocks, fewer.")
    if load.batch % micro_batches(choice, load):
        raise OptionError(
            f"--microbatches {choice.options.microbatches} does not divide --batch {load.batch}."
        )
    if load.sequence % degrees.cp:
        raise OptionError(f"cp={degrees.cp} does not divide --seq {load.sequence}.")
    _check_heads(model, "tp", degrees.tp)
    _check_heads(model, "ulysses", degrees.cp if choice.name == "ulysses" else 1)


def _check_heads(model: ModelShape, word: str, degree: int) -> None:
    shape = model.shape
    both = math.gcd(shape.heads, shape.kv_heads)
    if both % degree and not model.is_assumed:  # of an assumed one nobody said how many it has
        what = f"{shape.heads} heads and {shape.kv_heads} of keys and values"
        raise OptionError(
            f"{word} over {degree} ranks does not divide the {what} of {model.name}. Use {both} or "
            "a divisor of it."
        )


def micro_batches(choice: Choice, load: Load) -> int:
    """Pieces of a batch: as asked for, or the most, up to two per stage, that divide it."""
    stages = choice.degrees.pp
    if stages == 1:
        return 1
    if choice.options.microbatches:
        return choice.options.microbatches
    return max(n for n in range(1, 2 * stages + 1) if load.batch % n == 0)


def block_bytes(
    shape: Transformer, load: Load, widths: Widths, choice: Choice, *, kind: str = ""
) -> float:
    """Activations that one block keeps of one batch on one rank.

    Source: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, equations 1 to 4: this is
    s b h (34 + 5 a s / h) of bf16, with dropout, four times wider MLP and scores that are kept.
    What autocast, and norms and activations written out in Python keep more is counted as
    tests/engine/test_plan_models.py finds it in transformers' models.

    Args:
        shape: The model.
        load: Batch and sequence.
        widths: Bytes of numbers.
        choice: Of it count tp, cp, sequence parallelism and whether scores are kept (sdpa math).
        kind: "" for all that backward needs, "full" for the block's input alone, "selective" for
            what products of matrices and attention give.
    """
    tokens = load.batch * load.sequence / choice.degrees.cp
    tp = choice.degrees.tp
    # What tensor parallelism leaves whole, unless it splits the sequence there.
    whole = tp if choice.options.has_sequence_parallel else 1
    x, h, f = widths.compute, shape.hidden, shape.ffn
    entry = widths.residual * h / whole
    if kind == "full":
        return tokens * entry
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_size * x
    if kind == "selective":
        mlp = (2 if shape.is_gated else 1) * f * x
        return tokens * (entry + 2 * x * h / whole + (attention + mlp) / tp)
    masks = 2 * h if shape.has_dropout else 0
    norms = 2 * (widths.residual * h + _norm_bytes(shape))
    outside = (norms + _inputs(shape, widths) * x * h + masks) / whole
    mlp = (shape.kept_in_mlp or (4 if shape.is_gated else 2)) * f * x
    scores = load.batch * shape.heads * load.sequence**2 * _score_bytes(shape, choice, x) / tp
    return tokens * (outside + (attention + mlp) / tp) + scores


def _norm_bytes(shape: Transformer) -> int:
    """That a norm keeps besides its input."""
    return 4 * shape.hidden if shape.has_written_norm else 0


def _inputs(shape: Transformer, widths: Widths) -> int:
    """Inputs of linear layers after the two norms: autocast casts for each layer anew."""
    if widths.residual == widths.compute:
        return 2
    return (1 if shape.has_one_qkv else 3) + (2 if shape.is_gated else 1)


def _score_bytes(shape: Transformer, choice: Choice, x: int) -> int:
    """Kept for each pair of tokens and head: nothing by flash or efficient attention."""
    if choice.options.sdpa != "math":
        return 0
    return 2 * x + 1 if shape.has_dropout else x


def logits_bytes(shape: Transformer, load: Load, widths: Widths, choice: Choice) -> float:
    """After the last block: norm, head and loss.

    Logits as computed, their log-softmax in fp32 and the gradient of that.
    """
    tokens = load.batch * load.sequence / choice.degrees.cp
    x = widths.compute
    norm = (widths.residual + x) * shape.hidden + _norm_bytes(shape)
    return tokens * (norm + shape.vocab * (x + 8))


def _activations(model: ModelShape, choice: Choice, load: Load, widths: Widths) -> float:
    """Of the pipeline stage that has most; without a pipeline all blocks are one stage."""
    stages, pieces = choice.degrees.pp, micro_batches(choice, load)
    piece = replace(load, batch=load.batch // pieces)
    layers = math.ceil(model.shape.layers / stages)
    blocks = _blocks_bytes(model.shape, choice, piece, widths, layers)
    logits = logits_bytes(model.shape, piece, widths, choice)
    first = blocks * in_flight(choice, pieces)
    last = blocks * (pieces if choice.options.schedule == "gpipe" else 1) + logits
    if stages == 1:
        first = 0.0
    casts = widths.cast * model.stage_parameters(stages) / choice.degrees.tp
    return max(first, last) + casts


def in_flight(choice: Choice, pieces: int) -> float:
    """Micro-batches whose activations the first stage keeps at one time.

    Source: https://arxiv.org/abs/2104.04473 section 2.2, and Korthikanti et al. for interleaved.
    """
    stages, schedule = choice.degrees.pp, choice.options.schedule
    if schedule == "gpipe":
        return pieces
    if schedule == "interleaved":
        return min(pieces, stages * (1 + (stages - 1) / (stages * CHUNKS)))
    return min(pieces, stages)


def _blocks_bytes(
    shape: Transformer, choice: Choice, load: Load, widths: Widths, layers: int
) -> float:
    """Of so many blocks, as --checkpoint has it: what is kept, and one block computed again."""
    how = choice.options.checkpoint
    whole = block_bytes(shape, load, widths, choice)
    if not how:
        return layers * whole
    kind = "selective" if how == "selective" else "full"
    again = layers // int(how) if how.isdecimal() else layers
    kept = block_bytes(shape, load, widths, choice, kind=kind)
    return again * kept + (layers - again) * whole + (whole if again else 0)


def _buffers(
    model: ModelShape, choice: Choice, load: Load, widths: Widths, recipe: Recipe
) -> float:
    steps, degrees = {*steps_of(choice)}, choice.degrees
    total = 0.0
    if "ddp" in steps and degrees.dp * degrees.cp > 1:
        # DDP's buckets hold a copy of each gradient: gradient_as_bucket_view is off.
        total += model.parameters * recipe.gradients
    if steps & {"fsdp", "fsdp1"} and degrees.dp > 1:
        total += _gathered(model, choice, widths)
    if choice.name == "deepspeed" and degrees.dp > 1:
        total += min(model.parameters, _BUCKET) * widths.reduced
        if choice.options.stage == 3:
            total += min(model.parameters, _LIVE) * widths.gathered
    tokens = load.batch * load.sequence / degrees.cp
    across = tokens / micro_batches(choice, load) * model.shape.hidden * widths.compute
    total += 2 * across if degrees.pp > 1 else 0.0
    total += 2 * across if degrees.tp > 1 else 0.0
    if choice.options.context == "ring" and degrees.cp > 1:
        keys = model.shape.kv_heads * model.shape.head_size
        total += 2 * 2 * tokens * keys * widths.compute
    return total


def _gathered(model: ModelShape, choice: Choice, widths: Widths) -> float:
    """What FSDP has whole: two blocks (one is gathered ahead) or all, root, one block's gradients.

    Gradients stand there as backward made them and once more as they are reduced.
    """
    degrees = choice.degrees
    split = degrees.tp * degrees.pp
    block, root = model.block_parameters / degrees.tp, model.root_parameters / split
    gradients = block * (widths.compute + widths.reduced)
    if choice.options.accumulate > 1:
        gradients += model.parameters / split * widths.compute
    if choice.options.shard == "grad-op":
        return model.parameters / split * widths.gathered + gradients
    blocks = min(2, model.shape.layers)
    return (root + blocks * block) * widths.gathered + gradients
