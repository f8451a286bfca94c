"""torch.autograd.grad and functional_call say for which parameters they cannot be: fsdp, pp."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nbdist.errors import NbdistError

_GATHERED = (
    "torch.autograd.grad gives no gradients of parameters under fsdp: the graph has what was "
    "gathered for each block, and the parameters are this rank's parts. Call backward for each "
    "loss (retain_graph=True for all but the last) and read p.grad in between; or use ddp, and "
    "average what autograd.grad gives with accelerator.reduce(gradient, 'mean')"
)
_ABSENT = (
    "torch.autograd.grad was asked for parameters of other stages of the pipeline, which have no "
    "values here. On all ranks ask for [p for p in model.parameters() if not p.is_meta], each for "
    "its own stage; or use ddp"
)
_REPLACED = (
    "torch.func.functional_call with a model under fsdp would run with the model's own parameters, "
    "which are gathered for each block, and not with those that it is given: torch.func.grad of it "
    "is zero. Use ddp or tp (%dist_strategy ddp)"
)


@functools.cache  # once in a process
def install() -> None:
    """Wrap torch's functions. Before any user code."""
    torch.autograd.grad = _with_gradients(torch.autograd.grad)
    torch.func.functional_call = _with_values(torch.func.functional_call)


def _with_values(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def functional_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(module in (model.base, model.outer) for model in _prepared() if _is_fsdp(model)):
            raise NbdistError(_REPLACED)
        return original(module, *args, **kwargs)

    return functional_call


def _with_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        if not isinstance(listed, list | tuple):
            inputs = listed = list(listed)
        asks_for_parameters = any(isinstance(tensor, torch.nn.Parameter) for tensor in listed)
        refused = _refused() if asks_for_parameters else {}
        if reason := next((refused[id(t)] for t in listed if id(t) in refused), ""):
            raise NbdistError(reason)
        return original(outputs, inputs, *args, **kwargs)

    return grad


def _refused() -> dict[int, str]:
    """Why it cannot be, by ids of parameters."""
    return {
        id(parameter): _ABSENT if parameter.is_meta else _GATHERED
        for model in _prepared()
        # After a forward the model may have the gathered ones.
        for parameter in (*model.parameters.values(), *model.base.parameters())
        if parameter.is_meta or _is_fsdp(model)
    }


def _prepared() -> Iterable[Any]:
    # Not imported for this: accelerate comes with it.
    registry = sys.modules.get("nbdist.parallel.live.registry")
    return () if registry is None else registry.prepared()


def _is_fsdp(model: Any) -> bool:
    name: str = model.built.job.choice.name
    return name == "fsdp"
