"""Owners of this rank's memory: parameters, gradients, optimizer state, and what has no owner.

Everything is found among Python's objects, as parallel/live/live_models.py finds models; nothing is
asked of the user. Every storage counts once, for its first owner in the order of `owners`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbdist.memory.blocks import NOWHERE
from nbdist.memory.rank import ddp_fsdp
from nbdist.memory.snapshot import BUFFER, COMMUNICATION, GRADIENT, OPTIMIZER, PARAMETER, UNKNOWN
from nbdist.parallel.live import live_models, registry

# Modules around the user's own, and what each calls the one that is inside.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
_PARALLEL = (DistributedDataParallel, torch.nn.DataParallel)


@dataclass(frozen=True, slots=True)
class StorageOwner:
    """One storage and what holds it.

    Attributes:
        address: Where it begins; NOWHERE where that is not known.
        size_bytes: Of the whole storage, over 0.
        category: Place in memory.snapshot.CATEGORIES.
        name: The parameter or buffer as the user's model names it, the variable, or empty.
        device: As torch writes it: "cpu", "cuda:0".
    """

    address: int
    size_bytes: int
    category: int
    name: str
    device: str


@dataclass(slots=True)
class _Collected:
    """Owners found so far, and what tells their names.

    Attributes:
        variables: What the user's variables hold, by id.
        shards: What fully_shard knows of a parameter, by its module's id and its name there.
        owners: By device and address.
        places: Those without an address.
        more: How many further tensors of the same category lie in a storage.
        visited: Tensors that were looked at, by id.
        names: Of parameters, by id.
        trained: Parameters, in order.
    """

    variables: Mapping[int, str]
    shards: Mapping[tuple[int, str], Any]
    owners: dict[tuple[str, int], StorageOwner] = field(default_factory=dict)
    places: list[StorageOwner] = field(default_factory=list)
    more: dict[tuple[str, int], int] = field(default_factory=dict)
    visited: set[int] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)
    trained: list[torch.Tensor] = field(default_factory=list)

    def take(self, tensor: object, category: int, name: str) -> None:
        """Let a tensor own its storages, those that have no owner yet."""
        if not isinstance(tensor, torch.Tensor) or id(tensor) in self.visited:
            return
        self.visited.add(id(tensor))
        for device, address, size_bytes in storages(tensor):
            key = device, address
            previous = self.owners.get(key)
            if previous is None:
                self.owners[key] = StorageOwner(address, size_bytes, category, name, device)
            elif previous.category == category != UNKNOWN and previous.name != name:
                self.more[key] = self.more.get(key, 0) + 1

    def take_parameter(self, parameter: torch.Tensor, name: str) -> None:
        """The same of a parameter, whose gradient and state are then named after it."""
        if id(parameter) not in self.names:
            self.names[id(parameter)] = name
            self.trained.append(parameter)
        self.take(parameter, PARAMETER, name)

    def all(self) -> tuple[StorageOwner, ...]:
        """In the order in which they were found."""
        # A flat storage is of several tensors: the first one's name, and how many more.
        for key, more in self.more.items():
            self.owners[key] = replace(
                self.owners[key], name=f"{self.owners[key].name} and {more} more"
            )
        return (*self.owners.values(), *self.places)


def owners() -> tuple[StorageOwner, ...]:
    """Find owners of this rank's memory, as far as Python objects hold it. This rank alone.

    Parameters go before buffers, gradients, optimizers' state, what is gathered or sent, and what
    else there is, which is named by its variable. With one model, names are those of its
    state_dict; with several, their variables go before. A DTensor is its local part. Tensors on
    meta have no memory.
    """
    objects = list(live_models.live(torch.nn.Module, torch.Tensor))
    modules = [
        module
        for module in objects
        if issubclass(type(module), torch.nn.Module)
        # Whether its constructor has come far enough.
        and all(hasattr(module, name) for name in ("_modules", "_parameters"))
    ]
    optimizers = live_models.live_optimizers()
    collected = _Collected(live_models.variables(), ddp_fsdp.shards(modules))
    tensors = list(_of_models(collected.variables, modules))
    _take_models(collected, tensors)
    _take_optimizers(collected, optimizers)
    for place, _, name, _ in tensors:
        for gathered in ddp_fsdp.gathered(collected.shards.get(place)):
            collected.take(gathered, COMMUNICATION, name)
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            _take_buckets(collected, module)
    _take_rest(collected, [tensor for tensor in objects if issubclass(type(tensor), torch.Tensor)])
    for optimizer in optimizers:
        _names[optimizer] = {key: collected.names[key] for key in map(id, _stepped(optimizer))}
    return collected.all()


# What `owners` has called each optimizer's parameters, by id: the optimizer keeps them alive.
_names: weakref.WeakKeyDictionary[Optimizer, dict[int, str]] = weakref.WeakKeyDictionary()


def of_optimizer(optimizer: Optimizer) -> tuple[StorageOwner, ...]:
    """The same of what one optimizer steps: parameters, gradients, state. This rank alone.

    Much faster; all owners where the optimizer's parameters are not known yet.
    """
    names = _names.get(optimizer, {})
    parameters = list(_stepped(optimizer))
    if any(id(parameter) not in names for parameter in parameters):
        return owners()
    collected = _Collected({}, {}, names=dict(names), trained=parameters)
    for parameter in parameters:
        collected.take(parameter, PARAMETER, names[id(parameter)])
    _take_optimizers(collected, [optimizer])
    return collected.all()


def _stepped(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


# A parameter (or else a buffer) of a model: its module's id and its name in there, whether it is a
# parameter, its name in the user's own module, and itself.
_Held = tuple[tuple[int, str], bool, str, torch.Tensor]


def _of_models(variables: Mapping[int, str], modules: list[torch.nn.Module]) -> Iterator[_Held]:
    visited: set[int] = set()
    walked = []
    for root in _roots(modules):
        walk = list(_walk(root, "", set()))
        if any(id(tensor) not in visited for *_, tensor in walk):
            walked.append((root, walk))
        visited |= {id(tensor) for *_, tensor in walk}
    titles = _titles(variables, [root for root, _ in walked])
    for root, walk in walked:
        for place, is_parameter, name, tensor in walk:
            yield place, is_parameter, f"{titles[id(root)]}{name}", tensor


def _roots(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules that are in no other, without what is around them: prepared ones first."""
    inner = {id(child) for module in modules for child in module.children()}
    outermost = [_unwrapped(module) for module in modules if id(module) not in inner]
    first = [model.base for model in registry.prepared()]
    return list({id(module): module for module in [*first, *outermost]}.values())


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    children = list(module.named_children())
    while len(children) == 1 and _is_around(module, children[0][0]):
        module = children[0][1]
        children = list(module.named_children())
    return module


