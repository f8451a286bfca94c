"""Models without memory, with what they are called with: by their config, or as a rank has sent."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.parallel.live.training_step import is_language_model
from nbdist.planner.fake import pickle_by_value
from nbdist.planner.fake.process_group import CannotRun, never_packed
from nbdist.planner.fake_protocol import Source
from nbdist.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A model on meta, in training, and how it is called.

    Attributes:
        model: Its own for each run.
        inputs: Makes arguments and keyword arguments; under a FakeTensorMode. None where nobody
            knows what it takes.
        optimizer: Class and defaults of the live one; None for that of the load.
    """

    model: torch.nn.Module
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class PickledModel:
    """A live model as a rank sends it, its tensors on meta.

    Attributes:
        model: The user's module, under no strategy.
        args, kwargs: The arguments of a call; None where they are not known.
        optimizer: Class and defaults of what steps it.
    """

    model: torch.nn.Module
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None


def build_meta_model(source: Source, load: Workload) -> MetaModel:
    """The model of a source.

    Raises:
        CannotRun: It cannot be made here.
    """
    if source.pickled:
        return _unpickled(source, load)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise CannotRun(
            "transformers, which makes a model of a config, is not installed"
        ) from error
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a config names a model; nothing is fetched
    config = transformers.AutoConfig.for_model(**source.config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if load.recipe == "bf16" else torch.float32
        )
    never_packed()
    return MetaModel(model.train(), lambda: _tokens(load))


def _unpickled(source: Source, load: Workload) -> MetaModel:
    os.chdir(source.folder or ".")
    sys.path[:] = list(source.sys_path) or sys.path
    sent: PickledModel = pickle_by_value.loads(source.pickled)
    never_packed()
    if load.recipe == "bf16":
        sent.model.to(torch.bfloat16)
    optimizer = sent.optimizer if source.has_optimizer else None
    if sent.args is not None:
        args, kwargs = sent.args, dict(sent.kwargs)
        return MetaModel(sent.model, lambda: pickle_by_value.as_real((args, kwargs)), optimizer)
    if is_language_model(sent.model):
        return MetaModel(sent.model, lambda: _tokens(load), optimizer)
    return MetaModel(sent.model, None, optimizer)


def _tokens(load: Workload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tokens = torch.zeros(load.batch, load.sequence, dtype=torch.long)
    return (), {"input_ids": tokens, "labels": tokens, "use_cache": False}
