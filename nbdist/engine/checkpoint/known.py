"""What the last save found and agreed on; the next one need not, while nothing of it has changed.

Names, layouts, keys and shapes are compared over all ranks, which takes as long as copying a
gigabyte. They hang on what was prepared, on the strategy, and on what optimizers remember: each
rank looks at these by itself, and if all find them as they were, the last save's plan counts.
Values are taken anew each time, and numbers such as the step, where it is one for all parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbdist.engine.checkpoint import found as finding
from nbdist.engine.checkpoint.contents import MODEL, Contents, state_path
from nbdist.engine.checkpoint.found import Found, Model, Stepping
from nbdist.engine.parallel import fsdp, registry, saving
from nbdist.engine.parallel.agreement import rank, world_size
from nbdist.engine.parallel.build import Built
from nbdist.engine.parallel.common import Stepper, prepared_optimizers
from nbdist.engine.parallel.prepared import Prepared
from nbdist.engine.parallel.states import AgreedState, Entry, LocalState, Place
from nbdist.engine.parallel.wholes import local_values

# (The how manieth optimizer, key of its states) -> the number.
Numbers = dict[tuple[int, str], Any]
# The save whose plan still counts on a rank, and its numbers.
Told = tuple[str, Numbers]
# Type and shape of a local part; the class of what is no tensor.
_Look = tuple[Any, torch.Size | None]


@dataclass(frozen=True, slots=True)
class Recalled:
    """What is saved now, found with the last save's plan.

    Attributes:
        token: Of the save that agreed on it.
        found, contents: As `look` and `contents` would give them, but for the numbers of
            parameters of which only other ranks remember anything.
        numbers: What this rank's optimizers remember that is one number for all parameters.
    """

    token: str
    found: Found
    contents: Contents
    numbers: Numbers

    def told(self) -> Told:
        """What other ranks have to know."""
        return self.token, self.numbers


@dataclass(frozen=True, slots=True)
class _Model:
    """A model as it was; `found.Model` without holding it."""

    one: weakref.ref[Prepared]
    built: weakref.ref[Built]
    name: str
    names: dict[str, tuple[str, ...]]
    dtypes: dict[str, torch.dtype]
    looks: dict[str, _Look]


@dataclass(frozen=True, slots=True)
class _State:
    """One thing that an optimizer remembers here of one parameter.

    Attributes:
        place: The parameter's unique name, and the key.
        name: In the checkpoint.
        look: Of its local part.
        is_number: Whether all ranks have to have the same value.
    """

    place: Place
    name: str
    look: _Look
    is_number: bool


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """An optimizer as it was; `found.Stepping` without holding it.

    Attributes:
        own: What it remembers here of each parameter, in order: the keys, and each of them.
    """

    one: weakref.ref[Optimizer]
    name: str
    labels: dict[str, str]
    agreed: AgreedState
    own: dict[str, tuple[list[str], list[_State]]]


@dataclass(frozen=True, slots=True)
class _Known:
    """All of it; on this rank."""

    token: str
    models: list[_Model]
    optimizers: list[_Optimizer]
    accelerators: list[tuple[weakref.ref[Any], set[int]]]
    contents: Contents


_known: list[_Known] = []


def forget() -> None:
    """Let the next save find and agree on all of it again."""
    _known.clear()


def remember(token: str, found: Found, contents: Contents) -> None:
    """Note what a save has found, unless it cannot be told from a look whether it still holds.

    None of the objects is held, nor any of their tensors.

    Args:
        token: Of the save: the same on all ranks.
        found: What it has found.
        contents: What it saves.
    """
    forget()
    if not _can_be_known(found):
        return
    models = [
        _Model(
            weakref.ref(m.one), weakref.ref(m.one.built), m.name, m.names, m.dtypes, _looks(m.held)
        )
        for m in found.models
    ]
    optimizers = [_as_known(one) for one in found.optimizers]
    accelerators = [(weakref.ref(one), saving.numbers(one)) for one in found.accelerators]
    plan = replace(contents, held={})
    _known.append(_Known(token, models, optimizers, accelerators, plan))


def recall() -> Recalled | None:
    """What is saved now, if it is as the last save found it on this rank. No rank is met."""
    if not _known:
        return None
    known, held = _known[0], _Held()
    accelerators = finding.accelerators_here()
    with torch.no_grad():
        models = _same_models(known, held)
        if models is None or not _same_accelerators(known, accelerators):
            return None
        optimizers = _same_optimizers(known, models, held)
    if optimizers is None:
        return None
    found = Found(models, optimizers, accelerators)
    if rank() == 0 and not _same_names(found):
        return None
    plan = replace(known.contents, held=held.tensors)
    return Recalled(known.token, found, plan, held.numbers)


def agreed(recalled: Recalled | None, told: Iterable[Told | None]) -> bool:
    """Whether the last save's plan counts on all ranks, with the same numbers, which it gets then.

    Args:
        recalled: By this rank.
        told: By all ranks.
    """
    all_ = [one for one in told if one is not None and recalled and one[0] == recalled.token]
    if recalled is None or len(all_) < world_size():
        return False
    numbers = {place: value for _, own in all_ for place, value in own.items()}
    if any(_differ(value, numbers[place]) for _, own in all_ for place, value in own.items()):
        return False
    for at, one in enumerate(recalled.found.optimizers):
        assert one.stepper.agreed is not None
        own = {key: value for (number, key), value in numbers.items() if number == at}
        one.stepper.agreed = _with_numbers(one.stepper.agreed, own)
    return True


@dataclass(slots=True)
class _Held:
    """This rank's values: local parts by name in the checkpoint, and numbers."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=dict)

    def add(self, at: int, one: _State, local: Any) -> bool:
        """Add what the optimizer `at` remembers; False if other parameters have another number."""
        is_tensor = isinstance(local, torch.Tensor)
        if is_tensor:
            self.tensors[one.name] = local
        if not one.is_number:
            return True
        number = local.item() if is_tensor else local
        return not _differ(self.numbers.setdefault((at, one.place[1]), number), number)


