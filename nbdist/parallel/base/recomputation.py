"""Recomputation by torch.utils.checkpoint in backward, under the settings of its forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint

Run = Callable[..., Any]

# What `checkpoint(..., use_reentrant=False)` calls: of torch 2.15 and later, and of those before.
_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
_followed: list[Callable[[Run], Run]] = []


def follow(as_now: Callable[[Run], Run]) -> None:
    """Give every later checkpoint of this process what `as_now` makes of its function.

    A user's own checkpointing computes again outside of the model's forward. Under cp nothing
    would split the sequence there: each rank would attend to its own piece, and gradients would be
    wrong without an error. A `context_fn` is no way to it: it is the user's, and reentrant
    checkpoints take none. So the two functions that keep what is computed again are replaced.
    Where torch has neither name, a recomputation with use_reentrant=False ends in torch's
    CheckpointError.

    Args:
        as_now: Of a function, the same one under what this thread is under now; called in forward.
    """
    if as_now not in _followed:
        _followed.append(as_now)
    _replace()


@functools.cache
def _replace() -> None:
    reentrant: Any = checkpoint.CheckpointFunction
    forward = reentrant.forward

    @functools.wraps(forward)
    def forward_as_now(ctx: Any, run: Run, *args: Any) -> Any:
        return forward(ctx, _as_now(run), *args)

    reentrant.forward = staticmethod(forward_as_now)
    name = next((name for name in _GENERATORS if hasattr(checkpoint, name)), "")
    if not name:
        return
    generator = getattr(checkpoint, name)

    @functools.wraps(generator)
    def generator_as_now(run: Run, *args: Any, **kwargs: Any) -> Any:
        return generator(_as_now(run), *args, **kwargs)

    setattr(checkpoint, name, generator_as_now)


def _as_now(run: Run) -> Run:
    return functools.reduce(lambda inner, as_now: as_now(inner), _followed, run)
