"""What torch.utils.checkpoint computes again in backward finds attention split as in forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint

from nbdist.parallel.cp import attention

# What `checkpoint(..., use_reentrant=False)` calls: of torch 2.15 and later, and of those before.
_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)


@functools.cache
def follow() -> None:
    """Let every later recomputation in this process enter the mode that its forward was in.

    A user's own checkpointing runs outside of the model's forward, where nothing splits a
    sequence: each rank would attend to its own piece, and gradients would be wrong without an
    error. A `context_fn` is no way to it: it is the user's, and reentrant checkpoints take none.
    So the two functions that keep what is computed again are replaced. Where torch has neither
    name, a recomputation with use_reentrant=False ends in torch's CheckpointError.
    """
    reentrant: Any = checkpoint.CheckpointFunction
    forward = reentrant.forward

    @functools.wraps(forward)
    def forward_as_now(ctx: Any, run: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, attention.as_now(run), *args)

    reentrant.forward = staticmethod(forward_as_now)
    name = next((name for name in _GENERATORS if hasattr(checkpoint, name)), "")
    if not name:
        return
    generator = getattr(checkpoint, name)

    @functools.wraps(generator)
    def generator_as_now(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(attention.as_now(run), *args, **kwargs)

    setattr(checkpoint, name, generator_as_now)
