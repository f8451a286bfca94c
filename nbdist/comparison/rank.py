"""A rank's part of a comparison: it measures the memory that a cell takes.

    start_peak_memory       measure one cell's memory from here on
    peak_memory             the result
    clear_new_variables     forget what the cell has made; then the strategy is switched back
    discard_training_state  forget what was kept for the comparison

What training changes is kept and put back by switch.rank.saved_state.
"""

from __future__ import annotations

import ctypes
import gc
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim import Adam, AdamW
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from nbdist.comparison.comparison import CellMemory, HeldMemory
from nbdist.parallel.base.tensors import local_of
from nbdist.parallel.live import registry
from nbdist.parallel.live.prepared import Prepared
from nbdist.switch.rank import saved_state

_PROC = Path("/proc/self")
# Written to clear_refs: the highest resident memory counts from now on (man 5 proc).
_RESET_PEAK = "5"


@dataclass(slots=True)
class _Watch:
    """One cell's memory.

    Attributes:
        held: The most so far.
        optimizers: That have stepped.
        hook: Of all optimizers; None where nothing is watched.
        has_peak: The system counts the highest resident memory from the beginning of the watch.
    """

    held: HeldMemory = field(default_factory=HeldMemory)
    optimizers: list[Optimizer] = field(default_factory=list)
    hook: Any = None
    has_peak: bool = True


@dataclass(slots=True)
class _State:
    watch: _Watch = field(default_factory=_Watch)


_state = _State()


def clear_new_variables() -> None:
    """Stop watching, and forget what the cell has made; see switch.rank.saved_state."""
    _stop_watching()
    saved_state.clear_new_variables()


def discard_training_state() -> None:
    """Stop watching, and forget the copies."""
    _stop_watching()
    saved_state.discard_training_state()


def start_peak_memory() -> None:
    """Watch this rank's memory from now on, until `peak_memory`."""
    _stop_watching()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:  # else what the strategy before has freed counts for the next one
        trim(0)
    watch = _state.watch = _Watch()
    if registry.device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        try:
            (_PROC / "clear_refs").write_text(_RESET_PEAK)
        except OSError:  # some containers have no such file: the peak would be that so far
            watch.has_peak = False
    watch.hook = register_optimizer_step_post_hook(
        lambda optimizer, *_: _note_step(watch, optimizer)
    )


def peak_memory() -> CellMemory:
    """Memory of this rank at its peak since `start_peak_memory`."""
    watch = _state.watch
    _stop_watching()
    if not watch.held.total_bytes:
        watch.held = _held_memory(watch.optimizers)
    is_device = registry.device().type == "cuda"
    peak_bytes = torch.cuda.max_memory_allocated() if is_device else None
    if not is_device and watch.has_peak:
        peak_bytes = _resident_peak_bytes()
    trained = _stepped_models(watch.optimizers)
    shapes = [model.layouts[name].shape for model in trained for name in model.parameters]
    return CellMemory(
        held=watch.held,
        peak_bytes=peak_bytes,
        is_device=is_device,
        n_parameters=sum(torch.Size(shape).numel() for shape in shapes),
        has_adam=bool(watch.optimizers)
        and all(
            isinstance(optimizer, Adam | AdamW)
            and not any(group.get("amsgrad") for group in optimizer.param_groups)
            for optimizer in watch.optimizers
        ),
    )


def _note_step(watch: _Watch, optimizer: Optimizer) -> None:
    """An optimizer has stepped: gradients and state are there now."""
    if not any(stepped is optimizer for stepped in watch.optimizers):
        watch.optimizers.append(optimizer)
    memory = _held_memory(watch.optimizers)
    if memory.total_bytes > watch.held.total_bytes:
        watch.held = memory


def _stepped_models(optimizers: list[Optimizer]) -> list[Prepared]:
    """The prepared models that these optimizers step; all, where none has stepped.

    A model of a cell that failed lives on in its error.
    """
    if not optimizers:
        return registry.prepared()
    rows = [row for optimizer in optimizers for row in registry.names_in(optimizer).values()]
    return list({id(model): model for model, _, _ in rows}.values())


def _held_memory(optimizers: list[Optimizer]) -> HeldMemory:
    """Memory on this rank of prepared models, and of the parameters these optimizers step."""
    groups = [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]
    parameters = [
        *(p for model in _stepped_models(optimizers) for p in model.base.parameters()),
        *groups,
    ]
    distinct = list({id(parameter): parameter for parameter in parameters}.values())
    state = [
        v for optimizer in optimizers for entry in optimizer.state.values() for v in entry.values()
    ]
    tensors = [v for v in state if isinstance(v, torch.Tensor) and v.dim() > 0]
    return HeldMemory(
        sum(map(_bytes, distinct)),
        sum(_bytes(parameter.grad) for parameter in distinct if parameter.grad is not None),
        sum(map(_bytes, tensors)),
    )


def _bytes(tensor: torch.Tensor) -> int:
    local = local_of(tensor)
    return 0 if local.is_meta else local.nbytes


def _stop_watching() -> None:
    if _state.watch.hook is not None:
        _state.watch.hook.remove()
        _state.watch.hook = None


def _resident_peak_bytes() -> int | None:
    """The highest resident memory of this process; None where the system does not tell."""
    try:
        status = (_PROC / "status").read_text()
    except OSError:
        return None
    match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None
