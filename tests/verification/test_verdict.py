"""What a difference looks like, rule by rule, from rows made by hand."""

from dataclasses import replace
from typing import Any

import pytest

from nbdist.core.finding import BAD, Finding
from nbdist.strategy.choice import Degrees
from nbdist.verification.differences import (
    GRADIENT,
    INPUT,
    OUTPUT,
    PARAMETER,
    Addition,
    Difference,
    Row,
    TensorKey,
)
from nbdist.verification.draws import DrawProblem
from nbdist.verification.optimizers import Settings, StateApart
from nbdist.verification.verdict import (
    AxisEvidence,
    ModuleLine,
    StepFacts,
    Verification,
    conclude,
    kind_of,
)

LR_BY_RANK: tuple[Settings, ...] = (((("lr", (0.1,)),),), ((("lr", (0.2,)),),))
DP, TP = Degrees(dp_replicate=2), Degrees(tp=2)


def row(
    what: str = OUTPUT, name: str = "layer", *, factor: float = 1.0, left: float = 1.0,
    outside: tuple[int, ...] = (0, 1),
) -> Row:  # fmt: skip
    """Off by 1 where 0.01 is allowed, on these of two ranks."""
    worst = Difference(TensorKey(what, name), error=1.0, size=10.0, factor=factor, left=left)
    errors = {rank: 100.0 if rank in outside else 0.1 for rank in range(2)}
    return Row(worst.key, 0, 0.01, worst, outside, errors)


def verification(first: Row | None, degrees: Degrees = DP, **more: Any) -> Verification:
    rows = () if first is None else (first,)
    return Verification("a strategy", "single", rows, first, 1e-7, degrees, **more)


def kind(first: Row, facts: StepFacts | None = None, degrees: Degrees = DP, **more: Any) -> str:
    return kind_of(verification(first, degrees, **more), first, facts or StepFacts())


def evidence(
    axis: str, *, sum_error: float = 9.0, mean_error: float = 9.0, are_equal: bool = False
) -> StepFacts:
    of_rank = (AxisEvidence(axis, 2, sum_error, mean_error, are_equal),)
    return StepFacts(evidence=(of_rank, of_rank))


def test_other_inputs_come_before_all_else() -> None:
    """A step with another batch explains every other number."""
    facts = replace(evidence("tp", sum_error=0.0), are_other_inputs=True, varying="layer")

    assert kind(row(), facts).startswith("other inputs: the step gave the model another batch")


def test_what_is_not_the_same_twice_is_named() -> None:
    """By its module, or as the model itself."""
    assert kind(row(), StepFacts(varying="noise")).endswith("from noise on")
    assert kind(row(), StepFacts(varying="")).endswith("from the model itself on")


def test_parameters_that_were_trained_apart_are_named() -> None:
    """Those of the module where it begins, and the ranks that had other values."""
    facts = StepFacts(apart=((), ("layer.bias", "other.weight")))

    text = kind(row(), facts)
    assert text.startswith("trained apart: before the step, layer.bias had other values on rank 1 ")
    assert "other.weight" in kind(row(name="third"), facts)


@pytest.mark.parametrize("axis", ["tp", "cp", "dp"])
def test_a_sum_that_is_right_is_a_missing_reduction(axis: str) -> None:
    """Along the axis that has it."""
    text = kind(row(), evidence(axis, sum_error=0.001), Degrees(tp=2, cp=2, dp_shard=2))

    assert text.startswith(f"a missing reduction: the sum over the 2 ranks of {axis} is right")


def test_a_mean_that_is_right_is_not_averaged() -> None:
    """Of gradients and values after a step only; of activations a mean means nothing."""
    facts = evidence("dp", mean_error=0.001)

    assert kind(row(GRADIENT), facts).startswith("not averaged: each rank has its own")
    assert kind(row(PARAMETER), facts).startswith("not averaged")
    assert "not averaged" not in kind(row(), facts)


def test_ranks_that_have_the_same_have_not_missed_a_reduction() -> None:
    """Equal parts are not summands, however near their sum is."""
    text = kind(row(GRADIENT), evidence("dp", sum_error=0.0, mean_error=0.0, are_equal=True))

    assert text == "none of the kinds that verify can tell by numbers"


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (2.0, "2 times what it should be, and the degree of tp is 2: a reduction too many"),
        (0.5, "0.5 times what it should be, and the degree of tp is 2: divided once too often"),
        (4.0, "4 times what it should be, and the degree of tp is 2: two reductions too many"),
        (0.25, "0.25 times what it should be, and the degree of tp is 2: divided twice too often"),
        (1.7, "1.7 times what it should be, alike in all elements"),
    ],
)
def test_what_is_scaled_is_compared_with_the_degrees(factor: float, words: str) -> None:
    """Powers of a degree are told apart from any other number."""
    assert words in kind(row(factor=factor, left=0.001), degrees=TP)


