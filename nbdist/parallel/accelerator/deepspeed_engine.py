"""A prepared DeepSpeed engine: it has taken model and optimizer over, and steps them itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from nbdist.errors import OptionError
from nbdist.parallel.accelerator import save_state
from nbdist.parallel.accelerator.optimizer import OptimizerWrapper
from nbdist.parallel.dp import deepspeed
from nbdist.parallel.live import registry
from nbdist.strategy.choice import Strategy

# The engines of this rank. The class itself is not known before the package is imported.
_engines: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class EngineOptimizer(OptimizerWrapper):
    """An optimizer that steps an engine. Its groups are the user's optimizer's, for schedulers."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: torch.nn.Module) -> None:
        """Wrap the optimizer that `engine` has taken over."""
        super().__init__(optimizer)
        self.engine = engine

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step, if this backward is the last one of an accumulation. Collective: every rank.

        Raises:
            OptionError: A closure: DeepSpeed has no step for one.
        """
        if closure is not None:
            raise OptionError("DeepSpeed has no step(closure). Use fsdp or zero1 for one.")
        if self.gradient_state.sync_gradients:
            self._is_overflow = not deepspeed.step(self.engine)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: a step has cleared the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Torch's, of this rank's part; nothing while `save_state` runs (`save_state.absent`)."""
        return save_state.absent() if save_state.is_saving() else super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Leave the state as it is: DeepSpeed takes it over in its own form only."""
        if not save_state.is_absent(state_dict):
            save_state.tell_forgotten("DeepSpeed does not take an optimizer's state over")


def is_engine(module: torch.nn.Module) -> bool:
    """Whether a module is an engine that was prepared here."""
    return module in _engines


def drop() -> None:
    """End all engines: DeepSpeed keeps them for ever, also of cells that were run again."""
    for engine in list(_engines):
        _engines.discard(engine)
        engine.destroy()  # type: ignore[operator]


def refuse_switch(new: Strategy) -> None:
    """Raises an OptionError if there is an engine: it cannot be put under another strategy."""
    if _engines:
        raise OptionError(
            "A model that DeepSpeed has taken over cannot be switched: its state has a format of "
            "DeepSpeed's own. Save with accelerator.save_state(DIR), start afresh with %dist_reset "
            f"--strategy {new.name}, prepare again, and load with accelerator.load_state(DIR)."
        )


def only(models: Iterable[torch.nn.Module]) -> torch.nn.Module | None:
    """The engine among an Accelerator's models; None without one."""
    return next((model for model in models if is_engine(model)), None)


def outer_of(base: torch.nn.Module) -> torch.nn.Module | None:
    """Find the object that the user calls for a module: wrapper, module, engine; None if ended."""
    prepared = registry.prepared_of(base)
    if prepared is not None:
        return prepared.outer
    return base if is_engine(base) else None


def prepare_engine(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return prepare()'s arguments with model and optimizer replaced by an engine. Collective.

    Raises:
        OptionError: Not one model with one optimizer, or DeepSpeed cannot run as asked.
    """
    models = [a for a in arguments if isinstance(a, torch.nn.Module) and not is_engine(a)]
    optimizers = [a for a in arguments if isinstance(a, torch.optim.Optimizer)]
    optimizers = [o for o in optimizers if not isinstance(o, EngineOptimizer)]
    if not models and not optimizers:
        return tuple(arguments)
    if len(models) != 1 or len(optimizers) != 1:
        raise OptionError(
            "DeepSpeed takes one model and its optimizer over together, and prepare() was given "
            f"{len(models)} and {len(optimizers)}. Give both in one call: model, optimizer = "
            "accelerator.prepare(model, optimizer)."
        )
    raw = optimizers[0].optimizer if isinstance(optimizers[0], OptimizerWrapper) else optimizers[0]
    drop()
    choice = registry.current()
    engine, optimizer = deepspeed.prepare(
        models[0], raw, choice, registry.cached_mesh(), registry.device()
    )
    _engines.add(engine)
    placed = {id(models[0]): engine, id(optimizers[0]): EngineOptimizer(optimizer, engine)}
    return tuple(placed.get(id(argument), argument) for argument in arguments)
