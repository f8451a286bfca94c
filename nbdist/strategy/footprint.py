"""Costs of a strategy: bytes that a rank holds of a model, and bytes that it sends per step.

Exact for the number of ranks at hand, not the limits for many of them. Activations are not in it:
they depend on the batch and not on the strategy alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nbdist.strategy.choice import Strategy, rows_of
from nbdist.strategy.table import HELD, SentBytes


@dataclass(frozen=True, slots=True)
class Recipe:
    """How many bytes one parameter takes, by what is stored for it.

    Attributes:
        name: For people: the number alone says nothing without it.
        parameters, gradients: Bytes of each.
        optimizer: Adam's two moments, and a copy in fp32 where the recipe keeps one.
    """

    name: str
    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes per parameter on one device."""
        return self.parameters + self.gradients + self.optimizer


# Three that come to 16 bytes and one that does not. Sources: https://arxiv.org/abs/1910.02054
# section 3.1 (mixed), https://docs.pytorch.org/docs/stable/amp.html (autocast keeps fp32).
RECIPES: Mapping[str, Recipe] = {
    "fp32": Recipe("fp32: parameters 4 + gradients 4 + Adam 8", 4, 4, 8),
    "autocast": Recipe(
        "bf16 or fp16 autocast: parameters 4 + gradients 4 + Adam 8, all fp32", 4, 4, 8
    ),
    "mixed": Recipe(
        "bf16 or fp16 with a copy in fp32 (DeepSpeed): 2 + 2 + copy 4 + Adam 8", 2, 2, 12
    ),
    "bf16": Recipe("all in bf16, Adam's moments in fp32, no copy: 2 + 2 + Adam 8", 2, 2, 8),
}

_BY_STAGE = {1: ("optimizer",), 2: ("gradients", "optimizer"), 3: HELD}


def recipe_of(choice: Strategy) -> Recipe:
    """Recipe by which nbdist stores a model under a choice, with Adam."""
    if choice.options.precision == "fp32":
        return RECIPES["fp32"]
    return RECIPES["mixed" if choice.name == "deepspeed" else "autocast"]


def split_axes(choice: Strategy, what: str) -> tuple[str, ...]:
    """The axes, of those with ranks, over which a word of HELD, batch or sequence is split."""
    if choice.name == "deepspeed" and what in HELD and what not in _BY_STAGE[choice.options.stage]:
        return ()
    return tuple(
        axis
        for row in rows_of(choice)
        for axis, things in row.splits.items()
        if what in things and getattr(choice.degrees, axis) > 1
    )


def held_bytes(choice: Strategy, n_parameters: float, recipe: Recipe) -> float:
    """Bytes that a rank holds of a model between two steps, with gradients and Adam's state.

    For layers of equal size: what cannot be split evenly, and what a pipeline's first and last
    stage have besides blocks, comes on top.
    """
    return sum(held_parts(choice, n_parameters, recipe).values())


def held_parts(
    choice: Strategy, n_parameters: float, recipe: Recipe, n_stacked: float = 0
) -> dict[str, float]:
    """The same taken apart: word of HELD -> bytes. So many of the parameters are in experts."""
    parts = {}
    for what in HELD:
        rest, stacked = axes_size(choice, split_axes(choice, what)), stacked_ways(choice, what)
        numbers = (n_parameters - n_stacked) / rest + n_stacked / stacked
        parts[what] = numbers * getattr(recipe, what)
    return parts


def stacked_ways(choice: Strategy, what: str) -> int:
    """Over how many ranks a word of HELD is split of experts: tp leaves them whole.

    Under fsdp those that share experts are a part of dp_shard, under ep they are all there is.
    """
    axes = tuple(axis for axis in split_axes(choice, what) if axis != "tp")
    return axes_size(choice, axes) * (choice.degrees.ep if choice.degrees.dp_shard == 1 else 1)


def held_formula(choice: Strategy) -> str:
    """The same in letters: p, g and o are a parameter's bytes, the others are degrees."""
    letters: dict[tuple[str, ...], list[str]] = {}
    for what in HELD:
        letters.setdefault(split_axes(choice, what), []).append(what[0])
    shares = []
    for axes, summands in letters.items():
        text = " + ".join(summands)
        over = " * ".join(_word(choice, axis) for axis in axes)
        over = f"({over})" if len(axes) > 1 else over
        text = f"({text})" if axes and len(summands) > 1 else text
        shares.append(f"{text}/{over}" if axes else text)
    formula = " + ".join(shares)
    # Under fsdp experts take what all else does: the ranks of a share split it once more.
    has_whole = choice.degrees.ep > 1 and choice.degrees.dp_shard == 1
    return f"{formula}, of experts ({formula})/ep" if has_whole else formula


