"""What the prepared models of this rank are, for the panel: described once, until one changes."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import replace

from nbdist.parallel.accelerator.loader_state import last_batch
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.live.registry import prepared
from nbdist.parallel.live.training_step import optimizer_of
from nbdist.planner.live_model import LiveModel
from nbdist.planner.rank import describe_model, model_sizes

_cache: weakref.WeakKeyDictionary[Prepared, tuple[Hashable, LiveModel]] = (
    weakref.WeakKeyDictionary()
)


def sketches() -> tuple[LiveModel, ...]:
    """The prepared models, whole, in the order of `sizes`, with the batch that was seen last.

    Meets no rank. Nothing of them is made to be sent elsewhere: `source` is empty.
    """
    names = [name for name, _, _ in model_sizes.sizes()]
    return tuple(_sketch(name, model) for name, model in zip(names, prepared(), strict=True))


def _sketch(name: str, model: Prepared) -> LiveModel:
    optimizer = optimizer_of(model.base, model)
    trained = tuple(p.requires_grad for p in model.parameters.values())
    key = (name, type(optimizer), optimizer is not None and str(optimizer.defaults), hash(trained))
    cached_key, cached = _cache.get(model, (None, None))
    if cached is None or cached_key != key:
        cached = describe_model.describe(name, model.outer, None, {}, wants_source=False)
        _cache[model] = (key, cached)
    shape, word = last_batch()
    if not shape:
        return cached
    return replace(cached, inputs=(f"{shape} {word}",), inputs_shape=shape)
