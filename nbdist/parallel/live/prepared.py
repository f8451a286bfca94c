"""One prepared model: what was built, and which parameters it once had."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.parallel.base import events
from nbdist.parallel.base.transform import Layouts
from nbdist.parallel.live.build import Built
from nbdist.parallel.live.former import mark
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import Placement, TensorLayout

# Where a module keeps it: what a variable holds keeps it alive, and nothing else does.
_ATTRIBUTE = "_nbdist_prepared"
_RETIRED = "_nbdist_retired"


@dataclass(eq=False)
class Prepared:
    """A model under a strategy on this rank.

    Attributes:
        number: Counts models; the same on all ranks.
        own_names: Variables that mean the user's module itself, where it has a wrapper.
        former: id -> (parameter that it had before, first name): optimizers may hold it.
    """

    number: int
    built: Built
    own_names: set[str] = field(default_factory=set)
    former: dict[int, tuple[weakref.ref[torch.Tensor], str]] = field(default_factory=dict)

    @property
    def base(self) -> torch.nn.Module:
        """The user's own module, which `outer` is or has inside."""
        return self.built.job.base

    @property
    def outer(self) -> torch.nn.Module:
        """The object that the user calls: `base` itself or the wrapper around it."""
        assert self.built.outer is not None
        return self.built.outer

    @property
    def layouts(self) -> Layouts:
        """How each parameter and buffer lies, by first name."""
        return self.built.layouts

    @property
    def degrees(self) -> Degrees:
        """The mesh of the layouts."""
        return self.built.job.mesh.degrees

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The model's parameters, by first name; on meta where this rank does not hold them."""
        return self.built.parameters

    def side(self, name: str) -> Placement:
        """How a parameter or buffer lies."""
        return self.built.side(name)

    def whole(self, name: str, ranks: frozenset[int] | None = None) -> Placement:
        """All of it, on these ranks; None for every rank."""
        return Placement(TensorLayout(self.layouts[name].shape, ranks=ranks), Degrees())

    def remember(self, old: Mapping[str, torch.Tensor], *, is_gathered: bool = False) -> None:
        """Note parameters that are replaced now, by first name.

        A loss that uses one of them later is told; not of those gathered for a backward.
        """
        self.former = {key: pair for key, pair in self.former.items() if pair[0]() is not None}
        self.former |= {
            id(parameter): (weakref.ref(parameter), name) for name, parameter in old.items()
        }
        for name, parameter in () if is_gathered else old.items():
            mark(parameter, name, functools.partial(_is_replaced, weakref.ref(self), name))
            if parameter.requires_grad and parameter.is_leaf:
                tell = functools.partial(_tell_gradient, weakref.ref(self), name)
                parameter.register_post_accumulate_grad_hook(tell)  # type: ignore[no-untyped-call]  # untyped

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The first name of a parameter, also of one that the model had before."""
        former, name = self.former.get(id(parameter), (None, ""))
        if former is not None and former() is parameter:
            return name
        return self.current_name_of(parameter)

    def current_name_of(self, parameter: torch.Tensor) -> str | None:
        """The first name of a parameter that is in the model now."""
        return self.built.index.get(id(parameter))

    def __deepcopy__(self, _memo: object) -> None:
        """Nothing: a copy of a module is not prepared."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


def _is_replaced(reference: weakref.ref[Prepared], name: str, parameter: torch.Tensor) -> bool:
    """Whether this rank trains another parameter in its place; of other stages' it trains none."""
    model = reference()
    if model is None or model.current_name_of(parameter) is not None:
        return False
    current = model.parameters.get(name)
    return current is not None and not current.is_meta


def _tell_gradient(reference: weakref.ref[Prepared], name: str, parameter: torch.Tensor) -> None:
    """A backward has come to a parameter, which may be one that the model no longer has."""
    model = reference()
    if model is not None and model.current_name_of(parameter) is None:
        for act in events.on_former_gradient:
            act(model.outer, name)


def attach(prepared: Prepared) -> None:
    """Let a module know that it is prepared."""
    vars(prepared.base)[_ATTRIBUTE] = prepared


def find_prepared(module: torch.nn.Module) -> Prepared | None:
    """Look up a module, or the wrapper around it, among prepared models."""
    candidate: torch.nn.Module | None = module
    while candidate is not None:
        prepared = vars(candidate).get(_ATTRIBUTE)
        # A copy of the instance's dict (copy.copy) has it too, and is not prepared.
        if isinstance(prepared, Prepared) and candidate is prepared.base:
            return prepared
        # What a wrapper is around: DDP's module, a compiled one's original.
        inner = candidate._modules  # noqa: SLF001  # as torch's own tools
        candidate = inner.get("module", inner.get("_orig_mod")) if len(inner) == 1 else None
    return None


def retire(wrapper: torch.nn.Module, refuse: Callable[..., Any]) -> None:
    """Let a wrapper that no longer counts refuse to be called, if somebody still holds it."""
    # It would run the new parameters without the new strategy.
    vars(wrapper)["forward"] = refuse
    vars(wrapper)[_RETIRED] = True


def is_retired(module: torch.nn.Module) -> bool:
    """Whether a module is a wrapper that no longer counts."""
    return _RETIRED in vars(module)
