"""How many tokens the experts on this rank got in training forwards since the last cell began."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

# Experts of a layer -> tokens of each that is here.
_by_layer: weakref.WeakKeyDictionary[torch.nn.Module, list[int]] = weakref.WeakKeyDictionary()
# In all layers: what experts here computed, and what this rank's router sent anywhere.
_computed = _routed = 0


def count(module: torch.nn.Module, tokens: Sequence[int], n_routed: int) -> None:
    """The experts of a layer got so many tokens each, and this rank had so many for all experts.

    A token counts once for each of its experts.
    """
    global _computed, _routed  # one rank, one count
    before = _by_layer.get(module, [0] * len(tokens))
    _by_layer[module] = [a + b for a, b in zip(before, tokens, strict=True)]
    _computed, _routed = _computed + sum(tokens), _routed + n_routed


def forget() -> None:
    """A cell begins."""
    global _computed, _routed  # noqa: PLW0603
    _by_layer.clear()
    _computed = _routed = 0


def layers_of(base: torch.nn.Module) -> dict[str, list[int]]:
    """Tokens of each expert that is here, by the name of a layer's experts in a model."""
    return {name: _by_layer[module] for name, module in base.named_modules() if module in _by_layer}


def load() -> float | None:
    """Tokens that experts here computed, by those that this rank routed: 1.0 is even.

    None before the first training forward under ep. From any thread.
    """
    return _computed / _routed if _routed else None
