"""The tensors of a checkpoint, taken from what was found: their names, layouts and local parts.

model.MODEL.FIRST                    a parameter or buffer, also under its tied names
optimizer.OPTIMIZER.MODEL.FIRST.KEY  what an optimizer remembers of a parameter
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from nbdist.checkpoint.chunks import Part, Stored, is_complete, shared_out
from nbdist.checkpoint.rank.dcp_planners import Spot, Tensors
from nbdist.checkpoint.rank.live_objects import LiveObjects, Model, PreparedOptimizer, dtype_text
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
    """All tensors that are saved.

    Attributes:
        tensors: What is known of each.
        stored: How each lies, in order.
        held: This rank's local part of each that it has.
        parts: Which rank writes which box.
    """

    tensors: Tensors = field(default_factory=Tensors)
    stored: list[Stored] = field(default_factory=list)
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)

    def add(self, name: str, side: Placement) -> None:
        """Add a tensor that `tensors` knows."""
        self.stored.append(Stored(name, side, self.tensors.dtypes[name].itemsize))

    def own(self, rank: int) -> Iterator[tuple[Spot, torch.Tensor]]:
        """The boxes that a rank writes, as views of what it holds."""
        for one in self.parts:
            if one.writer == rank:
                box = self.held[one.name]
                for dim, n in enumerate(one.chunk.sizes):
                    if box.shape[dim] != n:
                        box = box.narrow(dim, one.chunk.local[dim], n)
                yield (one.name, one.chunk.offsets), box

    def own_bytes(self, rank: int) -> int:
        """That a rank writes."""
        dtypes = self.tensors.dtypes
        return sum(
            one.chunk.count * dtypes[one.name].itemsize for one in self.parts if one.writer == rank
        )


def tensors_of(found: LiveObjects) -> CheckpointTensors:
    """The tensors of all models and optimizers. This rank alone; the same list on all.

    Raises:
        CheckpointError: An optimizer's state has a form of its own, or a part of it is nowhere.
    """
    one = CheckpointTensors()
    for model in found.models:
        _add_model(one, model)
    for stepping in found.optimizers:
        _add_optimizer(one, stepping)
    one.parts = shared_out(one.stored, world_size())
    one.held = local_tensors(found)
    return one


def local_tensors(found: LiveObjects) -> dict[str, torch.Tensor]:
    """This rank's local part of each tensor that it has, by name in the checkpoint."""
    own = {
        f"{MODEL}.{model.name}.{first}": tensor
        for model in found.models
        for first, tensor in model.held.items()
    }
    for stepping in found.optimizers:
        for key, state, tensor in _states(stepping):
            own[".".join(state_path(stepping, key, state))] = tensor
    return own


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


def entries_of(stepping: PreparedOptimizer) -> list[dict[str, Any]]:
    """All that an optimizer remembers, in the order of its parameters."""
    assert stepping.stepper.agreed is not None
    found = stepping.stepper.agreed.entries
    return [entry_record(stepping.labels[n], key, entry) for (n, key), entry in found.items()]


def state_side(stepping: PreparedOptimizer, key: str) -> Placement:
    """How the state of a parameter lies; key is its unique name in the optimizer."""
    one, first, _ = stepping.stepper.names[key]
    return one.whole(first) if fsdp1_state.is_flat(one) else registry.state_side(one.built, first)


def state_path(stepping: PreparedOptimizer, key: str, state: str) -> tuple[str, ...]:
    """Where a state stands in a checkpoint."""
    _, first, _ = stepping.stepper.names[key]
    model = stepping.labels[key].removesuffix(f".{first}")
    return (OPTIMIZER, stepping.name, model, first, state)


def is_whole(side: Placement) -> bool:
    """Whether every rank that holds any of it has all."""
    layout = side.layout
    return layout.stages is None and layout.tp_dim is None and layout.shard_dim is None


def own_form(stepping: PreparedOptimizer, place: Place, side: Placement) -> torch.Tensor | None:
    """A state of another shape than its parameter, as Adafactor's; None where it cannot be saved.

    It has no layout: it is saved where each rank has all of the parameter, and loaded there.
    """
    assert stepping.stepper.agreed is not None
    key, state = place
    everywhere = stepping.stepper.agreed.entries[place].ranks == frozenset(range(world_size()))
    if not everywhere or not is_whole(side):
        return None
    value = stepping.optimizer.state[stepping.stepper.names[key][2]][state]
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return value.detach() if is_plain else None


