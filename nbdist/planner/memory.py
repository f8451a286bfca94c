"""Memory of one rank in a step of training, by closed formulas: states, activations, buffers.

What a rank holds between steps is strategy.footprint's. docs/plan.md has every formula with its
source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nbdist.errors import OptionError
from nbdist.planner.activations import activations, block_bytes, logits_bytes, scores_bytes
from nbdist.planner.lora import check_strategy, dequantized_bytes, held_parts, stage_scales
from nbdist.planner.models import ModelShape
from nbdist.planner.workload import (
    OPTIMIZERS,
    Widths,
    Workload,
    is_alone,
    micro_batches,
    recipe_for,
    rows_each,
    widths_for,
)
from nbdist.strategy.choice import Strategy, steps_of
from nbdist.strategy.degrees import divisors
from nbdist.strategy.footprint import Recipe
from nbdist.strategy.options import listed

FORMULAS = "formulas"
# CUDA's context, workspaces of cuBLAS and buffers of NCCL: an assumption, between what one process
# takes on an idle GPU (about 0.5 GB) and with NCCL's channels to seven others.
OVERHEAD_BYTES = 1e9
# DeepSpeed's defaults reduce_bucket_size and stage3_max_live_parameters, in elements.
# Source: https://www.deepspeed.ai/docs/config-json/
_BUCKET = 5e8
_LIVE = 1e9


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device of the rank that needs most.

    Attributes:
        parameters, gradients, optimizer: Held between steps.
        activations: Kept for backward, with copies in bf16 that autocast keeps and the logits.
        buffers: What is gathered, and what is reduced.
        step: The optimizer needs it while it steps, when activations are gone.
        overhead: CUDA's context and libraries.
        host, disk: In the CPU's memory, and on its NVMe; no part of the sum.
        engine: The source of the numbers.
        forward: The most of activations and buffers that are there together; 0 for their sum.
        backward: The same where all gradients are there: at backward's end.
        most: Of a run, the most at one time in forward and backward, without the optimizer's
            state; 0 of formulas.
        keeps_gradients: They are there while a forward runs: of backwards before it, which are
            accumulated, of micro-batches before it, or in buffers of DeepSpeed's.
        is_partial: Activations are not counted: they are not known. The peak is then more.
        note: Why another engine than the one that was asked for has counted; a phrase.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    step: float = 0.0
    overhead: float = OVERHEAD_BYTES
    host: float = 0.0
    disk: float = 0.0
    engine: str = FORMULAS
    forward: float = 0.0
    backward: float = 0.0
    most: float = 0.0
    keeps_gradients: bool = False
    is_partial: bool = False
    note: str = ""

    @property
    def states(self) -> float:
        """Parameters, gradients and the optimizer's state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> float:
        """The most at one time: at forward's end, at backward's, or while the optimizer steps.

        In between activations go as gradients come: never more than the larger of both.
        """
        gradients = self.gradients if self.keeps_gradients else 0.0
        forward = gradients + (self.forward or self.buffers + self.activations)
        passes = self.most or self.parameters + max(forward, self.gradients + self.backward)
        step = self.parameters + self.gradients + self.buffers + self.step
        return self.optimizer + max(passes, step) + self.overhead


