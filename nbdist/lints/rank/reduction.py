"""Which gradients of a DDP model are reduced: of the first backward after a forward, no others.

DDP waits for one backward from a forward on. Each further one, through the same forward or an
earlier one, adds to `.grad` what this rank alone has computed; the next backward that DDP waits
for reduces the sum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from nbdist.hang.rank.source_line import UserFrameFinder
from nbdist.hang.text import place_text
from nbdist.lints.gradients_apart import (
    BY_HAND,
    NO_SYNC,
    SECOND_BACKWARD,
    STEP_IN_HOOK,
    TWO_FORWARDS,
)
from nbdist.lints.rank import watch
from nbdist.lints.replicas import UnreducedStep

# Calls of torch.autograd.grad that run.
_grad_calls: list[bool] = []


@dataclasses.dataclass(slots=True)
class _Forward:
    """One forward: whether DDP waits for its backward, and whether one came through it."""

    is_synced: bool
    has_backward: bool = False


class Reduction:
    """State of one DDP model's gradients as of its last backward. Its hook after a forward.

    Attributes:
        is_awaited: DDP waits for a backward, which it will reduce.
        backward: Number of the last backward.
        idiom: Why the gradients are not reduced; empty where they are.
        is_stepped: An optimizer has stepped in this cell.
        step: The step with gradients that were not reduced, of the last cell with steps.
    """

    def __init__(self) -> None:
        self.is_awaited = False
        self.backward = -1
        self.idiom = ""
        self.is_stepped = False
        self.step: UnreducedStep | None = None

    def __call__(self, module: torch.nn.Module, _args: object, output: object) -> None:
        """After the model's forward."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._follow(module, output)

    def __reduce__(self) -> tuple[Any, ...]:
        # As for the hook before a forward: where there is no nbdist, a call that returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")

    @watch.guarded("gradients-apart")
    def _follow(self, module: Any, output: object) -> None:
        forward = _Forward(bool(module.require_backward_grad_sync))
        self.is_awaited |= forward.is_synced
        for node in {t.grad_fn for t in _tensors(output) if t.grad_fn is not None}:
            node.register_prehook(functools.partial(self._arrive, forward))

    @watch.guarded("gradients-apart")
    def _arrive(self, forward: _Forward, _gradients: object) -> None:
        """A backward comes to what a forward has returned."""
        number = backward_number()
        if number == self.backward:
            return
        self.backward = number
        if _grad_calls:  # of a loss, or of what becomes a part of one: DDP waits on
            self.idiom = BY_HAND
            return
        if self.is_awaited:
            self.idiom = ""
        elif not forward.is_synced:
            self.idiom = NO_SYNC
        else:
            self.idiom = SECOND_BACKWARD if forward.has_backward else TWO_FORWARDS
        self.is_awaited, forward.has_backward = False, True

    def idiom_of_step(self, ddp: Any) -> str:
        """An optimizer steps: why the gradients may differ between ranks; empty if none is known.

        Empty from the second such step of a cell on.
        """
        if not self.is_stepped:
            self.is_stepped, self.step = True, None
        idiom = STEP_IN_HOOK if backward_number() >= 0 else self.idiom
        if not idiom or self.step is not None or dist.get_world_size(ddp.process_group) == 1:
            return ""
        # Under ddp ranks may be meant to train apart for a while, as in local SGD.
        return "" if idiom == NO_SYNC and not _is_zero1(ddp) else idiom

    def note(self, name: str, number: int, idiom: str, ddp: Any, stepped: dict[int, Any]) -> None:
        """Note the gradients that this step takes, and tell the notebook of them at once."""
        gradients = [
            parameter.grad
            for parameter_name, parameter in ddp.module.named_parameters()
            if id(parameter) in stepped
            and parameter.grad is not None
            and parameter_name not in ddp.parameters_to_ignore
        ]
        line = _places().find(sys._getframe(1))  # noqa: SLF001  # there is no other way
        self.step = UnreducedStep(idiom, place_text(line, with_source=False), _digest(gradients))
        ranks = dist.get_process_group_ranks(ddp.process_group)
        facts = dataclasses.asdict(self.step)
        facts |= {"ranks": ranks, "of": len(ranks), "model": number}
        watch.note("gradients-apart", name, **facts)
        watch.note_now("gradients-apart", name, facts)


def install() -> None:
    """Know which gradients torch.autograd.grad computes; torch.func asks it too."""
    watch.wrap(torch.autograd, "grad", _noting_grad)


def _noting_grad(original: Any) -> Any:
    def grad(*args: Any, **kwargs: Any) -> Any:
        _grad_calls.append(True)
        try:
            return original(*args, **kwargs)
        finally:
            _grad_calls.pop()

    return grad


def backward_number() -> int:
    """A number of the backward that runs in this thread, of no other one; -1 where none runs.

    Private: nothing public tells one backward from the next, or that code runs in a hook of one.
    torch's own checkpointing asks the same. Without it no backward is known.
    """
    ask = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001
    return -1 if ask is None else int(ask())


def _tensors(output: object) -> Iterator[torch.Tensor]:
    if dataclasses.is_dataclass(output) and not isinstance(output, type | dict):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return (leaf for leaf in watch.leaves(output) if issubclass(type(leaf), torch.Tensor))


def _digest(gradients: list[torch.Tensor]) -> str:
    """Digest every bit. On a GPU this waits for it: once in a cell, where something is wrong."""
    from nbdist.hang.rank import reset_models  # with FSDP, for which a start does not wait

    total = hashlib.blake2b(digest_size=8)
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        total.update(reset_models.checksum(values).to_bytes(8, "little", signed=True))
    return total.hexdigest()


def _is_zero1(module: torch.nn.Module) -> bool:
    registry = sys.modules.get("nbdist.parallel.live.registry")
    return registry is not None and any(
        prepared.built.job.choice.name == "zero1" and module in set(prepared.outer.modules())
        for prepared in registry.prepared()
    )


@functools.cache
def _places() -> UserFrameFinder:
    return UserFrameFinder(watch.shell())
