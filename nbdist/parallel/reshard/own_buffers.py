"""Buffers that each rank has for itself, as its forward has changed them: codebooks, counters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist.parallel.base.consensus import all_gather_object
from nbdist.parallel.base.tensors import digest
from nbdist.parallel.live import build, fsdp1_state
from nbdist.parallel.live.prepared import Prepared

# Clauses that say whose values are taken.
RANK_0 = "rank 0's are written"
EACH_RANK = "each rank gets its own, so what rank 0 saves of it has rank 0's"

_MAX_NAMED = 2


def notes_on(models: Mapping[str, Prepared], whose: str) -> tuple[str, ...]:
    """A sentence on each model whose buffers differ between ranks. Collective: every rank.

    Args:
        models: By title; the same on all ranks.
        whose: A clause that says whose values are taken.
    """
    buffers = {title: _own_buffers(model) for title, model in models.items()}
    if not any(buffers.values()):  # alike on all ranks
        return ()
    digests = {
        title: {name: digest([tensor]) for name, tensor in by_name.items() if not tensor.is_meta}
        for title, by_name in buffers.items()
    }
    per_rank = all_gather_object(digests)
    return tuple(
        f"buffers of {title} differ between the ranks ({_first(names)}), since each rank's forward "
        f"changes its own and this strategy does not combine them: {whose}"
        for title in models
        if (names := _differing([report[title] for report in per_rank]))
    )


def _own_buffers(model: Prepared) -> dict[str, torch.Tensor]:
    """The saved buffers that no strategy makes equal, by name; on meta where another rank has it.

    None where DDP sends rank 0's to all ranks in the next forward, and none of `single`, where
    each rank has a model of its own.
    """
    is_sent = any(
        isinstance(module, DistributedDataParallel) and module.broadcast_buffers
        for module in model.outer.modules()
    )
    if is_sent or model.built.job.choice.name == "single" or fsdp1_state.is_flat(model):
        return {}
    saved = model.base.state_dict(keep_vars=True).keys()
    buffers = build.buffers_of(model.base)
    return {name: buffers[name] for name in buffers if name in saved and name in model.layouts}


def _first(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _differing(per_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """The names whose digests differ between the ranks that have them."""
    names = dict.fromkeys(itertools.chain.from_iterable(per_rank))
    return [n for n in names if len({digests[n] for digests in per_rank if n in digests}) > 1]
