"""Pipeline parallelism: which stage holds what of a model, and the modules that run it.

The list of blocks is cut into stages of consecutive blocks. What stands outside of the list:

    an embedding                 on the first stage; on the last too where it is tied to the
                                 head, or where no head has its number of rows
    the head                     on the last stage: it stands behind the blocks and has as many
                                 rows as an embedding
    everything else              on every stage, for it may be used before and after the blocks;
                                 its gradients are summed

A model that uses an embedding or the head elsewhere is refused at its first step, and says so
itself: `model.pp_everywhere = ["embed"]` names modules or parameters that every stage holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from nbdist.errors import OptionError
from nbdist.parallel.base.blocks import BlockList, find_blocks
from nbdist.parallel.base.transform import Layouts, ModelBuild, Transform
from nbdist.parallel.live.build import names_of, tensors_of
from nbdist.parallel.pp.pipeline import Pipeline
from nbdist.parallel.pp.stage import EVERYWHERE, StageModule, Stages
from nbdist.strategy.validate import check_pipeline, stages_per_rank

_KEPT = "pp"


@dataclass(frozen=True, slots=True)
class Cuts:
    """A model cut into stages.

    Attributes:
        spans: The blocks of each stage, as positions in the list.
        holders: First name of each parameter and buffer -> coordinates along pp; None for all.
    """

    blocks: BlockList
    spans: tuple[range, ...]
    holders: Mapping[str, frozenset[int] | None]


def _plan(job: ModelBuild, layouts: Layouts) -> Layouts:
    """Says which coordinates along pp hold each parameter and buffer.

    Raises:
        OptionError: No list of blocks, fewer blocks than ranks, a schedule that does not go with
            another option.
    """
    options, ranks = job.choice.options, job.choice.degrees.pp
    blocks = find_blocks(job.base, options.blocks)
    count = len(blocks.modules)
    if count < ranks:
        possible = [str(n) for n in range(2, count + 1) if job.choice.world_size % n == 0]
        way = f"Use --pp {' or '.join(possible)}" if possible else "Use another strategy"
        raise OptionError(
            f"{count} blocks ({blocks.name or 'the model itself'}) cannot form {ranks} pipeline "
            f"stages: each stage needs at least one. {way}, or name another list with --blocks "
            "NAME."
        )
    check_pipeline(job.choice, count)
    per_rank = stages_per_rank(job.choice, count)
    spans = spans_of(count, per_rank * ranks)
    holders = _holders(job.base, layouts, blocks, spans, ranks)
    job.step_data[_KEPT] = Cuts(blocks, spans, holders)
    return {name: replace(layout, stages=holders[name]) for name, layout in layouts.items()}


def _lay_out(job: ModelBuild) -> None:
    """Collects what this rank holds in a `Stages`, which further steps take for the model."""
    cuts: Cuts = job.step_data[_KEPT]
    here = job.mesh.coordinate.pp
    local_names = {n for n, places in cuts.holders.items() if places is None or here in places}
    tensors = _first_names(job.base)
    parts = []
    for index in range(here, len(cuts.spans), job.choice.degrees.pp):
        local_blocks = {cuts.blocks.modules[position] for position in cuts.spans[index]}
        foreign = set(cuts.blocks.modules) - local_blocks
        tree = _tree(job.base, foreign, lambda tensor: tensors[id(tensor)] in local_names)
        assert tree is not None
        parts.append(StageModule(cuts.blocks, cuts.spans[index], index, tree))
    job.root = Stages(parts)


def _wrap(job: ModelBuild, outer: torch.nn.Module) -> torch.nn.Module:
    cuts: Cuts = job.step_data[_KEPT]
    return Pipeline(job, len(cuts.spans), cuts.holders)


def spans_of(count: int, stages: int) -> tuple[range, ...]:
    """Cut `count` blocks into stages of consecutive ones that differ by one at most.

    >>> spans_of(7, 3)
    (range(0, 3), range(3, 5), range(5, 7))
    """
    size, more = divmod(count, stages)
    starts = [index * size + min(index, more) for index in range(stages + 1)]
    return tuple(range(*pair) for pair in itertools.pairwise(starts))


def _holders(
    base: torch.nn.Module, layouts: Layouts, blocks: BlockList, spans: tuple[range, ...], ranks: int
) -> dict[str, frozenset[int] | None]:
    """Who holds each tensor; of tied ones, everyone who holds it under one of its names."""
    first = _first_names(base)
    places: dict[str, set[int]] = {name: set() for name in layouts}
    stage_of = {position: stage for stage, span in enumerate(spans) for position in span}
    prefixes = {f"{blocks.block_name(n)}.": stage % ranks for n, stage in stage_of.items()}
    ends = _homes_of_ends(base, layouts, blocks, ranks)
    everywhere = tuple(getattr(base, EVERYWHERE, ()))
    for path, module in base.named_modules(remove_duplicate=False):
        for key, tensor in _own_tensors(module):
            name = f"{path}.{key}" if path else key
            home = next((n for prefix, n in prefixes.items() if name.startswith(prefix)), None)
            is_named = any(name == p or name.startswith(f"{p}.") for p in everywhere)
            if home is not None:
                places[first[id(tensor)]].add(home)
            elif is_named or module not in ends:
                places[first[id(tensor)]].update(range(ranks))
            else:
                places[first[id(tensor)]] |= ends[module]
    return {n: None if len(held) == ranks else frozenset(held) for n, held in places.items()}


def _homes_of_ends(
    base: torch.nn.Module, layouts: Layouts, blocks: BlockList, ranks: int
) -> dict[torch.nn.Module, set[int]]:
    """Coordinates along pp of embeddings and heads; what else is outside of blocks is on all."""
    first = _first_names(base)
    inside = {module for block in blocks.modules for module in block.modules()}
    modules = [module for module in base.modules() if module not in inside]
    behind = modules[modules.index(blocks.container) + 1 :]

    def rows(module: torch.nn.Module) -> int:
        """Count the rows of a module's own matrix, whole, however it is split now."""
        weight = getattr(module, "weight", None)
        if id(weight) not in first:
            return 0
        shape = layouts[first[id(weight)]].shape
        return shape[0] if len(shape) == 2 else 0

    embeddings = {m: rows(m) for m in modules if isinstance(m, torch.nn.Embedding)}
    counts = set(embeddings.values()) - {0}
    heads = {m: rows(m) for m in behind if rows(m) in counts and m not in embeddings}
    weights = {id(getattr(m, "weight", None)) for m in embeddings}
    # A tied head is on the first stage for its weight, so all of it is: a module is in one piece.
    return {
        **{m: {0} if n in heads.values() else {0, ranks - 1} for m, n in embeddings.items()},
        **{m: {0, ranks - 1} if id(m.weight) in weights else {ranks - 1} for m in heads},
    }


