"""Captures each module's inputs, outputs and gradients in one step, copied to the host."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from nbdist.hang.rank.source_line import UserFrameFinder
from nbdist.hang.records import SourceLine
from nbdist.parallel.base.tensors import local_as, local_of
from nbdist.parallel.cp.cp import ContextParallel
from nbdist.parallel.live import fsdp1_state
from nbdist.parallel.live.build import own_name
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.pp.stage import Stages
from nbdist.parallel.sequence.split_sequence import map_tensors, tensors
from nbdist.rpc.rank import namespace
from nbdist.verification.differences import (
    INPUT,
    INPUT_GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    TensorKey,
)
from nbdist.verification.optimizers import Settings

ROOT = ""
_MICRO = "number"  # the keyword with which torch's schedule names a micro-batch
PARTIAL = "it is a partial sum that the strategy adds up later"


@dataclass(slots=True)
class Captured:
    """Tensors and facts that one step has computed on this rank.

    Attributes:
        values: Each tensor; under a pipeline its micro-batches, in order.
        order: Number of each in its phase, as it was computed.
        lines: Module -> the user's line that called it.
        written: Module -> the first line of its forward, where the user has written it.
        callers: Module -> the module whose forward called it.
        partial: Tensors of which this rank has a partial sum.
        gradients: As the optimizer sees them at its first step: this rank's parts, by first name.
        n_steps: How often an optimizer has stepped.
        settings: Of the first step: the numbers of its groups, by name.
    """

    values: dict[TensorKey, list[torch.Tensor]] = field(default_factory=dict)
    order: dict[TensorKey, int] = field(default_factory=dict)
    lines: dict[str, SourceLine | None] = field(default_factory=dict)
    written: dict[str, SourceLine | None] = field(default_factory=dict)
    callers: dict[str, str] = field(default_factory=dict)
    partial: set[TensorKey] = field(default_factory=set)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    n_steps: int = 0
    settings: Settings = ()

    def note(self, key: TensorKey, value: torch.Tensor, micro: int) -> None:
        """Copy a tensor; one that was noted for this micro-batch stays."""
        if not value.is_floating_point() or value.is_meta:
            return
        if isinstance(value, DTensor) and any(p.is_partial() for p in value.placements):
            self.partial.add(key)
            return
        pieces = self.values.setdefault(key, [])
        self.order.setdefault(key, len(self.order))
        if len(pieces) == micro:
            pieces.append(local_of(value).to("cpu", copy=True))


class Capture:
    """Hooks on every module of a prepared model, while it is attached.

    Attributes:
        captured: What they have seen.
        is_root_whole: The model's own output is noted by `note_whole`: its caller gets a share.
    """

    def __init__(self, model: Prepared, *, moved_eps: float = 0.0) -> None:
        """Capture one model; `moved_eps` moves float inputs, or embeddings, by so much."""
        self.captured = Captured()
        self._model = model
        self._moved_eps = moved_eps
        self._moved = torch.Generator().manual_seed(0)
        self._handles: list[Any] = []
        self._finder = UserFrameFinder(namespace.shell())
        self._calls: dict[str, int] = {}
        self._stack: list[str] = []
        self._micro = 0
        self._firsts: dict[int, dict[str, int]] = {}
        self._in_backward = False
        self.is_root_whole = False
        # Where the wrapper runs the model for itself as well, it says when a step does.
        self._gate = _gate(model)
        self._is_open = self._gate is None

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """The hooks are there in here, and gone afterwards. This rank alone."""
        try:
            self._attach()
            yield
        finally:
            self.remove()

    def _attach(self) -> None:
        captured_names: set[str] = set()
        for path, module in self._model.base.named_modules():
            name = own_name(f"{path}.").removesuffix(".")
            if name in captured_names:
                continue
            captured_names.add(name)
            before = functools.partial(self._before, name)
            after = functools.partial(self._after, name)
            pre = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            self._handles += [pre, module.register_forward_hook(after, with_kwargs=True)]
        if self._gate is not None:
            self._handles += [
                self._gate.register_forward_pre_hook(self._open, with_kwargs=True, prepend=True),
                self._gate.register_forward_hook(self._close, always_call=True),
            ]
        self._handles.append(register_optimizer_step_pre_hook(self._step))

    def remove(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def note_whole(self, output: Any) -> None:
        """Note the model's own output, where the caller gets only a share of it."""
        self._note_all(OUTPUT, ROOT, output, self._calls.get(ROOT, 1) - 1)

    def move(self, value: torch.Tensor) -> torch.Tensor:
        """Each element one unit in the last place larger or smaller, at random."""
        signs = torch.randint(2, value.shape, generator=self._moved).to(value.device) * 2 - 1
        moved: torch.Tensor = value * (1 + self._moved_eps * signs.to(value.dtype))
        return moved

    def current_module(self) -> str:
        """The innermost module whose forward runs."""
        return self._stack[-1] if self._stack else ROOT

    @property
    def is_moving(self) -> bool:
        """Whether inputs are moved in this run."""
        return self._moved_eps > 0

    def _open(self, _gate: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        number = kwargs.get(_MICRO)
        if isinstance(self._gate, Stages) and number is None:  # it finds out shapes
            return
        self._is_open, self._in_backward = True, False
        self._micro = 0 if number is None else int(number)
        self._stack.clear()
        part = id(kwargs.get("part"))
        if not self._micro:
            self._firsts[part] = dict(self._calls)
        else:  # another piece of the same call
            self._calls = dict(self._firsts[part])

    def _close(self, *_: Any) -> None:
        self._is_open = False

    def _is_noting(self) -> bool:
        return self._is_open and torch.is_grad_enabled()

    def _before(self, name: str, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if name == ROOT and self._gate is None:
            self._in_backward = False
            self._stack.clear()
        self._stack.append(name)
        if not self._is_noting():
            return None
        args, kwargs = map_tensors(_identity, (args, kwargs))
        if self._in_backward:  # computed again, of a checkpoint
            return args, kwargs
        call = self._calls[name] = self._calls.get(name, 0) + 1
        if len(self._stack) > 1:
            self.captured.callers.setdefault(name, self._stack[-2])
        if name not in self.captured.lines:
            self._note_lines(name, module)
        if name != ROOT:
            self._note_all(INPUT, name, (args, kwargs), call - 1)
        return args, kwargs

    def _after(self, name: str, _module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        while self._stack and self._stack.pop() != name:
            pass
        if not self._is_noting() or self._in_backward:
            return None
        inputs = list(tensors((args, kwargs)))
        is_table = bool(inputs) and not any(t.is_floating_point() for t in inputs)
        if self.is_moving and is_table and not any(True for _ in _module.children()):
            output = map_tensors(lambda t: self.move(t) if t.is_floating_point() else t, output)
        if name == ROOT and self.is_root_whole:
            return None
        self._note_all(OUTPUT, name, output, self._calls[name] - 1)
        return output if self.is_moving and is_table else None

    def _note_lines(self, name: str, module: torch.nn.Module) -> None:
        line = self._finder.find(sys._getframe(1))  # noqa: SLF001  # as inspect's, without files
        self.captured.lines[name] = line
        self.captured.written[name] = self._finder.find_code(type(module).forward.__code__)

    def _note_all(self, what: str, name: str, values: Any, call: int) -> None:
        gradient = INPUT_GRADIENT if what == INPUT else OUTPUT_GRADIENT
        for item, value in enumerate(tensors(values)):
            self.captured.note(TensorKey(what, name, item, call), value, self._micro)
            if value.requires_grad and value.is_floating_point():
                key = TensorKey(gradient, name, item, call)
                value.register_hook(functools.partial(self._note_gradient, key, self._micro))  # type: ignore[no-untyped-call]

    def _note_gradient(self, key: TensorKey, micro: int, gradient: torch.Tensor) -> None:
        self._in_backward = True
        self.captured.note(key, gradient, micro)

    def _step(self, optimizer: Optimizer, *_: Any) -> None:
        self.captured.n_steps += 1
        if self.captured.n_steps == 1:
            self.captured.settings = tuple(map(_numbers, optimizer.param_groups))
            self.captured.gradients = gradients_of(self._model)


def gradients_of(model: Prepared) -> dict[str, torch.Tensor]:
    """Copy this rank's part of each gradient to the host, by first name. Collective along tp.

    Nothing under fsdp1, which keeps the gradients of a block in one tensor.
    """
    if fsdp1_state.is_flat(model):
        return {}
    return {
        name: local_as(parameter.grad, parameter).detach().to("cpu", copy=True)
        for name, parameter in model.parameters.items()
        if parameter.grad is not None
    }


def _numbers(group: dict[str, Any]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Settings of a group that are a number, or several: lr, betas, weight_decay."""
    listed = {k: v if isinstance(v, (tuple, list)) else (v,) for k, v in group.items()}
    return tuple(
        (key, tuple(float(value) for value in values))
        for key, values in sorted(listed.items())
        if key != "params" and all(_is_number(value) for value in values)
    )


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_scalar or isinstance(value, (int, float))


def _gate(model: Prepared) -> torch.nn.Module | None:
    """Module for a step's forward, if the wrapper runs the model to find things out as well."""
    root = model.built.job.root
    if isinstance(root, Stages):
        return root
    outer = model.outer
    if isinstance(outer, ContextParallel) and outer.module is not model.base:
        inner: torch.nn.Module = outer.module
        return inner
    return None


def _identity(value: torch.Tensor) -> torch.Tensor:
    """The same tensor with a gradient of its own: what comes back from this module alone."""
    if value.requires_grad and value.is_floating_point() and torch.is_grad_enabled():
        return value.view_as(value)
    return value
