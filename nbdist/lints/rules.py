"""All lints, and what they make of what ranks saw in a cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.core.finding import RuleHit
from nbdist.core.ranks import rank_label
from nbdist.errors import no_such
from nbdist.lints import (
    apart_since,
    beside_wrapper,
    bf16_scaler,
    effective_batch,
    experts,
    gradients_apart,
    initial_values,
    loss_not_divided,
    memory_shortage,
    model_inputs,
    parameters_apart,
    same_data,
    sharded_twice,
    unused_parameters,
    workers,
)  # fmt: skip

# Names that are silenced from the start, with commas between them; `all` for all.
VARIABLE = "NBDIST_SILENCE"

# Each says more than parameters-apart does.
_WITH_STEP = ("apart-since", "gradients-apart")
_ALL = (
    same_data.LINT, sharded_twice.LINT, model_inputs.LINT, same_data.SET_EPOCH,
    loss_not_divided.LINT, effective_batch.LINT, unused_parameters.LINT,
    unused_parameters.DEAD_PARAMETERS, beside_wrapper.LINT, gradients_apart.LINT,
    initial_values.LINT, initial_values.SHARD_SEEDS, parameters_apart.LINT, apart_since.LINT,
    bf16_scaler.LINT, memory_shortage.LINT, workers.LINT, experts.LINT, experts.UNTRAINED_ROUTER,
)  # fmt: skip
LINTS = {lint.name: lint for lint in _ALL}


@dataclass(frozen=True, slots=True)
class Observation:
    """An event that one rank saw in a cell: a lint's name, a variable or class, facts for JSON."""

    lint: str
    subject: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A finding of a lint in a cell.

    Attributes:
        model: Number of a model on its rank, where the lint is about one; else 0.
    """

    lint: str
    subject: str
    hit: RuleHit
    model: int = 0

    @property
    def cause(self) -> tuple[str, str, int]:
        """Name the key under which a diagnostic is reported once."""
        return self.lint, self.subject, self.model

    @property
    def lines(self) -> tuple[str, str]:
        """Word the mistake and its place; then the reason, the remedy, and how to silence it."""
        row = LINTS[self.lint]
        return (
            f"lint {row.name} [{rank_label(self.hit.ranks)}]: {self.hit.found}",
            f"  {row.why}; {row.do} (silence: %dist_check --silence {row.name})",
        )


def evaluate(observations: Mapping[int, Sequence[Observation]], *, is_ok: bool) -> list[Diagnostic]:
    """Judge a cell by the lints, in the table's order, from the observations of each rank.

    `is_ok`: the cell ended well on every rank that ran it.
    """
    grouped: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for rank, rank_observations in sorted(observations.items()):
        for seen in rank_observations:
            if seen.lint in LINTS:
                grouped.setdefault((seen.lint, seen.subject), {})[rank] = seen.facts
    diagnostics = []
    for row in LINTS.values():
        for (name, subject), facts in grouped.items():
            if name == row.name and (is_ok or not row.needs_success):
                model = next(iter(facts.values())).get("model", 0)
                hits = row.judge(subject, facts)
                diagnostics += [Diagnostic(name, subject, hit, model) for hit in hits]
    # What has its step says more.
    with_step = {each.subject for each in diagnostics if each.lint in _WITH_STEP}
    return [
        each
        for each in diagnostics
        if each.lint != "parameters-apart" or each.subject not in with_step
    ]


def resolve_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of lints, each of which exists; `all` is all.

    Raises:
        OptionError: One does not exist; lists those that do.
    """
    chosen: list[str] = []
    for name in names:
        if name != "all" and name not in LINTS:
            raise no_such("lint", name, LINTS, ", or all")
        chosen += list(LINTS) if name == "all" else [name]
    return tuple(dict.fromkeys(chosen))


def parse_silenced(text: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """(the lints that a value of NBDIST_SILENCE names, its words that name none)."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    valid = [word for word in words if word == "all" or word in LINTS]
    return frozenset(resolve_names(valid)), tuple(word for word in words if word not in valid)