def _can_be_known(found: Found) -> bool:
    """Whether a look at this rank's objects tells that all is as it was."""
    models = [one.one for one in found.models]
    prepared = prepared_optimizers(models)
    return (
        not any(one.is_flat for one in found.models)
        and models == registry.prepared()
        and prepared is not None
        and _ids(prepared) == _ids(one.optimizer for one in found.optimizers)
        and _ids(finding.accelerators_here()) == _ids(found.accelerators)
        and all(_has_plain_states(one) for one in found.optimizers)
    )


def _has_plain_states(one: Stepping) -> bool:
    """Whether each of its states lies as its parameter does, or is a number on this rank."""
    assert one.stepper.agreed is not None
    return all(entry.kind != "other" for entry in one.stepper.agreed.entries.values()) and all(
        _local(value, parameter) is not None
        for _, _, parameter in one.stepper.names.values()
        for value in one.optimizer.state.get(parameter, {}).values()
    )


def _as_known(one: Stepping) -> _Optimizer:
    agreed = one.stepper.agreed
    assert agreed is not None
    own = {}
    for key, (_, _, parameter) in one.stepper.names.items():
        now = one.optimizer.state.get(parameter, {})
        own[key] = (
            list(now),
            [
                _State(
                    place=(key, state),
                    name=".".join(state_path(one, key, state)),
                    look=_look(_local(value, parameter)),
                    is_number=agreed.entries[key, state].kind == "number",
                )
                for state, value in now.items()
            ],
        )
    return _Optimizer(weakref.ref(one.optimizer), one.name, one.labels, agreed, own)


