"""Values that blocks keep beside their results; no other stage gets them: NaN there, once.

An auxiliary loss in an attribute, or in a list, that forward adds up behind the blocks: the last
stage would add up its own blocks' alone. In the first run of a shape each stage says what its
blocks have kept, and each later one runs once more with NaN in these places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nbdist.errors import NbdistError
from nbdist.parallel.pp.stage import StageModule
from nbdist.parallel.sequence.kept import entries, find_holders
from nbdist.parallel.sequence.split_sequence import map_tensors, tensors

# Name -> what is kept under it.
SideValues = Mapping[str, Any]


def refusal(names: Sequence[str]) -> NbdistError:
    """Build the error for a forward that uses values which other stages keep."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return NbdistError(
        f"forward uses {', '.join(names[:2])}{more}, which blocks keep on the rank of their own "
        "stage: a pipeline hands on what blocks return, and nothing else. Let each block take and "
        "return it (h, aux = block(h, aux)) and forward add it to the loss, or use ddp or fsdp"
    )


@contextmanager
def noting(
    base: torch.nn.Module, parts: Sequence[StageModule]
) -> Iterator[Callable[[], SideValues]]:
    """A run of these stages; yields what says afterwards what their blocks keep, on meta."""
    before: dict[str, Any] = {}
    inside = tuple(f"{part.blocks.block_name(n)}." for part in parts for n in part.span)

    def find() -> SideValues:
        return {
            name: map_tensors(lambda tensor: tensor.to("meta"), value)
            for name, value in _changed(base, before).items()
            if name.startswith(inside) or isinstance(value, list | dict)
        }

    with _at_start(parts, lambda: before.update(_kept(base))):
        yield find


@contextmanager
def unknown(
    base: torch.nn.Module, part: StageModule, values: SideValues, device: torch.device
) -> Iterator[None]:
    """A run of a stage with NaN where blocks of other stages keep these values."""
    before = _kept(base)

    def put() -> None:
        # What forward makes before the blocks is made on each rank.
        for name in values.keys() - _changed(base, before).keys():
            _put(base, name, map_tensors(lambda t: _nan(t, device), values[name]))

    with _at_start([part], put):
        yield


def by_attribute(values: SideValues) -> list[SideValues]:
    """The same in groups: what has one name in all modules."""
    kinds = sorted({name.rpartition(".")[2] for name in values})
    return [{k: v for k, v in values.items() if k.rpartition(".")[2] == kind} for kind in kinds]


@contextmanager
def _at_start(parts: Sequence[StageModule], act: Callable[[], None]) -> Iterator[None]:
    for part in parts:
        part.before_blocks = act
    try:
        yield
    finally:
        for part in parts:
            part.before_blocks = None


def _kept(base: torch.nn.Module) -> SideValues:
    """Tensors of numbers by themselves, and lists and dicts of them without what else is there."""
    values = {name: _numbers(value) for _, name, _, value in entries(find_holders(base))}
    return {name: value for name, value in values.items() if [*tensors(value)]}


def _changed(base: torch.nn.Module, before: SideValues) -> SideValues:
    return {
        name: value
        for name, value in _kept(base).items()
        if [*map(id, tensors(value))] != [*map(id, tensors(before.get(name)))]
    }


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if _is_number(item)}
    if isinstance(value, list | tuple):
        return [item for item in value if _is_number(item)]
    return value if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _nan(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.full(tensor.shape, torch.nan, dtype=tensor.dtype, device=device)


def _put(base: torch.nn.Module, name: str, value: Any) -> None:
    """Into the list or dict that has this name on this rank too, or as an attribute."""
    places = {name: (holder.table, key) for holder, name, key, _ in entries(find_holders(base))}
    path, _, attribute = name.rpartition(".")
    table, key = places.get(name) or (vars(base.get_submodule(path)), attribute)
    if isinstance(value, dict) and isinstance(table.get(key), dict):
        table[key].update(value)
    elif isinstance(value, list) and isinstance(table.get(key), list):
        table[key].extend(value)
    else:
        table[key] = value
