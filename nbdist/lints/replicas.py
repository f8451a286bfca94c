"""Are models equal where ranks hold the same, and finite: what each rank says, as one record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nbdist.core.ranks import rank_label
from nbdist.lints.gradients_apart import sentence
from nbdist.lints.lint import group, versus

PARAMETER, BUFFER, GRADIENT = "parameter", "buffer", "gradient"
KINDS = (PARAMETER, BUFFER, GRADIENT)
# Of how many tensors that differ the largest difference is measured, and named.
MEASURED = 3


@dataclass(frozen=True, slots=True)
class Look:
    """One tensor as one rank has it; where it is split, its own part.

    Attributes:
        kind: Of KINDS.
        name: In the model.
        part: Equal for ranks that should hold the same; empty where nothing is to be compared.
        digest: Of all bits; equal for equal tensors.
        n_nan, n_inf: How many of them are not finite.
    """

    kind: str
    name: str
    part: str
    digest: int
    count: int
    n_nan: int = 0
    n_inf: int = 0


@dataclass(frozen=True, slots=True)
class UnreducedStep:
    """A step with gradients that DDP had not reduced, as one rank saw it.

    Attributes:
        idiom: Of lints.gradients_apart.
        place: The user's line; empty where it is not known.
        digest: Of the gradients; equal where ranks have reduced them in another way.
    """

    idiom: str
    place: str
    digest: str


@dataclass(frozen=True, slots=True)
class ModelLook:
    """One model as one rank has it.

    Attributes:
        name: Of its variable, or its class.
        looks: In the model's order.
        notes: What was not compared, and why, a sentence each.
        unreduced: Of the last cell that trained it; None where all gradients were reduced.
    """

    name: str
    strategy: str
    looks: tuple[Look, ...]
    notes: tuple[str, ...] = ()
    unreduced: UnreducedStep | None = None


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """A tensor that is not the same on all ranks that should hold the same.

    Attributes:
        groups: The ranks, those that agree together.
        count: Elements; those of the part that was compared.
        largest: The largest difference of an element between two of the ranks; None where it was
            not measured: beyond the first MEASURED, or a rank has none.
    """

    model: str
    kind: str
    name: str
    groups: tuple[tuple[int, ...], ...]
    count: int
    largest: float | None = None

    @property
    def is_expected(self) -> bool:
        """Buffers such as running means: DDP sends rank 0's at the next forward."""
        return self.kind == BUFFER


