"""The models and optimizers that are prepared on all ranks, with the optimizers' state.

A switch and a save both begin with them.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.errors import NbdistError
from nbdist.parallel.base.consensus import all_or_none, rank
from nbdist.parallel.live import live_models, registry
from nbdist.parallel.live.prepared import Prepared
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
        names: Unique name -> (model, first name, the parameter in its groups).
        local: Its state on this rank.
        agreed: Its state over all ranks.
    """

    optimizer: Optimizer
    names: dict[str, tuple[Prepared, str, torch.Tensor]]
    local: LocalState
    agreed: MergedState


def common_models(what: str) -> list[Prepared]:
    """The prepared models that are on all ranks. Collective.

    A cell that failed on one rank may leave a model there, in the error.
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

    With `is_quick` those that were prepared will do where they step every parameter. Otherwise they
    are looked for among all of Python's objects, which takes a tenth of a second.
    """
    optimizers = prepared_optimizers(models) if is_quick else None
    if optimizers is None:
        # Those that were bound first, then those that nobody has prepared.
        places = {optimizer: place for place, optimizer in enumerate(registry.bound_optimizers())}
        optimizers = [o for o in live_models.live_optimizers() if registry.names_in(o)]
        optimizers.sort(key=lambda optimizer: places.get(optimizer, len(places)))
    sketches_by_rank = all_or_none(what, lambda: [_sketch(optimizer) for optimizer in optimizers])
    shared = functools.reduce(operator.and_, map(Counter, sketches_by_rank))
    chosen: list[Optimizer] = []
    for key, count in shared.items():
        sketches = zip(optimizers, sketches_by_rank[rank()], strict=True)
        chosen += [optimizer for optimizer, sketch in sketches if sketch == key][:count]
    names = [registry.names_in(optimizer) for optimizer in chosen]
    states = [
        read(optimizer, {key: parameter for key, (_, _, parameter) in here.items()}, number)
        for number, (optimizer, here) in enumerate(zip(chosen, names, strict=True))
    ]
    handles = zip(chosen, names, states, merge_across_ranks(states), strict=True)
    return [OptimizerHandle(*parts) for parts in handles]


def prepared_optimizers(models: Sequence[Prepared]) -> list[Optimizer] | None:
    """Return this rank's prepared optimizers, in order; None unless they step all trained.

    With None there may be others, which only a search of all Python objects finds.
    """
    optimizers = [o for o in registry.bound_optimizers() if registry.names_in(o)]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    wanted = {id(p) for model in models for p in model.parameters.values() if p.requires_grad}
    return optimizers if wanted and wanted <= stepped else None


def _sketch(optimizer: Optimizer) -> tuple[Any, ...]:
    names = registry.names_in(optimizer)
    return type(optimizer).__name__, tuple(names), optimizer in registry.bound_optimizers()
