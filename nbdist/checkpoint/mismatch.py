"""Finds the parts of a checkpoint that do not fit the prepared models and optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.checkpoint.manifest import Checkpoint, SavedModel, SavedOptimizer, first_few
from nbdist.core.finding import BAD, WARN, Finding


def mismatches(
    saved: Checkpoint, models: Sequence[SavedModel], optimizers: Sequence[SavedOptimizer]
) -> tuple[Finding, ...]:
    """Everything that differs, each kind of difference once; empty where all fits.

    Models and optimizers are the prepared ones, in the order of their preparation.

    Returns:
        Findings that are BAD where the state cannot be taken over, WARN where it can be and
        changes on the way (a dtype that is rounded).
    """
    findings = _counts("model", saved.models, models)
    findings += _counts("optimizer", saved.optimizers, optimizers)
    for number, (old, new) in enumerate(zip(saved.models, models, strict=False)):
        findings += _model(old, new, _label(new.kind, number, len(models)))
    for number, (saved_optimizer, optimizer) in enumerate(
        zip(saved.optimizers, optimizers, strict=False)
    ):
        findings += _optimizer(
            saved_optimizer, optimizer, _label(optimizer.kind, number, len(optimizers))
        )
    return tuple(findings)


def _counts(
    what: str,
    saved: Sequence[SavedModel | SavedOptimizer],
    live: Sequence[SavedModel | SavedOptimizer],
) -> list[Finding]:
    if len(saved) == len(live):
        return []
    kinds = ", ".join(item.kind for item in saved) or "none"
    here = ", ".join(item.kind for item in live) or "none"
    return [
        Finding(
            f"{what}s",
            f"{len(saved)} in the checkpoint ({kinds}), {len(live)} here ({here})",
            BAD,
            "they are matched by their order",
            f"prepare as many {what}s as were saved, in the same order",
        )
    ]


def _label(kind: str, number: int, count: int) -> str:
    return f"{kind} (number {number})" if count > 1 else kind


def _model(saved: SavedModel, live: SavedModel, label: str) -> list[Finding]:
    old = {tensor.name: tensor for tensor in saved.tensors}
    new = {tensor.name: tensor for tensor in live.tensors}
    # A tied tensor has been saved under one of its names, which may not be the first one here.
    for names, tied in ((old, saved.tied), (new, live.tied)):
        names.update({name: names[first] for name, first in tied.items() if first in names})
    both = [(old[tensor.name], tensor) for tensor in live.tensors if tensor.name in old]
    shapes = [_difference(b.name, a.shape, b.shape) for a, b in both if a.shape != b.shape]
    dtypes = [_difference(b.name, a.dtype, b.dtype) for a, b in both if a.dtype != b.dtype]
    missing = [tensor.name for tensor in live.tensors if tensor.name not in old]
    surplus = [tensor.name for tensor in saved.tensors if tensor.name not in new]
    rows = (
        ("shapes", shapes, BAD, "the model has different sizes",
         "create the model as it was when it was saved"),
        ("dtypes", dtypes, WARN, "values are converted, and may be rounded", ""),
        ("missing", [f"{n} is not in the checkpoint" for n in missing], BAD,
         "it would keep its current value", "create the model as it was when it was saved"),
        ("surplus", [f"{n} is only in the checkpoint" for n in surplus], BAD,
         "its value would be lost", "create the model as it was when it was saved"),
    )  # fmt: skip
    return [
        Finding(f"{label}: {name}", first_few(differences, "; "), verdict, why, what)
        for name, differences, verdict, why, what in rows
        if differences
    ]


def _difference(name: str, old: object, new: object) -> str:
    return f"{name} is {old} in the checkpoint and {new} here"


def _optimizer(saved: SavedOptimizer, live: SavedOptimizer, label: str) -> list[Finding]:
    findings = []
    if saved.kind != live.kind:
        states = ", ".join(saved.states) or "none"
        findings.append(
            Finding(
                f"{label}: class",
                f"{saved.kind} in the checkpoint, {live.kind} here",
                BAD,
                f"{live.kind} cannot use the state of {saved.kind}: {states}",
                f"prepare {'an' if saved.kind[:1] in 'AEIOU' else 'a'} {saved.kind}",
            )
        )
    sizes, here = [len(group) for group in saved.names], [len(group) for group in live.names]
    before, now = set().union(*saved.names), set().union(*live.names)
    odd = [f"{n} is not in the checkpoint" for n in sorted(now - before)]
    odd += [f"{n} is only in the checkpoint" for n in sorted(before - now)]
    if not odd and sizes != here:
        odd = [f"groups of {sizes} parameters in the checkpoint, of {here} here"]
    if odd:
        findings.append(
            Finding(
                f"{label}: parameters", first_few(odd, "; "), BAD,
                "it would update other parameters",
                "create the optimizer with the same parameters, in the same groups",
            )
        )  # fmt: skip
    return findings
