"""A variable of this rank as a model, and the facts from which another process makes it."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.errors import OptionError
from nbdist.parallel.base.blocks import candidates, find_blocks
from nbdist.parallel.ep.experts import find_experts
from nbdist.parallel.live import build, registry
from nbdist.parallel.live.training_step import inputs_of, is_language_model, optimizer_of
from nbdist.planner.fake import pickle_by_value
from nbdist.planner.fake.models import PickledModel
from nbdist.planner.fake_protocol import Source
from nbdist.planner.live_model import LiveModel, ParameterKind
from nbdist.planner.shape.transformer import Lora
from nbdist.planner.workload import OPTIMIZERS
from nbdist.rpc.rank import namespace


def describe_model(name: str, inputs: str) -> LiveModel:
    """Describe a variable that is a model, whole, whatever strategy it is under. No rank is met.

    Nothing of the user's changes; no values are read.

    Args:
        name: The variable, or a path from one: `trainer.model`.
        inputs: A variable that the model is called with: a tensor, a tuple, or a dict of keyword
            arguments; empty for none.

    Raises:
        OptionError: There is no such variable, or it is no model; lists those that are.
    """
    args, kwargs = inputs_of(inputs)
    return describe(name, namespace.model_of(name), args, kwargs)


def describe(
    name: str,
    model: torch.nn.Module,
    args: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any],
    *,
    wants_source: bool = True,
) -> LiveModel:
    """Describe a model, with what makes it in another process where that is wanted: its code."""
    with _as_written(model) as (base, prepared):
        names = build.names_of(base)
        tensors = build.tensors_of(base)
        optimizer = optimizer_of(base, prepared)
        kind = None if optimizer is None else _kind_of(optimizer)
        to_dict = getattr(getattr(base, "config", None), "to_dict", None)
        # How a plan calls it.
        word = "" if kind is None else kind[0].__name__.lower()
        if optimizer is not None and word == "sgd" and optimizer.defaults.get("momentum"):
            word = "momentum"
        source, problem = Source(), ""
        if wants_source:
            source, problem = _source(PickledModel(base, args, kwargs, kind))
        distinct = [tensors[first] for first in names]
        parameters = [p for p in distinct if isinstance(p, torch.nn.Parameter)]
        experts = _experts(base)
        stacked = {id(p) for n in experts for p in base.get_submodule(n).parameters(recurse=False)}
        buffers = [b for b in distinct if not isinstance(b, torch.nn.Parameter)]
        inputs = [] if args is None else [*args, *kwargs.values()]
        shown = [t for t in inputs if isinstance(t, torch.Tensor)]
        return LiveModel(
            name=name,
            title=type(base).__name__,
            kinds=_kinds(parameters, stacked),
            buffers_bytes=sum(b.numel() * b.element_size() for b in buffers),
            n_buffers=len(buffers),
            tied=tuple(names for names in names.values() if len(names) > 1),
            experts=math.gcd(*experts.values()),
            blocks=_blocks(base),
            config=dict(to_dict()) if callable(to_dict) else {},
            optimizer="" if kind is None else kind[0].__name__,
            optimizer_word=word if word in OPTIMIZERS else "",
            inputs=tuple(f"{tuple(t.shape)} {_word(t.dtype)}" for t in shown),
            inputs_shape=tuple(shown[0].shape) if shown else (),
            is_language_model=is_language_model(base),
            lora=_lora(base),
            is_prepared=prepared is not None,
            digest=_digest(base, names, tensors),
            source=source,
            problem=problem,
        )


@contextmanager
def _as_written(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """The user's module under no strategy, and what is known of it as a prepared one."""
    prepared = registry.prepared_of(model)
    if prepared is None:
        yield model, None
        return
    with build.bare(prepared.built):
        yield prepared.base, prepared


def _kind_of(optimizer: Optimizer) -> tuple[type[Optimizer], dict[str, Any]]:
    kind = next(k for k in type(optimizer).__mro__ if "nbdist" not in k.__module__)
    # Subclasses, as AdamW is of Adam, set defaults that their constructor does not take.
    accepted = inspect.signature(kind).parameters
    return kind, {key: value for key, value in optimizer.defaults.items() if key in accepted}


def _source(sent: PickledModel) -> tuple[Source, str]:
    try:
        data = pickle_by_value.dumps(sent)
    except Exception as error:  # noqa: BLE001  # whatever a user's object raises when it is pickled
        return Source(), f"it cannot be sent to another process ({error})"
    return Source(pickled=data, sys_path=tuple(sys.path), folder=os.getcwd()), ""  # noqa: PTH109


def _kinds(parameters: list[torch.nn.Parameter], stacked: set[int]) -> tuple[ParameterKind, ...]:
    kinds: dict[tuple[str, bool, bool], ParameterKind] = {}
    for parameter in parameters:
        key = _word(parameter.dtype), parameter.requires_grad, id(parameter) in stacked
        kind = kinds.get(key, ParameterKind(*key[:2], 0, 0, key[2]))
        size_bytes = kind.size_bytes + parameter.numel() * parameter.element_size()
        kinds[key] = replace(kind, count=kind.count + parameter.numel(), size_bytes=size_bytes)
    return tuple(kinds.values())


def _experts(base: torch.nn.Module) -> dict[str, int]:
    """How many experts each module of them has, by its name; none where nbdist knows none."""
    try:
        return {name: layer.count for name, layer in find_experts(base).items()}
    except OptionError:
        return {}


def _lora(base: torch.nn.Module) -> Lora | None:
    """The adapters of a model that PEFT has made with those of one kind, by its own config."""
    configs = getattr(base, "peft_config", None)
    if not isinstance(configs, Mapping) or len(configs) != 1:
        return None
    [config] = configs.values()
    rank, targets = getattr(config, "r", None), getattr(config, "target_modules", None)
    if not isinstance(rank, int) or not isinstance(targets, set | list | tuple):
        return None
    return Lora(rank, tuple(sorted(targets)))


def _blocks(base: torch.nn.Module) -> str:
    if not candidates(base):
        return ""
    try:
        blocks = find_blocks(base)
    except OptionError:  # several are the largest
        return ""
    return f"{blocks.name} ({len(blocks.modules)} x {type(blocks.modules[0]).__name__})"


def _digest(
    base: torch.nn.Module, names: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> str:
    text = [type(base).__name__]
    for first in names:
        tensor = tensors[first]
        text.append(f"{first} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