def _is_around(module: torch.nn.Module, name: str) -> bool:
    """Whether a module is around the child of this name, and the user's names leave it out."""
    return name in _WRAPPERS or (name == "module" and isinstance(module, _PARALLEL))


def _titles(variables: Mapping[int, str], roots: list[torch.nn.Module]) -> dict[int, str]:
    """Prefix of names for each model: none for the only one that has a variable.

    A cell that was run again can leave models behind that nobody holds; they do not count.
    """
    named = [root for root in roots if id(root) in variables]
    single = named or roots
    titles = {key: f"{name}." for key, name in live_models.names(roots, variables).items()}
    return {**titles, id(single[0]): ""} if len(single) == 1 else titles


def _walk(module: torch.nn.Module, path: str, visited: set[int]) -> Iterator[_Held]:
    if id(module) in visited:
        return
    visited.add(id(module))
    for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield (id(module), key), True, f"{path}{key}", parameter
    for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        yield (id(module), key), False, f"{path}{key}", buffer
    for name, child in module.named_children():
        yield from _walk(child, path if _is_around(module, name) else f"{path}{name}.", visited)


def _take_models(collected: _Collected, tensors: list[_Held]) -> None:
    for place, is_parameter, name, tensor in tensors:
        if is_parameter:
            _take_parameter(collected, place, name, tensor)
    for _, is_parameter, name, tensor in tensors:
        if not is_parameter:
            collected.take(tensor, BUFFER, name)


