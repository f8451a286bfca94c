"""torch's own clipping of gradients is right where a rank has only a part of the model.

`torch.nn.utils.clip_grad_norm_` on a pipeline's stage would clip by the norm of the stage, and
under tp and ep it takes no list of plain tensors and DTensors. Both are handed on to ours where a
parameter is of a model that is prepared for tp, pp or ep; for all else torch's function is as it
was.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad as torch_clip_grad


@functools.cache  # once in a process
def install() -> None:
    """Wrap torch's functions, under every name that they have in torch. Before any user code."""
    wrappers: dict[str, Callable[[Any], Any]] = {
        "clip_grad_norm_": _whole_norm,
        "clip_grad_value_": _each_value,
        "get_total_norm": _norm_of_gradients,
    }
    for name, wrap in wrappers.items():
        original = getattr(torch.nn.utils, name)
        wrapped = wrap(original)
        for module in (torch.nn.utils, torch_clip_grad):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapped)


def _split_parameters() -> dict[int, torch.Tensor]:
    """By id, those of prepared models of which each rank has a part under tp, pp or ep."""
    registry = sys.modules.get("nbdist.parallel.live.registry")
    if registry is None:
        return {}
    return {
        id(parameter): parameter
        for model in registry.prepared()
        if model.degrees.tp * model.degrees.pp * model.degrees.ep > 1
        for parameter in model.parameters.values()
    }


def list_parameters(
    parameters: torch.Tensor | Iterable[torch.Tensor], function: str
) -> list[torch.Tensor]:
    """List the parameters that torch's functions accept: one of them, or several.

    Raises:
        NbdistError: A strategy has replaced one of them (`registry.refuse_replaced`).
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    registry = sys.modules.get("nbdist.parallel.live.registry")
    if registry is not None:
        registry.refuse_replaced(listed, function)
    return listed


def _clip(
    parameters: list[torch.Tensor], max_norm: float, norm_type: float, *, is_strict: bool
) -> torch.Tensor:
    # Late: DTensor takes long to import, and this module is there from a rank's start.
    from nbdist.parallel.accelerator.clip_grad import clip_grad_norm
    from nbdist.parallel.live import registry

    return clip_grad_norm(
        parameters,
        float(max_norm),
        float(norm_type),
        registry.layout_of,
        degrees=registry.current().degrees,
        is_strict=is_strict,
    )


def _whole_norm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        listed, split = list_parameters(parameters, "clip_grad_norm_"), _split_parameters()
        if any(id(parameter) in split for parameter in listed):
            return _clip(listed, max_norm, norm_type, is_strict=error_if_nonfinite)
        return original(listed, max_norm, norm_type, error_if_nonfinite, *args, **kwargs)

    return clip_grad_norm_


def _each_value(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> None:
        listed, split = list_parameters(parameters, "clip_grad_value_"), _split_parameters()
        if any(id(parameter) in split for parameter in listed):
            from nbdist.parallel.base.tensors import local_parts

            listed = local_parts(listed)
        original(listed, *args, **kwargs)

    return clip_grad_value_


def _norm_of_gradients(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def get_total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        listed, split = list_parameters(tensors, "get_total_norm"), _split_parameters()
        by_gradient = {id(p.grad): p for p in split.values() if p.grad is not None}
        if any(id(tensor) in by_gradient for tensor in listed):
            owners = [by_gradient[id(t)] for t in listed if id(t) in by_gradient]
            if len(owners) < len(listed):
                raise ValueError(
                    "get_total_norm got gradients of a model that is split over ranks together "
                    "with other tensors. Take the norm of each by itself."
                )
            return _clip(owners, math.inf, norm_type, is_strict=error_if_nonfinite)
        return original(listed, norm_type, error_if_nonfinite, *args, **kwargs)

    return get_total_norm