def _same_models(known: _Known, held: _Held) -> list[Model] | None:
    """The models, if they are those that were saved; what this rank holds of them to `held`."""
    here = registry.prepared()
    if _ids(here) != _ids(one.one() for one in known.models):
        return None
    found = []
    for place, (one, as_it_was) in enumerate(zip(here, known.models, strict=True)):
        if as_it_was.built() is not one.built:
            return None
        fsdp.settle(one.built.job.root)
        values = local_values(one)
        own = {first: values[first] for first in as_it_was.names if first in values}
        if _looks(own) != as_it_was.looks:
            return None
        name = as_it_was.name
        held.tensors |= {f"{MODEL}.{name}.{first}": tensor for first, tensor in own.items()}
        found.append(Model(name, place, one, as_it_was.names, as_it_was.dtypes, own))
    return found


def _same_accelerators(known: _Known, here: list[Any]) -> bool:
    """Whether they, and all that they have prepared, are those that all ranks had."""
    return _ids(here) == _ids(one() for one, _ in known.accelerators) and all(
        saving.numbers(one) == numbers
        for one, (_, numbers) in zip(here, known.accelerators, strict=True)
    )


def _same_optimizers(known: _Known, models: list[Model], held: _Held) -> list[Stepping] | None:
    """The optimizers, if they are those that were saved; what they remember here to `held`."""
    here = prepared_optimizers([one.one for one in models])
    if here is None or _ids(here) != _ids(one.one() for one in known.optimizers):
        return None
    found = []
    for at, (one, as_it_was) in enumerate(zip(here, known.optimizers, strict=True)):
        names, agreed = registry.names_in(one), as_it_was.agreed
        if list(names) != list(as_it_was.labels):
            return None
        for key, (_, _, parameter) in names.items():
            state = one.state.get(parameter, {})
            if not _same_state(at, state, parameter, as_it_was.own[key], held):
                return None
        local = LocalState(agreed.optimizer, agreed.number, agreed.names, {}, {})
        others = sum(len(group["params"]) for group in one.param_groups) - len(names)
        stepper = Stepper(one, names, local, agreed)
        found.append(Stepping(as_it_was.name, stepper, as_it_was.labels, others))
    return found


def _same_state(
    at: int,
    state: Mapping[str, Any],
    parameter: torch.Tensor,
    as_it_was: tuple[list[str], list[_State]],
    held: _Held,
) -> bool:
    """Whether what is remembered of a parameter has the keys and looks that it had."""
    keys, known = as_it_was
    if list(state) != keys:
        return False
    for one, value in zip(known, state.values(), strict=True):
        local = _local(value, parameter)
        if _look(local) != one.look or not held.add(at, one, local):
            return False
    return True


def _local(value: Any, parameter: torch.Tensor) -> Any:
    """This rank's part of a state; None where other ranks are needed to say it."""
    if not isinstance(value, DTensor):
        return value
    is_alike = isinstance(parameter, DTensor) and value.placements == parameter.placements
    return value.to_local() if is_alike and value.ndim else None


def _with_numbers(agreed: AgreedState, numbers: Mapping[str, Any]) -> AgreedState:
    """What all ranks remember, with the numbers of now, by key."""
    entries = {
        place: Entry(old.kind, old.dtype, numbers[place[1]], old.is_on_device, old.ranks)
        if old.kind == "number"
        else old
        for place, old in agreed.entries.items()
    }
    return replace(agreed, entries=entries)


def _differ(one: Any, other: Any) -> bool:
    if type(one) is type(other) and one == other and one:
        return False
    return repr(one) != repr(other)  # not a number is like itself, zero not like minus zero


def _same_names(found: Found) -> bool:
    """Whether the user's variables are called as they were. On rank 0, whose names count."""
    now = finding.variable_names(
        [one.one for one in found.models], [one.stepper for one in found.optimizers],
        found.accelerators,
    )  # fmt: skip
    return now == ([one.name for one in found.models], [one.name for one in found.optimizers])


def _look(value: Any) -> _Look:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    return type(value), None


def _looks(tensors: dict[str, torch.Tensor]) -> dict[str, _Look]:
    return {name: _look(tensor) for name, tensor in tensors.items()}


def _ids(several: Iterable[Any]) -> list[int]:
    return [id(one) for one in several]
