"""How many tokens the experts on this rank got in training forwards since the last cell began."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nbdist.core.rank import this_rank

if TYPE_CHECKING:
    from nbdist.parallel.live.prepared import Prepared

# Experts of a layer -> tokens of each that is here.
_by_layer: weakref.WeakKeyDictionary[torch.nn.Module, list[int]] = weakref.WeakKeyDictionary()
# In all layers: what experts here computed, and what this rank's router sent anywhere. One value,
# which another thread reads.
_totals = (0, 0)


def count(module: torch.nn.Module, tokens: Sequence[int], n_routed: int) -> None:
    """The experts of a layer got so many tokens each, and this rank had so many for all experts.

    A token counts once for each of its experts.
    """
    global _totals  # noqa: PLW0603  # one rank, one count
    before = _by_layer.get(module, [0] * len(tokens))
    _by_layer[module] = [a + b for a, b in zip(before, tokens, strict=True)]
    computed, routed = _totals
    _totals = computed + sum(tokens), routed + n_routed


def forget() -> None:
    """A cell begins."""
    global _totals  # noqa: PLW0603
    _by_layer.clear()
    _totals = (0, 0)


def of_models() -> Iterator[tuple[Prepared, dict[str, Any]]]:
    """Each prepared model whose experts are shared and got tokens, with what was counted.

    `layers`: tokens of each expert that is here, by the name of a layer's experts; `share`: which
    of the equal parts of all experts is here. This rank alone.
    """
    from nbdist.parallel.live import registry  # late: a model that has experts here has loaded it

    for model in registry.prepared():
        modules = model.base.named_modules()
        layers = {name: _by_layer[module] for name, module in modules if module in _by_layer}
        if layers and model.degrees.ep > 1:
            share, _ = model.degrees.ep_place(this_rank().place.rank)
            yield model, {"share": share, "layers": layers}


def load() -> float | None:
    """Tokens that experts here computed, by those that this rank routed: 1.0 is even.

    None before the first training forward under ep. From any thread.
    """
    computed, routed = _totals
    return computed / routed if routed else None
