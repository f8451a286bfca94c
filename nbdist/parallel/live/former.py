"""Parameters that a model no longer has: using one as if it were trained is an error.

Their values can be read, as of a snapshot. A gradient, a freeze and a change in place were meant
for the parameter that has come in their place.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from nbdist.errors import NbdistError

_GRADIENT: Any = torch.Tensor.grad
_NEEDS_GRADIENT: Any = torch.Tensor.requires_grad
_OF_TRAINING = (
    *(_GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__),
    _NEEDS_GRADIENT.__set__,
)
# Id -> name, and whether it is replaced now. Nothing is in the parameter, which may be pickled.
_former: dict[int, tuple[str, Callable[[torch.Tensor], bool]]] = {}
# Their code handles parameters that it was given; what it does with these is told elsewhere.
_LIBRARIES = ("torch.", "nbdist.", "accelerate.")


class FormerParameter(torch.nn.Parameter):
    """A parameter as it was before prepare or a switch."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Act as torch does, but refuse what the user's own code does to train."""
        caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001  # no other way
        if _trains(func) and args and not f"{caller}.".startswith(_LIBRARIES):
            _refuse(args[0])
        as_torch: Any = super().__torch_function__
        return as_torch(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A copy is a parameter like any other."""
        copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied


def mark(parameter: torch.Tensor, name: str, is_replaced: Callable[[torch.Tensor], bool]) -> None:
    """Let a plain parameter refuse to be trained while it is replaced."""
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = FormerParameter
        weakref.finalize(parameter, _former.pop, id(parameter), None).atexit = False
    if isinstance(parameter, FormerParameter):
        _former[id(parameter)] = name, is_replaced


def _trains(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name.startswith("__i") or func in _OF_TRAINING


def _refuse(parameter: Any) -> None:
    name, is_replaced = _former.get(id(parameter), ("", None))
    if is_replaced is not None and is_replaced(parameter):
        raise NbdistError(
            f"{name} is used as it was before prepare() or a switch. The strategy has put "
            "another parameter in its place, and that one is trained: take it from the model that "
            "prepare() returned (model.parameters(), named_parameters())."
        )
