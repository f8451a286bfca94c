"""PEFT's adapters for an export: their names and config as PEFT stores them, or merged.

A base weight with its adapter merged is made by PEFT's own layer, from whole tensors: so it is
right under every strategy, also where this rank holds parts of them, or none.
"""

from __future__ import annotations

import copy
import functools
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call

from nbdist.checkpoint.safetensors import ADAPTER_CONFIG
from nbdist.errors import OptionError
from nbdist.parallel.libraries.peft_layers import PREFIX, inner_model
from nbdist.parallel.live import build


def chosen_adapter(model: Any, name: str) -> str:
    """The adapter of this name, or else the one that a model trains. This rank alone.

    Empty for a model without adapters, if none is named.

    Raises:
        OptionError: There is none of this name, or several are active.
    """
    adapters = adapter_names(model)
    if name and name not in adapters:
        raise OptionError(f"There is no adapter {name}. There are: {', '.join(adapters) or 'none'}")
    if name or not adapters:
        return name
    active = model.active_adapters  # a method of models of transformers
    active = active() if callable(active) else active
    if len(active) != 1:
        raise OptionError(
            f"{len(active)} adapters are active: {', '.join(active)}. Choose the one to export: "
            "--adapter NAME."
        )
    return str(active[0])


def stored_names(model: Any, adapter: str, state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name in an adapter's file -> name in the model's state. This rank alone.

    Args:
        model: With adapters of PEFT.
        adapter: One of them.
        state: The model's state, of tensors that need no values.

    Raises:
        OptionError: PEFT computes what it stores of such an adapter.
    """
    from peft import PeftModel, get_peft_model_state_dict

    names = {id(tensor): name for name, tensor in state.items()}
    # PEFT goes by the modules' paths, in which FSDP1 has its own ones (0.21).
    tensors = [*model.named_parameters(), *model.named_buffers()]
    paths = {build.own_name(path): path for path, _ in tensors}
    given = {paths.get(name, name): tensor for name, tensor in state.items()}
    stored = get_peft_model_state_dict(model, state_dict=given, adapter_name=adapter)
    stored = {build.own_name(name): tensor for name, tensor in stored.items()}
    computed = [name for name, tensor in stored.items() if id(tensor) not in names]
    if computed:
        kind = model.peft_config[adapter].peft_type
        raise OptionError(
            f"PEFT computes {computed[0]} when it stores an adapter of type {kind}. Under ddp, "
            "rank 0 can store it: accelerator.unwrap_model(model).save_pretrained(DIR)."
        )
    # A model of transformers with adapters is stored as PEFT's own would be.
    prefix = "" if isinstance(model, PeftModel) else PREFIX
    return {prefix + name: names[id(tensor)] for name, tensor in stored.items()}


def adapter_names(model: Any) -> tuple[str, ...]:
    """The adapters of PEFT that a model has, also those that are not active. This rank alone."""
    has_any = "peft" in sys.modules and bool(getattr(model, "peft_config", None))
    return tuple(model.peft_config) if has_any else ()


def names_in_state(model: Any, state: Mapping[str, torch.Tensor]) -> set[str]:
    """Names in the model's state of all that its adapters train. This rank alone.

    Raises:
        OptionError: As `stored_names`; or it has no adapters.
    """
    adapters = adapter_names(model)
    if not adapters:
        raise OptionError(
            f"{user_class(model).__name__} has no adapters of PEFT. Leave --adapters out."
        )
    return {name for adapter in adapters for name in stored_names(model, adapter, state).values()}


def config_texts(model: Any, adapter: str) -> Mapping[str, str]:
    """An adapter's config as PEFT's `save_pretrained` writes it: file name -> text."""
    config = copy.deepcopy(model.peft_config[adapter])
    base = inner_model(model)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    kind = user_class(base)
    made_of = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(
            folder, auto_mapping_dict=made_of if config.task_type is None else None
        )
        return {ADAPTER_CONFIG: (Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8")}


def user_class(model: torch.nn.Module) -> type[object]:
    """A module's class, which FSDP2 replaces by one of its own."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


Make = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


def merged_names(
    model: Any, adapter: str, names: Collection[str]
) -> tuple[dict[str, tuple[str, ...]], dict[str, Make]]:
    """The base model's tensors with an adapter merged into them. This rank alone.

    Args:
        model: With adapters of PEFT.
        adapter: The one to merge.
        names: Of the tensors in the model's state.

    Returns:
        Name in the base model -> the names in the state that it is made of, first the one that
        has its shape and dtype; and what makes it of these values, where they are several.

    Raises:
        OptionError: Such an adapter is no part of weights.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    prefix = PREFIX if inner_model(model) is not model else ""
    made_of: dict[str, tuple[str, ...]] = {}
    make: dict[str, Make] = {}
    inside: set[str] = set()
    for own_path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        path = build.own_name(own_path)
        here = [name for name in names if name.startswith(f"{path}.") and name not in inside]
        inside.update(here)
        part, is_merged = _kept(module, adapter)
        for name in [name for name in here if name.startswith(f"{path}.{part}")]:
            short = f"{path}.{name.removeprefix(path + '.' + part)}".removeprefix(prefix)
            made_of[short] = (name, *(other for other in here if is_merged and other != name))
            if is_merged:
                make[short] = functools.partial(_merged, module, path, adapter, name)
    if not make:
        raise _unmergeable(str(model.peft_config[adapter].peft_type))
    plain = (name for name in names if name not in inside and name.startswith(prefix))
    return made_of | {name.removeprefix(prefix): (name,) for name in plain}, make


def _kept(module: Any, adapter: str) -> tuple[str, bool]:
    """Prefix of the names in a module of PEFT that remain, and whether the module merges."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, BaseTunerLayer):
        return "base_layer.", True
    if isinstance(module, ModulesToSaveWrapper):
        return f"modules_to_save.{adapter}.", False
    raise _unmergeable(type(module).__name__)


def _unmergeable(kind: str) -> OptionError:
    return OptionError(
        f"An adapter of type {kind} cannot be merged into weights. Leave --merged out: the adapter "
        "is written as PEFT loads it."
    )


def _merged(
    layer: Any, path: str, adapter: str, name: str, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """A tensor of the base layer, with the adapter merged. This rank alone."""
    inside = f"{path}."
    # PEFT changes the base layer's tensors in place.
    given = {
        f"layer.{key.removeprefix(inside)}": value.clone()
        for key, value in values.items()
        if key.startswith(inside)
    }
    merged: torch.Tensor = functional_call(
        _Merge(layer), given, (adapter, name.removeprefix(inside))
    )
    return merged


class _Merge(torch.nn.Module):
    """Merges a layer's adapter, and leaves the layer as if it had not."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    @torch.no_grad()
    def forward(self, adapter: str, name: str) -> torch.Tensor:
        """The tensor of this name in the layer, after the merge."""
        before = list(self.layer.merged_adapters)
        try:
            self.layer.merge(safe_merge=True, adapter_names=[adapter])
        finally:
            self.layer.merged_adapters[:] = before
        merged: torch.Tensor = functools.reduce(getattr, name.split("."), self.layer)
        return merged.detach()
