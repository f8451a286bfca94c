"""Whether optimizers step alike on all ranks: their settings, and what they remember."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nbdist.core.finding import BAD, Finding
from nbdist.core.ranks import rank_label

# Of each group: its settings by name, in order.
Settings = tuple[tuple[tuple[str, tuple[float, ...]], ...], ...]
_MOST_SHOWN = 3


@dataclass(frozen=True, slots=True)
class StateApart:
    """State of a parameter in an optimizer that differs between ranks.

    Attributes:
        name: Of the parameter.
        kind: As the optimizer names it: exp_avg, momentum_buffer, step.
        ranks: Those that have other values than the first rank that holds the same part.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]


def settings_apart(settings: Sequence[Settings]) -> dict[str, dict[int, tuple[float, ...]]]:
    """Setting -> rank -> its numbers, of those that are not the same on all ranks.

    `settings` are the ranks' in order. Of several groups that differ the first one is shown.
    """
    apart: dict[str, dict[int, tuple[float, ...]]] = {}
    for groups in zip(*settings, strict=False):
        by_rank = [dict(group) for group in groups]
        for name in by_rank[0]:
            values = {rank: of_rank[name] for rank, of_rank in enumerate(by_rank)
                      if name in of_rank}  # fmt: skip
            if len(set(values.values())) > 1:
                apart.setdefault(name, values)
    return apart


def optimizer_text(settings: Sequence[Settings], states: Sequence[StateApart]) -> str:
    """Clause on settings and state that differ between ranks; empty where none do."""
    apart = settings_apart(settings)
    texts = [
        f"{name} is "
        + ", ".join(f"{_shown(numbers)} on rank {rank}" for rank, numbers in _ends(values))
        for name, values in apart.items()
    ]
    if states:
        kinds = ", ".join(dict.fromkeys(state.kind for state in states))
        names = list(dict.fromkeys(state.name for state in states))
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        ranks = sorted({rank for state in states for rank in state.ranks})
        texts.append(
            f"{kinds} of {', '.join(names[:_MOST_SHOWN])}{more} had other values on rank "
            f"{rank_label(ranks)} before the step"
        )
    return "; ".join(texts)


def optimizer_findings(
    settings: Sequence[Settings], states: Sequence[StateApart]
) -> Iterator[Finding]:
    """Report optimizers whose numbers differ between ranks."""
    if text := optimizer_text(settings, states):
        yield Finding(
            "optimizer by rank", text, BAD, "parameters that ranks share are trained apart",
            "step optimizers and schedulers on all ranks alike, and make their settings and what "
            "they remember the same: %dist_sync_model",
        )  # fmt: skip


def _ends(values: dict[int, tuple[float, ...]]) -> list[tuple[int, tuple[float, ...]]]:
    """One rank for each value."""
    firsts = {numbers: rank for rank, numbers in reversed(values.items())}
    return sorted((rank, numbers) for numbers, rank in firsts.items())[:_MOST_SHOWN]


def _shown(numbers: tuple[float, ...]) -> str:
    text = ", ".join(f"{number:g}" for number in numbers)
    return text if len(numbers) == 1 else f"({text})"
