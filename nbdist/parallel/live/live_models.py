"""The models that live on this rank, found and named; those that it builds alone.

Nothing is asked of the user: DDP and FSDP2 objects are found among Python's objects and named
as the notebook names them.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbdist.errors import NbdistError
from nbdist.parallel.live import registry
from nbdist.parallel.live.prepared import is_retired
from nbdist.rpc.rank import namespace
from nbdist.rpc.wire import CELL_FOR_ALL


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model whose gradients ranks combine.

    Attributes:
        name: The variable that holds it, or holds what it is in; otherwise its class.
        module: A DDP object, the outermost FSDP2 module, or what is called of a model that is
            prepared for tp or pp.
        is_sharded: Each rank has a part of it.
        is_named: A variable holds it: it is no leftover, such as a failed cell's.
    """

    name: str
    module: torch.nn.Module
    is_sharded: bool
    is_named: bool = True


# Keys whose text is Python's own.
_PLAIN_KEYS = (str, int, bool, float, bytes, type(None))
# Whether this rank builds models that the others have already.
_is_catching_up = False
# Whether all ranks build now what this one builds, although no cell runs on all.
_is_joint = False
# What it has built alone.
_built_alone: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_ALONE = (
    "this rank built its model alone, after a restart, and does not have the other ranks' "
    "values yet. Run %dist_sync_model to copy them"
)


def find() -> tuple[NamedModel, ...]:
    """Every live DDP and FSDP2 model of this process, and every one that is split, by name."""
    models = _find()
    if all(model.is_named for model in models):
        return models
    # A cell that was run again leaves models that hold themselves in circles, and Python lets
    # go of them on each rank at another time: ranks would compare different ones.
    del models
    gc.collect()
    return _find()


def _find() -> tuple[NamedModel, ...]:
    modules = [m for m in live(DistributedDataParallel, FSDPModule) if not is_retired(m)]
    # One without a reducer comes from a constructor that has failed: the error holds it.
    ddps = [
        m for m in modules if issubclass(type(m), DistributedDataParallel) and hasattr(m, "reducer")
    ]
    shards = [m for m in modules if issubclass(type(m), FSDPModule)]
    replicas = {id(m) for m in ddps}
    # What is called of prepared models of which each rank has a part: under fsdp, tp, pp.
    split = [
        model.outer
        for model in registry.prepared()
        if model.degrees.product > 1
        and not any(id(module) in replicas for module in model.outer.modules())
    ]
    with_experts = {id(m.outer) for m in registry.prepared() if m.degrees.ep > 1}
    outermost = [*split, *shards]
    inner = {id(child) for m in outermost for child in m.modules() if child is not m}
    roots = {id(m): m for m in outermost if id(m) not in inner}
    pairs = [(m, id(m) in with_experts) for m in ddps] + [(m, True) for m in roots.values()]
    variable_names = variables()
    titles = names([module for module, _ in pairs], variable_names)
    models = [
        NamedModel(titles[id(m)], m, sharded, id(m) in variable_names) for m, sharded in pairs
    ]
    return tuple(sorted(models, key=lambda model: model.name))


def optimizers(model: NamedModel) -> tuple[tuple[str, Optimizer], ...]:
    """The optimizers that step this model's parameters, with their names, by name."""
    parameter_ids = {id(p) for p in model.module.parameters()}
    matching = [
        optimizer
        for optimizer in live_optimizers()
        if any(id(p) in parameter_ids for group in optimizer.param_groups for p in group["params"])
    ]
    titles = names(matching)  # no two are equal
    return tuple(sorted((titles[id(optimizer)], optimizer) for optimizer in matching))


def live_optimizers() -> list[Optimizer]:
    """Every optimizer of this process; Accelerate's wrapper is one too, and does not count."""
    return [
        optimizer
        for optimizer in live(Optimizer)
        if not isinstance(getattr(optimizer, "optimizer", None), Optimizer)
        and hasattr(optimizer, "param_groups")
    ]


def schedulers(optimizer: Optimizer) -> tuple[LRScheduler, ...]:
    """The learning rate schedulers of an optimizer, by class."""
    matching = [s for s in live(LRScheduler) if getattr(s, "optimizer", None) is optimizer]
    return tuple(sorted(matching, key=lambda scheduler: type(scheduler).__name__))


def catching_up(is_on: bool) -> None:
    """Let this rank alone build the models that the others have: DDP then sends nothing.

    Except in a cell that all ranks run: there they build it together. It ends with
    `sync_model`.
    """
    global _is_catching_up  # noqa: PLW0603  # one process is one rank
    _watch_constructor()
    _is_catching_up = is_on


def is_catching_up() -> bool:
    """Whether this rank replaces another one and has not got its models' values yet."""
    return _is_catching_up


def is_alone() -> bool:
    """Whether this rank builds by itself what the others have, while they do something else."""
    return _is_catching_up and not _is_joint and not _runs_on_all()


def note_alone(model: torch.nn.Module) -> None:
    """A model was built alone: it has not the others' values before `sync_model`."""
    _built_alone.add(model)


def refuse_alone() -> None:
    """Raises an NbdistError if a model of this rank has not got the others' values yet."""
    if _is_catching_up and _built_alone:
        gc.collect()  # one that was built again may be left over in a circle
        if _built_alone:
            raise NbdistError(_ALONE)


@contextmanager
def built_jointly() -> Iterator[None]:
    """All ranks build together what they build in here, although no cell runs on all: a switch."""
    global _is_joint  # noqa: PLW0603  # one process is one rank
    _is_joint = True
    try:
        yield
    finally:
        _is_joint = False


