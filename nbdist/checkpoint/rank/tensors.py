"""The tensors of a checkpoint, taken from live objects: their names, layouts and local parts.

model.MODEL.FIRST                    a parameter or buffer, also under its tied names
optimizer.OPTIMIZER.MODEL.FIRST.KEY  what an optimizer remembers of a parameter
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from nbdist.checkpoint.chunks import AssignedChunk, Stored, assign_chunks, is_complete
from nbdist.checkpoint.rank.dcp_planners import Spot, Tensors
from nbdist.checkpoint.rank.live_objects import (
    CheckpointModel,
    LiveObjects,
    PreparedOptimizer,
    dtype_text,
)
from nbdist.core.ranks import rank_label
from nbdist.errors import CheckpointError
from nbdist.parallel import registry
from nbdist.parallel.consensus import world_size
from nbdist.parallel.dp import fsdp1_state
from nbdist.parallel.reshard.optimizer_state import MergedState, Place, StateEntry
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import Placement, TensorLayout, missing_on_ranks

MODEL, OPTIMIZER = "model", "optimizer"


@dataclass(slots=True)
class CheckpointTensors:
    """The tensors of a checkpoint, and which rank writes which box.

    Attributes:
        tensors: What is known of each.
        stored: How each lies, in order.
        local: This rank's local part of each that it has.
        parts: Which rank writes which box.
    """

    tensors: Tensors = field(default_factory=Tensors)
    stored: list[Stored] = field(default_factory=list)
    local: dict[str, torch.Tensor] = field(default_factory=dict)
    parts: list[AssignedChunk] = field(default_factory=list)

    def add(self, name: str, side: Placement) -> None:
        """Add a tensor that `tensors` knows."""
        self.stored.append(Stored(name, side, self.tensors.dtypes[name].itemsize))

    def boxes_of(self, rank: int) -> Iterator[tuple[Spot, torch.Tensor]]:
        """The boxes that a rank writes, as views of what it holds."""
        for part in self.parts:
            if part.writer == rank:
                box = self.local[part.name]
                for dim, n in enumerate(part.chunk.sizes):
                    if box.shape[dim] != n:
                        box = box.narrow(dim, part.chunk.local[dim], n)
                yield (part.name, part.chunk.offsets), box

    def own_bytes(self, rank: int) -> int:
        """Bytes that a rank writes."""
        dtypes = self.tensors.dtypes
        return sum(
            part.chunk.count * dtypes[part.name].itemsize
            for part in self.parts
            if part.writer == rank
        )


def tensors_of(live: LiveObjects) -> CheckpointTensors:
    """The tensors of all models and optimizers. This rank alone; the same list on all.

    Raises:
        CheckpointError: An optimizer's state has its own format, or some of it is missing.
    """
    contents = CheckpointTensors()
    for model in live.models:
        _add_model(contents, model)
    for optimizer in live.optimizers:
        _add_optimizer(contents, optimizer)
    contents.parts = assign_chunks(contents.stored, world_size())
    contents.local = local_tensors(live)
    return contents


def local_tensors(live: LiveObjects) -> dict[str, torch.Tensor]:
    """This rank's local part of each tensor that it has, by name in the checkpoint."""
    local = {
        f"{MODEL}.{model.name}.{first}": tensor
        for model in live.models
        for first, tensor in model.local.items()
    }
    for optimizer in live.optimizers:
        for key, state, tensor in _states(optimizer):
            local[".".join(state_path(optimizer, key, state))] = tensor
    return local


def entry_record(label: str, key: str, entry: StateEntry) -> dict[str, Any]:
    """What an optimizer remembers of a parameter, without elements, as plain data."""
    return {
        "parameter": label,
        "key": key,
        "kind": entry.kind,
        "dtype": None if entry.dtype is None else dtype_text(entry.dtype),
        "value": entry.value if entry.kind == "number" else None,
        "is_on_device": entry.is_on_device,
    }


def entries_of(optimizer: PreparedOptimizer) -> list[dict[str, Any]]:
    """All that an optimizer remembers, in the order of its parameters."""
    assert optimizer.stepper.agreed is not None
    entries = optimizer.stepper.agreed.entries
    return [
        entry_record(optimizer.labels[parameter], key, entry)
        for (parameter, key), entry in entries.items()
    ]


def state_side(optimizer: PreparedOptimizer, key: str) -> Placement:
    """How the state of a parameter lies; key is its unique name in the optimizer."""
    prepared, first, _ = optimizer.stepper.names[key]
    return (
        prepared.whole(first)
        if fsdp1_state.is_flat(prepared)
        else registry.state_side(prepared.built, first)
    )


def state_path(optimizer: PreparedOptimizer, key: str, state: str) -> tuple[str, ...]:
    """Where a state stands in a checkpoint."""
    _, first, _ = optimizer.stepper.names[key]
    model = optimizer.labels[key].removesuffix(f".{first}")
    return (OPTIMIZER, optimizer.name, model, first, state)


def is_whole(side: Placement) -> bool:
    """Whether every rank that holds any of it has all."""
    layout = side.layout
    return layout.stages is None and layout.tp_dim is None and layout.shard_dim is None


