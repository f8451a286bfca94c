"""How large the prepared models of this rank are: what a plan of their memory begins with."""

from __future__ import annotations

import gc
import math
import weakref

from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.live.registry import prepared
from nbdist.parallel.reshard.rebind import names_for

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
