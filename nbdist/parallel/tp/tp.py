"""Tensor parallelism: each layer's matrices are split over ranks that see the same data.

Between a colwise and a rowwise layer each rank computes with its own heads or hidden units; the
rowwise one adds up what the ranks have. Two sums per block in forward and two in backward. With
sequence parallelism norms and dropout, too, are split, along the sequence: the same bytes go
over the wire, and activations between layers take a part of the memory.

Which layers are split is in a plan (strategy/tp_plan.py): found by usual names, or the user's own,
`model.tp_plan = {"layers.*.attn.wq": "colwise", ...}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from nbdist.errors import OptionError
from nbdist.parallel.base.foreach_by_mesh import step_by_mesh
from nbdist.parallel.base.transform import Layouts, ModelBuild, Transform
from nbdist.parallel.libraries.peft_layers import PREFIX, base_layer, inner_model
from nbdist.parallel.tp.attention import TpContext, check_attention, close_fast_paths
from nbdist.parallel.tp.attention_check import AttentionFit, fit, is_tryable
from nbdist.parallel.tp.hooks import Between, split_blocks, sum_gradient, watch_owner
from nbdist.parallel.tp.lora import check_adapters, split_adapters
from nbdist.parallel.tp.model import divide_attributes, layers_of
from nbdist.parallel.tp.rng import Streams
from nbdist.parallel.tp.sequence_parallel import Sequence, plan_sequence
from nbdist.parallel.tp.styles import norm_style, split_dims, split_layout, torch_style
from nbdist.strategy.tp_plan import (
    Attention,
    Layers,
    Plan,
    attentions,
    check_counts,
    counts,
    find_plan,
)
from nbdist.strategy.tp_user_plan import headless, incomplete, read_plan, unknown


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The result of planning for laying out; owners are modules with split heads."""

    plan: Plan
    owners: Mapping[str, AttentionFit]
    sequence: Sequence


def _plan(job: ModelBuild, layouts: Layouts) -> Layouts:
    """Find the plan and try it out on shapes, heads and code; lay out what it splits."""
    _refuse_computed(job.base)
    layers = layers_of(job.base)
    plan = _plan_of(job, layers)
    needed = counts(plan, layers)
    check_counts(needed, job.mesh.degrees.tp, job.choice.world_size)
    for name, style in plan.items():
        if style.kind == "attention":
            check_attention(job.base.get_submodule(name), name)
        check_adapters(job.base.get_submodule(name), name, style)
    owners = _owners(job, plan, layers)
    sequence = plan_sequence(job, plan, layers, layouts)
    job.step_data["tp"] = SplitPlan(plan, owners, sequence)
    return _split_layouts(job.base, plan, layouts)


def _lay_out(job: ModelBuild) -> None:
    """Make meta DTensors of what is split; set hooks on layers, attention, blocks and the root."""
    planned: SplitPlan = job.step_data["tp"]
    base = job.base
    streams = Streams(job.mesh, job.device, base)
    between = Between(job.mesh.submesh("tp"), streams)
    ties = [names for names in _names(base) if len(names) > 1]
    frozen = [name for name, parameter in base.named_parameters() if not parameter.requires_grad]
    for name, style in planned.plan.items():
        if style.kind != "divide":
            _split(base, name, planned, between)
    sequence = planned.sequence
    for name in sequence.norms:
        norm = norm_style(sequence.dim)
        parallelize_module(base.get_submodule(name), between.mesh, norm, src_data_rank=None)
    for name in frozen:  # torch's SequenceParallel makes them trainable (2.13)
        base.get_parameter(name).requires_grad_(False)
    _tie(base, ties)
    for name, owner in planned.owners.items():
        vars(base.get_submodule(name)).update(owner.values)
    _watch_owners(base, planned, between)
    for blocks in sequence.lists:
        modules = [base.get_submodule(name) for name in blocks]
        split_blocks(modules, between, sequence.dim)
    close_fast_paths(base)
    streams.attach(job.root)
    step_by_mesh()


def _wrap(job: ModelBuild, outer: torch.nn.Module) -> torch.nn.Module:
    for parameter in job.base.parameters():
        if isinstance(parameter, DTensor) and not parameter.is_meta:
            sum_gradient(parameter)
    return outer


def _plan_of(job: ModelBuild, layers: Layers) -> Plan:
    base = job.base
    for holder in dict.fromkeys((base, inner_model(base))):
        # A class's own, but no property: some libraries have one of this name.
        user_plan = vars(holder).get("tp_plan", getattr(type(holder), "tp_plan", None))
        if isinstance(user_plan, Mapping) and user_plan:
            prefix = "" if holder is base else PREFIX
            return read_plan({f"{prefix}{name}": word for name, word in user_plan.items()}, layers)
    result = find_plan(layers, job.mesh.degrees.tp)
    if not result.plan:
        raise OptionError(unknown(base))
    if result.headless:
        raise OptionError(headless(base, result.headless[0]))
    if result.missed:
        raise OptionError(incomplete(base, result.plan, result.missed))
    return result.plan


