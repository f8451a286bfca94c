"""How large the prepared models of this rank are: what a plan of their memory begins with."""

from __future__ import annotations

import gc
import math
import weakref

from nbdist.parallel.prepared import Prepared
from nbdist.parallel.registry import prepared
from nbdist.parallel.reshard.rebind import names_for

# Models that no variable holds, and that live all the same: an object of the user's has them.
_kept: weakref.WeakSet[Prepared] = weakref.WeakSet()


def sizes() -> tuple[tuple[str, int, int], ...]:
    """The prepared models: name, number of parameters and their bytes, each as if it were whole.

    Tied parameters count once. Meets no rank.
    """
    if any(one not in _kept and not names_for(one.outer) for one in prepared()):
        gc.collect()  # a cell that was run again leaves models that hold themselves in circles
        _kept.update(one for one in prepared() if not names_for(one.outer))
    return tuple(_size(one) for one in prepared())


def _size(one: Prepared) -> tuple[str, int, int]:
    counts = {n: math.prod(one.layouts[n].shape) for n in one.built.parameter_names}
    held_bytes = sum(count * one.parameters[n].element_size() for n, count in counts.items())
    name = next(iter(names_for(one.outer)), one.built.title)
    return name, sum(counts.values()), held_bytes
