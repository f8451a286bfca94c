"""A step without dropout, whose masks are drawn all the same, so that ranks' can be compared."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from nbdist.parallel.base.tensors import digest, local_of
from nbdist.verification.draws import Draw

# Those of torch.nn.functional, which torch's modules and models call by these names.
_DROPOUTS = (
    "dropout",
    "alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
)
_ATTENTION = "scaled_dot_product_attention"


@contextlib.contextmanager
def dropped_out(current_module: Callable[[], str]) -> Iterator[list[Draw]]:
    """No dropout changes a value in here; the masks that they would have had are listed.

    A strategy splits activations, so a mask over a whole batch is another one than its parts.
    Masks are drawn, so random generators go on as in any step.
    """
    draws: list[Draw] = []
    counts: Counter[str] = Counter()

    def note(name: str, x: torch.Tensor, p: float, draw: Any) -> None:
        module = current_module()
        mask = local_of(draw(torch.ones_like(x, requires_grad=False), p, True)) != 0
        draws.append(Draw(module, counts[module], tuple(x.shape), p, digest([mask]), name))
        counts[module] += 1

    def dropout(
        name: str, real: Any, input: torch.Tensor, p: float = 0.5, training: bool = True,  # noqa: A002  # torch's names
        inplace: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        if training and p > 0:
            with torch.no_grad():
                note(name, input, p, real)
        return input

    def attention(real: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs["dropout_p"] = 0.0
        result: torch.Tensor = real(*args[:4], **kwargs)
        return result

    with contextlib.ExitStack() as stack:
        for name in _DROPOUTS:
            instead = functools.partial(dropout, name, getattr(functional, name))
            stack.enter_context(_replaced(name, instead))
        real = getattr(functional, _ATTENTION)

        def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
            if len(args) > 5:
                kwargs["is_causal"] = args[5]
            return attention(real, *args, **kwargs)

        stack.enter_context(_replaced(_ATTENTION, attend))
        yield draws


@contextlib.contextmanager
def _replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another function of torch.nn.functional in here; modules look it up at each call."""
    real = getattr(functional, name)
    setattr(functional, name, function)
    try:
        yield
    finally:
        setattr(functional, name, real)
