"""A real step of a live model for a plan to be checked by; afterwards all is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.core.plan_check import Measured
from nbdist.engine import compared, described, namespace
from nbdist.engine.fake.sources import is_language_model
from nbdist.engine.measured import Subject, measured
from nbdist.engine.parallel import fsdp, registry
from nbdist.engine.parallel.agreement import random_kept
from nbdist.engine.parallel.build import local_of
from nbdist.engine.parallel.prepared import Prepared
from nbdist.errors import OptionError


def check_step(name: str, inputs: str, batch: int, sequence: int) -> Measured:
    """Measure a step of a variable that is a model. On every rank at once.

    Values, gradients, the optimizer's state and settings, random generators and modes are put
    back bit by bit; the user's optimizer steps, and no scheduler does.

    Args:
        name: As for described.describe_model.
        inputs: Likewise.
        batch: Of random tokens, for a language model that is called with nothing else.
        sequence: Tokens of each.

    Raises:
        OptionError: There is no such model, or nobody knows what it is called with.
        NbdistError: Another profiler runs.
    """
    model = namespace.model_of(name)
    one = registry.prepared_of(model)
    base = model if one is None else one.base
    outer = model if one is None else one.outer
    optimizer = described.optimizer_of(base, one)
    args, kwargs = described.inputs_of(inputs)
    if args is None:
        args, kwargs = _random(base, batch, sequence)
    with _kept(base, one, optimizer):
        base.train()
        return measured(Subject(outer, base, optimizer, args, dict(kwargs)))


def _random(
    base: torch.nn.Module, batch: int, sequence: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not is_language_model(base):
        raise OptionError(
            f"Nobody knows what {type(base).__name__} is called with. Name a variable that holds "
            "that with --inputs: a tensor, a tuple, or a dict of keyword arguments."
        )
    made = torch.Generator().manual_seed(0)
    words = base.config.vocab_size  # type: ignore[union-attr]
    tokens = torch.randint(0, int(words), (batch, sequence), generator=made)  # type: ignore[arg-type]
    tokens = tokens.to(registry.device())
    return (), {"input_ids": tokens, "labels": tokens, "use_cache": False}


@contextmanager
def _kept(
    base: torch.nn.Module, one: Prepared | None, optimizer: Optimizer | None
) -> Iterator[None]:
    """Everything that a step changes is put back. This rank alone."""
    if one is not None:
        fsdp.settle(one.built.job.root)
    values = [
        (local_of(t), local_of(t).to("cpu", copy=True))
        for t in (*base.parameters(), *base.buffers())
        if not t.is_meta
    ]
    gradients = [(p, p.grad) for p in base.parameters()]
    modes = [(module, module.training) for module in base.modules()]
    stepper = None if optimizer is None else compared.stepper_of(optimizer)
    put_back = random_kept()
    base.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        if one is not None:
            fsdp.settle(one.built.job.root)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, is_training in modes:
            module.training = is_training
        if stepper is not None:
            compared.put_back(stepper)
        put_back()
