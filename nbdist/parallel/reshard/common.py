"""The models and optimizers that are prepared on all ranks, with the optimizers' state.

A switch and a save both begin with them.
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
class OptimizerHandle:
    """One optimizer of prepared models, and its state.

    Attributes:
        optimizer: torch's object.
        names: Unique name -> (model, first name, the parameter in its groups).
        local: Its state on this rank.
        agreed: Its state over all ranks.
    """

    optimizer: Optimizer
    names: dict[str, tuple[Prepared, str, torch.Tensor]]
    local: LocalState
    agreed: MergedState | None = None


def common_models(what: str) -> list[Prepared]:
    """The prepared models that are on all ranks. Collective.

    A cell that failed on one rank may leave a model there, in the error.

    Args:
        what: The operation, for messages.
    """
    models = registry.prepared()
    by_rank = all_or_none(
        what, lambda: [(model.number, tuple(model.built.names)) for model in models]
    )
    names = [[names for _, names in entries] for entries in by_rank]
    if all(rank_names == names[0] for rank_names in names):
        return models  # numbers may differ: a rank that has replaced another begins with 0
    common = set.intersection(*(set(entries) for entries in by_rank))
    if not common and any(by_rank):
        counts = ", ".join(f"rank {rank}: {len(entries)}" for rank, entries in enumerate(by_rank))
        raise NbdistError(
            f"No prepared model is on all ranks (models on {counts}). Run the cells that prepare "
            "them on all ranks again."
        )
    registry.keep({number for number, _ in common})
    return registry.prepared()


def common_optimizers(
    what: str, models: Sequence[Prepared], *, is_quick: bool = False
) -> list[OptimizerHandle]:
    """The optimizers of these models that are on all ranks, with their state. Collective.

    Args:
        what: The operation, for messages.
        models: The models.
        is_quick: Those that were prepared will do where they step every parameter. Otherwise they
            are looked for among all of Python's objects, which takes a tenth of a second.
    """
    optimizers = _optimizers(models if is_quick else ())
    sketches_by_rank = all_or_none(what, lambda: [_sketch(optimizer) for optimizer in optimizers])
    local_sketches = sketches_by_rank[rank()]
    shared = [
        key for key in sketches_by_rank[0] if all(key in sketches for sketches in sketches_by_rank)
    ]
    chosen = []
    for key in dict.fromkeys(shared):
        count = min(sketches.count(key) for sketches in sketches_by_rank)
        same = [
            optimizer
            for optimizer, sketch in zip(optimizers, local_sketches, strict=True)
            if sketch == key
        ]
        chosen += same[:count]
    handles = []
    for number, optimizer in enumerate(chosen):
        names = registry.names_in(optimizer)
        local = read(
            optimizer, {key: parameter for key, (_, _, parameter) in names.items()}, number
        )
        handles.append(OptimizerHandle(optimizer, names, local))
    for handle, merged in zip(
        handles, merge_across_ranks([handle.local for handle in handles]), strict=True
    ):
        handle.agreed = merged
    return handles


def _optimizers(models: Sequence[Prepared] = ()) -> list[Optimizer]:
    """This rank's, those that were bound first; also those that nobody has prepared.

    Args:
        models: If those that were prepared step all of these models' parameters, they are all.
    """
    prepared = prepared_optimizers(models)
    if prepared is not None:
        return prepared
    optimizers = [
        optimizer for optimizer in live_models.live_optimizers() if registry.names_in(optimizer)
    ]
    return sorted(
        optimizers,
        key=lambda optimizer: (
            registry.bound(optimizer).number if registry.is_bound(optimizer) else 1 << 60
        ),
    )


def prepared_optimizers(models: Sequence[Prepared]) -> list[Optimizer] | None:
    """This rank's that were prepared, in order; None unless they step all that is trained.

    Then there may be others, that only a look at all of Python's objects finds.
    """
    optimizers = [
        optimizer for optimizer in registry.bound_optimizers() if registry.names_in(optimizer)
    ]
    stepped = {
        id(p)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    wanted = [p for model in models for p in model.parameters.values() if p.requires_grad]
    if not wanted or any(id(parameter) not in stepped for parameter in wanted):
        return None
    return sorted(optimizers, key=lambda optimizer: registry.bound(optimizer).number)


def _sketch(optimizer: Optimizer) -> tuple[Any, ...]:
    names = registry.names_in(optimizer)
    return type(optimizer).__name__, tuple(names), registry.is_bound(optimizer)
