"""A model's whole values, given and taken, whether it is prepared or a DeepSpeed engine."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.parallel.dp import deepspeed
from nbdist.parallel.live import build, fsdp1_state, registry
from nbdist.parallel.reshard import full_state, own_buffers


@dataclass(frozen=True, slots=True)
class Portable:
    """How a model's values are had and put back.

    Attributes:
        firsts: Every name of a parameter or buffer -> its first one; several where tied.
        shapes: Of the whole tensors, by first name.
        values: Gives whole tensors by first name, on every rank. Collective: every rank.
        load: Takes such values; what is not among them stays. Every rank, alike.
        listed: Gives the module's state_dict as it is on this rank: its names, and what is no
            tensor. This rank alone.
    """

    base: torch.nn.Module
    firsts: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    values: Callable[[], Mapping[str, torch.Tensor]]
    load: Callable[[Mapping[str, torch.Tensor]], None]
    listed: Callable[[], Mapping[str, Any]]

    def saved_names(self) -> list[str]:
        """Names in the module's state_dict that are of parameters and buffers."""
        return [name for name in self.listed() if name in self.firsts]

    def state_dict(self) -> dict[str, Any]:
        """The module's state_dict as it would be in one process. Collective: every rank."""
        values = self.values()
        return OrderedDict(
            (name, values[self.firsts[name]] if name in self.firsts else other)
            for name, other in self.listed().items()
        )


def portable(model: Any) -> Portable:
    """Make the state of a prepared model, or of the user's module, portable."""
    prepared = registry.prepared_of(model)
    if prepared is None:
        base: torch.nn.Module = model.module  # an engine's
        firsts = build.firsts_of(base)
        # The third stage leaves empty tensors, and notes their shapes.
        shapes = {
            name: tuple(getattr(tensor, "ds_shape", tensor.shape))
            for name, tensor in build.tensors_of(base).items()
            if name in firsts.values()
        }
        return Portable(
            base=base,
            firsts=firsts,
            shapes=shapes,
            values=functools.partial(deepspeed.full_state, model),
            load=functools.partial(deepspeed.load_full, model),
            listed=functools.partial(_state_dict, base),
        )
    return Portable(
        base=prepared.base,
        firsts=build.firsts_of(prepared.base),
        shapes={name: tuple(layout.shape) for name, layout in prepared.layouts.items()},
        values=functools.partial(full_state.full_state, prepared),
        load=functools.partial(full_state.load_full, prepared),
        listed=functools.partial(
            fsdp1_state.local_state_dict if fsdp1_state.is_flat(prepared) else _state_dict,
            prepared.base,
        ),
    )


def _state_dict(base: torch.nn.Module) -> Mapping[str, Any]:
    state: Mapping[str, Any] = base.state_dict(keep_vars=True)
    return state


def warn_of_own_buffers(model: Any) -> None:
    """Warn if a state that all ranks have asked for is another one on each. Collective."""
    prepared = registry.prepared_of(model)
    if prepared is not None:
        models = {prepared.built.title: prepared}
        for note in own_buffers.notes_on(models, own_buffers.EACH_RANK):
            warnings.warn(f"get_state_dict: {note}", stacklevel=3)
