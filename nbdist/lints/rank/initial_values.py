"""Whether ranks that should have the same values do: digests of the first elements of each tensor.

Values of ranks that are apart differ everywhere after one step, so a few elements of each tensor
tell it. `%dist_check` compares all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist.lints.rank import ddp as ddp_models
from nbdist.lints.rank import optimizer_steps, watch
from nbdist.parallel.base import events

HEAD = 16
MOST_TENSORS = 256
_FSDP = "torch.distributed.fsdp"


@dataclass(slots=True)
class _State:
    """Models given to fully_shard in this cell: class, digest, and the ranks of its mesh."""

    sharded: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    is_watching: bool = False


_state = _State()


def install() -> None:
    """Watch what is prepared from now on. FSDP is not loaded for it."""
    events.on_prepare.append(_note_initial)
    watch.undo.append(lambda: events.on_prepare.remove(_note_initial))
    _state.is_watching = False


def begin() -> None:
    """A cell begins: watch fully_shard once FSDP is loaded."""
    _state.sharded.clear()
    module = sys.modules.get(_FSDP)
    if not _state.is_watching and hasattr(module, "fully_shard"):
        _state.is_watching = True
        watch.wrap(module, "fully_shard", _watch_sharding)


def end() -> None:
    """Note this cell's models."""
    by_mesh: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for kind, value_digest, ranks in _state.sharded:
        by_mesh.setdefault(ranks, []).append((kind, value_digest))
    for ranks, sharded in by_mesh.items():
        # The outermost comes last, and may have no parameters of its own.
        text = " ".join(value_digest for _, value_digest in sharded)
        watch.note("shard-seeds", sharded[-1][0], digest=text, ranks=list(ranks))
    for number, ddp in ddp_models.find_used(optimizer_steps.list_stepped()):
        _note_parameters(ddp, number)


@watch.guarded("parameters-apart")
def _note_parameters(ddp: DistributedDataParallel, number: int) -> None:
    members = dist.get_process_group_ranks(ddp.process_group)
    # Each rank has experts of its own under ep, which DDP leaves alone.
    value_digest = digest(
        parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    )
    watch.note(
        "parameters-apart", ddp_models.name_of(ddp), digest=value_digest, ranks=members,
        model=number,
    )  # fmt: skip


@watch.guarded("initial-values")
def _note_initial(name: str, tensors: Iterable[torch.Tensor]) -> None:
    """A model of this class is about to be prepared, with rank 0's values on all ranks."""
    value_digest = digest(tensors)
    watch.note(
        "initial-values", name, digest=value_digest, ranks=list(range(dist.get_world_size()))
    )


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A text that differs where the first elements of the first tensors do, bit by bit."""
    heads: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in itertools.islice(tensors, MOST_TENSORS):
        head = watch.local(tensor)
        if head.is_meta or not head.numel():
            continue
        while head.ndim > 1:
            head = head[0]
        heads.setdefault((head.dtype, head.device), []).append(head.reshape(-1)[:HEAD])
    total = hashlib.blake2b(digest_size=8)
    for (dtype, _), parts in heads.items():
        joined = torch.cat(parts).cpu().contiguous()  # one copy from a GPU, not one for each
        total.update(str(dtype).encode() + joined.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _watch_sharding(original: Any) -> Any:
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        _note(module, kwargs.get("mesh"))
        return original(module, *args, **kwargs)

    return fully_shard


@watch.guarded("shard-seeds")
def _note(sharded: Any, mesh: Any) -> None:
    modules = sharded if isinstance(sharded, list | tuple) else [sharded]
    # Without those that are DTensors already.
    parameters = [p for m in modules for p in m.parameters() if not hasattr(p, "to_local")]
    if any(p.is_meta for p in parameters):
        return  # nbdist's own way, which sends values later
    ranks = mesh.mesh.flatten().tolist() if mesh is not None else range(dist.get_world_size())
    _state.sharded.append((type(modules[-1]).__name__, digest(parameters), tuple(ranks)))