def _add_model(one: CheckpointTensors, model: Model) -> None:
    for first, names in model.names.items():
        name = one.tensors.add(
            (MODEL, model.name, first),
            model.one.layouts[first].shape,
            model.dtypes[first],
            [(MODEL, model.name, other) for other in names[1:]],
        )
        one.add(name, model.side(first))


def _add_optimizer(one: CheckpointTensors, stepping: PreparedOptimizer) -> None:
    if any(fsdp1_state.is_flat(o) for o, _, _ in stepping.stepper.names.values()):
        _add_flat(one, stepping)
        return
    agreed = stepping.stepper.agreed
    assert agreed is not None
    for (key, state), entry in agreed.entries.items():
        side = state_side(stepping, key)
        if entry.kind == "other":
            value = own_form(stepping, (key, state), side)
            if value is None:
                _refuse_other(agreed, stepping.labels[key], state, entry)
            path = state_path(stepping, key, state)
            whole = Placement(TensorLayout(tuple(value.shape)), Degrees())
            one.add(one.tensors.add(path, value.shape, value.dtype), whole)
            continue
        if entry.dtype is None:
            continue  # a number of Python's
        shape = side.layout.shape if entry.kind == "tensor" else ()
        name = one.tensors.add(state_path(stepping, key, state), shape, entry.dtype)
        if entry.kind == "number":
            one.add(name, Placement(TensorLayout((), ranks=entry.ranks), Degrees()))
            continue
        own = replace(side, layout=replace(side.layout, ranks=_on(side, entry.ranks)))
        _refuse_missing(agreed, stepping, (key, state), side, own)
        one.add(name, own)


def _add_flat(one: CheckpointTensors, stepping: PreparedOptimizer) -> None:
    """Under FSDP1 every rank has all of it once it has been gathered; see `found`."""
    assert stepping.whole is not None
    for key, own in stepping.whole["state"].items():
        side = state_side(stepping, key)
        for state, value in own.items():
            if isinstance(value, torch.Tensor):
                name = one.tensors.add(state_path(stepping, key, state), value.shape, value.dtype)
                whole = replace(side, layout=replace(side.layout, shape=tuple(value.shape)))
                one.add(name, whole)


def _states(stepping: PreparedOptimizer) -> Iterator[tuple[str, str, torch.Tensor]]:
    """This rank's part of all that an optimizer remembers: (parameter, key, tensor)."""
    if stepping.whole is not None:
        for key, own in stepping.whole["state"].items():
            tensors = {k: v for k, v in own.items() if isinstance(v, torch.Tensor)}
            yield from ((key, state, value.detach()) for state, value in tensors.items())
        return
    agreed = stepping.stepper.agreed
    assert agreed is not None
    for place, entry in agreed.entries.items():
        value = _state(stepping, place, entry)
        if value is not None:
            yield *place, value


def _state(stepping: PreparedOptimizer, place: Place, entry: StateEntry) -> torch.Tensor | None:
    """This rank's part of one thing that an optimizer remembers."""
    stepper = stepping.stepper
    if entry.kind == "tensor":
        return stepper.local.tensors.get(stepper.local.label(place))
    if entry.kind == "other":
        return own_form(stepping, place, state_side(stepping, place[0]))
    return None if entry.dtype is None else torch.tensor(entry.value, dtype=entry.dtype)


def _on(side: Placement, ranks: frozenset[int]) -> frozenset[int]:
    known = side.layout.ranks
    return ranks if known is None else ranks & known


def _refuse_other(agreed: MergedState, label: str, state: str, entry: StateEntry) -> NoReturn:
    raise CheckpointError(
        f"{agreed.optimizer} keeps {state!r} of {label} in its own form ({entry.value}), which "
        "cannot be saved in parts. Save it under ddp, or use AdamW, Adam, SGD or another optimizer "
        "whose state has its parameters' shapes."
    )


def _refuse_missing(
    agreed: MergedState, stepping: PreparedOptimizer, place: Place, side: Placement, own: Placement
) -> None:
    if is_complete(own, world_size()):
        return
    key, state = place
    ranks = agreed.entries[place].ranks
    lacking = missing_on_ranks(
        own, Placement(replace(side.layout, ranks=None), side.degrees), world_size()
    )
    raise CheckpointError(
        f"{agreed.optimizer} has {state!r} of {stepping.labels[key]} on rank {rank_label(ranks)} "
        f"only; a part of it is nowhere (rank {rank_label(lacking)} has none). Run one step in "
        "which every rank's part has a gradient, then save."
    )
