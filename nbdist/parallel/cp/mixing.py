"""Search for positions that mix outside of attention: NaN before a cut shows up behind it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from nbdist.parallel.cp import attention
from nbdist.parallel.cp.kernels import Problem
from nbdist.parallel.sequence import split_sequence


def find_mixing(base: torch.nn.Module, call: inspect.BoundArguments, cut: int) -> str:
    """The module in which positions on both sides of a cut reach each other; "" without one.

    Forward runs twice, with NaN before the cut and then behind it. Zero times NaN is NaN, so no
    weight and no gate hides anything, however small it is. Attention, which may cross the cut,
    gives its own side's NaN on and nothing else.
    """
    n_positions = split_sequence.length(call)
    for side in (slice(0, cut), slice(cut, n_positions)):
        names = {module: name for name, module in base.named_modules()}
        taint = _Taint(names, side, n_positions)
        if module := taint.run(base, call):
            return module
    return ""


@dataclass
class _Taint:
    """One run with NaN on one side.

    Attributes:
        names: The modules of the model. Hooks of torch are for those of every model.
        side: Where NaN is put.
        length: Of the sequence.
        running: The names of modules whose forward runs, the innermost last.
        suspects: Modules whose output has NaN beyond the cut and whose input has not.
        proven: The first module because of which attention's input has NaN beyond the cut.
    """

    names: dict[torch.nn.Module, str]
    side: slice
    length: int
    running: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    proven: str = ""

    def run(self, base: torch.nn.Module, call: inspect.BoundArguments) -> str:
        """The module that mixes positions, "" without one."""
        changed: Any = {
            name: split_sequence.map_tensors(lambda tensor: self._poison(tensor, 1), value)
            for name, value in call.arguments.items()
        }
        poisoned = inspect.BoundArguments(call.signature, changed)
        hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True),
        ]
        try:
            with attention.SplitSequence(self._attend):
                base(*poisoned.args, **poisoned.kwargs)
        except Exception:  # noqa: BLE001  # the model's code may refuse NaN in words of its own
            return ""  # then results alone are compared, as they are after this
        finally:
            for hook in hooks:
                hook.remove()
        return self.proven or next(iter(self.suspects), "")

    def _attend(self, problem: Problem) -> torch.Tensor:
        inputs = (problem.query, problem.key, problem.value)
        if not self.proven and any(map(self._is_beyond, inputs)):
            # Without a suspect it happened in what runs now.
            self.proven = self.suspects[0] if self.suspects else self.running[-1]
        size = problem.value.shape[-1]
        return self._poison(problem.query.new_zeros(*problem.query.shape[:-1], size), -2)

    def _before(self, module: torch.nn.Module, _inputs: object) -> None:
        if module in self.names:
            self.running.append(self._label(module))

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if module not in self.names:
            return None
        self.running.pop()
        inputs = [*split_sequence.tensors((args, kwargs))]
        outputs = [t for t in split_sequence.tensors(output) if self._dims(t)]
        if not outputs:
            return None
        if not any(map(self._dims, inputs)) and not any(t.isnan().any() for t in outputs):
            # An embedding: the first numbers of the sequence.
            return split_sequence.map_tensors(lambda tensor: self._poison(tensor, -2), output)
        if not any(map(self._is_beyond, outputs)):
            # What was beyond has come back: experts, say, have sorted tokens for themselves.
            inside = f"{self.names[module]}." if self.names[module] else ""
            self.suspects = [name for name in self.suspects if not name.startswith(inside)]
        elif not any(map(self._is_beyond, inputs)):
            self.suspects.append(self._label(module))
        return None

    def _label(self, module: torch.nn.Module) -> str:
        kind = type(module).__name__
        return f"{self.names[module]} ({kind})" if self.names[module] else kind

    def _dims(self, tensor: torch.Tensor) -> list[int]:
        """The dims of a tensor of numbers that may be the sequence."""
        has_numbers = tensor.is_floating_point()
        return [d for d, n in enumerate(tensor.shape) if has_numbers and n == self.length]

    def _is_beyond(self, tensor: torch.Tensor) -> bool:
        """Whether there is NaN on the other side, whichever dim the sequence is."""
        dims = self._dims(tensor)
        start, stop = (0, self.side.start) if self.side.start else (self.side.stop, self.length)
        has_nan = (tensor.narrow(dim, start, stop - start).isnan().any() for dim in dims)
        return bool(dims) and all(has_nan)

    def _poison(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A copy with NaN on this side of a dim, if that is the sequence."""
        is_sequence = tensor.ndim > 1 and tensor.shape[dim] == self.length
        if not (is_sequence and tensor.is_floating_point()):
            return tensor
        tensor = tensor.clone()
        start, stop = self.side.start, self.side.stop
        tensor.narrow(dim, start, stop - start).fill_(torch.nan)
        return tensor
