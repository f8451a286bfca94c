"""Parts of a rank's steps: backwards, forwards of DDP models, gradients, scalers.

Everything is noted in calls that the user makes anyway: `Tensor.backward`, `Optimizer.step`
(torch's own global hook), `GradScaler.scale`, entering `torch.autocast`, and DDP's constructor,
which gets a forward hook for each model. A step costs some microseconds.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbdist.hang.rank.source_line import UserFrameFinder
from nbdist.hang.records import SourceLine
from nbdist.hang.text import place_text
from nbdist.lints.rank import ddp, experts, watch
from nbdist.lints.unused_parameters import SHOWN_NAMES
from nbdist.parallel.base import events

# The last operation of a loss that is a mean, and nothing else: what else there may be is divided,
# weighted, or not known.
_MEANS = frozenset({
    "BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0", "HuberLossBackward0",
    "MeanBackward0", "MeanBackward1", "MseLossBackward0", "NllLoss2DBackward0",
    "NllLossBackward0", "SmoothL1LossBackward0",
})  # fmt: skip
_MEAN = 1  # torch's number of reduction="mean"

Line = tuple[Any, int]  # a code object and a line of it


@dataclass(slots=True)
class _Stepper:
    """State of one optimizer as of its last step.

    Attributes:
        ddps: The DDP models whose parameters it has, and as of how many DDP models.
        at: Number of the last step.
        backwards: Of all, at the last step.
        lines: How often each line called backward before the last step, where that counts.
    """

    ddps: list[ddp.Ddp] = field(default_factory=list)
    ddp_count: int = -1
    at: int = 0
    backwards: int = 0
    lines: dict[Line, int] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    """Counts of this process, and what was replaced in torch.

    Attributes:
        lines: Line -> backwards since the last step, from losses that are undivided means.
        cleared: Lines before whose second backward there was no gradient any more.
        probe: A parameter that steps, to see whether gradients are added up.
        autocast: What was computed in since the last step.
        stepped: Optimizers that have stepped in this cell.
        former: Id of a model -> its name, and names of former parameters that losses have used.
    """

    count: int = 0
    backwards: int = 0
    steppers: weakref.WeakKeyDictionary[Optimizer, _Stepper] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    lines: dict[Line, int] = field(default_factory=dict)
    cleared: set[Line] = field(default_factory=set)
    probe: weakref.ref[torch.Tensor] | None = None
    autocast: torch.dtype | None = None
    is_inside: bool = False
    stepped: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    former: dict[int, tuple[str, list[str]]] = field(default_factory=dict)


_state = _State()


def count() -> int:
    """Steps of all optimizers so far."""
    return _state.count


def install() -> None:
    """Watch from now on."""
    watch.undo.append(register_optimizer_step_pre_hook(_before_step).remove)
    watch.wrap(torch.Tensor, "backward", _noting_backward)
    watch.wrap(torch.amp.GradScaler, "scale", _noting_scale)
    watch.wrap(torch.amp.autocast, "__enter__", _noting_autocast)
    events.on_backward.append(_Declared)
    watch.undo.append(lambda: events.on_backward.remove(_Declared))
    events.on_former_gradient.append(_note_former)
    watch.undo.append(lambda: events.on_former_gradient.remove(_note_former))


def begin() -> None:
    """Forget the backwards and steps of the cell before."""
    _state.lines.clear()
    _state.cleared.clear()
    _state.stepped.clear()
    _state.former.clear()
    for stepper in _state.steppers.values():
        stepper.lines = {}


def peers() -> tuple[int, ...]:
    """The ranks that should see other data than each other, this one too; empty if unknown.

    Those of the same DDP model, or along the data-parallel axes of a prepared model, that has
    stepped in this cell.
    """
    for optimizer in _state.stepped:
        parameter_ids = watch.parameters_by_id(optimizer).keys()
        mates = _peers_of_prepared(parameter_ids)
        if mates is not None:
            return mates
        if ranks := ddp.ranks_of(parameter_ids):
            return ranks
    return ()


def _peers_of_prepared(parameter_ids: Container[int]) -> tuple[int, ...] | None:
    registry = sys.modules.get("nbdist.parallel.live.registry")
    if registry is None:
        return None
    for prepared in registry.prepared():
        if not any(id(p) in parameter_ids for p in prepared.parameters.values()):
            continue
        if prepared.built.job.choice.name == "single":
            return ()
        rank = torch.distributed.get_rank()
        peers: tuple[int, ...] = prepared.degrees.peers(rank, "dp_replicate", "dp_shard")
        return peers
    return None


def list_stepped() -> list[Optimizer]:
    """The optimizers that have stepped in this cell."""
    return list(_state.stepped)


def end() -> None:
    """Note the former parameters that losses have used, those of a model together."""
    for model, names in _state.former.values():
        more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        watch.note("dead-parameters", f"{', '.join(names[:SHOWN_NAMES])}{more} of {model}")


class _Declared:
    """An Accelerator's `backward` runs torch's in here, of a loss divided by its backwards.

    The line that counts is the one that has called `backward`, beyond `events.backward`.
    """

    def __init__(self, loss: Any, divisor: int) -> None:
        if divisor == 1:
            _note_backward(loss, sys._getframe(3))  # noqa: SLF001  # there is no other way
        self._before = _state.is_inside

    def __enter__(self) -> None:
        _state.is_inside = True

    def __exit__(self, *_: object) -> None:
        _state.is_inside = self._before


def _noting_autocast(original: Any) -> Any:
    def __enter__(self: Any) -> Any:  # noqa: N807
        if getattr(self, "_enabled", False):
            _state.autocast = getattr(self, "fast_dtype", None)
        return original(self)

    return __enter__


def _noting_scale(original: Any) -> Any:
    def scale(self: Any, outputs: Any) -> Any:
        if _state.autocast is torch.bfloat16 and self.is_enabled():
            watch.note("bf16-scaler", "GradScaler")
        return original(self, outputs)

    return scale


def _noting_backward(original: Any) -> Any:
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _state.backwards += 1
        if not _state.is_inside:
            _note_backward(self, sys._getframe(1))  # noqa: SLF001  # there is no other way
        return original(self, *args, **kwargs)

    return backward


@watch.guarded("loss-not-divided")
def _note_backward(loss: Any, frame: Any) -> None:
    node = getattr(loss, "grad_fn", None)
    if type(node).__name__ not in _MEANS or getattr(node, "_saved_reduction", _MEAN) != _MEAN:
        return
    line = frame.f_code, frame.f_lineno
    before = _state.lines.get(line, 0)
    _state.lines[line] = before + 1
    if before == 1 and getattr(_probe_tensor(), "grad", None) is None:
        _state.cleared.add(line)


@watch.guarded("same-data, parameters-apart, beside-wrapper, unused-parameters, loss-not-divided")
def _before_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    if torch.compiler.is_compiling():  # a step that is compiled is not looked at
        return
    state = _state
    state.count += 1
    stepper = state.steppers.setdefault(optimizer, _Stepper())
    if stepper.ddp_count != ddp.count():
        stepper.ddps, stepper.ddp_count = ddp.find(optimizer), ddp.count()
    for model in stepper.ddps:
        ddp.look_unreduced(optimizer, model)
    if optimizer not in state.stepped:
        _look_at_dead(optimizer)
    if state.backwards > stepper.backwards:
        _look_at_backward(optimizer, stepper)
    stepper.lines = dict(state.lines)
    state.lines.clear()
    state.cleared.clear()
    state.autocast = None
    stepper.at, stepper.backwards = state.count, state.backwards
    state.stepped.add(optimizer)
    if _probe_tensor() is None:
        graded = (p for p in watch.parameters_by_id(optimizer).values() if p.grad is not None)
        state.probe = next(map(weakref.ref, graded), None)


def _look_at_backward(optimizer: Optimizer, stepper: _Stepper) -> None:
    experts.look_at_routers(optimizer)
    if stepper.ddps:
        _look_at_ddps(optimizer, stepper)
    if max(_state.lines.values(), default=1) > 1:
        _look_at_lines(optimizer, stepper)


@watch.guarded("dead-parameters")
def _look_at_dead(optimizer: Optimizer) -> None:
    """Has an optimizer parameters that prepared models no longer have?"""
    registry = sys.modules.get("nbdist.parallel.live.registry")
    parameters = list(watch.parameters_by_id(optimizer).values())
    for model in registry.prepared() if registry is not None else ():
        by_name = {model.name_of(p): p for p in parameters}
        dead = [n for n, p in by_name.items() if n and model.current_name_of(p) is None]
        if dead:
            watch.note(
                "dead-parameters", ddp.name_of(model.outer), names=dead[:SHOWN_NAMES],
                count=len(dead), total=len(parameters),
            )  # fmt: skip


@watch.guarded("dead-parameters")
def _note_former(model: torch.nn.Module, name: str) -> None:
    if id(model) not in _state.former:
        _state.former[id(model)] = ddp.name_of(model), []
    names = _state.former[id(model)][1]
    if name not in names:
        names.append(name)


def _probe_tensor() -> torch.Tensor | None:
    return None if _state.probe is None else _state.probe()


def _look_at_ddps(optimizer: Optimizer, stepper: _Stepper) -> None:
    for model in stepper.ddps:
        if model.has_run:
            model.has_run, model.run_at = False, _state.count
    if not any(model.run_at > stepper.at for model in stepper.ddps):
        ddp.look_beside(optimizer, stepper.ddps)
        return
    for model in stepper.ddps:
        if not model.is_checked and model.run_at > stepper.at:
            model.is_checked = True
            ddp.look_unused(optimizer, model)


@watch.guarded("loss-not-divided")
def _look_at_lines(_optimizer: Optimizer, stepper: _Stepper) -> None:
    gradient = getattr(_probe_tensor(), "grad", None)
    for line, times in _state.lines.items():
        is_again = stepper.lines.get(line) == times and line not in _state.cleared
        # Whether gradients are added up is only asked where all else is so: a GPU is waited for.
        if times > 1 and is_again and gradient is not None and gradient.count_nonzero() > 0:
            code, number = line
            place = _places().at(code, number)
            # A cell that is run again has another number.
            subject = f"line {place.line}: {place.source}"
            watch.note("loss-not-divided", subject, place=place_text(place), count=times)


class _Lines(UserFrameFinder):
    """Finds a line of code that may not be running any more."""

    def at(self, code: Any, line: int) -> SourceLine:
        """Place and source of a line of a code object."""
        return self._describe(code.co_filename, line)


@functools.cache
def _places() -> _Lines:
    return _Lines(watch.shell())
