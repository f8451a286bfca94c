"""The second half of a switch: this rank's models and optimizers change, or change back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.errors import NbdistError
from nbdist.parallel import build, module_patches, prepare, registry
from nbdist.parallel.build import Built
from nbdist.parallel.consensus import CommitVote, one_line, raise_failures
from nbdist.parallel.prepared import Prepared, retire
from nbdist.parallel.reshard.common import Stepper
from nbdist.parallel.reshard.optimizer_state import write
from nbdist.parallel.reshard.rebind import RebindReport, Replacement, is_internal, names_for, rebind
from nbdist.strategy.choice import Strategy, label

WHAT = "The switch"


@dataclass(slots=True)
class ModelMove:
    """One model on its way: what it is under now, and what it will be."""

    one: Prepared
    place: int
    next: Built


@dataclass(slots=True)
class ReceivedShards:
    """This rank's new parts.

    Attributes:
        values: Of parameters and buffers, by unique name.
        states: Of optimizers, by label.
        received_bytes: From other ranks.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    received_bytes: int = 0


class Commit:
    """The change itself, and the way back."""

    def __init__(
        self,
        choice: Strategy,
        models: list[ModelMove],
        steppers: list[Stepper],
        brought: ReceivedShards,
    ) -> None:
        """Write down what there is. Nothing changes yet."""
        self._choice, self._before = choice, registry.current()
        self._models, self._steppers, self._brought = models, steppers, brought
        self._built = [model.one.built for model in models]
        self._photos = [module_patches.snapshot_modules(model.one.base) for model in models]
        self._groups = [[list(g["params"]) for g in s.optimizer.param_groups] for s in steppers]
        self._states = [dict(stepper.optimizer.state) for stepper in steppers]

    def run(self, ballot: CommitVote) -> None:
        """Change this rank; everything back if that fails on any rank. Every rank.

        Raises:
            BaseException: What failed here.
            NbdistError: What failed elsewhere.
        """
        error = None
        try:
            self._change()
        except BaseException as caught:  # noqa: BLE001  # raised below, once all have gone back
            error = caught
        failures = ballot.answer("" if error is None else one_line(error))
        if failures:
            self._go_back()
            if error is not None:
                raise error
            raise_failures(WHAT, failures)

    def _change(self) -> None:
        new: dict[str, torch.Tensor] = {}
        for model, old in zip(self._models, self._built, strict=True):
            names = {name: registry.unique_name(model.place, name) for name in model.next.layouts}
            values = self._brought.values
            local = {name: values[key] for name, key in names.items() if key in values}
            build.commit(model.next, local, before=old.changes)
            model.one.built = model.next
            new |= {names[name]: parameter for name, parameter in model.next.parameters.items()}
        registry.set_choice(self._choice)
        known = [model.one for model in self._models]
        for stepper in self._steppers:
            before = {key: held for key, (_, _, held) in stepper.names.items()}
            after = {key: new[key] for key in before}
            sides = {
                key: registry.state_side(one.built, name)
                for key, (one, name, _) in stepper.names.items()
            }
            fresh = {id(before[key]): after[key] for key in before}
            prepare.replace_parameters(stepper.optimizer, fresh)
            assert stepper.agreed is not None
            states = self._brought.states
            write(stepper.optimizer, stepper.agreed, states, before, after, sides)
            prepare.attach_steps(stepper.optimizer, known)

    def _go_back(self) -> None:
        for photos in self._photos:
            module_patches.restore(photos)
        for model, built in zip(self._models, self._built, strict=True):
            model.one.built = built
        registry.set_choice(self._before)
        known = [model.one for model in self._models]
        for at, stepper in enumerate(self._steppers):
            groups = stepper.optimizer.param_groups
            for group, own in zip(groups, self._groups[at], strict=True):
                group["params"][:] = own
            stepper.optimizer.state.clear()
            stepper.optimizer.state.update(self._states[at])
            prepare.attach_steps(stepper.optimizer, known)

    def finish(self) -> tuple[RebindReport, tuple[str, ...]]:
        """Let go of what was, and put the user's names right. This rank alone, after `run`.

        Returns:
            What was rebound, and what else a person has to know.
        """
        notes = self._notes()
        dead, modules, kept = self._retired()
        return rebind(dead, modules, kept), notes

    def _retired(self) -> tuple[list[Replacement], list[Replacement], set[str]]:
        """Let go of everything old, but for the objects that names may still hold."""
        dead: list[Replacement] = []
        modules: list[Replacement] = []
        kept: set[str] = set()
        for model, old in zip(self._models, self._built, strict=True):
            _retire(model.one, old, dead, modules, kept)
        for held in (
            self._built,
            self._photos,
            self._groups,
            self._states,
            self._steppers,
            self._models,
            self._brought.values,
            self._brought.states,
        ):
            held.clear()
        return dead, modules, kept

    def _notes(self) -> tuple[str, ...]:
        notes = []
        for model, old in zip(self._models, self._built, strict=True):
            notes += model.next.job.step_data.get("notes", [])
            graded = sum(p.grad is not None for p in old.parameters.values())
            if graded:
                notes.append(
                    f"gradients of {graded} parameters of {display_name(old)} were cleared; "
                    "run the backward again before the next step"
                )
            hooked = [name for name, p in old.parameters.items() if _has_hooks(p)]
            if hooked:
                notes.append(
                    f"hooks on {', '.join(hooked[:3])} stay with the old parameters; register "
                    "them again"
                )
        return tuple(dict.fromkeys(notes))


def _retire(
    one: Prepared, old: Built, dead: list[Replacement], modules: list[Replacement], kept: set[str]
) -> None:
    """Make one model's old objects harmless, and pair them with the new ones."""
    name = display_name(old)
    assert old.outer is not None
    if old.outer is not one.base:
        one.own_names = set(names_for(one.base))
        if old.outer is not one.outer:
            dead.append(Replacement(old.outer, one.outer, name))
            retire(old.outer, _refusal(name, old.job.choice))
    elif one.outer is not one.base:
        modules.append(Replacement(one.base, one.outer, name))
        kept |= one.own_names
    for first, parameter in old.parameters.items():
        parameter.grad = None
        if parameter is not one.parameters[first]:
            dead.append(Replacement(parameter, one.parameters[first], first))
    one.remember(dict(old.parameters))


def _refusal(name: str, choice: Strategy) -> Callable[..., Any]:
    was = label(choice)

    def forward(*_args: Any, **_kwargs: Any) -> Any:
        raise NbdistError(
            f"This is {name} as it was under {was}; the strategy has changed since. Use the "
            f"variable {name}, or accelerator.prepare(...) again."
        )

    return forward


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Whether the user has registered hooks on a parameter. Strategies register their own."""
    tables = (
        getattr(parameter, "_backward_hooks", None),
        getattr(parameter, "_post_accumulate_grad_hooks", None),
    )
    found = [hook for table in tables if table for hook in table.values()]
    return any(not is_internal(hook) for hook in found)


def display_name(built: Built) -> str:
    """What a person calls a model: a variable that holds it, or its class."""
    return next(iter(names_for(built.outer)), built.title)
