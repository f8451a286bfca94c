"""Notes on the code around a model in a step: terms of each loss, calls that make data."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from nbdist.hang.rank.source_line import UserFrameFinder
from nbdist.parallel.base.tensors import local_of
from nbdist.parallel.sequence.split_sequence import tensors
from nbdist.rpc.rank import namespace
from nbdist.verification.losses import LossTerm, OuterCall
from nbdist.verification.rank.loss_terms import terms_of

# Functions that take data, move it and put it together: ranks may differ by them, as they have
# different data.
_SELECTING = frozenset(
    (
        "chunk", "split", "tensor_split", "narrow", "select", "unbind", "unsqueeze", "squeeze",
        "view", "reshape", "flatten", "unflatten", "transpose", "t", "permute", "expand",
        "contiguous", "clone", "detach", "to", "cpu", "cuda", "long", "float", "int", "cat",
        "stack", "pad",
    )
)  # fmt: skip
_LOADING = "torch/utils/data/"  # files; a dataset may well treat samples differently


class OuterCode(TorchFunctionMode):
    """Watches a step of the reference outside of its models' forwards. This rank alone.

    Attributes:
        terms: Of each backward, from the loss to the model.
        calls: Of torch, on the way to a loss or into a model.
    """

    def __init__(self, models: Sequence[torch.nn.Module], accumulate: int) -> None:
        """Watch code around the user's own modules; losses are divided by `accumulate`."""
        super().__init__()
        self.terms: list[LossTerm] = []
        self._calls: set[OuterCall] = set()
        self._models = models
        self._accumulate = accumulate
        self._finder = UserFrameFinder(namespace.shell())
        self._n_paused = 0
        self._n_steps = 0
        self._n_backwards = 0
        self._handles: list[Any] = []
        self._forget()

    @property
    def calls(self) -> frozenset[OuterCall]:
        """Calls whose results have come into a model, or into a loss."""
        return frozenset(self._calls)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """It watches in here."""
        real = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            handles, close = self._watch(roots)
            self._pause()
            try:
                real(tensors, *args, **kwargs)
            finally:
                self._resume()
                for handle in handles:
                    handle.remove()
            close()

        try:
            for model in self._models:
                self._handles += [
                    model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
                    model.register_forward_hook(self._leave, always_call=True),
                ]
            self._handles += [
                register_optimizer_step_pre_hook(self._pause),
                register_optimizer_step_post_hook(self._stepped),
            ]
            torch.autograd.backward = backward
            with self:
                yield
        finally:
            torch.autograd.backward = real
            while self._handles:
                self._handles.pop().remove()

    def _enter(self, _model: Any, args: Any, kwargs: Any) -> None:
        self._keep([*tensors((args, kwargs))])
        self._pause()

    def _leave(self, _model: Any, _args: Any, output: Any) -> None:
        self._resume()
        self._outputs += [t.grad_fn for t in tensors(output) if t.grad_fn is not None]

    def _pause(self, *_: Any) -> None:
        self._n_paused += 1

    def _resume(self, *_: Any) -> None:
        self._n_paused -= 1

    def _stepped(self, *_: Any) -> None:
        self._resume()
        self._n_steps += 1
        self._n_backwards = 0
        self._forget()

    # Calls

    def _forget(self) -> None:
        # Storages are kept, so that no other one gets the address of one that is in here.
        self._made: dict[int, list[tuple[OuterCall | None, tuple[int, ...]]]] = {}
        self._kept: list[Any] = []
        self._outputs: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call it, and note what was made of what."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if not self._n_paused and name not in {"__get__", "__set__"}:
            self._note(name, args, kwargs or {}, result)
        return result

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        inputs = list(tensors((args, kwargs)))
        if not inputs:
            return
        is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        written = inputs[:1] if is_in_place else list(tensors(result))
        sources = tuple(address for tensor in inputs if (address := self._address(tensor)))
        for tensor in written:
            if address := self._address(tensor):
                self._kept.append(tensor)
                call = self._call(name, inputs, args, kwargs)
                self._made.setdefault(address, []).append((call, sources))

    def _call(self, name: str, inputs: Sequence[torch.Tensor], args: Any, kwargs: Any
              ) -> OuterCall | None:  # fmt: skip
        is_by_tensor = name == "__getitem__" and len(inputs) > 1
        if name in _SELECTING or (name == "__getitem__" and not is_by_tensor):
            return None
        if _is_loading(sys._getframe(1)):  # noqa: SLF001  # as inspect's, without files
            return None
        is_data = not any(tensor.requires_grad for tensor in inputs) and name != "__setitem__"
        numbers = list(_numbers((args, tuple(kwargs.values())))) if is_data else []
        return OuterCall.at(name, numbers, self._finder.find(sys._getframe(1)))  # noqa: SLF001

    def _keep(self, roots: Sequence[torch.Tensor]) -> None:
        """Keep the calls that these tensors come from."""
        left = [address for tensor in roots if (address := self._address(tensor))]
        seen: set[int] = set()
        while left:
            address = left.pop()
            if address in seen:
                continue
            seen.add(address)
            for call, sources in self._made.get(address, ()):
                if call is not None:
                    self._calls.add(call)
                left += sources

    @staticmethod
    def _address(tensor: torch.Tensor) -> int:
        try:
            return local_of(tensor).untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # torch.func's tensors have no storage
            return 0

    # Losses

    def _watch(self, roots: Sequence[torch.Tensor]) -> tuple[list[Any], Callable[[], None]]:
        """Hooks on the terms of a loss, and what notes them when its backward is through."""
        self._keep(roots)
        weights: dict[int, float] = {}
        terms = terms_of([t.grad_fn for t in roots], self._outputs, self._accumulate)

        def note(number: int) -> Callable[[Any], None]:
            def hook(
                gradients: Sequence[torch.Tensor | None],
            ) -> None:  # a scalar's has one element
                gradient = gradients[0]
                if gradient is not None and gradient.numel() == 1:
                    weights[number] = float(local_of(gradient))

            return hook

        def close() -> None:
            for number, term in enumerate(terms):
                if number in weights:
                    self.terms.append(LossTerm(
                        term.kind, weights[number], term.count,
                        not any(above in weights for above in term.above), term.divisions,
                        self._n_steps, self._n_backwards,
                    ))  # fmt: skip
            self._n_backwards += 1

        return [t.node.register_prehook(note(i)) for i, t in enumerate(terms)], close


def _numbers(values: Any) -> Iterator[float]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _numbers(value)
        elif isinstance(value, (int, float)):
            yield float(value)


def _is_loading(frame: FrameType | None) -> bool:
    while frame is not None:
        if _LOADING in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
