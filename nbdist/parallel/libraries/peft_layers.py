"""Knowledge of PEFT's models: the model inside, and the layers that adapters surround.

PEFT is not imported here: a model has its classes only if somebody else has.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

PREFIX = "base_model.model."
"""Stands before the names of what is inside a `PeftModel`."""


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model that one of PEFT's calls; any other model itself."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    inner: torch.nn.Module = model.get_base_model()
    return inner


def is_adapted(module: torch.nn.Module) -> bool:
    """Whether it is a layer of PEFT around a layer of the model, with adapters beside that."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def base_layer(module: torch.nn.Module) -> torch.nn.Module:
    """The model's own layer inside a layer of PEFT; any other module itself."""
    if not is_adapted(module):
        return module
    layer: torch.nn.Module = module.get_base_layer()  # type: ignore[operator]
    return layer


def is_lora(module: torch.nn.Module) -> bool:
    """Whether all adapters of a layer of PEFT add B(A(x)) to what a linear layer makes of x."""
    lora: Any = sys.modules.get("peft.tuners.lora.layer")
    return lora is not None and isinstance(module, lora.Linear) and not module.lora_variant