@dataclass(frozen=True, slots=True)
class StepCollective:
    """A collective's cost on a ring of n ranks, for a message of which all ranks make up one."""

    text: str  # the share of the message that a rank sends
    share: Callable[[int], float]  # the same as a function of n


# Source: https://arxiv.org/abs/1910.02054 section 7.1 for the ring, and
# https://arxiv.org/abs/2309.14509 section 3.2 for all-to-all.
CALLS: Mapping[str, StepCollective] = {
    "all-reduce": StepCollective("2 (n - 1)/n", lambda n: 2 * (n - 1) / n),
    "reduce-scatter": StepCollective("(n - 1)/n", lambda n: (n - 1) / n),
    "all-gather": StepCollective("(n - 1)/n", lambda n: (n - 1) / n),
    "broadcast": StepCollective("(n - 1)/n", lambda n: (n - 1) / n),
    "ring": StepCollective("(n - 1)/n", lambda n: (n - 1) / n),
    "all-to-all": StepCollective("(n - 1)/n^2", lambda n: (n - 1) / n**2),
    # A stage sends its output and gets the gradient of it back; the last one and the first one
    # have one neighbour, so this is what the stages between them send.
    "send": StepCollective("1", lambda n: 1.0 if n > 1 else 0.0),
}


def sent_of(choice: Strategy) -> tuple[SentBytes, ...]:
    """Bytes a rank sends in a step of the optimizer, along the axes that have ranks."""
    options = choice.options
    sends: list[SentBytes] = []
    for row in rows_of(choice):
        gathers_once = options.shard == "grad-op" if row.name != "deepspeed" else options.stage < 3
        is_once = row.name in {"fsdp", "fsdp1", "deepspeed"} and gathers_once
        sends += [
            replace(sent, times=1) if is_once and sent.call == "all-gather" else sent
            for sent in row.sends
        ]
    return tuple(sent for sent in sends if axes_size(choice, sent.axes) > 1)


def axes_size(choice: Strategy, axes: tuple[str, ...]) -> int:
    """How many ranks lie along axes together."""
    return math.prod(getattr(choice.degrees, axis) for axis in axes)


def sent_bytes(
    choice: Strategy, n_parameters: float, *, parameter_bytes: int = 4, gradient_bytes: int = 4
) -> float:
    """Bytes of parameters and gradients that a rank sends in a step of the optimizer.

    Activations and keys and values, which tp, pp and cp send, are not in it: `sent_phrases` names
    them. Backwards that are accumulated count once where gradients wait for the last one. The bytes
    of a parameter and of a gradient are those on the wire: 2 under FSDP with bf16.
    """
    size = {"parameters": parameter_bytes, "gradients": gradient_bytes}
    return sum(
        wire_bytes(choice, sent, model_message(choice, sent, n_parameters * size[sent.what]))
        for sent in sent_of(choice)
        if sent.what in size
    )


def model_message(choice: Strategy, sent: SentBytes, model_bytes: float) -> float:
    """Return how many bytes of a model's parameters or gradients one message is about."""
    # What tp and pp split is not there to be sent; copies reduce what dp_shard has left.
    message = model_bytes / (choice.degrees.tp * choice.degrees.pp)
    return message / choice.degrees.dp_shard if "dp_replicate" in sent.axes else message


def wire_bytes(choice: Strategy, sent: SentBytes, message_bytes: float) -> float:
    """Bytes that a rank sends where all ranks along the axes make up messages of this size."""
    share = CALLS[sent.call].share(axes_size(choice, sent.axes))
    return sent.times * share * message_bytes


def sent_phrases(choice: Strategy) -> tuple[str, ...]:
    """Bytes a rank sends, a phrase each: `all-gather parameters 2 x over dp`."""
    per = {
        "tokens": ", per layer",
        "activations": ", per block",
        "keys-values": ", per block",
        "boundary": ", per stage",
    }
    phrases = []
    for sent in sent_of(choice):
        times = f" {sent.times} x" if sent.times > 1 else ""
        axes = (axis for axis in sent.axes if getattr(choice.degrees, axis) > 1)
        over = " x ".join(_word(choice, axis) for axis in axes)
        phrases.append(f"{sent.call} {sent.what}{times} over {over}{per.get(sent.what, '')}")
    return tuple(phrases)


def _word(choice: Strategy, axis: str) -> str:
    """An axis as its degree is typed; of hybrid sharding, copies and the ranks of each."""
    is_hybrid = choice.degrees.dp_shard > 1 and choice.degrees.dp_replicate > 1
    shard, replicate = ("shard", "replicas") if is_hybrid else ("dp", "dp")
    return {"dp_shard": shard, "dp_replicate": replicate}.get(axis, axis)
