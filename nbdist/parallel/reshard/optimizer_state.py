"""An optimizer's state, taken apart into named tensors that can be resharded, and put back.

local = read(optimizer, before)                           # this rank
(merged,) = merge_across_ranks([local])                   # collective
reshards = plan(merged, old, new)                         # this rank, alike on all; may refuse
tensors = redistribute(reshards, local.tensors, device)   # collective
write(optimizer, merged, tensors, before, after, new)     # this rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbdist.core.ranks import rank_label
from nbdist.errors import NbdistError, OptionError
from nbdist.parallel.base import consensus
from nbdist.parallel.base.consensus import all_gather_object
from nbdist.parallel.base.options import step_device
from nbdist.parallel.base.tensors import in_order, like, local_as, order_of
from nbdist.parallel.reshard.redistribute import Reshard
from nbdist.strategy.tensor_layout import Placement, is_same, local_runs, missing_on_ranks

# (Parameter's name, key in the optimizer's state of it.)
Place = tuple[str, str]

# Values that are immutable and equal on all ranks.
_PLAIN = (int, float, complex, str, type(None))


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One entry of an optimizer's state of one parameter, without its elements.

    Attributes:
        kind: "tensor": lies as the parameter does. "number": a number or a 0-dim tensor, the
            same on all ranks. "other": anything else, which only its optimizer understands.
        dtype: Of the tensor; None for what is no tensor.
        value: The number; for others a description.
        is_on_device: A 0-dim tensor on the parameter's device, which is not the CPU.
        ranks: Which ranks have it.
    """

    kind: str
    dtype: torch.dtype | None = None
    value: Any = None
    is_on_device: bool = False
    ranks: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class MergedState:
    """An optimizer's state over all ranks, without its elements. Equal on all ranks.

    Attributes:
        optimizer: Its class's name.
        number: Which one, of several that are switched together; part of the labels.
        names: Of the parameters that were asked for.
        entries: By place; parameters without state have none.
    """

    optimizer: str
    number: int
    names: tuple[str, ...]
    entries: dict[Place, StateEntry]

    def label(self, place: Place) -> str:
        """The name under which an entry's tensor moves."""
        name, key = place
        return f"{self.number}:{name} [{key}]"


@dataclass(frozen=True, slots=True)
class LocalState(MergedState):
    """The same of this rank alone, with the elements that it has.

    Attributes:
        tensors: Local parts of the entries of kind "tensor", by label: `redistribute`'s `local`.
    """

    tensors: dict[str, torch.Tensor]


def read(
    optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], number: int = 0
) -> LocalState:
    """Take an optimizer's state apart. Nothing is changed; the tensors are the optimizer's own.

    Collective only where a state's placements differ from its parameter's (SGD's momentum
    begins as a gradient, which tp may leave as partial sums): it is laid out as the parameter.

    Args:
        optimizer: torch's own object, not Accelerate's wrapper.
        parameters: Name -> what the optimizer's groups hold for it on this rank; in the same
            order on all ranks. State of other parameters is left alone.
        number: Of this optimizer among those that are switched together.
    """
    local = LocalState(type(optimizer).__name__, number, tuple(parameters), {}, {})
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            entry = local.entries[name, key] = _entry(value, parameter)
            if entry.kind == "tensor":
                local.tensors[local.label((name, key))] = local_as(value, parameter)
    return local


def merge_across_ranks(local: Sequence[LocalState]) -> list[MergedState]:
    """All ranks' states together, one for each optimizer. Collective: every rank.

    Raises:
        NbdistError: Ranks differ in the number or classes of optimizers, in a dtype, or in a
            number such as the step. Raised on all ranks.
    """
    by_rank = all_gather_object([replace(state, tensors={}) for state in local])
    classes = [[(state.optimizer, state.names) for state in theirs] for theirs in by_rank]
    for rank, theirs in enumerate(classes):
        if theirs != classes[0]:
            raise NbdistError(
                "The optimizers differ: rank 0 has "
                f"{_describe_optimizers(classes[0])}, rank {rank} has "
                f"{_describe_optimizers(theirs)}. Create the same ones on all ranks, in the same "
                "order."
            )
    return [_merge(states) for states in zip(*by_rank, strict=True)]


def plan(
    merged: MergedState, old: Mapping[str, Placement], new: Mapping[str, Placement]
) -> list[Reshard]:
    """The reshards that bring the state to `new`. This rank alone; the same on all.

    Args:
        merged: From `merge_across_ranks`.
        old: Placement of each parameter's state, by name.
        new: Placement afterwards: the parameter's, under zero1 with `ranks`.

    Raises:
        OptionError: There is state that cannot be resharded (Adafactor's factors, LBFGS's
            history) and a parameter's layout changes.
        NbdistError: A part of a state is on no rank.
    """
    world_size = consensus.world_size()
    _refuse_others(merged, old, new, world_size)
    reshards = []
    for place, entry in merged.entries.items():
        if entry.kind != "tensor":
            continue
        assert entry.dtype is not None
        name, key = place
        before, after = _on_ranks(old[name], entry.ranks), new[name]
        if missing_ranks := missing_on_ranks(before, after, world_size):
            raise NbdistError(
                f"{merged.optimizer} has {key!r} of {name} only on rank {rank_label(entry.ranks)}, "
                f"and the part for rank {rank_label(missing_ranks)} does not exist yet. Run one "
                "step in which every rank's part has a gradient, then switch."
            )
        reshards.append(Reshard(merged.label(place), entry.dtype, before, after))
    return reshards