def test_accumulated_steps_come_before_a_degree() -> None:
    """Two steps on two ranks: the steps are what a user has written."""
    text = kind(row(factor=2.0, left=0.001), degrees=TP, accumulate=2)

    assert "the number of accumulated steps is 2: the gradients of a step are added up" in text


def test_what_is_not_alike_in_all_elements_is_not_scaled() -> None:
    """So much is left when the factor is taken out."""
    assert "scaled" not in kind(row(factor=2.0, left=0.5), degrees=TP)


def test_ranks_that_are_right_are_named() -> None:
    """The others depend on their rank."""
    text = kind(row(outside=(1,)), degrees=TP)

    assert text.startswith("on some ranks only: rank 0 is right")


def test_a_loss_that_alone_is_wrong_has_wrong_shares() -> None:
    """The model's own output, where there is data parallelism; elsewhere it is no share."""
    assert kind(row(name="")).startswith("wrong batch shares")
    assert "shares" not in kind(row(name=""), degrees=TP)


def test_an_output_under_pure_data_parallelism_has_statistics_of_a_share() -> None:
    """What goes in is right, so it looks at other samples; with tp it may be something else."""
    assert kind(row()).startswith("statistics of a share")
    assert kind(row(INPUT)).startswith("statistics of a share")
    assert "statistics" not in kind(row(), degrees=Degrees(dp_shard=2, tp=2))


def test_a_number_that_explains_a_gradient_is_what_was_added() -> None:
    """Where nothing is left of the difference without it; before what depends on the rank."""
    added = Addition(0.05, "for each element", left=0.001)
    gradient = row(GRADIENT, outside=(1,))
    explained = replace(gradient, worst=replace(gradient.worst, addition=added))

    assert kind(explained).startswith("something added: 0.05 for each element")
    left = replace(explained.worst, addition=replace(added, left=0.5))
    assert kind(replace(explained, worst=left)).startswith("on some ranks only")


def test_gradients_that_are_all_changed_without_a_factor_have_something_added() -> None:
    """One alone may be another mistake."""
    gradients = (row(GRADIENT, "a.weight"), row(GRADIENT, "b.weight"))
    whole = replace(verification(gradients[0]), rows=gradients)

    assert kind_of(whole, gradients[0], StepFacts()).startswith(
        "something added: forward and backward"
    )
    assert "added" not in kind(gradients[0])


def test_values_after_a_step_are_explained_by_the_optimizer() -> None:
    """By its settings and by what it remembers, where these are not the same on all ranks."""
    states = (StateApart("layer.weight", "exp_avg", (1,)),)
    facts = StepFacts(settings=LR_BY_RANK, states=states)

    assert kind(row(PARAMETER, outside=(1,)), facts) == (
        "other numbers of the optimizer: gradients are right, and lr is 0.1 on rank 0, 0.2 on "
        "rank 1; exp_avg of layer.weight had other values on rank 1 before the step"
    )
    assert "optimizer" not in kind(row(GRADIENT, outside=(1,)), facts)


def test_gradients_that_are_all_outside_are_of_no_module() -> None:
    """One that is outside alone keeps its place."""
    gradients = (row(GRADIENT, "a.weight"), row(GRADIENT, "b.weight"))
    right = replace(gradients[1], outside=())
    place = ModuleLine("a")

    concluded = conclude(
        replace(verification(gradients[0], place=place), rows=gradients), StepFacts()
    )
    assert concluded.place.module == ""
    assert "all 2 gradients are outside" in concluded.kind
    concluded = conclude(
        replace(verification(gradients[0], place=place), rows=(gradients[0], right)), StepFacts()
    )
    assert concluded.place.module == "a"


@pytest.mark.parametrize(
    ("facts", "name", "is_right"),
    [
        (StepFacts(is_same_batch=True), "same batch", True),
        (StepFacts(varying="noise"), "not the same twice", False),
        (StepFacts(are_other_inputs=True), "other inputs", False),
        (StepFacts(outer=(Finding("code by rank", "rank 1 alone calls roll", BAD),)),
         "code by rank", False),
        (StepFacts(settings=LR_BY_RANK), "optimizer by rank", False),
        (StepFacts(draws=(DrawProblem("drop", "tp", (0, 1), is_equal=False),)),
         "random numbers", False),
        (StepFacts(draws=(DrawProblem("", "dp_shard", (0, 1), is_equal=True),)),
         "random numbers", False),
    ],
)  # fmt: skip
def test_what_is_wrong_though_nothing_differs_is_a_finding(
    facts: StepFacts, name: str, is_right: bool
) -> None:
    """A warning leaves a step right, anything worse does not."""
    concluded = conclude(verification(None), facts)

    assert [finding.name for finding in concluded.findings] == [name]
    assert concluded.is_right == is_right


def test_settings_that_agree_are_no_finding() -> None:
    """They are the same on all ranks."""
    facts = StepFacts(settings=LR_BY_RANK[:1] * 2)

    assert conclude(verification(None), facts).findings == ()
