"""A live model as bytes for a process that has not run the notebook's cells.

Classes and functions that no import finds (those of cells) travel as their code, by cloudpickle;
tensors as shape and type, without values. What is unpickled is the same user's, on the same
machine or cluster.
"""

from __future__ import annotations

import io
import pickle
import weakref
from typing import Any

import cloudpickle
import torch
from torch.utils._pytree import tree_map

from nbdist.variables.definitions import corrected

# What nbdist or users set on parameters and steps look at.
_KEPT = frozenset({"tp_plan"})
_WEAK = (weakref.ref, weakref.WeakSet, weakref.WeakKeyDictionary)


def dumps(value: Any) -> bytes:
    """The value with all that it needs.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: Something in it cannot travel.
    """
    into = io.BytesIO()
    _Pickler(into, protocol=5).dump(value)
    return into.getvalue()


def loads(data: bytes) -> Any:
    """Read the text that `dumps` has written. Tensors are on meta."""
    return pickle.loads(data)  # noqa: S301


def as_real(value: Any) -> Any:
    """The same with tensors on the CPU in the place of those on meta: under a FakeTensorMode."""

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
            return leaf
        fresh = torch.zeros(leaf.shape, dtype=leaf.dtype)
        return fresh.requires_grad_(leaf.requires_grad)

    return tree_map(real, value)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, but for tensors without values and references to what is not sent."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape, is_parameter = tuple(value.shape), isinstance(value, torch.nn.Parameter)
            args = (shape, tuple(value.stride()), value.dtype, value.requires_grad, is_parameter)
            return _tensor, args, {k: v for k, v in vars(value).items() if k in _KEPT} or None
        if isinstance(value, _WEAK):
            return _lost, ()
        reduced = corrected(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def _tensor(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    has_gradient: bool,
    is_parameter: bool,
) -> torch.Tensor:
    empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if is_parameter:
        return torch.nn.Parameter(empty, requires_grad=has_gradient)
    return empty.requires_grad_(has_gradient) if dtype.is_floating_point else empty


def _lost() -> None:
    return None
