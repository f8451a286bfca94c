"""Tensor parallelism: each layer's matrices are split over ranks that see the same data.

Between a colwise and a rowwise layer each rank computes with its own heads or hidden units; the
rowwise one adds up what the ranks have. Two sums per block in forward and two in backward. With
sequence parallelism norms and dropout, too, are split, along the sequence: the same bytes go
over the wire, and activations between layers take a part of the memory.

Which layers are split is in a plan (core/tp_plans.py): found by usual names, or the user's own,
`model.tp_plan = {"layers.*.attn.wq": "colwise", ...}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from nbdist.core.tp_given import headless, incomplete, read_plan, unknown
from nbdist.core.tp_plans import Layers, Plan, attentions, check_counts, counts, find_plan
from nbdist.engine.parallel.blocks import Blocks, candidates, find_blocks
from nbdist.engine.parallel.mixed_lists import step_by_mesh
from nbdist.engine.parallel.step import Job, Layouts, Step
from nbdist.engine.parallel.tp_attention import check_attention
from nbdist.engine.parallel.tp_hooks import Between, split_blocks, sum_gradient, watch_owner
from nbdist.engine.parallel.tp_model import (
    divide,
    divided,
    is_attention,
    is_norm,
    layers_of,
)
from nbdist.engine.parallel.tp_random import Streams
from nbdist.engine.parallel.tp_styles import (
    Surroundings,
    norm_style,
    split_dims,
    split_layout,
    torch_style,
)
from nbdist.engine.parallel.tp_trial import shown_width
from nbdist.errors import OptionError


@dataclass(frozen=True, slots=True)
class Owner:
    """An attention module on one rank.

    Attributes:
        values: Its attributes for heads and widths.
        n_shown: How wide its forward sees its input; None for as it is.
    """

    values: Mapping[str, int]
    n_shown: int | None


@dataclass(frozen=True, slots=True)
class Kept:
    """What planning leaves for laying out.

    Attributes:
        plan: Module -> style.
        owners: Module -> what changes in it.
        sequence: With sequence parallelism, lists of blocks -> the own stage's blocks by name.
        dim: The sequence's.
        norms: With sequence parallelism, what in blocks has parameters and stays whole.
    """

    plan: Plan
    owners: Mapping[str, Owner]
    sequence: Mapping[str, Mapping[str, torch.nn.Module]]
    dim: int
    norms: tuple[str, ...]


def _plan(job: Job, layouts: Layouts) -> Layouts:
    degree = job.grid.degrees.tp
    layers = layers_of(job.base)
    plan = _plan_of(job, layers)
    _check(job, plan, layers)
    owners = {}
    for one in attentions(plan, layers):
        module = job.base.get_submodule(one.owner)
        values = divided(module, one.owner, plan, one.columns, degree)
        owners[one.owner] = Owner(values, shown_width(module, one.owner, plan, one.columns, degree))
    for name, style in plan.items():
        if style.kind == "divide" and name not in owners:
            values = divided(job.base.get_submodule(name), name, plan, (), degree)
            owners[name] = Owner(values, None)
    job.kept["tp"] = _with_sequence(job, plan, owners, layouts)
    return _split_layouts(job.base, plan, layouts)


def _lay_out(job: Job) -> None:
    kept: Kept = job.kept["tp"]
    base = job.base
    mesh = job.grid.submesh("tp")
    streams = Streams(job.grid, job.device, base)
    between = Between(mesh, streams)
    ties = _ties(base)
    whole: Placement = Replicate()
    for name, style in kept.plan.items():
        if style.kind == "divide":
            continue
        module = base.get_submodule(name)
        dim = kept.dim if _block_of(name, kept) is not None else None
        torchs = torch_style(module, style, Surroundings(streams, dim))
        parallelize_module(module, mesh, torchs, src_data_rank=None)
        owner = name.rpartition(".")[0]
        if style.kind == "colwise":
            place = Shard(kept.dim) if _gathers_itself(name, owner, base, kept) else whole
            between.watch_column(module, place, base.get_submodule(owner))
        elif style.kind == "rowwise":
            between.watch_row(module)
    for name in kept.norms:
        parallelize_module(
            base.get_submodule(name), mesh, norm_style(kept.dim), src_data_rank=None
        )
    _tie(base, ties)
    _watch_owners(base, kept, between)
    for blocks in kept.sequence.values():
        split_blocks(blocks, between, streams, kept.dim)
    streams.attach(job.root)
    step_by_mesh()


def _wrap(job: Job, outer: torch.nn.Module) -> torch.nn.Module:
    for parameter in job.base.parameters():
        if isinstance(parameter, DTensor) and not parameter.is_meta:
            sum_gradient(parameter)
    return outer
