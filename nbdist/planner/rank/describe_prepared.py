"""The prepared models of this rank for the panel: described once, until one changes."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Hashable
from dataclasses import replace

from nbdist.parallel.accelerator.loader_state import last_batch
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.live.registry import prepared
from nbdist.parallel.live.training_step import optimizer_of
from nbdist.parallel.reshard.rebind import names_for
from nbdist.planner.live_model import LiveModel
from nbdist.planner.rank import describe_model

_cache: weakref.WeakKeyDictionary[Prepared, tuple[Hashable, LiveModel]] = (
    weakref.WeakKeyDictionary()
)
# Models that no variable holds, and that live all the same: an object of the user's has them.
_held_by_objects: weakref.WeakSet[Prepared] = weakref.WeakSet()


def sizes() -> tuple[tuple[str, int, int], ...]:
    """The prepared models: name, number of parameters and their bytes, each as if it were whole.

    Tied parameters count once. Meets no rank.
    """
    if any(model not in _held_by_objects and not names_for(model.outer) for model in prepared()):
        gc.collect()  # a cell that was run again leaves models that hold themselves in circles
        _held_by_objects.update(model for model in prepared() if not names_for(model.outer))
    return tuple(_size(model) for model in prepared())


def _size(model: Prepared) -> tuple[str, int, int]:
    counts = {n: math.prod(model.layouts[n].shape) for n in model.built.parameter_names}
    held_bytes = sum(count * model.parameters[n].element_size() for n, count in counts.items())
    name = next(iter(names_for(model.outer)), model.built.title)
    return name, sum(counts.values()), held_bytes


def sketches() -> tuple[LiveModel, ...]:
    """The prepared models, whole, in the order of `sizes`, with the batch that was seen last.

    Meets no rank. Nothing of them is made to be sent elsewhere: `source` is empty.
    """
    names = [name for name, _, _ in sizes()]
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
