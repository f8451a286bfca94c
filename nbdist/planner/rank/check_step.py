"""A real step of a live model for a plan to be checked by; afterwards all is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from nbdist.parallel.base.tensors import local_of
from nbdist.parallel.base.training_state import (
    generators,
    keep_gradients,
    keep_modes,
    keep_optimizer,
    keep_values,
    put_back_after,
)
from nbdist.parallel.dp import fsdp
from nbdist.parallel.live import registry
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.live.training_step import inputs_of, optimizer_of, random_tokens
from nbdist.planner.check import MeasuredMemory
from nbdist.planner.rank.measure_step import StepSubject, measure_step
from nbdist.rpc.rank import namespace


def check_step(name: str, inputs: str, batch: int, sequence: int) -> MeasuredMemory:
    """Measure a step of a variable that is a model. On every rank at once.

    Values, gradients, the optimizer's state and settings, random generators and modes are put
    back bit by bit; the user's optimizer steps, and no scheduler does.

    `name` and `inputs` are as for planner.rank.describe_model, `batch` and `sequence` those of
    random tokens, for a language model that is called with nothing else.

    Raises:
        OptionError: There is no such model, or nobody knows what it is called with.
        NbdistError: Another profiler runs.
    """
    model = namespace.model_of(name)
    prepared = registry.prepared_of(model)
    base = model if prepared is None else prepared.base
    outer = model if prepared is None else prepared.outer
    optimizer = optimizer_of(base, prepared)
    args, kwargs = inputs_of(inputs)
    if args is None:
        args, kwargs = random_tokens(base, batch, sequence)
    with _values_put_back(base, prepared, optimizer):
        base.train()
        return measure_step(StepSubject(outer, base, optimizer, args, dict(kwargs)))


@contextmanager
def _values_put_back(
    base: torch.nn.Module, prepared: Prepared | None, optimizer: Optimizer | None
) -> Iterator[None]:
    """Everything that a step changes is put back. This rank alone."""

    def settle() -> None:
        if prepared is not None:
            fsdp.settle(prepared.built.job.root)

    settle()
    tensors = (*base.parameters(), *base.buffers())
    local = dict(enumerate(local_of(tensor) for tensor in tensors if not tensor.is_meta))
    put_backs = [
        settle,
        keep_values(type(base).__name__, lambda: local),
        keep_gradients(base),
        keep_modes(base),
        *([] if optimizer is None else [keep_optimizer(optimizer)]),
        generators().put_back,
    ]
    base.zero_grad(set_to_none=True)
    with put_back_after(*put_backs):
        yield
