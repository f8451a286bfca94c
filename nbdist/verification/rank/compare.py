"""Comparison of this rank's tensors with the same parts of the reference's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nbdist.parallel.base.consensus import all_gather_object, rank
from nbdist.parallel.base.tensors import digest
from nbdist.parallel.live import build
from nbdist.parallel.live.prepared import Prepared
from nbdist.verification.differences import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    GRADIENTS,
    PARAMETER,
    PHASES,
    Addition,
    Difference,
    TensorKey,
)
from nbdist.verification.rank.capture import PARTIAL, ROOT, Captured
from nbdist.verification.rank.pieces import RankShare, pieces
from nbdist.verification.rank.sorted_rows import Rows, matches
from nbdist.verification.verdict import AxisEvidence

# Word of an axis -> its names in the mesh.
AXES = {"dp": ("dp_replicate", "dp_shard"), "cp": ("cp",), "tp": ("tp",)}
_NEVER = "it did not run in the reference, or not as often"
_NOT_HERE = "it did not run under the strategy"
_NO_LAYOUT = "its shapes {here} and {whole} fit no layout of the strategy"
_UNKNOWN = "it is unknown on this stage"


@dataclass(slots=True)
class StepRun:
    """One step of one model: what its modules computed, and the parameters before and after.

    Attributes:
        before, after: This rank's parts, by first name; of a reference whole tensors.
    """

    captured: Captured
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes on the host."""
        captured = self.captured
        tables = (captured.gradients, self.before, self.after)
        tensors = [t for pieces in captured.values.values() for t in pieces]
        return sum(t.nbytes for t in (*tensors, *(t for table in tables for t in table.values())))


def compute_as_rank_0(run: StepRun) -> None:
    """Put rank 0's values in place of others that this rank's process has computed. Collective.

    Every rank. The reference is one process: code that asks for its rank gets one answer there.
    """
    captured = run.captured
    tables: tuple[dict[Any, Any], ...] = (captured.values, captured.gradients, run.after)
    digests = {
        (number, key): digest(value if isinstance(value, list) else [value])
        for number, table in enumerate(tables)
        for key, value in table.items()
    }
    of_ranks = all_gather_object(digests)
    differing = [k for k, mine in of_ranks[0].items() if any(r.get(k) != mine for r in of_ranks)]
    is_first = rank() == 0
    values = {(n, key): tables[n][key] for n, key in differing} if is_first else {}
    values, captured.order = all_gather_object((values, captured.order if is_first else {}))[0]
    for number, key in digests.keys() - of_ranks[0].keys():
        del tables[number][key]
    for (number, key), value in values.items():
        tables[number][key] = value


@dataclass(slots=True)
class Sides:
    """A model's step under the strategy, the reference's, and the one with moved inputs.

    Attributes:
        weight: By what a gradient of an activation is divided: ranks whose losses are averaged
            each compute the gradient of their own.
        prefix: Before names of modules, where there are several models.
    """

    model: Prepared
    here: StepRun
    reference: StepRun
    moved: StepRun
    share: RankShare
    weight: float
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Triple:
    """A tensor of this rank, and the same part of both references."""

    here: torch.Tensor
    reference: torch.Tensor
    moved: torch.Tensor

    def difference(self, key: TensorKey, order: int) -> Difference:
        """Compare the two in double precision."""
        here, reference, moved = (t.double() for t in (self.here, self.reference, self.moved))
        square = float((reference * reference).sum())
        factor = float((here * reference).sum()) / square if square else 1.0
        return Difference(
            key, order, error=rms(here - reference), moved=rms(moved - reference),
            size=rms(reference), factor=factor, left=rms(here - factor * reference),
        )  # fmt: skip


def rms(value: torch.Tensor) -> float:
    """The root of the mean square; nan where a value is not finite."""
    return float(value.double().norm()) / math.sqrt(max(1, value.numel()))


