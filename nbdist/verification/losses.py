"""Whether the code around a model treats the batches of all ranks alike: losses, and data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nbdist.core.finding import BAD, WARN, Finding
from nbdist.core.ranks import rank_label
from nbdist.hang.records import SourceLine
from nbdist.hang.text import place_text

# Two weights that are nearer to each other, as a share, are taken for equal.
_NEAR = 0.02
_MOST_SHOWN = 4
_WORDS = {"__getitem__": "an index", "__setitem__": "an assignment to elements"}


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A mean or a sum to one number, or a model's own loss, on the way of a backward.

    Attributes:
        kind: autograd's name of it.
        weight: Its factor in the loss: the gradient that it gets.
        count: By what it divides its sum, as the number of labels; 1 for a sum.
        is_outer: There is no other term between it and the loss.
        divisions: How often it is divided by the number of accumulated steps on the way.
        step: How often an optimizer had stepped before.
        backward: Number of the backward within the step.
    """

    kind: str
    weight: float
    count: float = 1.0
    is_outer: bool = True
    divisions: int = 0
    step: int = 0
    backward: int = 0

    @property
    def element_weight(self) -> float:
        """Weight of one of its elements in the loss."""
        return self.weight / self.count if self.count else math.inf


@dataclass(frozen=True, slots=True, order=True)
class OuterCall:
    """A function of torch that computes what goes into a model or a loss, outside of the model.

    Attributes:
        name: Of the function.
        numbers: Among its arguments, where it changes data.
        place: The user's line, as text; empty where it is in a library.
    """

    name: str
    numbers: tuple[float, ...]
    place: str

    @property
    def shown_numbers(self) -> str:
        """The numbers as text."""
        return " and ".join(f"{number:g}" for number in self.numbers) or "no number"

    @staticmethod
    def at(name: str, numbers: Sequence[float], line: SourceLine | None) -> OuterCall:
        """One on a line of the user's code."""
        return OuterCall(name, tuple(map(float, numbers)), place_text(line))


def share_findings(
    terms: Sequence[Sequence[LossTerm]], peers: Iterable[Sequence[int]]
) -> Iterator[Finding]:
    """Losses whose elements weigh more on some data-parallel ranks than on others.

    Args:
        terms: Of the ranks, in order.
        peers: The ranks whose batches make up a whole one.
    """
    for ranks in peers:
        kinds = {tuple(term.kind for term in terms[rank]) for rank in ranks}
        if len(kinds) != 1:  # they compute other losses, which is no matter of weights
            continue
        for same_term in zip(*(terms[rank] for rank in ranks), strict=True):
            weights = [term.element_weight for term in same_term]
            if not all(math.isclose(w, weights[0], rel_tol=_NEAR) for w in weights):
                shown = ", ".join(
                    f"{weight:.3g} on rank {rank}"
                    for rank, weight in itertools.islice(zip(ranks, weights, strict=True),
                                                         _MOST_SHOWN)
                )  # fmt: skip
                yield Finding(
                    "wrong batch shares", f"an element of the loss weighs {shown}", BAD,
                    "the mean of the ranks' losses is not the loss of the whole batch: ranks count "
                    "different numbers of samples or labels, or weigh their losses by rank",
                    "divide the sum of a rank's losses by the mean number of labels per rank: "
                    "accelerator.reduce(count, 'mean')",
                    tuple(ranks),
                )  # fmt: skip
                return


def weight_finding(terms: Sequence[LossTerm], accumulate: int) -> Finding | None:
    """Report weights of an accumulated step's losses that do not add up to 1; None if they do.

    Only each backward's first outer term is counted. Nothing is reported about sums, which have no
    weight to judge, or if the optimizer steps after another number of backwards.
    """
    firsts: dict[tuple[int, int], LossTerm] = {}
    for term in terms:
        if term.is_outer:
            firsts.setdefault((term.step, term.backward), term)
    in_step = [term for (step, _), term in firsts.items() if step == 0]
    if accumulate == 1 or len(in_step) != accumulate or any(_is_sum(term) for term in in_step):
        return None
    weight = sum(term.weight for term in in_step)
    if abs(weight - 1) <= _NEAR:
        return None
    is_sure = abs(weight / accumulate - 1) <= _NEAR or all(t.divisions > 1 for t in in_step)
    return Finding(
        "weight of the loss", f"the losses of a step weigh {weight:.4g} together",
        BAD if is_sure else WARN,
        "the gradient of a step is that of the mean of its losses times this number",
        "divide each loss by the accumulated steps once: accelerator.backward does",
    )  # fmt: skip


def _is_sum(term: LossTerm) -> bool:
    return term.kind.startswith("Sum")


def code_finding(calls: Sequence[frozenset[OuterCall]], peers: Iterable[Sequence[int]]
                 ) -> Finding | None:  # fmt: skip
    """Report data-parallel ranks that change data or losses by other code; None without any.

    Args:
        calls: The calls that each rank made, in rank order.
        peers: The ranks whose batches make up a whole one.
    """
    for ranks in peers:
        common = frozenset.intersection(*(calls[rank] for rank in ranks))
        odd = {rank: calls[rank] - common for rank in ranks if calls[rank] - common}
        if odd:
            return _code_finding(odd, len(ranks))
    return None


def _code_finding(odd: dict[int, frozenset[OuterCall]], n_peers: int) -> Finding:
    first = min(min(of_rank) for of_rank in odd.values())
    same = {
        rank: call
        for rank, of_rank in odd.items()
        for call in of_rank
        if (call.name, call.place) == (first.name, first.place)
    }
    name = _WORDS.get(first.name, first.name)
    if len(same) == n_peers:  # the function is the same, and the numbers are not
        values = (f"{call.shown_numbers} on rank {rank}" for rank, call in same.items())
        difference = f"{name} is called with {', '.join(itertools.islice(values, _MOST_SHOWN))}"
    else:
        difference = f"rank {rank_label(list(same))} alone calls {name}"
    where = f": {first.place}" if first.place else ""
    return Finding(
        "code by rank", f"{difference}, on what goes into the model or the loss{where}", BAD,
        "data-parallel ranks learn from data, or by a loss, that one process would not have",
        "let all ranks run the same code on their batches", tuple(same),
    )  # fmt: skip
