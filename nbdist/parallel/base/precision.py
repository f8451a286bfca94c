"""bf16 and fp16: forward runs under autocast, and what it returns is fp32 again."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbdist.errors import OptionError
from nbdist.parallel.base.transform import Layouts, ModelBuild, Transform
from nbdist.strategy.choice import Strategy

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# What the user's Accelerator() says: it counts where the strategy's options say nothing.
_of_accelerator = "fp32"


def note(mixed_precision: str) -> None:
    """Remember what this rank's Accelerator was made with: no, bf16 or fp16."""
    global _of_accelerator  # noqa: PLW0603  # one process is one rank
    _of_accelerator = mixed_precision if mixed_precision in DTYPES else "fp32"


def with_accelerator_precision(choice: Strategy) -> Strategy:
    """The choice with the Accelerator's precision, unless its own options name one."""
    if choice.options.precision != "fp32" or _of_accelerator == "fp32":
        return choice
    return dataclasses.replace(
        choice, options=dataclasses.replace(choice.options, precision=_of_accelerator)
    )


def _plan(job: ModelBuild, layouts: Layouts) -> Layouts:
    """Changes no layout: parameters stay as they are, each use of one is cast."""
    precision = job.choice.options.precision
    if precision in DTYPES and not torch.amp.is_autocast_available(job.device.type):
        raise OptionError(
            f"--{precision}: torch has no autocast for {job.device.type}. Leave the option out."
        )
    if precision == "bf16" and job.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise OptionError(
            f"--bf16: {torch.cuda.get_device_name()} cannot compute in bf16. Use --fp16."
        )
    return layouts


def _wrap(job: ModelBuild, outer: torch.nn.Module) -> torch.nn.Module:
    """Put autocast around the forward of the root: a pipeline's stage, else the user's module.

    Under FSDP too, beside its policy. The policy gathers parameters in half the bytes, but
    what runs between them stays as the model wrote it: a loss of bf16 logits would be bf16,
    with three digits, and a product with an fp32 buffer an error.
    """
    dtype = DTYPES.get(job.choice.options.precision)
    if dtype is not None:
        run = job.root.forward
        # No closure: copy.deepcopy makes a partial's bound method one of the copy.
        lower: Any = functools.partial(_run_in_autocast, run, job.device.type, dtype)
        job.root.forward = functools.update_wrapper(lower, run)
    return outer


def _run_in_autocast(
    run: Callable[..., Any], device_type: str, dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    with torch.autocast(device_type, dtype=dtype):
        outputs = run(*args, **kwargs)
    return to_fp32(outputs)


def to_fp32(value: Any) -> Any:
    """The same with every bf16 and fp16 tensor in it as fp32; gradients flow.

    Goes into mappings (a Hugging Face output is one), tuples, lists and dataclasses; what
    else there is stays the same object.
    """
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in DTYPES.values() else value
    if isinstance(value, Mapping):
        changed: Any = copy.copy(value)
        for key, inner in value.items():
            changed[key] = to_fp32(inner)
        return changed
    if isinstance(value, list | tuple):
        items = [to_fp32(inner) for inner in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(
            value, **{name: to_fp32(getattr(value, name)) for name in fields}
        )
    return value


STEP = Transform(plan=_plan, wrap=_wrap)