def differences(sides: Sides) -> tuple[Difference, ...]:
    """Every tensor of this rank beside the reference's. Collective: every rank."""
    return (*_of_modules(sides), *_of_parameters(sides))


def _of_modules(sides: Sides) -> Iterator[Difference]:
    here, reference = sides.here.captured, sides.reference.captured
    averaged = _averaged(sides)
    for key in reference.values.keys() - here.values.keys():
        why = PARTIAL if key in here.partial else _NOT_HERE
        yield Difference(key, reference.order[key], problem=why)
    all_parts: dict[TensorKey, Triple | str] = {}
    n_calls = [calls_of(captured) for captured in (here, reference, sides.moved.captured)]
    for key in here.values:
        is_everywhere = key in reference.values and key in sides.moved.captured.values
        if is_everywhere and len({calls[key.name] for calls in n_calls}) == 1:
            all_parts[key] = triple_of(sides, key, averaged)
        else:
            yield Difference(key, problem=_NEVER)
    for key, parts in (all_parts | _of_sorted_rows(sides, all_parts)).items():
        if isinstance(parts, str):
            yield Difference(key, reference.order[key], problem=parts)
        else:
            yield parts.difference(key, reference.order[key])


def calls_of(captured: Captured) -> Counter[str]:
    """How often each module was called."""
    calls: Counter[str] = Counter()
    for key in captured.values:
        calls[key.name] = max(calls[key.name], key.call + 1)
    return calls