def own_form(optimizer: PreparedOptimizer, place: Place, side: Placement) -> torch.Tensor | None:
    """A state of another shape than its parameter, as Adafactor's; None where it cannot be saved.

    It has no layout: it is saved where each rank has all of the parameter, and loaded there.
    """
    assert optimizer.stepper.agreed is not None
    key, state = place
    everywhere = optimizer.stepper.agreed.entries[place].ranks == frozenset(range(world_size()))
    if not everywhere or not is_whole(side):
        return None
    value = optimizer.optimizer.state[optimizer.stepper.names[key][2]][state]
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return value.detach() if is_plain else None


def _add_model(contents: CheckpointTensors, model: CheckpointModel) -> None:
    for first, names in model.names.items():
        name = contents.tensors.add(
            (MODEL, model.name, first),
            model.prepared.layouts[first].shape,
            model.dtypes[first],
            [(MODEL, model.name, other) for other in names[1:]],
        )
        contents.add(name, model.side(first))


def _add_optimizer(contents: CheckpointTensors, optimizer: PreparedOptimizer) -> None:
    if any(fsdp1_state.is_flat(prepared) for prepared, _, _ in optimizer.stepper.names.values()):
        _add_flat(contents, optimizer)
        return
    agreed = optimizer.stepper.agreed
    assert agreed is not None
    for (key, state), entry in agreed.entries.items():
        side = state_side(optimizer, key)
        if entry.kind == "other":
            value = own_form(optimizer, (key, state), side)
            if value is None:
                _refuse_other(agreed, optimizer.labels[key], state, entry)
            path = state_path(optimizer, key, state)
            whole = Placement(TensorLayout(tuple(value.shape)), Degrees())
            contents.add(contents.tensors.add(path, value.shape, value.dtype), whole)
            continue
        if entry.dtype is None:
            continue  # a number of Python's
        shape = side.layout.shape if entry.kind == "tensor" else ()
        name = contents.tensors.add(state_path(optimizer, key, state), shape, entry.dtype)
        if entry.kind == "number":
            contents.add(name, Placement(TensorLayout((), ranks=entry.ranks), Degrees()))
            continue
        placement = replace(side, layout=replace(side.layout, ranks=_on(side, entry.ranks)))
        _refuse_missing(agreed, optimizer, (key, state), side, placement)
        contents.add(name, placement)


def _add_flat(contents: CheckpointTensors, optimizer: PreparedOptimizer) -> None:
    """Under FSDP1 every rank has all of it once it has been gathered; see `live_objects`."""
    assert optimizer.whole is not None
    for key, states in optimizer.whole["state"].items():
        side = state_side(optimizer, key)
        for state, value in states.items():
            if isinstance(value, torch.Tensor):
                name = contents.tensors.add(
                    state_path(optimizer, key, state), value.shape, value.dtype
                )
                whole = replace(side, layout=replace(side.layout, shape=tuple(value.shape)))
                contents.add(name, whole)


def _states(optimizer: PreparedOptimizer) -> Iterator[tuple[str, str, torch.Tensor]]:
    """This rank's part of all that an optimizer remembers: (parameter, key, tensor)."""
    if optimizer.whole is not None:
        for key, states in optimizer.whole["state"].items():
            tensors = {k: v for k, v in states.items() if isinstance(v, torch.Tensor)}
            yield from ((key, state, value.detach()) for state, value in tensors.items())
        return
    agreed = optimizer.stepper.agreed
    assert agreed is not None
    for place, entry in agreed.entries.items():
        value = _state(optimizer, place, entry)
        if value is not None:
            yield *place, value


def _state(optimizer: PreparedOptimizer, place: Place, entry: StateEntry) -> torch.Tensor | None:
    """This rank's part of one thing that an optimizer remembers."""
    stepper = optimizer.stepper
    if entry.kind == "tensor":
        return stepper.local.tensors.get(stepper.local.label(place))
    if entry.kind == "other":
        return own_form(optimizer, place, state_side(optimizer, place[0]))
    return None if entry.dtype is None else torch.tensor(entry.value, dtype=entry.dtype)


def _on(side: Placement, ranks: frozenset[int]) -> frozenset[int]:
    layout_ranks = side.layout.ranks
    return ranks if layout_ranks is None else ranks & layout_ranks


def _refuse_other(agreed: MergedState, label: str, state: str, entry: StateEntry) -> NoReturn:
    raise CheckpointError(
        f"{agreed.optimizer} keeps {state!r} of {label} in its own format ({entry.value}), which "
        "cannot be saved in parts. Save it under ddp, or use AdamW, Adam, SGD or another optimizer "
        "whose state has its parameters' shapes."
    )


def _refuse_missing(
    agreed: MergedState,
    optimizer: PreparedOptimizer,
    place: Place,
    side: Placement,
    placement: Placement,
) -> None:
    if is_complete(placement, world_size()):
        return
    key, state = place
    ranks = agreed.entries[place].ranks
    lacking = missing_on_ranks(
        placement, Placement(replace(side.layout, ranks=None), side.degrees), world_size()
    )
    raise CheckpointError(
        f"{agreed.optimizer} has {state!r} of {optimizer.labels[key]} on rank {rank_label(ranks)} "
        f"only; some of it is missing (rank {rank_label(lacking)} has none). Run one step in "
        "which every rank's part has a gradient, then save."
    )
