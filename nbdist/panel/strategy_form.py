"""Choosing a strategy on the panel: which fields it has, what they come to, what it would hold.

Read off the tables of strategies and their options; there is no second list.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbdist.core import units
from nbdist.core.topology import HostRanks
from nbdist.errors import OptionError
from nbdist.strategy import footprint
from nbdist.strategy.choice import Options, Strategy
from nbdist.strategy.choose import choose
from nbdist.strategy.degrees import WORDS, divisors
from nbdist.strategy.options import DEGREE_LABELS, DEGREES, OPTIONS, SHORTHANDS, takers
from nbdist.strategy.table import ROWS

# A field that was left alone.
UNSET = ""
_KINDS = {"choice": "choice", "switch": "switch", "blocks": "suggest"}
Value = str | bool
# How many ranks, their device's type, their backend, their hosts.
OnRanks = tuple[int, str, str, tuple[HostRanks, ...]]


@dataclass(frozen=True, slots=True)
class FormField:
    """One field of a strategy.

    Attributes:
        word: A degree, or an option's name from Python.
        label: In words: `tensor parallel`.
        flag: As typed: `--tp`.
        kind: "choice" (one of), "suggest" (one of these, or another text), "text" or "switch".
        choices: Of the first two; UNSET is not among them.
        default: What counts where it is left alone, in words.
        is_own: It belongs to this strategy and few others.
    """

    word: str
    label: str
    flag: str
    kind: str
    choices: tuple[str, ...]
    default: str
    help: str
    is_own: bool


def fields(name: str, world_size: int) -> tuple[FormField, ...]:
    """The fields of a strategy, its degrees first."""
    row = ROWS[name]
    degrees = [word for word in DEGREES if word in {WORDS[row.axis], *row.takes}]
    if name in takers(OPTIONS["shard"]):
        degrees.append("replicas")
    counts = tuple(str(n) for n in divisors(world_size))
    result = [
        FormField(
            word,
            DEGREE_LABELS[word],
            f"--{word}",
            "choice",
            counts,
            "auto",
            DEGREES[word],
            is_own=True,
        )
        for word in degrees
    ]
    for option in OPTIONS.values():
        if name in takers(option):
            kind = _KINDS.get(option.kind, "text")
            choices = tuple(choice for choice in option.choices if choice != option.default)
            is_own = len(takers(option)) < len(ROWS) / 2
            words = option.default or "no", option.help
            result.append(
                FormField(option.word, option.label, option.flag, kind, choices, *words, is_own)
            )
    return tuple(result)


def chosen_options(values: Mapping[str, Value]) -> dict[str, object]:
    """Values of the fields, as `choose` takes them; fields left alone are not in them."""
    return {word: _typed(word, value) for word, value in values.items() if value not in {"", False}}


def _typed(word: str, value: Value) -> object:
    is_number = any(row.word == word and row.kind == "number" for row in OPTIONS.values())
    try:
        return float(value) if is_number else value
    except ValueError:
        return value  # which is refused with the option's own words


def pick(
    name: str,
    values: Mapping[str, Value],
    world_size: int,
    device_type: str = "",
    backend: str = "",
    ranks_on: Sequence[HostRanks] = (),
) -> Strategy | str:
    """The choice that the fields make, or why it cannot be had."""
    try:
        return choose(
            name, chosen_options(values), world_size,
            device_type=device_type, backend=backend, ranks_on=ranks_on,
        )  # fmt: skip
    except OptionError as error:
        return str(error)


def values_of(choice: Strategy) -> dict[str, Value]:
    """The fields of a choice, so that `pick` gives it again; fields at their default left out."""
    own_word, default = WORDS[ROWS[choice.name].axis], Options()
    degrees = choice.degrees
    values: dict[str, Value] = {w: str(n) for w, n in degrees.by_word.items() if w != own_word}
    if degrees.dp_replicate > 1 and degrees.dp_shard > 1:
        values["replicas"] = str(degrees.dp_replicate)
    for row in OPTIONS.values():
        value = getattr(choice.options, row.name)
        if value != getattr(default, row.name) and choice.name in takers(row):
            text = f"{value:g}" if isinstance(value, float) else str(value)
            values[row.word] = value if row.kind == "switch" else text
    return values


def typed(name: str, values: Mapping[str, Value]) -> str:
    """The fields as they would be typed: `fsdp --tp 2 --bf16`."""
    words = [name]
    for word, value in values.items():
        if value in {"", False}:
            continue
        flag = f"--{word.replace('_', '-')}"
        if value is True or (word, value) in SHORTHANDS.values():
            words.append(flag if value is True else f"--{value}")
        else:
            words.append(f"{flag} {shlex.quote(str(value))}")
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """The size of a model that ranks have prepared.

    Attributes:
        name: A variable that holds it, or its class.
        n_parameters: Of the whole model, tied ones once.
    """

    name: str
    n_parameters: int
    parameter_bytes: int


def model_text(model: PreparedModel) -> str:
    """`model: 12.6 million parameters`, `model: 12,600 parameters`."""
    n = model.n_parameters
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if n >= unit:
            return f"{model.name}: {n / unit:.1f} {word} parameters"
    return f"{model.name}: {n:,} parameters"


def batch_text(choice: Strategy, samples: int) -> str:
    """`effective batch 32: 8 samples x dp 2 x 2 accumulated`; samples are of a rank's batch."""
    times = choice.options.accumulate
    accumulated = f" x {times} accumulated" if times > 1 else ""
    dp = choice.degrees.dp
    return f"effective batch {samples * dp * times}: {samples} samples x dp {dp}{accumulated}"


def describe_held(
    choice: Strategy, models: Sequence[PreparedModel], current: Strategy | None = None
) -> str:
    """Describe the bytes a rank would hold of prepared models between steps, with Adam's state.

    By strategy.footprint's formula; activations are not in it. `current` is the strategy that
    counts, to compare with.
    """
    recipe = footprint.recipe_of(choice)
    if not models:
        per_parameter = footprint.held_bytes(choice, 1, recipe)
        return (
            f"each rank holds {per_parameter:.4g} B per parameter "
            f"({footprint.held_formula(choice)}; {recipe.name}); no model is prepared yet"
        )
    parts = _parts_held(choice, models)
    parts_text = " + ".join(f"{what} {units.size(size)}" for what, size in parts.items())
    now = ""
    if current is not None and current != choice:
        now = f", now {units.size(sum(_parts_held(current, models).values()))}"
    return (
        f"each rank holds {units.size(sum(parts.values()))} between steps{now}: {parts_text} (Adam)"
    )


def _parts_held(choice: Strategy, models: Sequence[PreparedModel]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for model in models:
        # Parameters that are no fp32 have gradients like them.
        is_short = model.parameter_bytes < 4 * model.n_parameters
        recipe = footprint.RECIPES["bf16"] if is_short else footprint.recipe_of(choice)
        model_parts = footprint.held_parts(choice, model.n_parameters, recipe)
        parts = {what: parts.get(what, 0.0) + size for what, size in model_parts.items()}
    return parts
