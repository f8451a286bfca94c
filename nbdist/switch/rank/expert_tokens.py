"""What this rank counted of its models' experts, for a picture in the notebook."""

from __future__ import annotations

from typing import Any

from nbdist.core.rank import this_rank
from nbdist.parallel import registry
from nbdist.parallel.ep import tokens


def count() -> list[dict[str, Any]]:
    """Each prepared model under ep: its class, which share of the experts is here, their tokens.

    Of the training forwards of the last cell; a model without any is left out. This rank alone.
    """
    rank = this_rank().place.rank
    return [
        {
            "model": type(model.base).__name__,
            "share": model.degrees.ep_place(rank)[0],
            "layers": layers,
        }
        for model in registry.prepared()
        if model.degrees.ep > 1 and (layers := tokens.layers_of(model.base))
    ]
