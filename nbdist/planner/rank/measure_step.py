"""The memory of a real step on this rank, by torch's allocator or, on a CPU, by its profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from nbdist.errors import NbdistError
from nbdist.memory.rank import ddp_fsdp
from nbdist.parallel.base.tensors import local_of
from nbdist.parallel.live.training_step import loss_of
from nbdist.planner.check import MeasuredMemory
from nbdist.recording.rank.steps import is_profiling, start_profiler


@dataclass(frozen=True, slots=True)
class StepSubject:
    """The model and the inputs whose training step is measured.

    Attributes:
        outer: What is called.
        base: The model, with its parameters.
        optimizer: Whose step counts; None for none.
    """

    outer: torch.nn.Module
    base: torch.nn.Module
    optimizer: Optimizer | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def measure_step(subject: StepSubject) -> MeasuredMemory:
    """Run four steps, and say what the last one takes.

    Parameters, state and gradients change. On every rank at once, where the model is split.

    Raises:
        NbdistError: Another profiler runs, and torch has one at a time.
    """
    if is_profiling(unknown=False):
        raise NbdistError(
            "Another profiler runs on this rank, and torch allows one at a time. Stop it first."
        )
    is_device = next(iter(subject.base.parameters())).device.type == "cuda"
    meter = _of_cuda if is_device else _of_cpu
    for _ in range(2):  # DDP makes its buckets anew in the second forward
        _step(subject)
        subject.base.zero_grad()
    activations, _, loss = meter(lambda: _forward(subject))
    if loss.requires_grad:
        loss.backward()
    del loss
    if subject.optimizer is not None:
        subject.optimizer.step()
    subject.base.zero_grad()
    resident = _tensors(subject)
    # Between steps: states, buckets, inputs.
    inputs = [*subject.args, *subject.kwargs.values()]
    base = sum(resident.values()) + _bytes(v for v in inputs if isinstance(v, torch.Tensor))
    _, peak, _ = meter(lambda: _step(subject))
    gradients = _bytes(p.grad for p in subject.base.parameters() if p.grad is not None)
    needs = 0
    if subject.optimizer is not None:
        _, needs, _ = meter(subject.optimizer.step)
    subject.base.zero_grad()
    return MeasuredMemory(
        parameters=resident["parameters"],
        gradients=gradients,
        optimizer=resident["optimizer"],
        activations=activations,
        buffers=base - resident["parameters"] - resident["optimizer"],
        peak=base + max(peak, gradients + needs),
        has_optimizer=subject.optimizer is not None,
        is_device=is_device,
    )


def _forward(subject: StepSubject) -> torch.Tensor:
    return loss_of(subject.outer(*subject.args, **subject.kwargs))


def _step(subject: StepSubject) -> None:
    loss = _forward(subject)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]


def _tensors(subject: StepSubject) -> dict[str, int]:
    state = () if subject.optimizer is None else subject.optimizer.state.values()
    buckets = 0
    for module in subject.outer.modules():
        if isinstance(module, DistributedDataParallel) and not module.gradient_as_bucket_view:
            buckets += sum(ddp_fsdp.bucket_sizes(module))
    return {
        "parameters": _bytes(subject.base.parameters()),
        "optimizer": _bytes(
            value
            for entry in state
            for value in entry.values()
            if isinstance(value, torch.Tensor) and value.ndim
        ),
        "buffers": _bytes(subject.base.buffers()) + buckets,
    }


def _bytes(tensors: Any) -> int:
    """Sum the bytes of this rank's parts; a tensor under several names counts once."""
    parts = {id(tensor): local_of(tensor) for tensor in tensors}
    return sum(part.numel() * part.element_size() for part in parts.values() if not part.is_meta)


def _of_cuda(run: Callable[[], Any]) -> tuple[int, int, Any]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return after - before, peak - before, result


def _of_cpu(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """Measure a call's memory at its end and at its peak; and return its result.

    Private: the profiler's own list of events. The file for Chrome has them too, and takes
    seconds to write and read.
    """
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    start_profiler(profiler)
    try:
        result = run()
    finally:
        profiler.stop()
    inner = getattr(profiler, "profiler", None)
    events = inner.kineto_results.events() if inner is not None else ()
    memory = [event for event in events if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return now, peak, result
