"""The result of a model's forward: the loss in it, and its parts that a pipeline gets right."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from nbdist.errors import NbdistError
from nbdist.parallel.pp.pytree import pack


def find_loss(value: Any) -> torch.Tensor | None:
    """The loss in what a model returns: a scalar, `.loss`, ["loss"], or the first of a tuple.

    None if there is none. A tensor with dims is an output, if there is but one number in it: the
    only row of a micro-batch may have one.
    """
    loss = value
    if isinstance(value, list | tuple) and value:
        loss = value[0]
    elif isinstance(value, dict):
        loss = value.get("loss")
    elif not isinstance(value, torch.Tensor):
        loss = getattr(value, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.ndim == 0 else None


def loss_of(value: Any) -> torch.Tensor:
    """The same of a model that has returned one for a batch of this shape.

    Raises:
        NbdistError: There is none.
    """
    loss = find_loss(value)
    if loss is None:
        raise NbdistError(
            f"forward returned a {type(value).__name__} without a loss, and one with a loss before "
            "for a batch of the same shape: a pipeline runs backward while it runs such a forward, "
            "so it has to know which it is. Call it with other arguments where it returns no loss, "
            "or use model.eval() or torch.no_grad()"
        )
    return loss


def has_nan(value: Any) -> bool:
    """Whether a floating point tensor in it has a NaN."""
    return any(
        bool(tensor.isnan().any())
        for tensor in pack(value).leaves
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    )


def only_loss(output: Any) -> Any:
    """The same kind of output with its loss alone, the rest None or left out; else all of it."""
    loss = find_loss(output)
    if loss is None:
        return without_cache(output)
    if isinstance(output, torch.Tensor):
        return loss
    if isinstance(output, dict):  # Hugging Face's outputs are
        return type(output)(loss=loss)
    if isinstance(output, list | tuple):
        fields = getattr(output, "_fields", None)
        first: Any = type(output)
        return first(loss, *[None] * (len(fields) - 1)) if fields else first([loss])
    shell = copy.copy(output)
    for name, value in vars(output).items():
        if isinstance(value, torch.Tensor):
            object.__setattr__(shell, name, loss if name == "loss" else None)
    return shell


def without_cache(output: Any) -> Any:
    """The output without a cache of keys and values: the last stage's has its own blocks' alone."""
    if not isinstance(output, dict):
        return output
    # Its name in outputs of transformers is past_key_values, and cache from 5.24 on.
    library: Any = sys.modules.get("transformers.cache_utils")
    caches = {
        key
        for key, entry in output.items()
        if (key == "past_key_values" and entry is not None)
        or (library is not None and isinstance(entry, library.Cache))
    }
    kind: Any = type(output)
    return (
        kind(**{k: entry for k, entry in output.items() if k not in caches}) if caches else output
    )