def rebuild_reducer(module: DistributedDataParallel) -> None:
    """Give a DDP object a new reducer, as after unpickling, all its options kept.

    A reducer changes its buckets after the first step, so an old one does not fit a replaced
    rank's new one. Hooks that Python registered are registered again. Every rank of its group.
    """
    ddp: Any = module
    # The same private steps as in DDP.__setstate__, which torch keeps in order for itself.
    parameters, expects_sparse = ddp._build_params_for_reducer()  # noqa: SLF001
    names = ddp._build_debug_param_to_name_mapping(parameters)  # noqa: SLF001
    ddp._ddp_init_helper(parameters, expects_sparse, names, ddp.static_graph)  # noqa: SLF001
    ddp._has_rebuilt_buckets = False  # noqa: SLF001
    if ddp.static_graph:
        ddp.reducer._set_static_graph()  # noqa: SLF001
        ddp.logger._set_static_graph()  # noqa: SLF001
        # The new reducer's first backward reduces all at its end, once it is asked to.
        ddp._static_graph_delay_allreduce_enqueued = False  # noqa: SLF001
    for hook, hook_state in ddp._comm_hooks:  # noqa: SLF001
        torch.distributed._register_comm_hook(ddp.reducer, hook_state, hook)  # noqa: SLF001
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)  # noqa: SLF001


@functools.cache  # once is enough
def _watch_constructor() -> None:
    """Keep DDP's constructor from its collectives while this rank is catching up."""
    cls: Any = DistributedDataParallel
    construct = cls.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # The sixth argument after the module, which nobody gives by place.
        is_quiet = len(args) <= 5 and is_alone()
        if is_quiet:
            kwargs["init_sync"] = False
        construct(self, *args, **kwargs)
        if is_quiet:
            note_alone(self)
            self.register_forward_pre_hook(_refuse_in_forward)

    cls.__init__ = init


def _refuse_in_forward(*_: Any) -> None:
    """Before the forward of a model that was built alone: it is not the others' model yet.

    Raises:
        NbdistError: In a cell of all ranks, which would train different models without a word.
    """
    if _runs_on_all():
        refuse_alone()


def _runs_on_all() -> bool:
    """Whether every rank was sent the cell that runs here."""
    kernel: Any = getattr(namespace.shell(), "kernel", None)
    if kernel is None:
        return False
    return bool(kernel.get_parent("shell").get("metadata", {}).get(CELL_FOR_ALL))


def live(*kinds: type) -> Iterator[Any]:
    """Every live object of these classes, and of those made from them.

    By its type: asking each object for its class would run code of lazy ones. There are
    hundreds of thousands, so no line of Python runs for those that are not meant.
    """
    wanted = set(kinds)
    todo = list(kinds)
    while todo:
        fresh: set[type] = set(type.__subclasses__(todo.pop())) - wanted
        wanted |= fresh
        todo += fresh
    objects = gc.get_objects()
    is_wanted = map(wanted.__contains__, map(type, objects))
    return itertools.compress(objects, is_wanted)


def names(
    objects: Iterable[Any], variable_names: Mapping[int, str] | None = None
) -> dict[int, str]:
    """Name each object, by id; no two names are equal. Variables are looked up if not given."""
    titles: dict[int, str] = {}
    used: set[str] = set()
    variable_names = variables() if variable_names is None else variable_names
    for obj in objects:
        base = variable_names.get(id(obj)) or type(namespace.unwrapped(obj)).__name__
        name, number = base, 2
        while name in used:
            name, number = f"{base}_{number}", number + 1
        used.add(name)
        titles[id(obj)] = name
    return titles


def variables() -> dict[int, str]:
    """Name, by id, what the user's variables hold, themselves or one step inside.

    One step inside are models, optimizers and tensors alone. Nothing of the user's objects runs:
    a lazy one would load, and another raise.
    """
    names: dict[int, str] = {}
    namespace = _namespace()
    for name, value in namespace.items():
        names.setdefault(id(value), name)
    for name, value in namespace.items():
        for inner_name, inner in _inside(value):
            names.setdefault(id(inner), f"{name}{inner_name}")
    return names


def user_modules() -> dict[str, torch.nn.Module]:
    """The modules that the user's variables hold themselves, by name."""
    return {n: v for n, v in _namespace().items() if _is_any(v, torch.nn.Module)}


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """List the parts of a variable's value that can have a name, by type."""
    if _is_any(value, torch.nn.Module):
        # Compiled models and the like: named as what they are in.
        yield from (("", child) for child in namespace.modules_in(value))
    elif _is_any(value, Optimizer):
        yield "", namespace.attributes(value).get("optimizer")
    else:
        for key, item in _entries(value):
            if _is_any(item, torch.nn.Module, torch.Tensor, Optimizer):
                is_in_object = not _is_any(value, list, tuple, dict)
                yield f".{key}" if is_in_object else f"[{_key_text(key)}]", item


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    """List a value's entries by key, index or attribute; by methods of Python's own classes."""
    if _is_any(value, list):
        return enumerate(list.__iter__(value))
    if _is_any(value, tuple):
        return enumerate(tuple.__iter__(value))
    if _is_any(value, dict):
        return list(dict.items(value))
    if not _is_any(value, type) and type(value).__module__ == "__main__":
        return namespace.attributes(value).items()
    return ()


def _key_text(key: Any) -> str:
    """A key as it is typed; its class where its text would come from the user's code."""
    return repr(key) if type(key) in _PLAIN_KEYS else type(key).__name__


def _is_any(value: Any, *kinds: type) -> bool:
    """Whether a value is of one of these classes, by its type: `isinstance` may run its code."""
    return issubclass(type(value), kinds)


def _namespace() -> dict[str, Any]:
    """The names that the user's cells have made, but for those that begin with _."""
    # A copy: other threads may make names meanwhile.
    return {n: v for n, v in dict(namespace.everything()).items() if not n.startswith("_")}
