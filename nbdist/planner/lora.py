"""LoRA and QLoRA as they are typed, and what a rank stores of a frozen model with adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nbdist.core.units import gigabytes
from nbdist.errors import OptionError, no_such
from nbdist.planner.models import ModelShape
from nbdist.planner.shape.transformer import Linear, Lora, linears
from nbdist.strategy import footprint
from nbdist.strategy.choice import Strategy
from nbdist.strategy.footprint import Recipe
from nbdist.strategy.options import listed

ALL = "all-linear"
# What PEFT takes where none are typed: TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING of
# peft/utils/constants.py.
USUAL = ("q_proj", "v_proj", "c_attn")
# What there is of the types that formulas know: the last three are gpt2's.
TARGETS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "c_attn", "c_proj",
    "c_fc", ALL,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quant:
    """How 4-bit weights are scaled, as bitsandbytes stores them.

    Source: https://arxiv.org/abs/2305.14314, section 3, and quantize_4bit of
    bitsandbytes/functional.py.

    Attributes:
        block: Numbers that share a scale.
        scale: Bytes of each scale.
        second: Scales that share one of their own, in fp32; 0 where none do.
    """

    title: str
    block: int
    scale: int
    second: int = 0

    def scales_bytes(self, weights: float) -> float:
        """Bytes of the scales of one matrix of so many numbers."""
        scales = math.ceil(weights / self.block)
        return scales * self.scale + (4 * math.ceil(scales / self.second) if self.second else 0)


QUANTS: Mapping[str, Quant] = {
    "4bit": Quant("NF4, a scale in fp32 for each 64", 64, 4),
    "4bit-double": Quant(
        "NF4, a scale in 8 bits for each 64 and one in fp32 for each 256 of these", 64, 1, 256
    ),
}


def with_lora(
    model: ModelShape, rank: int | None, targets: str | Sequence[str] | None, quant: str | None
) -> ModelShape:
    """The model with adapters beside its layers and all else frozen; as it is where none are typed.

    Args:
        model: Without adapters.
        rank: r of all adapters.
        targets: Names of linear layers, with commas or as a list; ALL for all of a block.
        quant: A key of QUANTS for the linear layers of blocks.

    Raises:
        OptionError: A layer or a storage does not exist, or r is none.
    """
    if rank is None:
        if targets is not None:
            raise OptionError("--targets names the layers that --lora adds to. Type --lora 16 too.")
        if quant is not None:
            raise OptionError(
                f"--quant {quant} needs --lora: numbers of 4 bits cannot be trained, as a step of "
                "the optimizer is smaller than the difference of two of them. Type --lora 16 too; "
                "to run a model without training it is not planned."
            )
        return model
    if quant is not None and quant not in QUANTS:
        raise no_such("--quant", quant, QUANTS)
    if model.shape.experts is not None:
        raise OptionError(
            f"{model.name} has experts, and adapters beside experts are not planned. Leave --lora "
            "out."
        )
    layers = linears(model.shape)
    shape = replace(model.shape, lora=Lora(rank, _targets(layers, targets), quant or ""))
    _check_rank(rank, shape.targets)
    parameters = model.parameters + shape.layers * int(shape.adapters())
    return replace(model, shape=shape, parameters=parameters, frozen=model.parameters)


def quantized(model: ModelShape) -> ModelShape | None:
    """The same in 4 bits; None of a model without adapters, one in 4 bits, and one on the ranks."""
    lora = model.lora
    if lora is None or lora.quant or lora.stored:
        return None
    return replace(model, shape=replace(model.shape, lora=replace(lora, quant="4bit")))


def _targets(layers: Sequence[Linear], typed: str | Sequence[str] | None) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(layer.name for layer in layers))
    if typed is None:
        return tuple(name for name in names if name in USUAL)
    words = typed.split(",") if isinstance(typed, str) else typed
    wanted = tuple(dict.fromkeys(text for word in words if (text := str(word).strip())))
    if wanted == (ALL,):
        return names
    for word in wanted or ("''",):
        if word not in names:
            raise no_such("--targets", word, (*names, ALL))
    return wanted


def _check_rank(rank: int, layers: Sequence[Linear]) -> None:
    """Refuse an r by which A and B together say no less than the layer."""
    if type(rank) is not int or rank < 1:
        raise OptionError(f"--lora {rank} is no rank. It is the r of the adapters, such as 16.")
    for layer in layers:
        most = min(layer.inputs, layer.outputs)
        if rank > most:
            raise OptionError(
                f"--lora {rank} is more than {layer.name} has: it is {layer.inputs} x "
                f"{layer.outputs}, and of rank {most} at most. Use {most} or less, such as 16."
            )


def check_strategy(model: ModelShape, choice: Strategy) -> None:
    """Refuse strategies that do not go with what is frozen, or whose time nothing says.

    Raises:
        OptionError: With what to do instead.
    """
    if model.lora is None:
        return
    if model.lora.quant and choice.degrees.tp > 1:
        raise OptionError(
            "tp splits matrices, and 4-bit weights are packed into lists of bytes. Leave --quant "
            "out, or use ddp, fsdp or pp."
        )
    if choice.degrees.pp > 1 and choice.options.schedule == "zb":
        raise OptionError(
            "--schedule zb fills idle time with gradients of weights, and what is frozen has none. "
            "Use 1f1b."
        )


def scales_bytes(model: ModelShape) -> float:
    """Bytes of the scales of one block's packed weights, whole on every rank that has them.

    They are in the layer's `quant_state` and in no parameter, so nothing that splits parameters
    splits them.
    """
    if model.lora is None or not model.lora.quant:
        return 0.0
    quant = QUANTS[model.lora.quant]
    if model.is_assumed:
        return quant.scales_bytes(model.packed)
    return sum(quant.scales_bytes(layer.weights) for layer in linears(model.shape))


def dequantized_bytes(model: ModelShape, width: int) -> float:
    """Bytes of a product's copy of the largest packed matrix, at so many bytes a number.

    Forward and backward make it anew for each layer (MatMul4Bit in bitsandbytes/autograd).
    """
    if not model.packed:
        return 0.0
    return width * max(layer.weights for layer in linears(model.shape))


def held_parts(
    model: ModelShape, choice: Strategy, recipe: Recipe, stored: int
) -> dict[str, float]:
    """Compute footprint.held_parts of the pipeline stage that has most.

    Of what is frozen there are only parameters, of so many bytes as `stored` unless packed. FSDP1
    splits a block as one row, so adapters may lie on one rank alone: they are counted so.
    """
    stages, tp = choice.degrees.pp, choice.degrees.tp
    parameters, stacked = model.largest_stage(stages)
    if model.lora is None:  # as if all stages were as large as the largest
        return footprint.held_parts(choice, parameters * stages, recipe, stacked * stages)
    blocks = model.stage_blocks(stages)
    trained, packed = blocks * model.block_trained(choice.degrees), blocks * model.packed
    frozen = (parameters - blocks * model.block_trained() - packed) * stored + packed / 2
    # As if tp and pp split it all into such parts.
    shares = footprint.held_parts(choice, trained * tp * stages, recipe)
    if choice.name == "fsdp1":
        shares |= {what: trained * getattr(recipe, what) for what in shares}
    split = footprint.axes_size(choice, footprint.split_axes(choice, "parameters"))
    shares["parameters"] += frozen * stages / split + stage_scales(model, stages)
    return shares


def stage_scales(model: ModelShape, stages: int) -> float:
    """Bytes of scales of the pipeline stage that has most; they stay on the device."""
    return model.stage_blocks(stages) * scales_bytes(model)


def described(model: ModelShape, stored: int) -> list[str]:
    """Describe trained and frozen parameters, a line each; `stored` are a frozen number's bytes."""
    lora = model.lora
    if lora is None:
        return []
    share = 100 * model.trained / model.parameters
    first = (
        f"LoRA: r {lora.rank} on {listed(lora.targets)}, {model.trained:,} parameters "
        f"({share:.4f} %) are trained, {model.frozen:,} are frozen"
    )
    packed = model.shape.layers * model.packed
    if not packed:
        return [first, f"frozen: {gigabytes(stored * model.frozen)}, {stored} B each"]
    scales, rest = model.shape.layers * scales_bytes(model), model.frozen - packed
    second = (
        f"frozen: linear layers of blocks in 4 bits, {gigabytes(packed / 2)} and "
        f"{gigabytes(scales)} of scales ({QUANTS[lora.quant].title})"
    )
    if rest:
        second += f"; embedding, norms, biases and head {gigabytes(stored * rest)}, {stored} B each"
    return [first, second]