def _of_sorted_rows(
    sides: Sides, all_parts: Mapping[TensorKey, Triple | str]
) -> dict[TensorKey, Triple]:
    """Tensors whose rows the model sorts, beside the rows of the reference. Collective."""
    degrees = sides.share.degrees
    if degrees.dp == 1:
        return {}
    references = {key: value_of(sides.reference.captured, key) for key in all_parts}
    tables: dict[TensorKey, Rows] = {}
    order = sides.reference.captured.order
    for key in sorted(all_parts, key=lambda key: (PHASES.index(key.phase), order[key])):
        whole = references[key]
        here = value_of(sides.here.captured, key, tuple(whole.shape))
        is_of_rows = key.name != ROOT and here.ndim > 1 and here.shape[1:] == whole.shape[1:]
        if is_of_rows and here.numel() and here.shape[0] < whole.shape[0]:
            parts = all_parts[key]
            first, last, total = sides.share.samples
            share = range(first * len(whole) // total, last * len(whole) // total)
            tables[key] = Rows(_weighted(sides, key, here), whole, _relative(parts), share)
    rows = matches(tables, degrees.peers(rank(), *AXES["dp"]))
    moved = {key: value_of(sides.moved.captured, key) for key in rows}
    return {
        key: Triple(tables[key].here, references[key][index], moved[key][index])
        for key, index in rows.items()
        if moved[key].shape == references[key].shape
    }


def _relative(parts: Triple | str) -> float:
    if isinstance(parts, str):
        return math.inf
    size = rms(parts.reference)
    return rms(parts.here.double() - parts.reference) / size if size else 0.0


def triple_of(
    sides: Sides, key: TensorKey, averaged: Mapping[TensorKey, torch.Tensor]
) -> Triple | str:
    """A tensor of this rank and the parts of the references; or why there is no such part."""
    reference = value_of(sides.reference.captured, key)
    moved = value_of(sides.moved.captured, key)
    here = value_of(sides.here.captured, key, tuple(reference.shape))
    if here.isnan().any() and not reference.isnan().any() and sides.share.degrees.pp > 1:
        return _UNKNOWN
    here = averaged[key] if key in averaged else _weighted(sides, key, here)
    shape = tuple(here.shape)
    candidates = [
        Triple(here, part.value, moved_part.value)
        for part, moved_part in zip(
            pieces(reference, shape, sides.share), pieces(moved, shape, sides.share), strict=True
        )
    ]
    if not candidates:
        shapes = {"here": tuple(here.shape), "whole": tuple(reference.shape)}
        return _NO_LAYOUT.format(**shapes)
    return min(candidates, key=lambda each: rms(each.here.double() - each.reference))


def _weighted(sides: Sides, key: TensorKey, value: torch.Tensor) -> torch.Tensor:
    return value / sides.weight if key.phase == BACKWARD else value


def value_of(
    captured: Captured, key: TensorKey, whole: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A captured tensor, its micro-batches put together: one behind the other.

    Of what has no batch, such as a loss or positions (it is as large as `whole` by itself), the
    mean; the sum of its gradients.
    """
    parts = captured.values[key]
    if len(parts) == 1:
        return parts[0]
    if not parts[0].ndim or tuple(parts[0].shape) == whole:
        total = torch.stack(parts).sum(0)
        return total if key.phase == BACKWARD else total / len(parts)
    return torch.cat(parts)


def _averaged(sides: Sides) -> dict[TensorKey, torch.Tensor]:
    """Mean, over ranks, of values not split by data that still differ by rank. Collective.

    A loss; and the gradient of what is the same for all samples, such as positions.
    """
    degrees = sides.share.degrees
    if degrees.dp * degrees.cp == 1:
        return {}
    here, reference = sides.here.captured, sides.reference.captured
    parts: dict[TensorKey, tuple[torch.Tensor, tuple[str, ...]]] = {}
    for key in here.values.keys() & reference.values.keys():
        whole = value_of(reference, key)
        value = value_of(here, key, tuple(whole.shape))
        if value.ndim and key.phase != BACKWARD:
            continue
        split = next((piece.axes for piece in pieces(whole, tuple(value.shape), sides.share)), None)
        axes = () if split is None else tuple(sorted({"dp", "cp"} - split))
        if axes:
            parts[key] = (value, axes)
    gathered = all_gather_object(parts)
    averaged = {}
    for key, (value, axes) in parts.items():
        peers = degrees.peers(rank(), *(name for axis in axes for name in AXES[axis]))
        values = [gathered[peer].get(key, (value,))[0] for peer in peers]
        total = torch.stack(values).double().sum(0)
        averaged[key] = total / (sides.weight if key.phase == BACKWARD else len(peers))
    return averaged


def _of_parameters(sides: Sides) -> Iterator[Difference]:
    runs = (sides.here, sides.reference, sides.moved)
    tables = (
        (GRADIENT, [run.captured.gradients for run in runs]),
        (PARAMETER, [run.after for run in runs]),
    )
    for what, (here, reference, moved) in tables:
        for order, (name, value) in enumerate(reference.items()):
            key = TensorKey(what, name)
            if name not in here or name not in moved:
                continue
            parts = [part(sides, name, tensor) for tensor in (value, moved[name])]
            if parts[0] is None or parts[1] is None or parts[0].shape != here[name].shape:
                yield Difference(key, order, problem=_NO_LAYOUT.format(
                    here=tuple(here[name].shape), whole=tuple(value.shape)))  # fmt: skip
            elif value.is_floating_point():
                triple = Triple(here[name], parts[0], parts[1])
                difference = triple.difference(key, order)
                if what == GRADIENT and name in sides.here.before:
                    added = _addition(triple, sides.here.before[name])
                    difference = replace(difference, addition=added)
                yield difference


def _addition(triple: Triple, parameter: torch.Tensor) -> Addition | None:
    """Which of two numbers, if it were added, explains a gradient's difference better."""
    difference = triple.here.double() - triple.reference
    bases = {
        "for each element": torch.ones_like(difference),
        "times the parameter, as a decay of weights": parameter.double(),
    }
    additions = []
    for what, base in bases.items():
        if base.shape == difference.shape and (square := float((base * base).sum())):
            amount = float((difference * base).sum()) / square
            additions.append(Addition(amount, what, rms(difference - amount * base)))
    return min(additions, key=lambda addition: addition.left, default=None)


def part(sides: Sides, name: str, whole: torch.Tensor) -> torch.Tensor | None:
    """Part of a parameter that this rank holds; None for nothing."""
    return build.part_of(whole, sides.model.layouts[name], sides.model.degrees, rank())


def apart_before(sides: Sides) -> tuple[str, ...]:
    """Parameters of which this rank had other values before the step than the others."""
    names = []
    for name, value in sides.reference.before.items():
        value_here = sides.here.before.get(name)
        expected = None if value_here is None else part(sides, name, value)
        if value_here is None or expected is None:
            continue
        if not torch.equal(value_here, expected):
            names.append(name)
    return tuple(names)


def evidence(sides: Sides, key: TensorKey) -> tuple[AxisEvidence, ...]:
    """The sum and the mean of a tensor over the ranks of each axis. Collective: every rank."""
    here = triple(sides, key)
    gathered: Sequence[Triple | None] = all_gather_object(here)
    if here is None:
        return ()
    results = []
    for axis, names in AXES.items():
        degree = math.prod(getattr(sides.share.degrees, name) for name in names)
        triples = [gathered[peer] for peer in sides.share.degrees.peers(rank(), *names)]
        parts = [
            t.here.double() for t in triples if t is not None and t.here.shape == here.here.shape
        ]
        if degree == 1 or len(parts) < degree:
            continue
        references = [t.reference.double() for t in triples if t is not None]
        # Each rank's own part of a split tensor is no summand of the others'.
        if any(not torch.equal(whole, references[0]) for whole in references):
            continue
        total = torch.stack(parts).sum(0)
        results.append(AxisEvidence(
            axis, degree, rms(total - references[0]), rms(total / degree - references[0]),
            all(torch.equal(p, parts[0]) for p in parts),
        ))  # fmt: skip
    return tuple(results)


def triple(sides: Sides, key: TensorKey) -> Triple | None:
    """A tensor of this rank beside the references' parts of it; None where there are none."""
    if key.phase in (GRADIENTS, "parameters"):
        tables: Iterable[Mapping[str, torch.Tensor]] = [
            run.captured.gradients if key.what == GRADIENT else run.after
            for run in (sides.here, sides.reference, sides.moved)
        ]
        here, reference, moved = (table.get(key.name) for table in tables)
        if here is None or reference is None or moved is None:
            return None
        parts = [part(sides, key.name, whole) for whole in (reference, moved)]
        if parts[0] is None or parts[1] is None or parts[0].shape != here.shape:
            return None
        return Triple(here, parts[0], parts[1])
    if key not in sides.here.captured.values or key not in sides.reference.captured.values:
        return None
    parts_of = triple_of(sides, key, {})
    return None if isinstance(parts_of, str) else parts_of


def furthest(sides: Sides) -> float:
    """The largest share of its size by which moved inputs have moved a tensor of the forward."""
    reference, moved = sides.reference.captured.values, sides.moved.captured.values
    shares = [
        rms(moved[key][0].double() - value[0]) / (rms(value[0]) or 1.0)
        for key, value in reference.items()
        if key.phase == FORWARD and key in moved and moved[key][0].shape == value[0].shape
    ]
    return max(shares, default=0.0)


def varying(runs: Sequence[StepRun], again: Sequence[StepRun], limit: float) -> str | None:
    """The first module that is not the same in two runs of the reference; None where all are.

    `limit` is the share of its size by which a tensor may differ.
    """
    for run, second in zip(runs, again, strict=True):
        values, twice = run.captured.values, second.captured.values
        for key in sorted(values, key=run.captured.order.__getitem__):
            value = values[key][0]
            other = twice[key][0] if key in twice else value
            if value.shape != other.shape or not rms(other.double() - value) <= limit * rms(value):
                return key.name
    return None