def memory_of(model: ModelShape, choice: Strategy, load: Workload) -> Memory:
    """The memory of the rank that needs most.

    Raises:
        OptionError: If a degree does not divide what it has to, or a word does not exist.
    """
    check_fits(model, choice, load)
    recipe = recipe_for(choice, load)
    widths = widths_for(model, choice, load)
    shares = held_parts(model, choice, recipe, widths.frozen)
    # Numbers whose state this rank has.
    stepped = held_parts(model, choice, replace(recipe, optimizer=1), 0)["optimizer"]
    # On a CPU torch's optimizers go parameter by parameter, and there is no CUDA context.
    has_lists = load.has_gpu and not choice.options.is_fused
    needs = OPTIMIZERS[load.optimizer].step_bytes if has_lists else 0
    activation_bytes = activations(model, choice, load, widths)
    buffers = _buffers(model, choice, load, widths, recipe)
    piece = replace(load, batch=load.batch // micro_batches(choice, load))
    logits = logits_bytes(model.shape, piece, widths, choice)
    memory = Memory(
        shares["parameters"],
        shares["gradients"],
        shares["optimizer"],
        activations=activation_bytes,
        buffers=buffers,
        forward=max(
            activation_bytes + _standing(model, choice, load, widths, buffers),
            activation_bytes - logits + buffers,
        ),
        backward=buffers + block_bytes(model.shape, piece, widths, choice),
        step=stepped * needs,
        overhead=OVERHEAD_BYTES if load.has_gpu else 0.0,
        keeps_gradients=choice.options.accumulate > 1
        or choice.name == "deepspeed"
        or micro_batches(choice, load) > 1,
    )
    if not choice.options.offload:
        return memory
    # To the host go all states, or what DeepSpeed's stage splits.
    stage = 3 if choice.name != "deepspeed" else choice.options.stage
    moved = ("optimizer", "gradients", "parameters")[:stage]
    where = "disk" if choice.options.offload == "nvme" else "host"
    rest: dict[str, float] = dict.fromkeys((*moved, "step"), 0.0)
    rest[where] = sum(getattr(memory, what) for what in moved)
    if "parameters" in moved:
        rest["parameters"] = stage_scales(model, choice.degrees.pp)
        rest[where] -= rest["parameters"]
    return replace(memory, **rest)  # type: ignore[arg-type]  # names of numbers


def check_fits(model: ModelShape, choice: Strategy, load: Workload) -> None:
    """Refuse degrees that do not divide heads, blocks or the batch, and what LoRA does not take.

    Raises:
        OptionError: With the number and what it has to divide, or what nothing can share or split.
    """
    check_experts(model.experts, model.name, choice)
    check_strategy(model, choice)
    degrees = choice.degrees
    if degrees.pp > model.shape.layers:
        raise OptionError(f"pp={degrees.pp}: {model.name} has {model.shape.layers} blocks, fewer.")
    if load.batch % micro_batches(choice, load):
        raise OptionError(
            f"--microbatches {choice.options.microbatches} does not divide --batch {load.batch}."
        )
    if load.sequence % degrees.cp:
        raise OptionError(f"cp={degrees.cp} does not divide --seq {load.sequence}.")
    if degrees.cp > 1 and choice.options.context == "ring" and model.shape.has_dropout:
        raise OptionError(
            f"cp takes attention without dropout, and {model.name} has it. Use ulysses, or a "
            "config without."
        )
    if degrees.tp > 1 and model.shape.unsplit:
        raise OptionError(
            f"nbdist does not know how to split {model.shape.unsplit} of {model.name} over tp, so "
            "every rank would hold it whole. Use fsdp or fsdp --ep 2."
        )
    shape, ulysses = model.shape, degrees.cp if choice.name == "ulysses" else 1
    both = math.gcd(shape.heads, shape.kv_heads)
    for word, degree in (("tp", degrees.tp), ("ulysses", ulysses)):
        if both % degree and not model.is_assumed:  # of an assumed one nobody said how many it has
            what = f"{shape.heads} heads and {shape.kv_heads} of keys and values"
            raise OptionError(
                f"{word} over {degree} ranks does not divide the {what} of {model.name}. Use "
                f"{both} or a divisor of it."
            )


def check_experts(count: int, name: str, choice: Strategy) -> None:
    """Refuse to share experts that there are not, or not evenly, and offloading beside it.

    `count` is that of a layer, 0 without any.

    Raises:
        OptionError: In the words in which ranks refuse it.
    """
    degree = choice.degrees.ep
    if degree == 1:
        return
    if not count:
        raise OptionError(
            f"{name} has no experts that nbdist knows, so ep has nothing to share. Use ddp or fsdp."
        )
    if count % degree:
        fitting = divisors(count)[1:]
        use = f"--ep {listed(fitting, 'or')}, or fsdp" if fitting else "fsdp"
        raise OptionError(
            f"{degree} ranks cannot share the {count} experts of {name} evenly. Use {use}."
        )
    if choice.options.offload:
        raise OptionError("--offload and --ep cannot be combined yet. Leave one of them out.")


def has_buckets(choice: Strategy) -> bool:
    """Whether DDP's buckets hold a copy of each gradient: gradient_as_bucket_view is off."""
    return "ddp" in steps_of(choice) and choice.degrees.dp * choice.degrees.cp > 1


def _buffers(
    model: ModelShape, choice: Strategy, load: Workload, widths: Widths, recipe: Recipe
) -> float:
    steps, degrees = {*steps_of(choice)}, choice.degrees
    total = dequantized_bytes(model, widths.compute)
    if has_buckets(choice):
        # DDP leaves experts alone that ranks share.
        alone = model.shape.stacked_parameters if degrees.ep > 1 else 0
        total += (model.trained - alone) * recipe.gradients
    if steps & {"fsdp", "fsdp1"} and degrees.dp > 1:
        total += _gathered(model, choice, widths, micro_batches(choice, load))
    if choice.name == "deepspeed" and degrees.dp > 1:
        total += min(model.trained, _BUCKET) * widths.reduced
        if choice.options.stage == 3:
            part = min(model.parameters, _LIVE) / model.parameters
            total += part * model.whole_bytes(widths.gathered)
    piece = replace(load, batch=load.batch // micro_batches(choice, load))
    tokens = load.batch * load.sequence / degrees.cp
    across = tokens / micro_batches(choice, load) * model.shape.hidden * widths.compute
    total += 2 * across if degrees.pp > 1 else 0.0
    total += 2 * across if degrees.tp > 1 else 0.0
    if model.shape.has_sinks:  # two more of a block's, on the way to softmax and back
        total += 2 * scores_bytes(model.shape, piece, widths, choice)
    if degrees.ep > 1:
        # Rows that are sent and those that arrive; gradients of a block's experts and their mean.
        rows = tokens * rows_each(model.shape, choice, load)
        total += 2 * rows * model.shape.hidden * widths.residual
        total += model.shape.stacked / degrees.ep * widths.reduced
    if choice.options.context == "ring" and degrees.cp > 1:
        keys = model.shape.kv_heads * model.shape.head_size
        total += 2 * 2 * tokens * keys * widths.compute
    return total


def _standing(
    model: ModelShape, choice: Strategy, load: Workload, widths: Widths, buffers: float
) -> float:
    """Buffers that exist beside the logits: not the blocks that FSDP gathers in turn.

    The loss is done with its logits before the first block is gathered again. A frozen head has no
    gradient to make between the two.
    """
    if not {"fsdp", "fsdp1"} & {*steps_of(choice)} or choice.degrees.dp == 1 or model.lora:
        return buffers
    split = choice.degrees.tp * choice.degrees.pp
    if micro_batches(choice, load) > 1:
        return buffers
    if choice.options.shard == "grad-op":
        whole = model.whole_bytes(widths.gathered, choice.degrees)
        return whole - _alone(choice, model.shape.stacked_parameters) * widths.gathered
    return model.root_parameters / split * widths.gathered


def _alone(choice: Strategy, stacked: float) -> float:
    """Experts' numbers that FSDP leaves alone, as no other rank has them."""
    return stacked / choice.degrees.ep if is_alone(choice) else 0.0


def _gathered(model: ModelShape, choice: Strategy, widths: Widths, pieces: int) -> float:
    """Count tensors that FSDP gathers: two blocks (one ahead) or all, root, a block's gradients.

    Gradients stand there as backward made them and once more as they are reduced. Where several
    backwards are added up, of batches or of a pipeline's micro-batches, all are there as they are
    reduced; and a pipeline keeps what a backward has gathered until its last one (torch's
    `pipelining/stage.py` sets `set_reshard_after_backward(False)`).
    """
    degrees = choice.degrees
    split = degrees.tp * degrees.pp
    alone, all_alone = (
        _alone(choice, numbers) for numbers in (model.shape.stacked, model.shape.stacked_parameters)
    )
    trained = model.block_trained(degrees) - alone
    gradients = trained * (widths.compute + widths.reduced)
    if choice.options.accumulate > 1 or pieces > 1:
        stacked = model.shape.stacked_parameters
        whole = (model.trained - stacked) / split + stacked / (degrees.ep * degrees.pp) - all_alone
        gradients = (trained + whole) * widths.reduced
    block = model.block_bytes(widths.gathered, degrees) - alone * widths.gathered
    if choice.options.shard == "grad-op" or pieces > 1:
        # The message that the last block came in stays, too. Gradients of all are larger.
        last = max(block, gradients) if model.lora else gradients
        return model.whole_bytes(widths.gathered, degrees) - all_alone * widths.gathered + last
    blocks = min(2, model.shape.layers) * block
    return model.root_parameters / split * widths.gathered + blocks + gradients
