"""The view of `%dist_check`: a table of models, then the mistakes in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbdist.core.failures import ranks_phrase
from nbdist.core.view import View, table
from nbdist.lints.replicas import (
    GRADIENT,
    KINDS,
    CheckedModel,
    NotFinite,
    ReplicaCheck,
    ReplicaDifference,
)

# Tensors that are named of each kind; more are counted.
SHOWN = 5


def checkup(check: ReplicaCheck) -> View:
    """All models, one row each; below it each difference and what is not finite."""
    if not check.models:
        return View("there are no models on the ranks")
    rows = [
        [model.name, model.strategy, *(_cell(model, kind) for kind in KINDS)]
        for model in check.models
    ]
    after = [line for model in check.models for line in _lines(check, model)]
    view = table(
        ["model", "under", *(f"{kind}s" for kind in KINDS)],
        rows,
        before=[_verdict(check)],
        after=after,
    )
    return View(view.text, view.html, is_bad=not check.is_healthy)


def lints(states: Sequence[tuple[str, str, str]]) -> View:
    """All lints: which are silenced, and when each is reported."""
    rows = [list(state) for state in states]
    after = [
        "%dist_check --silence NAME: silence it; --tell NAME: report it again (all: every lint)"
    ]
    return table(["lint", "state", "reported when"], rows, after=after)


def _verdict(check: ReplicaCheck) -> str:
    ranks_text = f"{len(check.ranks)} rank{'s' if len(check.ranks) > 1 else ''}"
    if check.is_healthy:
        return f"healthy: on {ranks_text} everything is finite, and equal where it should be"
    wrong = ["something is not finite"] if check.not_finite else []
    wrong += ["ranks differ"] if any(not d.is_expected for d in check.differences) else []
    wrong += ["gradients were not reduced"] if any(m.unreduced for m in check.models) else []
    return f"NOT healthy on {ranks_text}: {' and '.join(wrong)}"


def _cell(model: CheckedModel, kind: str) -> str:
    count = model.tensors[kind]
    return f"{count}, {model.compared[kind]} compared" if count else "-"


def _lines(check: ReplicaCheck, model: CheckedModel) -> Iterator[str]:
    if model.unreduced:
        yield model.unreduced
    for bad in check.not_finite:
        if bad.model == model.name:
            yield _not_finite(bad)
    for kind in KINDS:
        differences = [d for d in check.differences if (d.model, d.kind) == (model.name, kind)]
        yield from (_difference(difference) for difference in differences[:SHOWN])
        if len(differences) > SHOWN:
            yield f"{model.name}: {len(differences) - SHOWN} more {kind}s differ"
        if differences:
            yield _advice(model.name, differences[0])
    yield from (f"{model.name}: {note}" for note in model.notes)


def _not_finite(bad: NotFinite) -> str:
    counts = [
        f"{count} {what}" for count, what in ((bad.n_nan, "NaN"), (bad.n_inf, "inf")) if count
    ]
    many = f"{len(bad.names)} {bad.kind}{'s' if len(bad.names) > 1 else ''}"
    where = "last" if bad.kind == GRADIENT else "first"
    return (
        f"{bad.model}: {' and '.join(counts)} in {many} on {ranks_phrase(bad.ranks)}; {where} in "
        f"the model's order: {bad.first}, of module {bad.module}"
    )


def _difference(difference: ReplicaDifference) -> str:
    ranks_text = " and ".join(ranks_phrase(group) for group in difference.groups)
    size = "" if difference.largest is None else f", by up to {difference.largest:.3g}"
    tensor = f"{difference.kind} {difference.name}"
    return f"{difference.model}: {tensor} differs between {ranks_text}{size}"


def _advice(name: str, first: ReplicaDifference) -> str:
    if first.is_expected:
        return f"{name}: buffers may differ; DDP sends rank 0's in the next forward"
    if first.kind == GRADIENT:
        return f"{name}: gradients differ until a backward reduces them (no_sync, or around DDP)"
    return f"{name}: %dist_sync_model makes the ranks equal; under fsdp and tp load a saved state"
