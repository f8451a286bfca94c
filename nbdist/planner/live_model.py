"""A live model as ranks describe it, for a plan: its numbers, and what makes it elsewhere."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbdist.core.ranks import rank_label
from nbdist.errors import NbdistError, OptionError
from nbdist.planner.fake_protocol import Source
from nbdist.planner.lora import with_lora
from nbdist.planner.memory import OVERHEAD_BYTES, Memory, check_experts, has_buckets, memory_of
from nbdist.planner.models import ModelShape, of_config, of_count
from nbdist.planner.shape.transformer import Lora
from nbdist.planner.workload import OPTIMIZERS, Workload, widths_for
from nbdist.strategy import footprint
from nbdist.strategy.choice import Strategy

# A config speaks for a model whose number of parameters is as close: adapters add a few.
_SAME = 0.02


@dataclass(frozen=True, slots=True)
class ParameterKind:
    """Parameters that are alike.

    Attributes:
        dtype: torch's name, without "torch.".
        is_stacked: They are those of experts, which ep shares and tp leaves whole.
    """

    dtype: str
    is_trained: bool
    count: int
    size_bytes: int
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A variable on a rank that is a model.

    Attributes:
        name, title: The variable and its class.
        kinds: Its parameters; tied ones once.
        tied: Names of each parameter that has several.
        experts: The number in a layer; 0 where nbdist knows none.
        blocks: "layers (12 x Block)"; empty where it has no list of blocks.
        config: As in a config.json; empty where it has none.
        optimizer: Class of what steps it; empty where no variable does.
        optimizer_word: The same as a key of workload.OPTIMIZERS; empty where it has none.
        inputs: Shape and type of each tensor that it is called with; empty where unknown.
        inputs_shape: The shape of the first of them.
        is_language_model: One of transformers that takes tokens and labels.
        lora: Its adapters, of one that PEFT has made with them.
        is_prepared: It is under the strategy that counts; else it is as the user wrote it.
        digest: A hash of names, shapes, types: equal on ranks with like models.
        source: What makes it in another process; empty on ranks that were not asked for it.
        problem: Why it cannot be made there; a phrase.
    """

    name: str
    title: str
    kinds: tuple[ParameterKind, ...]
    buffers_bytes: int = 0
    n_buffers: int = 0
    tied: tuple[tuple[str, ...], ...] = ()
    experts: int = 0
    blocks: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    optimizer: str = ""
    optimizer_word: str = ""
    inputs: tuple[str, ...] = ()
    inputs_shape: tuple[int, ...] = ()
    is_language_model: bool = False
    lora: Lora | None = None
    is_prepared: bool = False
    digest: str = ""
    source: Source = field(default_factory=Source, repr=False)
    problem: str = ""

    @property
    def parameters(self) -> int:
        """All numbers in its parameters."""
        return sum(kind.count for kind in self.kinds)


def alike(descriptions: Sequence[LiveModel]) -> LiveModel:
    """Rank 0's, if all ranks have the same model.

    Raises:
        NbdistError: They have not.
        OptionError: It has nothing to plan for.
    """
    first = descriptions[0]
    odd = [rank for rank, live in enumerate(descriptions) if live.digest != first.digest]
    if odd:
        other = descriptions[odd[0]]
        raise NbdistError(
            f"{first.name} differs between ranks: rank {rank_label(odd)} has {other.title} "
            f"({other.parameters:,} parameters), rank 0 has {first.title} "
            f"({first.parameters:,}). Build the same model on every rank."
        )
    if not first.parameters:
        raise OptionError(
            f"{first.name} ({first.title}) has no parameters: there is nothing to plan for."
        )
    return first


def shape_of(live: LiveModel) -> ModelShape:
    """The model for a plan: with the shape of its config, where that is this model's.

    Adapters are part of it where they are all that is trained, to the last parameter.
    """
    shape, frozen = None, [kind for kind in live.kinds if not kind.is_trained]
    n_frozen = sum(kind.count for kind in frozen)
    with contextlib.suppress(OptionError):  # no config, or of a kind that no formula knows
        configured = of_config(live.config)
        if math.isclose(configured.parameters, live.parameters, rel_tol=_SAME):
            shape = configured.shape
        if live.lora is not None:
            adapted = with_lora(configured, live.lora.rank, live.lora.targets, None)
            if (adapted.frozen, adapted.parameters) == (n_frozen, live.parameters):
                stored = sum(kind.size_bytes for kind in frozen) // n_frozen
                shape = replace(adapted.shape, lora=replace(live.lora, stored=stored))
    return ModelShape(
        live.name,
        live.parameters,
        shape or of_count(live.parameters, live.name).shape,
        config=live.config,
        has_shape=shape is not None,
        frozen=n_frozen,
        experts=live.experts,
    )


