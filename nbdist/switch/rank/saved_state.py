"""Saves and restores this rank's training state: for a step that is to leave no trace.

Every copy is of this rank's own part, under the strategy of before, so no rank is met.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from nbdist.errors import NbdistError, OptionError
from nbdist.parallel.accelerator.loader_state import keep_loops
from nbdist.parallel.base.training_state import (
    PutBack,
    generators,
    keep_accelerator,
    keep_generators,
    keep_modes,
    keep_optimizer,
    keep_values,
)
from nbdist.parallel.dp import fsdp
from nbdist.parallel.live import registry
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.reshard.full_state import local_state
from nbdist.rpc.rank import namespace
from nbdist.strategy.choice import label, rows_of
from nbdist.switch.rank.commit import display_name


@dataclass(slots=True)
class _SavedState:
    """Saved training state of this rank.

    Attributes:
        put_back: Puts back the values and modes of these, what their optimizers hold, schedulers,
            scaler, loaders' epochs and random generators.
    """

    models: list[Prepared]
    put_back: list[PutBack]
    names: dict[str, Any]


@dataclass(slots=True)
class _State:
    saved: _SavedState | None = None


_state = _State()


def save_training_state() -> tuple[str, ...]:
    """Copy what training changes on this rank, to the host; the names of the live models.

    Raises:
        OptionError: A live model lies in buffers that no other strategy can take over.
    """
    gc.collect()  # models of cells that were run again
    models = registry.prepared()
    choice = registry.current()
    fixed = next((row.fixed for row in rows_of(choice) if row.fixed), "")
    if models and fixed:
        raise OptionError(
            f"Live models cannot be switched from {label(choice)}: {fixed}. Compare with a "
            "cell that creates its own model while none is prepared, or start with %dist_reset "
            "--strategy ddp."
        )
    for model in models:
        fsdp.settle(model.built.job.root)
    names = {k: v for k, v in namespace.everything().items() if not k.startswith("_")}
    _state.saved = _SavedState(
        models=models,
        put_back=[
            *(
                put
                for model in models
                for put in (
                    keep_values(type(model.base).__name__, functools.partial(local_state, model)),
                    keep_modes(model.base),
                )
            ),
            *(keep_optimizer(optimizer) for optimizer in registry.bound_optimizers()),
            generators().put_back,
            *keep_generators(_generators_in(names)),
            *(put for watcher in registry.watchers() for put in keep_accelerator(watcher)),
            *keep_loops(),
        ],
        names=names,
    )
    return tuple(display_name(model.built) for model in models)


def _generators_in(variables: Mapping[str, Any]) -> Iterator[object]:
    """Values of variables, and the generators of loaders that are not prepared."""
    for value in variables.values():
        yield value
        if issubclass(type(value), DataLoader):
            yield value.generator


def clear_new_variables() -> None:
    """Forget the models and variables that the cell has made on this rank.

    Variables that it has bound anew stand for what they stood for before, but for live models and
    their parameters: a switch binds their names.
    """
    saved = _saved_state()
    variables: Any = namespace.everything()
    for name in namespace.names():
        if name not in saved.names:
            del variables[name]
    switched = (torch.nn.Module, torch.Tensor) if saved.models else ()
    namespace.push(
        {
            name: value
            for name, value in saved.names.items()
            # What IPython is given becomes a name of the user's: not what it has defined itself.
            if variables.get(name) is not value and not issubclass(type(value), switched)
        }
    )
    registry.keep({model.number for model in saved.models})
    gc.collect()


def restore_training_state() -> None:
    """Put back what was saved, in place; gradients are cleared. This rank alone.

    Raises:
        NbdistError: A model or an optimizer lies otherwise now than it did.
    """
    saved = _saved_state()
    for model in saved.models:
        fsdp.settle(model.built.job.root)
        for parameter in model.base.parameters():
            parameter.grad = None
    for put_back in saved.put_back:
        put_back()


def discard_training_state() -> None:
    """Forget the copies."""
    _state.saved = None


def _saved_state() -> _SavedState:
    if _state.saved is None:
        raise NbdistError("There is no saved state on this rank: its process was restarted.")
    return _state.saved
