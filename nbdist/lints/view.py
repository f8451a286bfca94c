"""What `%dist_check` shows: a table of models, then what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbdist.core.failures import ranks_phrase
from nbdist.core.view import View, table
from nbdist.lints.replicas import GRADIENT, KINDS, Counted, Difference, NotFinite, ReplicaCheck

# Tensors that are named of each kind; more are counted.
SHOWN = 5


def checkup(found: ReplicaCheck) -> View:
    """All models, one row each; below it each difference and what is not finite."""
    if not found.models:
        return View("no model is on the ranks")
    rows = [[one.name, one.strategy, *(_cell(one, kind) for kind in KINDS)] for one in found.models]
    after = [line for one in found.models for line in _lines(found, one)]
    view = table(
        ["model", "under", *(f"{kind}s" for kind in KINDS)],
        rows,
        before=[_verdict(found)],
        after=after,
    )
    return View(view.text, view.html, is_bad=not found.is_healthy)


def lints(states: Sequence[tuple[str, str, str]]) -> View:
    """All lints, with whether they are told and when."""
    rows = [list(one) for one in states]
    after = ["%dist_check --silence NAME: no more of it; --tell NAME: again (all: all of them)"]
    return table(["lint", "state", "told when"], rows, after=after)


def _verdict(found: ReplicaCheck) -> str:
    who = f"{len(found.ranks)} rank{'s' if len(found.ranks) > 1 else ''}"
    if found.is_healthy:
        return f"healthy: on {who} everything is finite, and equal where it should be"
    wrong = [
        "something is not finite" if found.not_finite else "",
        "ranks differ" if any(not one.is_expected for one in found.differences) else "",
    ]
    return f"NOT healthy on {who}: {' and '.join(filter(None, wrong))}"


def _cell(one: Counted, kind: str) -> str:
    count, compared = one.tensors[kind], one.compared[kind]
    if not count:
        return "-"
    return f"{count}, {compared} compared"


def _lines(found: ReplicaCheck, model: Counted) -> Iterator[str]:
    for bad in found.not_finite:
        if bad.model == model.name:
            yield _not_finite(bad)
    for kind in KINDS:
        own = [d for d in found.differences if (d.model, d.kind) == (model.name, kind)]
        yield from (_difference(one) for one in own[:SHOWN])
        if len(own) > SHOWN:
            yield f"{model.name}: {len(own) - SHOWN} more {kind}s differ"
        if own:
            yield _advice(model.name, own[0])
    yield from (f"{model.name}: {note}" for note in model.notes)


def _not_finite(one: NotFinite) -> str:
    counts = [
        f"{count} {what}" for count, what in ((one.n_nan, "NaN"), (one.n_inf, "inf")) if count
    ]
    many = f"{len(one.names)} {one.kind}{'s' if len(one.names) > 1 else ''}"
    where = "last" if one.kind == GRADIENT else "first"
    return (
        f"{one.model}: {' and '.join(counts)} in {many} on {ranks_phrase(one.ranks)}; {where} in "
        f"the model's order: {one.first}, of module {one.module}"
    )


def _difference(one: Difference) -> str:
    who = " and ".join(ranks_phrase(group) for group in one.groups)
    size = "" if one.largest is None else f", by up to {one.largest:.3g}"
    return f"{one.model}: {one.kind} {one.name} differs between {who}{size}"


def _advice(name: str, first: Difference) -> str:
    if first.is_expected:
        return f"{name}: buffers of each rank's own are usual; DDP sends rank 0's in a forward"
    if first.kind == GRADIENT:
        return (
            f"{name}: gradients differ until a backward has reduced them (no_sync, or beside DDP)"
        )
    return f"{name}: %dist_sync_model makes the ranks equal; a saved state does under fsdp and tp"