def load_of(live: LiveModel, load: Workload, optimizer: str | None = None) -> Workload:
    """The load with the model's own optimizer and batch, where they are known.

    The optimizer that was typed counts before the model's own.
    """
    load = replace(load, optimizer=optimizer or live.optimizer_word or load.optimizer)
    shape = live.inputs_shape
    if shape:
        load = replace(load, batch=max(1, shape[0]))
    if len(shape) > 1 and live.is_language_model:
        load = replace(load, sequence=max(1, shape[1]))
    return load


def described(live: LiveModel) -> tuple[str, ...]:
    """Lines that describe the model."""
    kinds = ", ".join(
        f"{kind.count:,} {kind.dtype} {'trained' if kind.is_trained else 'frozen'} "
        f"{'in experts ' if kind.is_stacked else ''}({_size(kind.size_bytes)})"
        for kind in live.kinds
    )
    buffers = f"{live.n_buffers} buffers ({_size(live.buffers_bytes)})" if live.n_buffers else ""
    tied = f"tied: {', '.join(' and '.join(names) for names in live.tied)}" if live.tied else ""
    blocks = f"blocks: {live.blocks}" if live.blocks else "no list of blocks"
    optimizer = live.optimizer or "no variable holds its optimizer"
    inputs = f"called with {', '.join(live.inputs)}" if live.inputs else ""
    second = "; ".join(filter(None, [buffers, tied, blocks, optimizer, inputs]))
    return f"{live.name} is a {live.title}: {kinds}", second


def by_kinds(live: LiveModel, model: ModelShape, choice: Strategy, load: Workload) -> Memory:
    """The memory by formulas, with what is frozen: no gradient and no state of an optimizer.

    As if everything could be split evenly. Without a shape activations are not counted.

    Raises:
        OptionError: As memory_of, of a model with a shape; or it has no experts to share.
    """
    check_experts(live.experts, live.name, choice)
    trained = [kind for kind in live.kinds if kind.is_trained]
    cost = OPTIMIZERS[load.optimizer]
    has_lists = load.has_gpu and not choice.options.is_fused
    states: dict[str, Any] = {
        "parameters": _held(choice, "parameters", {k: k.size_bytes for k in live.kinds}),
        "gradients": _held(choice, "gradients", {k: k.size_bytes for k in trained}),
        "optimizer": _held(choice, "optimizer", {k: k.count * cost.state_bytes for k in trained}),
        "step": _held(choice, "optimizer", {k: k.count * cost.step_bytes for k in trained})
        * has_lists,
    }
    if model.has_shape and not choice.options.offload:
        memory = memory_of(model, choice, load)
        return replace(memory, **states, buffers=memory.buffers + live.buffers_bytes)
    overhead = OVERHEAD_BYTES if load.has_gpu else 0.0
    # DDP leaves experts alone that ranks share.
    reduced = {k: k.size_bytes for k in trained if not (k.is_stacked and choice.degrees.ep > 1)}
    buckets = _held(choice, "gradients", reduced) if has_buckets(choice) else 0.0
    buffers = live.buffers_bytes + buckets
    if choice.options.shard == "grad-op" and choice.degrees.dp > 1:  # gathered until backward ends
        width = widths_for(model, choice, load).gathered
        split = choice.degrees.tp * choice.degrees.pp
        buffers += sum(kind.count for kind in live.kinds) * width / split
    return Memory(**states, activations=0, buffers=buffers, overhead=overhead, is_partial=True)


def _held(choice: Strategy, what: str, sizes: Mapping[ParameterKind, float]) -> float:
    """Bytes that a rank has of a word of footprint.HELD, from bytes by kind of parameter."""
    rest = footprint.axes_size(choice, footprint.split_axes(choice, what))
    stacked = footprint.stacked_ways(choice, what)
    return sum(size / (stacked if kind.is_stacked else rest) for kind, size in sizes.items())


def _size(value_bytes: float) -> str:
    unit, name = (1e9, "GB") if value_bytes >= 1e9 else (1e6, "MB")
    return f"{value_bytes / unit:.1f} {name}"
