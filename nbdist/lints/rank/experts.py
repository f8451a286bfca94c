"""How many tokens the experts of this rank got, in the training forwards of a cell."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from nbdist.core.rank import this_rank
from nbdist.lints.rank import ddp, watch
from nbdist.parallel import events

# Experts of a layer -> tokens of each that is here.
_loads: weakref.WeakKeyDictionary[torch.nn.Module, list[int]] = weakref.WeakKeyDictionary()


def install() -> None:
    """Count from now on."""
    events.on_experts.append(_count)
    watch.undo.append(lambda: events.on_experts.remove(_count))


def begin() -> None:
    """Forget the tokens of the cell before."""
    _loads.clear()


def end() -> None:
    """Note this cell's models."""
    if _loads:
        _note_models()


def _count(module: torch.nn.Module, tokens: Sequence[int]) -> None:
    before = _loads.get(module, [0] * len(tokens))
    _loads[module] = [a + b for a, b in zip(before, tokens, strict=True)]


@watch.guarded("uneven-experts")
def _note_models() -> None:
    from nbdist.parallel import registry  # late: a model that has experts here has loaded it

    for model in registry.prepared():
        layers = {
            name: _loads[module] for name, module in model.base.named_modules() if module in _loads
        }
        if layers and model.degrees.ep > 1:
            share, _ = model.degrees.ep_place(this_rank().place.rank)
            watch.note("uneven-experts", ddp.name_of(model.outer), share=share, layers=layers)