@dataclass(frozen=True, slots=True)
class NotFinite:
    """NaN or inf in one kind of a model's tensors.

    Attributes:
        names: The tensors, in the model's order.
        n_nan, n_inf: Elements, over those ranks.
    """

    model: str
    kind: str
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    n_nan: int
    n_inf: int

    @property
    def first(self) -> str:
        """The tensor where to look first, in the order in which the model has them.

        Of gradients that is the last one: a backward goes from the loss and hands NaN on to all
        that comes before.
        """
        return self.names[-1 if self.kind == GRADIENT else 0]

    @property
    def module(self) -> str:
        """The module that holds it."""
        return self.first.rpartition(".")[0] or "(the model itself)"


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """One model: what was looked at.

    Attributes:
        tensors: Kind -> how many different tensors on any rank.
        compared: Kind -> how many of them two ranks or more hold alike.
        notes: What was not compared, with its ranks.
        unreduced: A sentence on a step with gradients that DDP had not reduced; mostly empty.
    """

    name: str
    strategy: str
    tensors: Mapping[str, int]
    compared: Mapping[str, int]
    notes: tuple[str, ...] = ()
    unreduced: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """The result of a check of all ranks.

    Attributes:
        ranks: That were asked.
        differences, not_finite: In the models' order.
    """

    ranks: tuple[int, ...]
    models: tuple[CheckedModel, ...]
    differences: tuple[ReplicaDifference, ...] = ()
    not_finite: tuple[NotFinite, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Everything is finite and equal where it should be, and DDP reduced all that was used."""
        return (
            not self.not_finite
            and all(difference.is_expected for difference in self.differences)
            and not any(model.unreduced for model in self.models)
        )

    @property
    def to_measure(self) -> tuple[ReplicaDifference, ...]:
        """The finite differences whose size is worth knowing: the first of each kind and model."""
        not_finite = {(bad.model, bad.kind, name) for bad in self.not_finite for name in bad.names}
        chosen: list[ReplicaDifference] = []
        for difference in self.differences:
            subject = difference.model, difference.kind
            n_same = sum((other.model, other.kind) == subject for other in chosen)
            is_finite = (*subject, difference.name) not in not_finite
            if n_same < MEASURED and difference.count and is_finite:
                chosen.append(difference)
        return tuple(chosen)

    def measured(self, sizes: Mapping[ReplicaDifference, float | None]) -> ReplicaCheck:
        """The same with sizes of differences."""
        sized = (replace(each, largest=sizes.get(each)) for each in self.differences)
        return replace(self, differences=tuple(sized))


def compare(models_of: Mapping[int, Sequence[ModelLook]]) -> ReplicaCheck:
    """All ranks' looks at their models as one."""
    names = dict.fromkeys(look.name for looks in models_of.values() for look in looks)
    models, differences, not_finite = [], [], []
    for name in names:
        on_ranks = {
            rank: look for rank, looks in models_of.items() for look in looks if look.name == name
        }
        models.append(_count(name, on_ranks, models_of))
        differences += _differences(name, on_ranks)
        not_finite += _not_finite(name, on_ranks)
    return ReplicaCheck(
        tuple(sorted(models_of)), tuple(models), tuple(differences), tuple(not_finite)
    )


def _count(name: str, on_ranks: Mapping[int, ModelLook], all_ranks: Iterable[int]) -> CheckedModel:
    tensors: dict[str, set[str]] = {kind: set() for kind in KINDS}
    compared: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for (kind, tensor, _), ranks in _holders(on_ranks).items():
        tensors[kind].add(tensor)
        if len(ranks) > 1:
            compared[kind].add(tensor)
    for model in on_ranks.values():
        for look in model.looks:
            tensors[look.kind].add(look.name)
    notes: dict[str, list[int]] = {}
    for rank, model in on_ranks.items():
        for note in model.notes:
            notes.setdefault(note, []).append(rank)
    without = [rank for rank in all_ranks if rank not in on_ranks]
    if without:
        notes["no model of this name"] = without
    return CheckedModel(
        name,
        next(iter(on_ranks.values())).strategy,
        {kind: len(names) for kind, names in tensors.items()},
        {kind: len(names) for kind, names in compared.items()},
        tuple(f"[{rank_label(ranks)}] {note}" for note, ranks in notes.items()),
        _unreduced(name, on_ranks),
    )


def _unreduced(name: str, on_ranks: Mapping[int, ModelLook]) -> str:
    """A sentence, where the ranks' gradients at such a step differed."""
    steps = {rank: look.unreduced for rank, look in on_ranks.items() if look.unreduced is not None}
    by_digest = group({rank: step.digest for rank, step in steps.items()})
    if len(by_digest) < 2:
        return ""
    first = next(iter(steps.values()))
    return sentence(name, versus(by_digest.values()), first.idiom, first.place)


def _holders(on_ranks: Mapping[int, ModelLook]) -> dict[tuple[str, str, str], dict[int, Look]]:
    """(kind, name, part) -> rank -> look, of what is to be compared; in the model's order."""
    holders: dict[tuple[str, str, str], dict[int, Look]] = {}
    for rank, model in sorted(on_ranks.items()):
        for look in model.looks:
            if look.part:
                holders.setdefault((look.kind, look.name, look.part), {})[rank] = look
    order = {kind: place for place, kind in enumerate(KINDS)}
    return dict(sorted(holders.items(), key=lambda item: order[item[0][0]]))


def _differences(name: str, on_ranks: Mapping[int, ModelLook]) -> list[ReplicaDifference]:
    differences = []
    for (kind, tensor, _), looks in _holders(on_ranks).items():
        groups: dict[tuple[int, int], list[int]] = {}
        for rank, look in looks.items():
            groups.setdefault((look.digest, look.count), []).append(rank)
        if len(groups) > 1:
            counts = {count for _, count in groups}
            size = counts.pop() if len(counts) == 1 else 0
            differences.append(
                ReplicaDifference(name, kind, tensor, tuple(map(tuple, groups.values())), size)
            )
    return differences


def _not_finite(name: str, on_ranks: Mapping[int, ModelLook]) -> list[NotFinite]:
    entries = []
    for kind in KINDS:
        bad_looks = {
            rank: [look for look in model.looks if look.kind == kind and look.n_nan + look.n_inf]
            for rank, model in on_ranks.items()
        }
        ranks = tuple(rank for rank, looks in sorted(bad_looks.items()) if looks)
        if not ranks:
            continue
        everything = [look for rank in ranks for look in bad_looks[rank]]
        bad_names = {look.name for look in everything}
        order = [look.name for model in on_ranks.values() for look in model.looks]
        names = tuple(dict.fromkeys(tensor for tensor in order if tensor in bad_names))
        n_nan = sum(look.n_nan for look in everything)
        n_inf = sum(look.n_inf for look in everything)
        entries.append(NotFinite(name, kind, ranks, names, n_nan, n_inf))
    return entries