def write(
    optimizer: Optimizer,
    merged: MergedState,
    tensors: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    new: Mapping[str, Placement],
) -> None:
    """Put the state under the new parameters. This rank alone; the groups are not touched.

    `optimizer.state` stays the same dict. The old parameters' dicts in it are not changed, so
    a `dict(optimizer.state)` from before is all that is needed to go back.

    Args:
        optimizer: The one that was read.
        merged: From `merge_across_ranks`.
        tensors: From `redistribute`, by label.
        before: Name -> the parameter that had the state.
        after: Name -> the parameter that gets it; in the groups already, or still the old one.
        new: As in `plan`.
    """
    rank = consensus.rank()
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    states: dict[str, dict[str, Any]] = {}
    for (name, key), entry in merged.entries.items():
        if local_runs(new[name].layout, new[name].degrees, rank) is None:
            continue
        state = states.setdefault(name, {})
        if entry.kind == "tensor":
            state[key] = _laid_as(after[name], tensors[merged.label((name, key))])
        elif entry.kind == "number":
            group = groups.get(id(after[name])) or groups.get(id(before[name]), {})
            state[key] = _number(key, entry, after[name], group)
        elif rank in entry.ranks:
            state[key] = optimizer.state[before[name]][key]
    for name in merged.names:
        optimizer.state.pop(before[name], None)
    for name, state in states.items():
        optimizer.state[after[name]] = state


def _laid_as(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A state that lies as its parameter: fused kernels want the same order in memory."""
    if isinstance(parameter, DTensor) or part.shape != parameter.shape:
        return like(parameter, part)
    return in_order(part, order_of(parameter))


def _entry(value: Any, parameter: torch.Tensor) -> StateEntry:
    if isinstance(value, _PLAIN):
        return StateEntry("number", None, value)
    if not isinstance(value, torch.Tensor):
        return StateEntry("other", None, type(value).__name__)
    if value.ndim == 0:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        is_there = value.device == parameter.device and value.device.type != "cpu"
        return StateEntry("number", value.dtype, whole.item(), is_there)
    # A DTensor's shape is the whole one. Some optimizers keep plain tensors beside DTensors.
    is_plain = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
    wanted = parameter.to_local().shape if is_plain else parameter.shape  # type: ignore[attr-defined]
    if value.shape == wanted:
        return StateEntry("tensor", value.dtype)
    return StateEntry("other", value.dtype, f"shape {tuple(value.shape)}, not {tuple(wanted)}")


def _merge(by_rank: Sequence[LocalState]) -> MergedState:
    """One optimizer's entries of all ranks, each with the ranks that have it.

    Raises:
        NbdistError: Two ranks have different numbers or dtypes.
    """
    first_rank = by_rank[0]
    entries: dict[Place, StateEntry] = {}
    for rank, state in enumerate(by_rank):
        for place, entry in state.entries.items():
            first = entries.setdefault(place, entry)
            if _equal_part(first) != _equal_part(entry):
                name, key = place
                raise NbdistError(
                    f"{state.optimizer}'s {key!r} of {name} differs: {_describe_entry(first)} on "
                    f"rank {min(first.ranks)}, {_describe_entry(entry)} on rank {rank}. The ranks "
                    "have not made the same steps. Load a checkpoint on all ranks, then switch."
                )
            entries[place] = replace(first, ranks=first.ranks | {rank})
    return MergedState(first_rank.optimizer, first_rank.number, first_rank.names, entries)


def _equal_part(entry: StateEntry) -> tuple[Any, ...]:
    """Take the part that is equal on all ranks. Numbers by text: NaN differs from itself."""
    return entry.kind, entry.dtype, entry.kind == "number" and repr(entry.value)


def _refuse_others(
    merged: MergedState, old: Mapping[str, Placement], new: Mapping[str, Placement], world_size: int
) -> None:
    """Raise for state that only its optimizer understands, unless every layout stays.

    Every parameter's, as a history such as LBFGS's is of all of them though one holds it.
    """
    for (holder, key), entry in merged.entries.items():
        if entry.kind != "other":
            continue
        before = {**old, holder: _on_ranks(old[holder], entry.ranks)}
        changed = [n for n in merged.names if not is_same(before[n], new[n], world_size)]
        if changed:
            raise OptionError(
                f"{merged.optimizer} keeps {key!r} of {holder} in its own form ({entry.value}), "
                f"which cannot be resharded, and the placement of {changed[0]} changes. Use AdamW, "
                "Adam, SGD or another optimizer whose state has its parameters' shapes, or clear "
                "the state first: optimizer.state.clear()."
            )


def _on_ranks(side: Placement, ranks: Iterable[int]) -> Placement:
    return Placement(replace(side.layout, ranks=frozenset(ranks)), side.degrees)


def _number(key: str, entry: StateEntry, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
    if entry.dtype is None:
        return entry.value
    device = parameter.device if entry.is_on_device else torch.device("cpu")
    if key == "step":  # a fused option may have changed
        device = step_device(group, parameter)
    return torch.tensor(entry.value, dtype=entry.dtype, device=device)


def _describe_entry(entry: StateEntry) -> str:
    if entry.kind == "other":
        return str(entry.value)
    value = "a tensor" if entry.kind == "tensor" else repr(entry.value)
    return f"{value} of {entry.dtype}" if entry.dtype else value


def _describe_optimizers(optimizers: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    descriptions = [f"{name} of {len(names)} parameters" for name, names in optimizers]
    return ", ".join(descriptions) or "none"
