"""What is prepared on all ranks: models, and optimizers with what they remember.

Both a switch and a save begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.errors import NbdistError
from nbdist.parallel import live_models, registry
from nbdist.parallel.consensus import all_or_none, rank
from nbdist.parallel.prepared import Prepared
from nbdist.parallel.reshard.optimizer_state import (
    LocalState,
    MergedState,
    merge_across_ranks,
    read,
)


@dataclass(slots=True)
class Stepper:
    """One optimizer of prepared models, and what it remembers.

    Attributes:
        optimizer: It.
        names: Unique name -> (model, first name, what its groups hold).
        local: What it remembers here.
        agreed: What it remembers on all ranks.
    """

    optimizer: Optimizer
    names: dict[str, tuple[Prepared, str, torch.Tensor]]
    local: LocalState
    agreed: MergedState | None = None


def common_models(what: str) -> list[Prepared]:
    """The prepared models that are on all ranks. Collective.

    A cell that failed on one rank may leave a model there, in the error.

    Args:
        what: Is done, for messages.
    """
    own = registry.prepared()
    told = all_or_none(what, lambda: [(one.number, tuple(one.built.names)) for one in own])
    names = [[names for _, names in one] for one in told]
    if all(one == names[0] for one in names):
        return own  # numbers may differ: a rank that has replaced another begins with 0
    common = set.intersection(*(set(one) for one in told))
    if not common and any(told):
        counts = ", ".join(f"rank {rank}: {len(one)}" for rank, one in enumerate(told))
        raise NbdistError(
            f"The ranks have no prepared model in common (models on {counts}). Run the cells that "
            "prepare them on all ranks again."
        )
    registry.keep({number for number, _ in common})
    return registry.prepared()


def steppers_of(what: str, found: Sequence[Prepared], *, is_quick: bool = False) -> list[Stepper]:
    """The optimizers of these models that are on all ranks, with what they remember. Collective.

    Args:
        what: Is done, for messages.
        found: The models.
        is_quick: Those that were prepared will do where they step every parameter. Otherwise they
            are looked for among all of Python's objects, which takes a tenth of a second.
    """
    own = _optimizers(found if is_quick else ())
    told = all_or_none(what, lambda: [_sketch(optimizer) for optimizer in own])
    sketches = told[rank()]
    shared = [key for key in told[0] if all(key in one for one in told)]
    chosen = []
    for key in dict.fromkeys(shared):
        count = min(one.count(key) for one in told)
        same = [o for o, sketch in zip(own, sketches, strict=True) if sketch == key]
        chosen += same[:count]
    steppers = []
    for number, optimizer in enumerate(chosen):
        names = registry.names_in(optimizer)
        local = read(optimizer, {key: held for key, (_, _, held) in names.items()}, number)
        steppers.append(Stepper(optimizer, names, local))
    for one, agreed in zip(steppers, merge_across_ranks([s.local for s in steppers]), strict=True):
        one.agreed = agreed
    return steppers


def _optimizers(covered: Sequence[Prepared] = ()) -> list[Optimizer]:
    """This rank's, those that were bound first; also those that nobody has prepared.

    Args:
        covered: If those that were prepared step all of these models' parameters, they are all.
    """
    known = prepared_optimizers(covered)
    if known is not None:
        return known
    found = [one for one in live_models.live_optimizers() if registry.names_in(one)]
    return sorted(
        found,
        key=lambda one: registry.bound(one).number if registry.is_bound(one) else 1 << 60,
    )


def prepared_optimizers(models: Sequence[Prepared]) -> list[Optimizer] | None:
    """This rank's that were prepared, in order; None unless they step all that is trained.

    Then there may be others, that only a look at all of Python's objects finds.
    """
    known = [one for one in registry.bound_optimizers() if registry.names_in(one)]
    stepped = {id(p) for one in known for group in one.param_groups for p in group["params"]}
    wanted = [p for one in models for p in one.parameters.values() if p.requires_grad]
    if not wanted or any(id(parameter) not in stepped for parameter in wanted):
        return None
    return sorted(known, key=lambda one: registry.bound(one).number)


def _sketch(optimizer: Optimizer) -> tuple[Any, ...]:
    names = registry.names_in(optimizer)
    return type(optimizer).__name__, tuple(names), registry.is_bound(optimizer)
