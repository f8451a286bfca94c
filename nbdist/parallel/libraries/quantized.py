"""4-bit weights of bitsandbytes: packed bytes in a frozen parameter, with constants beside them.

The constants (`quant_state`) are an attribute of the parameter and lie in no parameter or buffer
of the model: a rank keeps its own, whole, whatever part of the bytes it has. So they have to be
the same on all ranks. Checked with bitsandbytes 0.50.2, `Params4bit` and `Linear4bit`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from nbdist.core.versions import release
from nbdist.errors import OptionError
from nbdist.parallel.base.tensors import digest
from nbdist.parallel.base.transform import ModelBuild

_STATE = "quant_state"
# Of 8-bit weights, whose constants are in the layer and are made in its first forward.
_EIGHT_BIT = "Int8Params"
# FSDP2 of torch 2.11 lets every sharded parameter require a gradient at first, which bytes cannot.
_SPLITS_BYTES = (2, 13)


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether it has packed weights, whatever strategy they are under."""
    return vars(tensor).get(_STATE) is not None


def quantized_names(model: torch.nn.Module) -> list[str]:
    """Parameters of a model that are packed."""
    return [name for name, parameter in model.named_parameters() if is_quantized(parameter)]


def constants(tensor: torch.Tensor) -> str:
    """Equal for packed weights with the same constants; empty for other tensors."""
    if not is_quantized(tensor):
        return ""
    state: Any = vars(tensor)[_STATE]
    values = state.as_dict(packed=True)  # what bitsandbytes stores of it: tensors by name
    return digest(values[name] for name in sorted(values))


def comparable(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor's local part; of packed weights its bytes, which as floats may be NaN."""
    return local.contiguous().view(torch.uint8) if is_quantized(tensor) else local


def keep_constants(old: torch.Tensor, fresh: torch.Tensor) -> None:
    """Let what stands in the place of packed weights be known as such."""
    if is_quantized(old):
        vars(fresh)[_STATE] = vars(old)[_STATE]


def keep_class(old: torch.Tensor, fresh: torch.nn.Parameter) -> None:
    """Let whole packed weights be of bitsandbytes' class again, which PEFT looks for."""
    nn: Any = sys.modules.get("bitsandbytes.nn")
    if nn is not None and is_quantized(old) and type(fresh) is torch.nn.Parameter:
        fresh.__class__ = nn.Params4bit


def check(job: ModelBuild) -> None:
    """Refuse what would compute with other bytes than the packed ones. No rank is met.

    Raises:
        OptionError: Says what to take instead.
    """
    name, options = job.choice.name, job.choice.options
    for path, parameter in job.base.named_parameters():
        if type(parameter).__name__ == _EIGHT_BIT:
            raise OptionError(
                f"{path} has 8-bit weights of bitsandbytes, whose constants no strategy takes "
                "along. Load the model in 4 bit, or in bfloat16."
            )
    if not (packed := quantized_names(job.base)):
        return
    if job.choice.degrees.tp > 1 or name in {"fsdp1", "deepspeed"}:
        what = "tp" if job.choice.degrees.tp > 1 else name
        raise OptionError(
            f"{what} does not split 4-bit weights, such as {packed[0]}: they are packed by blocks "
            "of the whole matrix. Use fsdp, ddp, zero1, pp, cp or ulysses."
        )
    kinds = {job.base.get_parameter(path).dtype for path in packed}
    is_old = release(str(torch.__version__)) < _SPLITS_BYTES
    if job.choice.degrees.dp_shard > 1 and is_old and not all(k.is_floating_point for k in kinds):
        raise OptionError(
            f"{name} with torch {torch.__version__} cannot split 4-bit weights that lie as "
            "integers. Quantize with bnb_4bit_quant_storage of the dtype that is computed in, "
            "install torch 2.13 or newer, or use ddp."
        )
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
    if job.choice.degrees.dp_shard > 1 and half is not None:
        converted = [kind for kind in kinds if kind.is_floating_point and kind != half]
        if converted:
            raise OptionError(
                f"{name} --{options.precision} would convert the bytes of 4-bit weights, which lie "
                f"as {converted[0]}. Quantize with bnb_4bit_quant_storage=torch.uint8, or leave "
                f"--{options.precision} out."
            )