def _first_names(base: torch.nn.Module) -> dict[int, str]:
    tensors = tensors_of(base)
    return {id(tensors[name]): name for name in names_of(base)}


def _own_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]


class Shadow(torch.nn.Module):
    """Holds a module's own parameters and buffers, and those children that a rank has.

    It is never called: the user's module is. FSDP finds here what it is to split.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        # The same dicts: what is put into one is in the other.
        tables = module.__dict__
        self.__dict__.update(_parameters=tables["_parameters"], _buffers=tables["_buffers"])


def _tree(module: torch.nn.Module, foreign: set[torch.nn.Module], is_held: Any) -> Any:
    """The module, as far as it is held: itself where that is all of it, None where nothing is."""
    if module in foreign:
        return None
    children = {name: _tree(child, foreign, is_held) for name, child in module.named_children()}
    flags = [is_held(tensor) for _, tensor in _own_tensors(module)]
    if flags and not any(flags):
        # No module has tensors on different stages, but for children.
        return None
    if all(tree is child for tree, child in zip(children.values(), module.children(), strict=True)):
        return module
    shadow = Shadow(module)
    for name, tree in children.items():
        if tree is not None:
            shadow.add_module(name, tree)
    return shadow


STEP = Transform(plan=_plan, lay_out=_lay_out)
PIPELINE = Transform(wrap=_wrap)
