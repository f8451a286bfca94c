"""Sequence parallelism: what of a model is split along the sequence, between its split layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbdist.errors import OptionError
from nbdist.parallel.base.blocks import BlockList, candidates, find_blocks
from nbdist.parallel.base.transform import Layouts, ModelBuild
from nbdist.parallel.tp.model import is_attention
from nbdist.strategy.tp_plan import Layers, Plan, attentions

_WITHOUT = "Leave --sequence-parallel out."


@dataclass(frozen=True, slots=True)
class Sequence:
    """The split of blocks' inputs along the sequence.

    Attributes:
        lists: Names of the own stage's blocks, list by list, in order. It is split before the
            first and whole after the last.
        norms: Layers with parameters in blocks that are not split themselves.
        dim: The sequence's.
    """

    lists: tuple[tuple[str, ...], ...] = ()
    blocks: frozenset[str] = frozenset()
    norms: tuple[str, ...] = ()
    dim: int = 1

    def has(self, name: str) -> bool:
        """Whether a module is in a block."""
        return any(name.startswith(f"{block}.") for block in self.blocks)


def plan_sequence(job: ModelBuild, plan: Plan, layers: Layers, layouts: Layouts) -> Sequence:
    """Plan the splits along the sequence; none without the option.

    Raises:
        OptionError: The model has no list of blocks with split layers, or in the blocks is
            something with parameters that is no norm, or whose input may be whole or split.
    """
    if not job.choice.options.has_sequence_parallel:
        return Sequence()
    lists = _lists(job, plan)
    names = [[blocks.block_name(index) for index in range(len(blocks.modules))] for blocks in lists]
    attention_modules = [module for module in job.base.modules() if is_attention(module)]
    stage = job.mesh.coordinate.pp

    def is_own(block: str) -> bool:
        stages = [layout.stages for name, layout in layouts.items() if name.startswith(f"{block}.")]
        return all(holders is None or stage in holders for holders in stages)

    sequence = Sequence(
        lists=tuple(filter(None, (tuple(filter(is_own, blocks)) for blocks in names))),
        blocks=frozenset(name for blocks in names for name in blocks),
        dim=1 if all(module.batch_first for module in attention_modules) else 0,
    )
    for attention in attentions(plan, layers):
        if attention.owner in sequence.blocks:
            raise OptionError(
                f"{attention.owner} computes attention in the block itself, with whole sequences. "
                f"Put it into a module of its own. {_WITHOUT}"
            )
    return replace(sequence, norms=_norms(sequence, plan, layers))


def _lists(job: ModelBuild, plan: Plan) -> list[BlockList]:
    """The outermost lists of blocks that have split layers in them."""
    wanted = job.choice.options.blocks
    block_lists = [find_blocks(job.base, wanted)] if wanted else list(candidates(job.base))
    lists: list[BlockList] = []
    for blocks in block_lists:
        has_split = all(
            any(name.startswith(f"{blocks.block_name(index)}.") for name in plan)
            for index in range(len(blocks.modules))
        )
        outside = [module for outer in lists for module in outer.container.modules()]
        is_inner = any(module is blocks.container for module in outside)
        if has_split and not is_inner:
            lists.append(blocks)
    if not lists:
        raise OptionError(
            f"{type(job.base).__name__} has no list of blocks with split layers, between which "
            f"hidden states could be split along the sequence. {_WITHOUT}"
        )
    for blocks in lists:
        if len(set(blocks.modules)) < len(blocks.modules):
            raise OptionError(
                f"{blocks.name} has a block several times, so that none is its first. {_WITHOUT}"
            )
    return lists


def _norms(sequence: Sequence, plan: Plan, layers: Layers) -> tuple[str, ...]:
    owners = {name.rpartition(".")[0] for name, style in plan.items() if style.kind == "colwise"}
    owners -= sequence.blocks
    norms = []
    for name, layer in layers.items():
        is_in_block = name in sequence.blocks or sequence.has(name)
        if name in plan or not layer.n_own or not is_in_block:
            continue
        owner = next((o for o in owners if name == o or name.startswith(f"{o}.")), None)
        if layer.kind != "norm" or owner is not None:
            raise OptionError(
                f"{name} has parameters of its own{f' inside {owner}' if owner else ''}, and "
                "sequence parallelism splits only norms between a block's attention and its "
                f"feed-forward part. {_WITHOUT}"
            )
        norms.append(name)
    return tuple(norms)
