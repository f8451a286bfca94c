"""The second half of a switch: this rank's models and optimizers change, or change back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.errors import NbdistError
from nbdist.parallel.accelerator import prepare
from nbdist.parallel.base import module_patches
from nbdist.parallel.base.consensus import CommitVote, one_line, raise_failures
from nbdist.parallel.live import build, registry
from nbdist.parallel.live.build import Built
from nbdist.parallel.live.prepared import Prepared, retire
from nbdist.parallel.reshard.common import OptimizerHandle
from nbdist.parallel.reshard.optimizer_state import write
from nbdist.parallel.reshard.rebind import RebindReport, Replacement, has_hooks, names_for, rebind
from nbdist.strategy.choice import Strategy, label

WHAT = "The switch"


@dataclass(slots=True)
class ModelMove:
    """One model of a switch: what it is built as now, and what it will be."""

    model: Prepared
    place: int
    next: Built


class Commit:
    """The change itself, and the way back."""

    def __init__(
        self,
        choice: Strategy,
        moves: list[ModelMove],
        handles: list[OptimizerHandle],
        shards: dict[str, torch.Tensor],
    ) -> None:
        """Keep what a rollback needs. Nothing changes yet.

        `shards` are this rank's new parts: of parameters and buffers by unique name, of states of
        optimizers by label. They are emptied at the end.
        """
        self._choice, self._before = choice, registry.current()
        self._moves, self._handles, self._shards = moves, handles, shards
        self._built = [move.model.built for move in moves]
        self._snapshots = [module_patches.snapshot_modules(move.model.base) for move in moves]
        self._groups = [
            [list(group["params"]) for group in handle.optimizer.param_groups] for handle in handles
        ]
        self._states = [dict(handle.optimizer.state) for handle in handles]

    def run(self, vote: CommitVote) -> None:
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
        failures = vote.answer("" if error is None else one_line(error))
        if failures:
            self._roll_back()
            if error is not None:
                raise error
            raise_failures(WHAT, failures)

    def _change(self) -> None:
        new: dict[str, torch.Tensor] = {}
        for move, old in zip(self._moves, self._built, strict=True):
            names = {name: registry.unique_name(move.place, name) for name in move.next.layouts}
            shards = self._shards
            local = {name: shards[key] for name, key in names.items() if key in shards}
            build.commit(move.next, local, before=old.changes)
            move.model.built = move.next
            new |= {names[name]: parameter for name, parameter in move.next.parameters.items()}
        registry.set_choice(self._choice)
        models = [move.model for move in self._moves]
        for handle in self._handles:
            before = {key: parameter for key, (_, _, parameter) in handle.names.items()}
            after = {key: new[key] for key in before}
            sides = {
                key: registry.state_side(model.built, name)
                for key, (model, name, _) in handle.names.items()
            }
            fresh = {id(before[key]): after[key] for key in before}
            prepare.replace_parameters(handle.optimizer, fresh)
            write(handle.optimizer, handle.agreed, self._shards, before, after, sides)
            prepare.attach_steps(handle.optimizer, models)

    def _roll_back(self) -> None:
        for snapshot in self._snapshots:
            module_patches.restore(snapshot)
        for move, built in zip(self._moves, self._built, strict=True):
            move.model.built = built
        registry.set_choice(self._before)
        models = [move.model for move in self._moves]
        for index, handle in enumerate(self._handles):
            groups = handle.optimizer.param_groups
            for group, parameters in zip(groups, self._groups[index], strict=True):
                group["params"][:] = parameters
            handle.optimizer.state.clear()
            handle.optimizer.state.update(self._states[index])
            prepare.attach_steps(handle.optimizer, models)

    def finish(self) -> tuple[RebindReport, tuple[str, ...]]:
        """Drop everything old, and update the user's names. This rank alone, after `run`.

        Returns:
            What was rebound, and what else a person has to know.
        """
        notes = self._notes()
        dead, modules, own_names = self._retire_old()
        return rebind(dead, modules, own_names), notes

    def _retire_old(self) -> tuple[list[Replacement], list[Replacement], set[str]]:
        """Drop everything old, except for objects that the user's names may still hold."""
        dead: list[Replacement] = []
        modules: list[Replacement] = []
        own_names: set[str] = set()
        for move, old in zip(self._moves, self._built, strict=True):
            _retire(move.model, old, dead, modules, own_names)
        for records in (
            self._built,
            self._snapshots,
            self._groups,
            self._states,
            self._handles,
            self._moves,
            self._shards,
        ):
            records.clear()
        return dead, modules, own_names

    def _notes(self) -> tuple[str, ...]:
        notes = []
        for move, old in zip(self._moves, self._built, strict=True):
            notes += move.next.job.step_data.get("notes", [])
            graded = sum(p.grad is not None for p in old.parameters.values())
            if graded:
                notes.append(
                    f"gradients of {graded} parameters of {display_name(old)} were cleared; "
                    "run the backward again before the next step"
                )
            hooked = [name for name, p in old.parameters.items() if has_hooks(p)]
            if hooked:
                notes.append(
                    f"hooks on {', '.join(hooked[:3])} stayed on the old parameters; register "
                    "them again"
                )
        return tuple(dict.fromkeys(notes))


def _retire(
    model: Prepared,
    old: Built,
    dead: list[Replacement],
    modules: list[Replacement],
    own_names: set[str],
) -> None:
    """Make one model's old objects harmless, and pair them with the new ones."""
    name = display_name(old)
    assert old.outer is not None
    if old.outer is not model.base:
        model.own_names = set(names_for(model.base))
        if old.outer is not model.outer:
            dead.append(Replacement(old.outer, model.outer, name))
            retire(old.outer, _refusal(name, old.job.choice))
    elif model.outer is not model.base:
        modules.append(Replacement(model.base, model.outer, name))
        own_names |= model.own_names
    for first, parameter in old.parameters.items():
        parameter.grad = None
        if parameter is not model.parameters[first]:
            dead.append(Replacement(parameter, model.parameters[first], first))
    model.remember(dict(old.parameters))


def _refusal(name: str, choice: Strategy) -> Callable[..., Any]:
    was = label(choice)

    def forward(*_args: Any, **_kwargs: Any) -> Any:
        raise NbdistError(
            f"This is the old {name}, from before the switch away from {was}. Use the variable "
            f"{name}, or call accelerator.prepare(...) again."
        )

    return forward


def display_name(built: Built) -> str:
    """A model's name in messages: a variable that holds it, or its class."""
    return next(iter(names_for(built.outer)), built.title)
