"""Private memory of a model in DDP and FSDP2. It is read alone; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def shards(modules: Iterable[torch.nn.Module]) -> dict[tuple[int, str], Any]:
    """The record of fully_shard on each parameter, by its module's id and its name there.

    Private: the modules show the gathered parameters from a forward on, and nothing public gives
    the shards then. Without it what the modules show is taken for the parameters.
    """
    shards_by_name = {}
    for module in modules:
        if not issubclass(type(module), FSDPModule):
            continue
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        single = getattr(state, "_fsdp_param_group", None)
        for group in getattr(state, "_fsdp_param_groups", [single]):
            for shard in getattr(group, "fsdp_params", ()):
                info = shard._module_info  # noqa: SLF001
                pairs = [
                    (info.module, info.param_name),
                    *zip(info.shared_modules, info.shared_param_names, strict=True),
                ]
                shards_by_name.update({(id(holder), name): shard for holder, name in pairs})
    return shards_by_name


def unsharded_gradients(shard: Any) -> Iterator[Any]:
    """Yield the gradients of a parameter under fully_shard, before they are reduced."""
    yield getattr(getattr(shard, "_unsharded_param", None), "grad", None)
    yield getattr(shard, "unsharded_accumulated_grad", None)


def padded(shard: Any) -> Any:
    """The padded tensor around a rank's shard: as large on each rank."""
    return getattr(shard, "_sharded_param_data", None)


def gathered(shard: Any) -> Iterator[Any]:
    """A parameter under fully_shard as it was gathered from all ranks, while it is there."""
    yield from getattr(shard, "all_gather_outputs", ())
    yield getattr(shard, "_unsharded_param", None)


def bucket_sizes(module: DistributedDataParallel) -> tuple[int, ...]:
    """Bytes of each of DDP's buckets.

    Private: the buckets are held in C++, and DDP's log data has all that is shown of them. Without
    it they have no owner.
    """
    ask = getattr(module, "_get_ddp_logging_data", None)
    if ask is None or not hasattr(module, "reducer"):
        return ()
    logged = ask()
    # Since the first step they follow the order in which gradients come.
    sizes = str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
    return tuple(int(size) for size in sizes.split(",") if size.strip().isdigit() and int(size))
