"""Degrees that were typed, made into a mesh of all ranks, or refused with those that work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from nbdist.errors import OptionError
from nbdist.strategy.options import listed
from nbdist.strategy.table import ROWS, StrategyRow

# Axis of a row -> the word that is typed for its degree.
WORDS = {"": "", "dp_replicate": "dp", "dp_shard": "dp", "tp": "tp", "pp": "pp", "cp": "cp"}
# Rows that split nothing but the batch, or can do without a second rank.
_ONE_RANK = frozenset({"single", "ddp", "fsdp", "fsdp1", "zero1", "deepspeed"})
_NEAREST = {
    ("ddp", "tp"): "fsdp --tp {n}",
    ("ddp", "pp"): "pp --pp {n}, which has fsdp around it",
    ("ddp", "cp"): "cp --cp {n}, which has ddp around it",
    ("fsdp", "cp"): "cp --cp {n}, which has ddp around it",
    ("tp", "cp"): "tp --sequence-parallel, or cp without tp",
    ("pp", "cp"): "pp --dp {n}, or cp without pp",
    ("cp", "tp"): "cp alone, or tp --sequence-parallel",
    ("cp", "pp"): "cp alone, or pp --dp {n}",
    ("ulysses", "tp"): "ulysses alone, or tp --sequence-parallel",
    ("ulysses", "pp"): "ulysses alone, or pp --dp {n}",
    ("single", "dp"): "ddp --dp {n}",
    ("ddp", "ep"): "ep --ep {n}, which has ddp around it",
    ("single", "ep"): "ep --ep {n}",
    **{
        (name, "ep"): "fsdp --ep {n}, or ep --ep {n}"
        for name in ("fsdp1", "zero1", "deepspeed", "pp", "cp", "ulysses")
    },
}


def name_for(typed: Mapping[str, int]) -> str:
    """The row of a mesh that was typed without a name."""
    return next((word for word in ("pp", "tp", "cp", "ep") if typed.get(word, 1) > 1), "ddp")


def resolve(
    row: StrategyRow, typed: Mapping[str, int], world_size: int, within: int = 0
) -> dict[str, int]:
    """Every degree of a row on so many ranks: word -> count, with product `world_size`.

    The degree that the name stands for takes all ranks that the typed ones leave; where it is
    typed itself, dp takes them, if the row has that. Of dp, tp, pp and cp any may be typed.
    `within` is the most ranks that lie on one host wherever they begin (hosts.within); of more,
    tp and cp take so many, and dp, unless it is typed, takes the others. The degree of experts is
    no factor of the product: it divides dp, of which it takes all where its row is named alone.

    Raises:
        OptionError: If the row does not take one of them, or they do not fit the ranks.
    """
    own_word = WORDS[row.axis]
    words = [word for word in (own_word, *row.takes) if word]
    for word, count in typed.items():
        if word not in words and count > 1:
            _refuse_degree(row, words, word, count)
    experts = typed.get("ep")
    typed = {word: n for word, n in typed.items() if word in words and word != "ep"}
    if not words:
        return {}
    free = next((word for word in (own_word, "dp") if word in words and word not in typed), None)
    degrees = dict(typed)
    product = math.prod(typed.values())
    if world_size % product or (free is None and product != world_size):
        _refuse_product(typed, world_size, has_rest=free is not None)
    if free is not None:
        degrees[free] = world_size // product
    if free in {"tp", "cp"} and "dp" not in typed:
        inside = math.gcd(degrees[free], within)
        if inside > 1:
            degrees["dp"], degrees[free] = degrees[free] // inside, inside
    _check_own(row, own_word, degrees, world_size)
    shares = _experts(row, experts, degrees, within)
    return degrees if shares == 1 else {**degrees, "ep": shares}


def _experts(row: StrategyRow, typed: int | None, degrees: Mapping[str, int], within: int) -> int:
    """Over how many of the ranks that see different data the experts lie; 1 for whole on each."""
    dp = degrees.get("dp", 1)
    if typed is None:
        return (math.gcd(dp, within) if within > 1 else dp) if row.name == "ep" else 1
    if typed == 1 and row.name == "ep":
        raise OptionError(
            f"--ep 1 leaves all experts on each rank, and ep would have no effect. Use ddp, or "
            f"--ep {listed(divisors(dp)[1:], 'or')}."
        )
    if degrees.get("pp", 1) > 1 and typed > 1:
        raise OptionError(
            f"--ep {typed} and --pp {degrees['pp']} cannot be combined yet. Use ep, fsdp --ep "
            f"{typed}, or pp without --ep, which keeps all experts of a stage on each of its ranks."
        )
    if dp % typed:
        fitting = divisors(dp)[1:]
        use = f"--ep {listed(fitting, 'or')}" if fitting else f"--dp {typed} with it"
        raise OptionError(
            f"--ep {typed} does not divide the {ranks(dp)} that see different data. Use {use}."
        )
    return typed


def _check_own(
    row: StrategyRow, own_word: str, degrees: Mapping[str, int], world_size: int
) -> None:
    """Refuse a strategy for which no ranks are left: it would have no effect."""
    if degrees[own_word] > 1 or (world_size == 1 and row.name in _ONE_RANK):
        return
    if world_size == 1:
        raise OptionError(
            f"{row.name} needs 2 ranks or more, and there is 1. %dist_reset -n 2 starts more; one "
            f"rank can do {listed((name for name in ROWS if name in _ONE_RANK), 'or')}."
        )
    rest = {word: n for word, n in degrees.items() if word != own_word and n > 1}
    others = " x ".join(f"{word}={n}" for word, n in rest.items())
    names = " ".join(map(_row_of, rest))
    raise OptionError(
        f"{others} leaves 1 of {world_size} ranks for {row.name}, which would have no effect. "
        f"Use {names}, or a smaller degree."
    )


def _row_of(word: str) -> str:
    return "fsdp" if word == "dp" else word


def _refuse_degree(row: StrategyRow, words: Sequence[str], word: str, count: int) -> NoReturn:
    default = "fsdp --tp {n}" if word == "tp" else f"{_row_of(word)} --{word} {{n}}"
    nearest = _NEAREST.get((row.name, word), default).format(n=count)
    takes = listed(f"--{degree}" for degree in words) if words else "no degrees"
    raise OptionError(
        f"{row.name} and --{word} {count} cannot be combined: {row.name} takes {takes}. The "
        f"nearest that works is {nearest}."
    )


def _refuse_product(typed: Mapping[str, int], world_size: int, *, has_rest: bool) -> NoReturn:
    product = math.prod(typed.values())
    asked = " x ".join(f"{word}={count}" for word, count in typed.items())
    ways = []
    for word, count in typed.items():
        others = product // count
        if world_size % others == 0:
            rest = world_size // others
            fitting = divisors(rest) if has_rest else [rest]
            ways.append(f"{listed(fitting, 'or')}{f' for {word}' if len(typed) > 1 else ''}")
    use = f"Use {', or '.join(ways)}." if ways else f"Their product has to be {world_size}."
    why = f"that is {ranks(product)}"
    if len(typed) == 1 and has_rest:
        why = f"{world_size} is not a multiple of {product}"
    raise OptionError(f"{ranks(world_size)} cannot form {asked}: {why}. {use}")


def replicas(asked: int | None, dp: int) -> int:
    """Copies of the model under hybrid sharding: 2 unless another number is asked for.

    Raises:
        OptionError: If there are not that many, or each would lie on one rank.
    """
    fitting = [n for n in divisors(dp) if 1 < n < dp]
    if not fitting:
        raise OptionError(
            f"--shard hybrid needs 2 copies of the model or more, each on 2 ranks or more: {dp} "
            f"data-parallel rank{'s' if dp > 1 else ''} cannot form them. Use --shard full, or 4 "
            "ranks or more."
        )
    count = fitting[0] if asked is None else asked
    if count not in fitting:
        raise OptionError(
            f"{dp} data-parallel ranks cannot form {count} copies of 2 ranks or more. Use "
            f"--replicas {listed(fitting, 'or')}."
        )
    return count


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def ranks(count: int) -> str:
    """A number of ranks in words: `1 rank`, `8 ranks`."""
    return f"{count} rank{'s' if count != 1 else ''}"
