"""A model is put under a strategy: planned, changed, and filled with values, without a collective.

built = plan(job)                       # refuses what cannot be; nothing changes
...                                     # bring this rank's local tensors (exchange)
commit(built, local)                    # the model is laid out anew
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbdist.errors import OptionError
from nbdist.parallel.base import module_patches
from nbdist.parallel.base.absent import absent
from nbdist.parallel.base.consensus import interrupts_held
from nbdist.parallel.base.tensors import in_order, like, local_of, order_of
from nbdist.parallel.base.transform import Layouts, ModelBuild, Transform, load
from nbdist.parallel.libraries import quantized
from nbdist.parallel.sequence.same_inputs import watch_inputs
from nbdist.strategy.choice import Degrees, steps_of
from nbdist.strategy.tensor_layout import Placement, TensorLayout, local_runs, local_shape


@dataclass(slots=True, weakref_slot=True)
class Built:
    """A model under a strategy on this rank, or the plan of one.

    Attributes:
        steps: What the choice consists of.
        names: First name -> all names, of parameters and buffers; several where tied.
        strides: First name -> a whole parameter's order in memory, alike on all ranks: DDP adds
            gradients up as they lie.
        parameters: First name -> what is in the model now; an `AbsentTensor` where not held here.
        index: id -> first name, of these.
        outer: What the user calls.
        changes: What the steps have done to base's modules.
    """

    job: ModelBuild
    steps: tuple[Transform, ...]
    layouts: Layouts
    names: dict[str, tuple[str, ...]]
    strides: dict[str, tuple[int, ...]]
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    index: dict[int, str] = field(default_factory=dict)
    outer: torch.nn.Module | None = None
    changes: list[module_patches.ModuleChange] = field(default_factory=list)

    def side(self, name: str) -> Placement:
        """How a parameter or buffer lies."""
        return Placement(self.layouts[name], self.job.mesh.degrees)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """First names of parameters alone."""
        return tuple(self.strides)

    @property
    def title(self) -> str:
        """The model's class, which a strategy may have replaced."""
        kinds = [change.kind for change in self.changes if change.module is self.job.base]
        return (kinds or [type(self.job.base)])[0].__name__


def plan(job: ModelBuild) -> Built:
    """Say how a model will lie. Nothing is changed, no rank is met; the same on all ranks.

    The model is whole, real or on meta. Under another strategy it is so in `bare`.

    Raises:
        OptionError: The model does not allow it; or a parameter has no shape yet.
    """
    names, tensors = names_of(job.base), tensors_of(job.base)
    lazy = [name for name, tensor in tensors.items() if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise OptionError(
            f"{lazy[0]} has no shape before the model's first forward. Run it once on a small "
            "batch before prepare()."
        )
    quantized.check(job)
    steps = load(steps_of(job.choice))
    layouts = {name: TensorLayout(tuple(tensors[name].shape)) for name in names}
    for step in steps:
        layouts = step.plan(job, layouts)
    assert layouts.keys() == names.keys(), layouts.keys() ^ names.keys()
    strides = {
        name: order_of(tensors[name])
        for name in names
        if isinstance(tensors[name], torch.nn.Parameter)
    }
    return Built(job, steps, layouts, names, strides)


def commit(
    built: Built,
    local: Mapping[str, torch.Tensor],
    before: Iterable[module_patches.ModuleChange] = (),
    *,
    keeps_parameters: bool = False,
) -> torch.nn.Module:
    """Lay the model out and fill it with values. This rank alone; what is returned is called.

    A failure leaves the model half changed: `snapshot_modules` before, and `restore` after it;
    parameters that are kept have other values (`Parameter.data`) then.

    Args:
        built: From `plan`.
        local: This rank's part of each parameter and buffer that it holds, by first name; used
            as they are.
        before: What an earlier strategy has changed: taken off first.
        keeps_parameters: Those that this rank holds whole stay the same objects, as under DDP:
            hooks, lists and dicts of the user's go on with them. Not where an earlier strategy
            has hooks of its own on them.
    """
    job = built.job
    module_patches.revert(before)
    job.root = job.base
    old = _to_meta(built)
    snapshots = module_patches.snapshot_modules(job.base)
    for step in built.steps:
        step.lay_out(job)
    _fill(built, local, old, keeps_parameters=keeps_parameters)
    outer = job.root
    for step in built.steps:
        outer = step.wrap(job, outer)
    watch_inputs(job, outer)
    built.outer = outer
    built.changes = module_patches.diff(snapshots)
    return outer


@contextlib.contextmanager
def bare(built: Built) -> Iterator[None]:
    """The model as the user wrote it in here, whole and on meta; then as it was. This rank alone.

    Plans look at classes, attributes and shapes, and a strategy changes these.
    """
    with interrupts_held():
        snapshots = module_patches.snapshot_modules(built.job.base)
        try:
            module_patches.revert(built.changes)
            _to_meta(built, keeps_order=True)
            yield
        finally:
            module_patches.restore(snapshots)


def part_of(
    whole: torch.Tensor, layout: TensorLayout, degrees: Degrees, rank: int
) -> torch.Tensor | None:
    """Cut this rank's part of a whole tensor; None for nothing."""
    runs = local_runs(layout, degrees, rank)
    if runs is None:
        return None
    for dim, pieces in enumerate(runs):
        parts = [whole.narrow(dim, start, length) for start, length in pieces]
        whole = torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)
    return whole.contiguous()


