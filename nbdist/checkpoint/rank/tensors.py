"""The tensors of a checkpoint, taken from live objects: their names, layouts and local parts.

model.MODEL.FIRST                    a parameter or buffer, also under its tied names
optimizer.OPTIMIZER.MODEL.FIRST.KEY  what an optimizer remembers of a parameter
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbdist.checkpoint.chunks import AssignedChunk, assign_chunks, is_complete
from nbdist.checkpoint.rank.live_objects import (
    LiveObjects,
    PreparedOptimizer,
    dtype_text,
)
from nbdist.core.ranks import rank_label
from nbdist.errors import CheckpointError
from nbdist.parallel.base.consensus import world_size
from nbdist.parallel.live import fsdp1_state, registry
from nbdist.parallel.reshard.optimizer_state import Place
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import Placement, TensorLayout, missing_on_ranks

MODEL, OPTIMIZER = "model", "optimizer"
# A box of one tensor: (name, offsets).
Spot = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class CheckpointTensors:
    """The tensors of a checkpoint by their names in it, and which rank writes which box.

    Attributes:
        shapes, dtypes: Shapes and types of the whole tensors.
        paths: Where each stands in the nested dict that torch's converter makes.
        aliases: Further names of the same tensor, of tied weights.
        sides: How each lies, in order.
        local: This rank's local part of each that it has.
        parts: Which rank writes which box.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sides: dict[str, Placement] = field(default_factory=dict)
    local: dict[str, torch.Tensor] = field(default_factory=dict)
    parts: list[AssignedChunk] = field(default_factory=list)

    def add(
        self,
        path: tuple[str, ...],
        dtype: torch.dtype,
        side: Placement,
        local: torch.Tensor | None,
        aliases: Iterable[tuple[str, ...]] = (),
    ) -> None:
        """Add a tensor under its path and further ones, and this rank's part where it has any."""
        name = ".".join(path)
        self.shapes[name] = tuple(side.layout.shape)
        self.dtypes[name], self.sides[name] = dtype, side
        if local is not None:
            self.local[name] = local
        others = {".".join(alias): alias for alias in aliases}
        self.paths |= {name: path, **others}
        self.aliases[name] = tuple(others)

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
        return sum(
            part.chunk.count * self.dtypes[part.name].itemsize
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
        for first, names in model.names.items():
            path, *aliases = [(MODEL, model.name, name) for name in names]
            local = model.local.get(first)
            contents.add(path, model.dtypes[first], model.side(first), local, aliases)
    for optimizer in live.optimizers:
        if optimizer.whole is not None:
            _add_whole(contents, optimizer, optimizer.whole["state"])
        else:
            _add_parts(contents, optimizer)
    stored = [(name, side, contents.dtypes[name].itemsize) for name, side in contents.sides.items()]
    # Every rank may have its own values of buffers: those of one rank belong together.
    buffers = {
        f"{MODEL}.{model.name}.{first}"
        for model in live.models
        for first in model.names
        if first not in model.prepared.parameters
    }
    contents.parts = assign_chunks(stored, world_size(), buffers)
    return contents


def entries_of(optimizer: PreparedOptimizer) -> list[dict[str, Any]]:
    """The state of an optimizer, without elements, as plain data, parameter by parameter."""
    return [
        {
            "parameter": optimizer.labels[parameter],
            "key": key,
            "kind": entry.kind,
            "dtype": None if entry.dtype is None else dtype_text(entry.dtype),
            "value": entry.value if entry.kind == "number" else None,
            "is_on_device": entry.is_on_device,
        }
        for (parameter, key), entry in optimizer.agreed.entries.items()
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
    """Path of a state's keys in a checkpoint."""
    _, first, _ = optimizer.stepper.names[key]
    model = optimizer.labels[key].removesuffix(f".{first}")
    return (OPTIMIZER, optimizer.name, model, first, state)


def is_whole(side: Placement) -> bool:
    """Whether every rank that holds any of it has all."""
    layout = side.layout
    dims = layout.stages, layout.tp_dim, layout.ep_dim, layout.shard_dim
    return all(dim is None for dim in dims)


def own_form(optimizer: PreparedOptimizer, place: Place, side: Placement) -> torch.Tensor | None:
    """A state of another shape than its parameter, as Adafactor's; None where it cannot be saved.

    It has no layout: it is saved where each rank has all of the parameter, and loaded there.
    """
    key, state = place
    everywhere = optimizer.agreed.entries[place].ranks == frozenset(range(world_size()))
    if not everywhere or not is_whole(side):
        return None
    value = optimizer.optimizer.state[optimizer.stepper.names[key][2]][state]
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return value.detach() if is_plain else None


def _add_whole(
    contents: CheckpointTensors, optimizer: PreparedOptimizer, states: Mapping[str, dict[str, Any]]
) -> None:
    """Under FSDP1 every rank has all of it once it has been gathered; see `live_objects`."""
    for key, values in states.items():
        side = state_side(optimizer, key)
        for state, value in values.items():
            if isinstance(value, torch.Tensor):
                whole = replace(side, layout=replace(side.layout, shape=tuple(value.shape)))
                path = state_path(optimizer, key, state)
                contents.add(path, value.dtype, whole, value.detach())


def _add_parts(contents: CheckpointTensors, optimizer: PreparedOptimizer) -> None:
    for (key, state), entry in optimizer.agreed.entries.items():
        side, path = state_side(optimizer, key), state_path(optimizer, key, state)
        if entry.kind == "other":
            value = own_form(optimizer, (key, state), side)
            if value is None:
                raise CheckpointError(
                    f"{optimizer.agreed.optimizer} keeps {state!r} of {optimizer.labels[key]} in "
                    f"its own format ({entry.value}), which cannot be saved in parts. Save it "
                    "under ddp, or use AdamW, Adam, SGD or another optimizer whose state has its "
                    "parameters' shapes."
                )
            whole = Placement(TensorLayout(tuple(value.shape)), Degrees())
            contents.add(path, value.dtype, whole, value)
        elif entry.dtype is None:
            continue  # a number of Python's
        elif entry.kind == "number":
            number = torch.tensor(entry.value, dtype=entry.dtype)
            layout = TensorLayout((), ranks=entry.ranks)
            contents.add(path, entry.dtype, Placement(layout, Degrees()), number)
        else:
            ranks = entry.ranks if side.layout.ranks is None else entry.ranks & side.layout.ranks
            placement = replace(side, layout=replace(side.layout, ranks=ranks))
            if not is_complete(placement, world_size()):
                _refuse_missing(optimizer, (key, state), side, placement)
            here = optimizer.stepper.local
            local = here.tensors.get(here.label((key, state)))
            contents.add(path, entry.dtype, placement, local)


def _refuse_missing(
    optimizer: PreparedOptimizer, place: Place, side: Placement, placement: Placement
) -> None:
    key, state = place
    ranks = optimizer.agreed.entries[place].ranks
    lacking = missing_on_ranks(
        placement, Placement(replace(side.layout, ranks=None), side.degrees), world_size()
    )
    raise CheckpointError(
        f"{optimizer.agreed.optimizer} has {state!r} of {optimizer.labels[key]} on rank "
        f"{rank_label(ranks)} only; some of it is missing (rank {rank_label(lacking)} has none). "
        "Run one step in which every rank's part has a gradient, then save."
    )