def _refuse_computed(base: torch.nn.Module) -> None:
    """Refuse layers whose weight is no parameter of theirs, as weight_norm makes it."""
    names = [
        name
        for name, module in base.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        and "weight" not in dict(module.named_parameters(recurse=False))
    ]
    if names:
        raise OptionError(
            f"tp cannot split {', '.join(names)}: the weight is computed from other parameters in "
            "each forward (weight_norm, torch.nn.utils.parametrize). Use ddp, fsdp or pp, or make "
            "it a parameter again (torch.nn.utils.parametrize.remove_parametrizations)."
        )


def _owners(job: ModelBuild, plan: Plan, layers: Layers) -> dict[str, AttentionFit]:
    """Plan changes of modules that split heads; equal modules are tried out once."""
    base, degree = job.base, job.mesh.degrees.tp
    owners = {
        name: AttentionFit(divide_attributes(base.get_submodule(name), name, plan, (), degree))
        for name, style in plan.items()
        if style.kind == "divide"
    }
    alike: dict[object, list[Attention]] = {}
    for attention in attentions(plan, layers):
        shapes = tuple(layers[name].n_out for name in attention.columns)
        alike.setdefault(
            (type(base.get_submodule(attention.owner)), layers[attention.owner].heads, shapes), []
        ).append(attention)
    for group in alike.values():
        # On each rank the same outcome, whichever stage it is.
        tried = next((o for o in group if is_tryable(base.get_submodule(o.owner))), group[0])
        fitted = fit(base.get_submodule(tried.owner), tried.owner, plan, tried.columns, degree)
        owners |= {attention.owner: fitted for attention in group}
    return owners


def _split_layouts(base: torch.nn.Module, plan: Plan, layouts: Layouts) -> Layouts:
    """The layouts with what the plan splits.

    Raises:
        OptionError: Tied parameters are not all split alike.
    """
    names = _names(base)
    first = {name: aliases[0] for aliases in names for name in aliases}
    splits = {}
    for path, style in plan.items():
        for key, dim in split_dims(base.get_submodule(path), style).items():
            name = f"{path}.{key}" if path else key
            splits[name] = split_layout(layouts[first[name]], key, dim, style)
    changed = {}
    for tied in names:
        ways = {splits.get(name) for name in tied if not _is_mirror(name, tied, splits)}
        if len(ways) > 1:
            raise OptionError(
                f"{' and '.join(tied)} are one parameter, which the plan splits in different ways. "
                "Name all of them in model.tp_plan, as embedding and head for example, or none."
            )
        changed[tied[0]] = ways.pop() or layouts[tied[0]]
    return {**layouts, **changed}


def _is_mirror(name: str, tied: Iterable[str], splits: Mapping[str, object]) -> bool:
    """Whether a module only shows a parameter of a split layer inside it, as BERT's head does."""
    owner = name.rpartition(".")[0]
    return name not in splits and any(
        other in splits and other.startswith(f"{owner}.") for other in tied
    )


def _split(base: torch.nn.Module, name: str, planned: SplitPlan, between: Between) -> None:
    """Split one layer of the plan, and watch what goes in and out."""
    module, style = base.get_submodule(name), planned.plan[name]
    sequence = planned.sequence
    dim = sequence.dim if sequence.has(name) else None
    context = TpContext(between.mesh, between.streams, dim)
    layer = base_layer(module)
    parallelize_module(layer, between.mesh, torch_style(layer, style, context), src_data_rank=None)
    split_adapters(module, style, context)
    owner = name.rpartition(".")[0]
    if style.kind == "colwise":
        # Elsewhere the module that it is in has gathered its input.
        is_split = dim is not None and owner in sequence.blocks
        place = Shard(sequence.dim) if is_split else Replicate()
        between.watch_column(module, place, base.get_submodule(owner) if dim is None else None)
    elif style.kind == "rowwise":
        between.watch_row(module, draws_alike=dim is None)


def _watch_owners(base: torch.nn.Module, planned: SplitPlan, between: Between) -> None:
    """Let modules with colwise layers see their input whole, and as wide as their forward needs."""
    sequence = planned.sequence
    inside = {
        name.rpartition(".")[0]: None
        for name, style in planned.plan.items()
        if style.kind == "colwise" and sequence.has(name)
    }
    for name in {**inside, **dict.fromkeys(planned.owners)}:
        owner = planned.owners.get(name)
        n_shown = None if owner is None else owner.n_shown
        if name in sequence.blocks:
            continue
        place = Shard(sequence.dim) if sequence.has(name) else Replicate()
        if n_shown is not None or place != Replicate():
            watch_owner(base.get_submodule(name), between, place, n_shown)


def _tie(base: torch.nn.Module, ties: Iterable[tuple[str, ...]]) -> None:
    """Make one parameter again of each group of names."""
    for tied in ties:
        parameters = [base.get_parameter(name) for name in tied]
        shared = next((p for p in parameters if isinstance(p, DTensor)), parameters[0])
        for name in tied:
            path, _, key = name.rpartition(".")
            base.get_submodule(path).register_parameter(key, shared)


def _names(base: torch.nn.Module) -> list[tuple[str, ...]]:
    """All names of each parameter; several where it is tied."""
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in names_by_id.values()]


STEP = Transform(_plan, _lay_out, _wrap)