def names_of(base: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """First name -> all names of each parameter and buffer; several where tied."""
    names_by_id: dict[int, list[str]] = {}
    for named in (base.named_parameters, base.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names_by_id.setdefault(id(tensor), []).append(own_name(name))
    return {names[0]: tuple(names) for names in names_by_id.values()}


def firsts_of(base: torch.nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> its first one; several where tied."""
    return {name: first for first, names in names_of(base).items() for name in names}


def tensors_of(base: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, by each of its names."""
    parameters = base.named_parameters(remove_duplicate=False)
    return {own_name(name): tensor for name, tensor in parameters} | buffers_of(base)


def buffers_of(base: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer, by each of its names."""
    buffers = base.named_buffers(remove_duplicate=False)
    return {own_name(name): tensor for name, tensor in buffers}


def own_name(name: str) -> str:
    """A name as the user's module had it, before FSDP1 put its wrapper around each block."""
    return name.replace("_fsdp_wrapped_module.", "")


def _to_meta(built: Built, *, keeps_order: bool = False) -> dict[str, torch.Tensor]:
    """Put a meta parameter of the whole shape in every parameter's place; what was there.

    Contiguous, as FSDP2 wants them; or in the order in memory that the user's have.
    """
    tensors = tensors_of(built.job.base)
    old = {}
    for name, names in built.names.items():
        tensor = old[name] = tensors[name]
        if not isinstance(tensor, torch.nn.Parameter):
            continue
        empty = torch.empty(built.layouts[name].shape, dtype=tensor.dtype, device="meta")
        if keeps_order:
            empty = empty.as_strided(empty.shape, built.strides[name])
        fresh = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
        quantized.keep_constants(tensor, fresh)  # a plan asks for them
        for alias in names:
            _set(built.job.base, alias, fresh)
    return old


def _fill(
    built: Built,
    local: Mapping[str, torch.Tensor],
    old: Mapping[str, torch.Tensor],
    *,
    keeps_parameters: bool,
) -> None:
    tensors = tensors_of(built.job.base)
    replaced: dict[int, torch.Tensor] = {}
    for name, names in built.names.items():
        fresh = _fill_tensor(built, name, tensors[name], local.get(name))
        if isinstance(fresh, torch.nn.Parameter):
            fresh = _succeed(old[name], fresh, keeps_parameters=keeps_parameters)
            built.parameters[name] = fresh
            built.index[id(fresh)] = name
        for alias in names:
            replaced[id(tensors[alias])] = fresh
            _set(built.job.base, alias, fresh)
    # The modules on a stage's path have dicts of their own.
    for module in built.job.root.modules():
        tables: tuple[Any, ...] = (module._parameters, module._buffers)  # noqa: SLF001
        for table in tables:
            for leaf, tensor in table.items():
                if tensor is not None and id(tensor) in replaced:
                    table[leaf] = replaced[id(tensor)]


def _are_alike(old: torch.Tensor, fresh: torch.nn.Parameter) -> bool:
    """Whether both are plain parameters of one shape and dtype, with values."""
    is_like = (type(old), old.shape, old.dtype) == (torch.nn.Parameter, fresh.shape, fresh.dtype)
    return is_like and not old.is_meta and type(old.data) is type(fresh.data) is torch.Tensor


def _succeed(
    old: torch.Tensor, fresh: torch.nn.Parameter, *, keeps_parameters: bool
) -> torch.nn.Parameter:
    """Choose an old parameter's successor: itself with the new values, or the new one."""
    if keeps_parameters and _are_alike(old, fresh):
        assert isinstance(old, torch.nn.Parameter)
        old.grad, old.data = None, fresh.data
        return old
    # Libraries and users mark parameters by attributes of theirs; `_is_param` is torch's.
    vars(fresh).update({key: mark for key, mark in vars(old).items() if key != "_is_param"})
    quantized.keep_class(old, fresh)
    return fresh


def _fill_tensor(
    built: Built, name: str, shell: torch.Tensor, part: torch.Tensor | None
) -> torch.Tensor:
    """Fill the tensor that the model has from now on: with this rank's values, or absent."""
    mesh = built.job.mesh
    expected = local_shape(built.layouts[name], mesh.degrees, mesh.rank)
    if expected is None:
        # One that is split stays a DTensor, whose placements stand for it where it is missing.
        return shell if isinstance(shell, DTensor) else absent(shell)
    assert part is not None, f"{name} is to be on rank {mesh.rank}, and no values came"
    assert tuple(part.shape) == expected, (name, tuple(part.shape), expected)
    if not isinstance(shell, torch.nn.Parameter):
        return part
    laid_out = tuple(local_of(shell).shape)
    assert laid_out == expected, f"{name}: planned as {expected}, laid out as {laid_out}"
    if not isinstance(shell, DTensor) and expected == built.layouts[name].shape:
        part = in_order(part, built.strides[name])
    else:
        part = like(shell, part.contiguous())
    return torch.nn.Parameter(part, requires_grad=shell.requires_grad)


def _set(base: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = base.get_submodule(path)
    if type(module).__setattr__ is not torch.nn.Module.__setattr__:
        setattr(module, leaf, tensor)  # an LSTM keeps its parameters in a list as well
        return
    parameters, buffers = module._parameters, module._buffers  # noqa: SLF001  # as torch's own tools
    if leaf in parameters:
        parameters[leaf] = tensor  # type: ignore[assignment]
    else:
        assert leaf in buffers, name
        buffers[leaf] = tensor
