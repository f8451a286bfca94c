"""What is said of the code around a model, from records made by hand."""

from dataclasses import replace

import pytest

from nbdist.core.finding import BAD, WARN
from nbdist.hang.records import SourceLine
from nbdist.verification.losses import (
    LossTerm,
    OuterCall,
    code_finding,
    share_findings,
    weight_finding,
)

BOTH = [(0, 1)]
MEAN = LossTerm("NllLossBackward0", weight=1.0, count=64.0)


def test_labels_that_weigh_more_on_a_rank_are_found() -> None:
    """Whose mean is over fewer of them; not where the weights make up for it."""
    few = replace(MEAN, count=16.0)
    balanced = replace(few, weight=0.25)

    (finding,) = share_findings([[MEAN], [few]], BOTH)
    assert finding.found == "an element of the loss weighs 0.0156 on rank 0, 0.0625 on rank 1"
    assert finding.verdict == BAD
    assert list(share_findings([[MEAN], [balanced]], BOTH)) == []
    assert list(share_findings([[MEAN], [few]], [(0,), (1,)])) == []


def test_a_loss_of_no_label_at_all_is_no_share() -> None:
    """0 divided by 0 is no weight."""
    assert len(list(share_findings([[MEAN], [replace(MEAN, count=0.0)]], BOTH))) == 1


@pytest.mark.parametrize(
    ("weights", "divisions", "verdict"),
    [
        ((0.5, 0.5), 1, None),
        ((1.0, 1.0), 0, BAD),
        ((0.25, 0.25), 2, BAD),
        ((0.25, 0.25), 1, WARN),
        ((1.0,), 0, None),
    ],
)
def test_losses_of_two_accumulated_steps_weigh_1_together(
    weights: tuple[float, ...], divisions: int, verdict: str | None
) -> None:
    """A factor of the user's own is a warning; another number of backwards is not judged."""
    terms = [
        replace(MEAN, weight=weight, divisions=divisions, backward=number)
        for number, weight in enumerate(weights)
    ]
    next_step = [replace(term, step=1) for term in terms]

    finding = weight_finding([*terms, *next_step], accumulate=2)
    assert (finding and finding.verdict) == verdict


def test_code_that_some_ranks_run_alone_is_named() -> None:
    """With its line; where only the numbers differ, with these."""
    line = SourceLine(3, "", 7, "y = y.roll(1)")
    shift = OuterCall.at("__setitem__", (), line)
    add = [frozenset({OuterCall.at("add", (number,), None)}) for number in (0, 1)]

    finding = code_finding([frozenset(), frozenset({shift})], BOTH)
    assert finding is not None
    assert finding.found == (
        "rank 1 alone calls an assignment to elements, on what goes into the model or the loss: "
        "line 7 of cell [3]: y = y.roll(1)"
    )
    assert finding.ranks == (1,)
    finding = code_finding(add, BOTH)
    assert finding is not None
    assert finding.found.startswith("add is called with 0 on rank 0, 1 on rank 1, on what")
    assert code_finding([add[0], add[0]], BOTH) is None
