"""A rank's report when its memory ran out, and a ladder of remedies that would make room.

Gains are predicted from what was measured on that rank: states (parameters, gradients, optimizer)
by the shares of strategy.footprint, which are exact; activations by the batch and by what computes
them, which are estimates. docs/memory.md has each formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from nbdist.errors import OptionError
from nbdist.memory.oom_message import DEVICE, UNKNOWN, OomMessage
from nbdist.memory.snapshot import (
    ACTIVATION,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    TEMPORARY,
)
from nbdist.strategy import footprint
from nbdist.strategy.choice import Strategy, steps_of
from nbdist.strategy.choose import choose
from nbdist.strategy.table import HELD

# What a block needs of its input, of all that it keeps: 2 of 34 bytes for each number in it.
# Source: https://arxiv.org/abs/2205.05198 section 4.1.
_INPUT_SHARE = 2 / 34
# Blocks that FSDP has whole at a time: one computes while the next is gathered.
_GATHERED_BLOCKS = 2
_CATEGORY = {"parameters": PARAMETER, "gradients": GRADIENT, "optimizer": OPTIMIZER}


@dataclass(frozen=True, slots=True)
class Holder:
    """A named owner of memory, or all unnamed blocks of a category.

    Attributes:
        name: The parameter, the variable; empty where it has none.
        category: Place in memory.snapshot.CATEGORIES.
        size_bytes: The size of all its blocks.
    """

    name: str
    category: int
    size_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class OomReport:
    """A rank's knowledge when its memory ran out.

    Attributes:
        phase: FORWARD, BACKWARD, STEPPING, or empty.
        categories: In use for each of memory.snapshot.CATEGORIES, in bytes.
        holders: The largest first.
        limit_bytes: The memory of the device, or the host; 0 where it is not known.
        free_bytes: Free of it for this process; UNKNOWN where it is not known.
        choice: The strategy of the models; None where none was prepared.
        blocks: Like layers of the largest model; 0 where it has no list of them.
        problem: Why data is missing, as a sentence.
    """

    rank: int
    message: OomMessage
    phase: str
    categories: tuple[int, ...]
    holders: tuple[Holder, ...]
    limit_bytes: int
    free_bytes: int
    choice: Strategy | None
    blocks: int = 0
    problem: str = ""

    @property
    def activation_bytes(self) -> int:
        """Bytes that shrink with the batch: activations and temporary memory."""
        return self.categories[ACTIVATION] + self.categories[TEMPORARY]

    @property
    def scaled_bytes(self) -> int:
        """`activation_bytes`, plus the requested bytes in forward and backward."""
        asks = self.phase in {FORWARD, BACKWARD} and self.message.asked_bytes > 0
        return self.activation_bytes + (self.message.asked_bytes if asks else 0)

    @property
    def shortfall_bytes(self) -> int:
        """How much more memory the allocation needed; UNKNOWN where that cannot be said.

        It failed: where enough seems to be free, it is in pieces, or another limit was hit.
        """
        if UNKNOWN in (self.message.asked_bytes, self.free_bytes):
            return UNKNOWN
        shortfall = self.message.asked_bytes - self.free_bytes
        return shortfall if shortfall > 0 else UNKNOWN


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to try when memory ran out, with its predicted gain.

    Attributes:
        what: The act, as typed where it is an option.
        gain_bytes: Predicted; UNKNOWN where there is nothing to predict from.
        fits: Whether that would make room; None where it cannot be said.
        why: The source of the number, or why there is none.
    """

    what: str
    gain_bytes: int
    fits: bool | None
    why: str


def remedies(shortage: OomReport) -> tuple[Remedy, ...]:
    """Remedies in the order in which to try them: the cheap ones first. Taken ones are left out."""
    return tuple(rung for step in _STEPS for rung in step(shortage))


def _rung(shortage: OomReport, what: str, gain: float, why: str) -> Remedy:
    shortfall = shortage.shortfall_bytes
    fits = None if UNKNOWN in (gain, shortfall) else gain >= shortfall
    return Remedy(what, round(gain), fits, why)


_NONE_SEEN = "no activations were recorded to predict from"


def _batch(shortage: OomReport) -> Iterator[Remedy]:
    times = 2 * (shortage.choice.options.accumulate if shortage.choice else 1)
    scaled = shortage.scaled_bytes
    for what, why in (
        ("half the batch", "half of the activations"),
        (
            f"half the batch with --accumulate {times}",
            "the same; the batch per step stays as it is",
        ),
    ):
        gain = scaled / 2 if scaled else UNKNOWN
        yield _rung(shortage, what, gain, why if scaled else _NONE_SEEN)


def _half_precision(shortage: OomReport) -> Iterator[Remedy]:
    choice = shortage.choice
    if choice is not None and choice.options.precision != "fp32":
        return
    what = "--bf16"
    if choice is None:
        yield Remedy(what, UNKNOWN, None, "no prepared model to predict from")
        return
    if not shortage.scaled_bytes:
        yield Remedy(what, UNKNOWN, None, _NONE_SEEN)
        return
    gathers = "fsdp" in steps_of(choice) or choice.name == "deepspeed"
    # autocast keeps copies of the weights beside them; FSDP gathers them in half as many bytes.
    copies = -shortage.categories[PARAMETER] if not gathers else shortage.categories[COMMUNICATION]
    gain = max(0.0, (shortage.scaled_bytes + copies) / 2)
    why = "half of the activations" + ("" if gathers else ", less copies of the weights")
    yield _rung(shortage, what, gain, why)


