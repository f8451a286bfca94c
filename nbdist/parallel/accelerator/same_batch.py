"""Whether ranks that must see the same data do."""

from __future__ import annotations

from typing import Any

from nbdist.core.ranks import rank_label
from nbdist.errors import NbdistError
from nbdist.parallel import registry
from nbdist.parallel.consensus import all_gather_object
from nbdist.parallel.cp.split_sequence import tensors
from nbdist.parallel.tensors import digest


def check_alike(batch: Any, index: int) -> None:
    """Compare a batch with those of the ranks that share a model's copy with this one.

    Collective under tp, pp and cp: every rank. Nothing is done elsewhere: there no two ranks see
    the same data, or each rank is by itself.

    Args:
        batch: Tensors in lists, tuples and dicts.
        index: Which part of the data it is of; equal for ranks that share a copy.

    Raises:
        NbdistError: They differ, on all ranks: a model's parts would each compute with
            different data, and nothing else would tell.
    """
    choice = registry.current()
    if choice.name == "single" or choice.degrees.dp == choice.degrees.product:
        return
    digests = all_gather_object((index, digest(tensors(batch))))
    for part in {shard for shard, _ in digests}:
        ranks = [rank for rank, (shard, _) in enumerate(digests) if shard == part]
        if len({digests[rank][1] for rank in ranks}) > 1:
            raise NbdistError(
                f"Ranks {rank_label(ranks)} share one copy of the model and got different batches: "
                "the dataset, its transforms or its sampler draw random numbers that are not the "
                "same on these ranks. Let rank 0 read for all, with Accelerator(dataloader_config="
                "DataLoaderConfiguration(dispatch_batches=True)), or seed the ranks alike "
                "(%dist_init --seed 0)."
            )
