"""Notes inputs of the models of which several ranks have one copy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nbdist.lints.rank import ddp, watch
from nbdist.parallel.base import events

# Odd: no bit of an earlier call is lost.
_FACTOR = 1_000_003


@dataclass(slots=True)
class _Calls:
    """One model's calls in this cell.

    Attributes:
        ranks: Those that share this copy of the model.
        count: Of calls.
        digest: Of all their tensors; on their device, so that no call waits for a GPU.
    """

    ranks: list[int]
    count: int = 0
    digest: torch.Tensor | int = 0


_calls: weakref.WeakKeyDictionary[torch.nn.Module, _Calls] = weakref.WeakKeyDictionary()


def install() -> None:
    """Note inputs from now on."""
    events.on_inputs.append(_note)
    watch.undo.append(lambda: events.on_inputs.remove(_note))


def begin() -> None:
    """Forget the calls of the cell before."""
    _calls.clear()


def end() -> None:
    """Note this cell's models."""
    for module, calls in list(_calls.items()):
        _note_calls(module, calls)


@watch.guarded("model-inputs")
def _note_calls(module: torch.nn.Module, calls: _Calls) -> None:
    digest = f"{calls.count} {int(calls.digest)}"
    watch.note("model-inputs", ddp.name_of(module), digest=digest, ranks=calls.ranks)


@watch.guarded("model-inputs")
def _note(module: torch.nn.Module, inputs: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
    # Late: it imports torch's strategies and Accelerate, which a model that calls this has loaded.
    from nbdist.hang.rank.reset_models import sum_words

    calls = _calls.setdefault(module, _Calls(list(ranks)))
    calls.count += 1
    for tensor in inputs:
        calls.digest = calls.digest * _FACTOR + sum_words(tensor).to(inputs[0].device)