def _checkpoint(shortage: OomReport) -> Iterator[Remedy]:
    choice = shortage.choice
    if choice is not None and choice.options.checkpoint:
        return
    what, activations = "--checkpoint full", shortage.activation_bytes
    if not activations:
        yield Remedy(what, UNKNOWN, None, _NONE_SEEN)
    elif shortage.blocks < 2:
        yield Remedy(what, UNKNOWN, None, "no list of two or more similar layers was found")
    else:
        gain = max(0.0, activations * (1 - 1 / shortage.blocks - _INPUT_SHARE))
        why = f"activations of one of {shortage.blocks} blocks and inputs of all remain"
        yield _rung(shortage, what, gain, why)


def _allocator(shortage: OomReport) -> Iterator[Remedy]:
    """Only where what the allocator holds and does not use would be enough."""
    unused, asked = shortage.message.unused_bytes, shortage.message.asked_bytes
    if shortage.message.memory == DEVICE and unused > 0 and 0 < asked <= unused:
        yield _rung(
            shortage,
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before %dist_init",
            unused,
            "held by the allocator in pieces that are too small",
        )


def _split(shortage: OomReport) -> Iterator[Remedy]:
    """Strategies under which a rank holds less of the states."""
    choice = shortage.choice
    if choice is None:
        yield Remedy("%dist_strategy fsdp", UNKNOWN, None, "no prepared model to predict from")
        return
    ranks = max(2, choice.world_size)
    on = "" if ranks == choice.world_size else f" on {ranks} ranks (%dist_init -n {ranks})"
    for name, options, words in (("deepspeed", {"stage": 2}, " --stage 2"), ("fsdp", {}, "")):
        other = _like(choice, name, options, ranks)
        if other is None or (gain := _gain(shortage, choice, other)) <= 0:
            continue
        degrees = ((word, getattr(other.degrees, word)) for word in ("tp", "pp", "cp"))
        in_use = "".join(f" --{word} {degree}" for word, degree in degrees if degree > 1)
        formula = footprint.held_formula(other)
        yield _rung(
            shortage, f"%dist_strategy {name}{words}{in_use}{on}", gain, f"states as {formula}"
        )


def _offload(shortage: OomReport) -> Iterator[Remedy]:
    """Propose offload on a GPU: on a CPU the states lie in the host's memory already."""
    choice = shortage.choice
    if shortage.message.memory != DEVICE or (choice and choice.options.offload == "nvme"):
        return
    is_on_host = bool(choice and choice.options.offload)
    for words, where in (("fsdp", "cpu"), ("deepspeed --stage 3", "nvme")):
        if where == "cpu" and is_on_host:
            continue
        what = f"%dist_strategy {words} --offload {where}"
        if choice is None:
            yield Remedy(what, UNKNOWN, None, "no prepared model to predict from")
        elif is_on_host:
            yield _rung(shortage, what, 0, "frees the host's memory, not the device's")
        else:
            held_bytes = sum(shortage.categories[_CATEGORY[states]] for states in HELD)
            gain = held_bytes - _gathered(shortage, choice)
            yield _rung(
                shortage, what, max(0, gain), "moves all states off the device, block by block"
            )


_STEPS: tuple[Callable[[OomReport], Iterator[Remedy]], ...] = (
    _batch, _half_precision, _checkpoint, _allocator, _split, _offload,
)  # fmt: skip


def _like(
    choice: Strategy, name: str, options: Mapping[str, object], ranks: int
) -> Strategy | None:
    """Another strategy with the degrees and options that are in use; None where it does not go."""
    degrees = choice.degrees
    degrees_kept = {word: n for word in ("tp", "pp", "cp") if (n := getattr(degrees, word)) > 1}
    half = choice.options.precision
    merged = {**options, **degrees_kept, **({"precision": half} if half != "fp32" else {})}
    try:
        return choose(name, merged, ranks)
    except OptionError:
        return None


def _gain(shortage: OomReport, now: Strategy, other: Strategy) -> float:
    """Bytes of states less, without what is gathered meanwhile."""
    gain = 0.0
    for what in HELD:
        held_bytes = shortage.categories[_CATEGORY[what]]
        before, after = (
            footprint.axes_size(strategy, footprint.split_axes(strategy, what))
            for strategy in (now, other)
        )
        gain += held_bytes - held_bytes * before / after
    is_split, was_split = (
        footprint.split_axes(strategy, "parameters") for strategy in (other, now)
    )
    is_gathered = is_split and not was_split
    return gain - (_gathered(shortage, now) if is_gathered else 0)


def _gathered(shortage: OomReport, now: Strategy) -> float:
    """Parameters that are whole at a time while their states are split."""
    parameters = shortage.categories[PARAMETER]
    whole = parameters * footprint.axes_size(now, footprint.split_axes(now, "parameters"))
    return whole * min(1.0, _GATHERED_BLOCKS / shortage.blocks) if shortage.blocks else whole
