"""Finds copies of models and tables of tensors by parameter name, which a switch leaves as is.

An average of the weights (EMA) is one, a reference that is to stay as it is another, and nothing
tells them apart. So a copy is not changed: the switch that parts it from its model names it.
"""

from __future__ import annotations

import gc
import itertools
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.parallel.live import registry
from nbdist.parallel.live.live_models import live, live_optimizers
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.reshard.rebind import holders
from nbdist.switch.rank.commit import display_name

# In an advice, where the name of what it is about comes.
_NAME = "<name>"
_MAX_NAMED = 4
_TABLES = frozenset({dict, OrderedDict})


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """How a model's parameters lie and are named.

    Attributes:
        layouts: What two tensors must have alike for an update in place, by first name.
        prefix: What stands in front of a name where the user asks what he calls for it.
    """

    model: Prepared
    layouts: dict[str, Hashable]
    prefix: str


def layout_of(model: Prepared) -> ModelLayout:
    """How a model's parameters lie and are named now. This rank alone."""
    is_wrapped = isinstance(model.outer, DistributedDataParallel)
    return ModelLayout(model, _layouts(model.parameters), "module." if is_wrapped else "")


def notes(before: Sequence[ModelLayout]) -> tuple[str, ...]:
    """Sentences on the copies that fitted their model before a switch and do not after it.

    What no name of the user's leads to is left out. This rank alone, after the switch.
    """
    lines: list[str] = []
    names: set[str] = set()  # a copy of one model may look like one of another, and is told once
    for was in before:
        now = layout_of(was.model)
        if now == was:
            continue
        title = display_name(was.model.built)
        if modules := _named(_modules(was, now), names):
            name, advice = _first(modules.items())
            lines.append(
                f"Copies of {title} that are not prepared were not switched: {_short(modules)}. An "
                f"update from {title} (EMA) fails now. To let one follow: "
                f"{advice.replace(_NAME, name)}"
            )
        if tables := _named(_tables(was, now), names):
            lines.append(
                f"Tensors by the names of {title}'s parameters were not switched: "
                f"{_short(tables)}. The parameters {_first(tables.values())} now, and an update "
                f"from them fails. Make the tensors again, or use a prepared copy of {title}"
            )
    return tuple(lines)


def _named(held_details: Iterable[tuple[Any, str]], told_names: set[str]) -> dict[str, str]:
    """Details by the user's names for their objects, without names already told; sorted."""
    pairs = list(held_details)
    names = [min(several, key=len, default="") for several in holders([held for held, _ in pairs])]
    details = dict(zip(names, (detail for _, detail in pairs), strict=True))
    named = {name: details[name] for name in sorted(details.keys() - told_names - {""})}
    told_names.update(named)
    return named


def _short(names: Iterable[str]) -> str:
    first = list(names)
    more = f" and {len(first) - _MAX_NAMED} more" if len(first) > _MAX_NAMED else ""
    return ", ".join(first[:_MAX_NAMED]) + more


def _layouts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Hashable]:
    return {
        name: (
            tuple(tensor.shape),
            tensor.is_meta,
            (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None,
        )
        for name, tensor in tensors.items()
    }


def _modules(was: ModelLayout, now: ModelLayout) -> Iterator[tuple[Any, str]]:
    """The outermost modules that hold a copy, such as an AveragedModel; how to let it follow."""
    if was.layouts == now.layouts:
        return
    kinds = set(type(was.model.base).__mro__) - {torch.nn.Module, object}
    prepared = {id(module) for model in registry.prepared() for module in model.outer.modules()}
    modules = [module for module in live(torch.nn.Module) if id(module) not in prepared]
    parents = {
        id(child): (module, name)
        for module in modules
        for name, child in vars(module).get("_modules", {}).items()
    }
    # One that is trained by itself is no average of another.
    stepped = {
        id(p) for o in live_optimizers() for group in o.param_groups for p in group["params"]
    }
    for module in modules:
        if type(module) not in kinds or not stepped.isdisjoint(map(id, module.parameters())):
            continue
        if _layouts(dict(module.named_parameters())) == was.layouts:
            root, path, inner = module, "", ""
            while id(root) in parents:
                root, name = parents[id(root)]
                if isinstance(root, DistributedDataParallel):
                    inner = f".{name}"
                else:
                    path = f".{name}{path}"
            yield root, f"{_NAME}{path} = accelerator.prepare({_NAME}{path}{inner})"


def _tables(was: ModelLayout, now: ModelLayout) -> Iterator[tuple[Any, str]]:
    """Dicts of tensors by the names that the model gives, as a state_dict; what has changed."""
    names = {name for tied in was.model.built.names.values() for name in tied}
    objects = gc.get_objects()
    for table in itertools.compress(objects, map(_TABLES.__contains__, map(type, objects))):
        # Most are of other things, and to ask one of these for its class may run code.
        is_of_tensors = issubclass(type(_first(table.values())), torch.Tensor)
        if not is_of_tensors or not isinstance(_first(table), str):
            continue
        items = list(table.items())
        if not all(isinstance(key, str) for key, _ in items):
            continue
        tensors = {key.removeprefix(was.prefix): value for key, value in items}
        if not names.issuperset(tensors) or not _are_copies(tensors.values()):
            continue
        layouts = _layouts({name: tensors[name] for name in was.layouts if name in tensors})
        if layouts and layouts.items() <= was.layouts.items():
            old_name, new_name = _first(table), f"{now.prefix}{_first(tensors)}"
            if was.prefix != now.prefix and old_name.startswith(was.prefix):
                yield table, f"are named {new_name}, not {old_name},"
            elif not layouts.items() <= now.layouts.items():
                yield table, "lie otherwise"


def _are_copies(values: Collection[Any]) -> bool:
    """Whether these are tensors, and not parameters alone, as in a module's own table."""
    is_own = all(isinstance(value, torch.nn.Parameter) for value in values)
    return not is_own and all(isinstance(value, torch.Tensor) for value in values)


def _first(items: Iterable[Any]) -> Any:
    return next(iter(items), None)