def _take_optimizers(collected: _Collected, optimizers: list[Optimizer]) -> None:
    """Parameters that are in no module, all gradients, and state."""
    groups = [(o, number, g) for o in optimizers for number, g in enumerate(o.param_groups)]
    for optimizer, number, group in groups:
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in collected.names:
                title = f"{type(optimizer).__name__}, group {number}, parameter {place}"
                collected.take_parameter(parameter, collected.variables.get(id(parameter), title))
    for parameter in collected.trained:
        if parameter.is_leaf or parameter.retains_grad:  # torch warns of others
            collected.take(parameter.grad, GRADIENT, collected.names[id(parameter)])
    for optimizer in optimizers:
        _take_state(collected, optimizer)


def _take_parameter(
    collected: _Collected, place: tuple[int, str], name: str, parameter: torch.Tensor
) -> None:
    """A parameter; under fully_shard this rank's shard, with its padding."""
    shard = collected.shards.get(place)
    if shard is None:
        collected.take_parameter(parameter, name)
        return
    collected.take_parameter(shard.sharded_param, name)
    collected.take(ddp_fsdp.padded(shard), PARAMETER, name)
    for gradient in ddp_fsdp.unsharded_gradients(shard):
        collected.take(gradient, GRADIENT, name)


def _take_state(collected: _Collected, optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        name = collected.names.get(id(parameter), "")
        for key, tensor in _inside(state):
            collected.take(tensor, OPTIMIZER, f"{name}: {key}" if name else key)
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        for key, tensor in _inside(options):
            title = f"{type(optimizer).__name__}, group {number}: {key}"
            collected.take(tensor, OPTIMIZER, title)


def _inside(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in dicts and lists, by the outermost key."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _inside(item, name or str(key))
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _inside(item, name)


def _take_buckets(collected: _Collected, module: DistributedDataParallel) -> None:
    """DDP's buckets, unless gradients lie in them."""
    is_view = module.gradient_as_bucket_view
    if is_view and any(parameter.grad is not None for parameter in module.parameters()):
        return
    device = str(next(module.parameters()).device)
    for number, size_bytes in enumerate(ddp_fsdp.bucket_sizes(module)):
        name = f"DDP bucket {number}"
        collected.places.append(StorageOwner(NOWHERE, size_bytes, COMMUNICATION, name, device))


def _take_rest(collected: _Collected, tensors: list[torch.Tensor]) -> None:
    """Tensors without an owner, those that a variable means first."""
    tensors.sort(key=lambda tensor: id(tensor) not in collected.variables)
    for tensor in tensors:
        name = collected.variables.get(id(tensor), "")
        if id(tensor) not in collected.names and _is_trained(tensor):
            collected.take(tensor.grad, GRADIENT, name)
        collected.take(tensor, UNKNOWN, name)


def _is_trained(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf and tensor.requires_grad
    except Exception:  # noqa: BLE001  # half made, or of a library's own kind
        return False


def storages(tensor: torch.Tensor) -> list[tuple[str, int, int]]:
    """Device, address and bytes of what a tensor lies in; nothing where it cannot be asked."""
    return [
        (str(storage.device), storage.data_ptr(), storage.nbytes())
        for storage in _own_storages(tensor)
    ]


def live_storages() -> Iterator[torch.UntypedStorage]:
    """Storages of all tensors of this process; one that several share comes several times."""
    for tensor in live_models.live(torch.Tensor):
        yield from _own_storages(tensor)


def _own_storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    try:
        storages = [part.untyped_storage() for part in _parts(tensor)]
        # Those on meta have no memory, and a fake tensor's is on meta.
        return [
            storage
            for storage in storages
            if storage.device.type != "meta" and storage.nbytes() and storage.data_ptr()
        ]
    except Exception:  # noqa: BLE001  # not made yet, or without a storage
        return []


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of which one is made."""
    if hasattr(type(tensor), "__tensor_flatten__"):  # DTensor and others of its kind
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
        for attribute in inner:
            if isinstance(attribute, torch.Tensor):  # a DTensor's mesh is among them
                yield from _parts(attribute)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())  # noqa: SLF001  # before coalesce()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor
