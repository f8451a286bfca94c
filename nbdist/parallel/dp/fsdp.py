"""Fully sharded data parallelism (torch's FSDP2): full, shard-grad-op and hybrid.

Each rank holds a piece of every parameter, of its gradient and of the optimizer's state. A
block's parameters are gathered for its forward and backward; its gradients are averaged and
split in one reduce-scatter.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from nbdist.errors import OptionError
from nbdist.parallel.base.blocks import candidates, find_blocks
from nbdist.parallel.base.precision import DTYPES
from nbdist.parallel.base.transform import Layouts, ModelBuild, Transform
from nbdist.parallel.live.prepared import find_prepared
from nbdist.parallel.sequence.split_sequence import map_tensors, tensors
from nbdist.strategy.choice import Degrees, Strategy
from nbdist.strategy.tensor_layout import TensorLayout

# Norms whose kernels take no fp32 input beside bf16 or fp16 parameters. On other devices than
# the CPU autocast lets layer and group norms compute in fp32.
_STRICT = {"cpu": (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)}
_STRICT_ELSEWHERE = (torch.nn.RMSNorm,)
# Its running statistics stay fp32, and so must its parameters.
_BATCH_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)

# The mesh's axes that see different data, outermost first: FSDP2 takes the last for splitting.
_AXES = ("dp_replicate", "dp_shard")


def _plan(job: ModelBuild, layouts: Layouts) -> Layouts:
    """Every parameter is split along its first dim; buffers are whole on each rank."""
    if job.choice.options.offload not in ("", "cpu"):
        raise OptionError(
            f"fsdp does not offload to {job.choice.options.offload}. Use --offload cpu, or "
            "deepspeed --stage 3 --offload nvme."
        )
    degrees = job.mesh.degrees
    if degrees.dp_shard == 1 and degrees.product > 1:  # as the mesh will be, if it is not made yet
        _refuse_without_split(job)
        return layouts
    if degrees.ep > 1 and job.choice.options.offload:
        raise OptionError("--offload and --ep cannot be combined yet. Leave one of them out.")
    parameters = dict(job.base.named_parameters())
    check_parameters(job)
    return {
        name: replace(layout, shard_dim=_shard_dim(layout, degrees))
        if name in parameters
        else layout
        for name, layout in layouts.items()
    }


def _shard_dim(layout: TensorLayout, degrees: Degrees) -> int | None:
    """Which dim of a parameter is split; none of experts that no other rank has."""
    copies = degrees.dp // degrees.ep
    if layout.ep_dim is None:
        return 0
    return None if copies == 1 else _expert_dim(layout.shape, copies)


def _expert_dim(shape: tuple[int, ...], copies: int) -> int:
    """Choose a dim of stacked experts to split: not the experts', of which a rank has few.

    FSDP2 splits dims but the first only evenly.
    """
    return 1 if len(shape) > 1 and shape[1] % copies == 0 else 0


def _lay_out(job: ModelBuild) -> None:
    """Split each block by itself, then the root with what is left."""
    mesh = _mesh(job)
    if mesh is None:
        return
    options = job.choice.options
    offload: OffloadPolicy = OffloadPolicy()
    if options.offload:
        offload = CPUOffloadPolicy(pin_memory=job.device.type != "cpu")  # pinned for copies
    does_reshard = options.shard != "grad-op"
    policy = MixedPrecisionPolicy()
    shard = functools.partial(
        fully_shard, mesh=mesh, offload_policy=offload, ignored_params=_unshared(job)
    )
    if options.precision in DTYPES:  # gathered in half the bytes; gradients are summed in fp32
        policy = MixedPrecisionPolicy(DTYPES[options.precision], reduce_dtype=torch.float32)
        for norm in _separate_units(_modules_of(job.root, _BATCH_NORMS), job.root):
            shard(norm, reshard_after_forward=does_reshard)
        cast_norm_inputs(job.root, job.device)
    _shard_experts(job, reshard_after_forward=does_reshard, mp_policy=policy)
    for unit in (*units_of(job), job.root):
        if does_reshard:
            unit.register_forward_hook(_copy_parameters)
        # Torch by itself keeps the root's parameters whole for a backward that may not come. Until
        # then the model shows those: an optimizer that is made after a look would train copies.
        shard(unit, reshard_after_forward=does_reshard, mp_policy=policy)
    if not does_reshard:
        job.root.register_forward_hook(_settle_evaluated)  # behind FSDP2's own
    settle_failed = functools.partial(_settle_failed, does_reshard=does_reshard)
    job.root.register_forward_hook(settle_failed, always_call=True)


def _experts(job: ModelBuild) -> list[torch.nn.Module]:
    return [job.base.get_submodule(name) for name in job.step_data.get("ep", ())]


def _unshared(job: ModelBuild) -> set[torch.nn.Parameter]:
    """Parameters that no other rank has: of experts, where all ranks share them."""
    degrees = job.mesh.degrees
    modules = _experts(job) if degrees.dp == degrees.ep else []
    return {parameter for module in modules for parameter in module.parameters()}


def _shard_experts(job: ModelBuild, **options: Any) -> None:
    """Split the experts of each layer over the ranks that have the same ones."""
    degrees = job.mesh.degrees
    if degrees.dp == degrees.ep:
        return
    for module in _experts(job):
        assert job.mesh.expert_mesh is not None
        mesh = job.mesh.expert_mesh["edp"]

        def place(parameter: torch.nn.Parameter, copies: int = mesh.size()) -> Shard:
            return Shard(_expert_dim(tuple(parameter.shape), copies))

        fully_shard(module, mesh=mesh, shard_placement_fn=place, **options)


def cast_norm_inputs(root: torch.nn.Module, device: torch.device) -> None:
    """Let norms take what comes where their parameters are bf16 or fp16.

    Activations are fp32 where one was multiplied with an fp32 buffer, for example.
    """
    for norm in _modules_of(root, _STRICT.get(device.type, _STRICT_ELSEWHERE)):
        norm.register_forward_pre_hook(_as_weight)


def parameter_device(choice: Strategy, device: torch.device) -> torch.device:
    """Choose the device of this rank's shards: with --offload cpu it is the host's memory."""
    return torch.device("cpu") if choice.options.offload == "cpu" else device


@contextmanager
def no_sync(module: torch.nn.Module) -> Iterator[None]:
    """Backwards in here communicate no gradients: they add up whole, on each rank by itself.

    The first backward after it reduces the sum; until then a parameter's `.grad` is what it
    was. A module without FSDP2 in it is left alone. No rank is met; every rank must do the same.
    """
    try:
        for shard in _shards(module):
            shard.set_requires_gradient_sync(False, recurse=False)
        yield
    finally:
        for shard in _shards(module):
            shard.set_requires_gradient_sync(True, recurse=False)


def settle(module: torch.nn.Module) -> None:
    """Let the module's parameters be this rank's pieces again.

    With grad-op all are whole after a forward with gradients. No rank is met.
    """
    for shard in _shards(module):
        shard.reshard()


def _copy_parameters(module: torch.nn.Module, _args: object, output: Any) -> Any:
    """The output without a parameter itself in it: what was gathered is freed after a forward."""
    if torch.compiler.is_compiling():
        return output
    whole = {
        parameter.untyped_storage().data_ptr()
        for parameter in module.parameters()
        if not isinstance(parameter, DTensor)
    } - {0}  # of tensors that have no memory: fake ones

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        is_parameter = not isinstance(tensor, DTensor) and (
            tensor.untyped_storage().data_ptr() in whole
        )
        return tensor.clone() if is_parameter else tensor

    changed = map_tensors(copy, output)
    is_same = all(map(operator.is_, tensors(changed), tensors(output)))
    return output if is_same else changed


def _settle_evaluated(root: torch.nn.Module, args: object, output: Any) -> Any:
    """Give back what grad-op keeps for a backward, where none can come."""
    if torch.is_grad_enabled():
        _remember(root)
        return output
    output = _copy_parameters(root, args, output)
    settle(root)
    return output


def _settle_failed(
    root: torch.nn.Module, _args: object, _output: object, *, does_reshard: bool
) -> None:
    """Give back what is gathered where a forward fails: FSDP2's own hook does not run then."""
    if torch.compiler.is_compiling() or sys.exc_info()[0] is None:
        return
    for shard in _shards(root):  # in the middle of a forward grad-op would keep them
        shard.set_reshard_after_forward(True, recurse=False)
        shard.reshard()
        shard.set_reshard_after_forward(does_reshard, recurse=False)


def _remember(root: torch.nn.Module) -> None:
    """Note whole parameters as former ones: whoever uses them later gets an error."""
    prepared = find_prepared(root)
    shown = dict(root.named_parameters())
    if prepared is not None and not all(prepared.name_of(whole) for whole in shown.values()):
        former = {name: p for name, p in shown.items() if name in prepared.parameters}
        prepared.remember(former, is_gathered=True)


def units_of(job: ModelBuild) -> tuple[torch.nn.Module, ...]:
    """The blocks that are gathered one by one; what else there is goes with the root.

    Those of this rank's stage, if there are stages. A block that shares a parameter with
    another one or with the rest of the model goes with the root: it would be two parameters.
    None where the model has no list of blocks.

    Raises:
        OptionError: A list was named that is not there, or several are the largest.
    """
    if not job.choice.options.blocks and not candidates(job.base):
        return ()
    blocks = find_blocks(job.base, job.choice.options.blocks)
    present = set(job.root.modules())
    return _separate_units((block for block in blocks.modules if block in present), job.root)


def check_parameters(job: ModelBuild) -> None:
    """Refuse parameters that cannot be split; leave a note where all are gathered at once.

    Of FSDP2 and FSDP1 alike. No rank is met.

    Raises:
        OptionError: A scalar, or several dtypes in one unit; or as `units_of`.
    """
    scalars = [name for name, p in job.base.named_parameters() if p.dim() == 0]
    if scalars:
        raise OptionError(
            f"{job.choice.name} cannot split {', '.join(scalars)}: a parameter without dimensions. "
            "Give it the shape (1,), or use ddp or zero1."
        )
    units = units_of(job)
    _refuse_mixed_dtypes(job, units)
    text = (
        f"{type(job.base).__name__} has no list of blocks: all its parameters are gathered at "
        "once. --blocks NAME names one."
    )
    notes = job.step_data.setdefault("notes", [])
    if not units and text not in notes:
        notes.append(text)


def _separate_units(
    blocks: Iterable[torch.nn.Module], root: torch.nn.Module
) -> tuple[torch.nn.Module, ...]:
    unique = list(dict.fromkeys(blocks))
    inside = {module for block in unique for module in block.modules()}
    outside = {
        parameter
        for module in root.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    }
    holders = Counter(parameter for block in unique for parameter in block.parameters())
    return tuple(
        block
        for block in unique
        if any(True for _ in block.parameters())
        and all(holders[p] == 1 and p not in outside for p in block.parameters())
    )


def _mesh(job: ModelBuild) -> DeviceMesh | None:
    """The mesh of the data parallel axes; None where nothing is split (`fsdp --tp 2` on 2)."""
    mesh = job.mesh.device_mesh
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if "dp_shard" not in names:
        return None
    return job.mesh.submesh(*(axis for axis in _AXES if axis in names))


def _as_weight(norm: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    weight = norm.weight
    if isinstance(weight, torch.Tensor) and args and args[0].dtype != weight.dtype:
        return (args[0].to(weight.dtype), *args[1:])
    return args


def _modules_of(
    root: torch.nn.Module, kinds: tuple[type[torch.nn.Module], ...]
) -> Iterator[torch.nn.Module]:
    return (module for module in root.modules() if isinstance(module, kinds))


def _shards(module: torch.nn.Module) -> Iterator[FSDPModule]:
    return (inner for inner in module.modules() if isinstance(inner, FSDPModule))


def _refuse_without_split(job: ModelBuild) -> None:
    replicas = job.mesh.degrees.dp_replicate
    if replicas > 1:
        raise OptionError(
            f"--shard hybrid: {replicas} copies of the model leave 1 rank for each, and nothing to "
            f"split. Use --replicas with a number below {replicas}, or ddp."
        )
    if job.choice.options.offload:
        raise OptionError(
            "--offload cpu: there is no data parallel axis to split parameters along "
            f"({job.choice.world_size} ranks, all used by other axes). Leave it out, or give "
            "fsdp ranks of its own with --dp 2."
        )


def _refuse_mixed_dtypes(job: ModelBuild, units: tuple[torch.nn.Module, ...]) -> None:
    """Gradients of one unit travel in one buffer, so they have one dtype."""
    names = {parameter: name for name, parameter in job.base.named_parameters()}
    counted: set[torch.nn.Parameter] = set()
    for unit in (*units, job.base):
        parameters = [p for p in unit.parameters() if p.requires_grad and p not in counted]
        counted |= set(parameters)
        by_dtype = {p.dtype: names[p] for p in reversed(parameters)}
        if len(by_dtype) > 1:
            listing = ", ".join(f"{name} is {dtype}" for dtype, name in by_dtype.items())
            raise OptionError(
                f"{job.choice.name} needs trained parameters of one dtype in each block and in "
                f"the rest of the model: {listing}. Convert the model, as with model.float(), and "
                "let --bf16 or --fp16 choose what is computed in."
            )


STEP = Transform(plan=_plan, lay_out=_lay_out)
