"""Plans' times beside steps that others measured: bars on what was not fitted, and the page."""

import dataclasses
import statistics
from pathlib import Path

import pytest

from nbdist.planner.block_time import Speeds
from nbdist.planner.devices import DEVICES
from nbdist.planner.memory import memory_of
from nbdist.planner.models import model_of
from nbdist.planner.plan import SAFE
from tests.accuracy import fit, published_memory, steps, time_report
from tests.accuracy.published_memory import MemoryCase
from tests.accuracy.steps import AUTOMODEL, BRIDGE, FOUNDRY, ONE_GPU, QLORA, VTRAIN, Step
from tests.accuracy.time_report import Score, Timed, order, regret, score
from tests.support import tables

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"


@pytest.fixture(scope="module", name="scores")
def _scores() -> dict[str, Score]:
    return dict(time_report.scores())


def some(*times: tuple[float, float], group: str = "a") -> list[Timed]:
    """Steps of one group that took, and were predicted to take, so long."""
    [first, *_] = steps.torchtitan()
    return [
        Timed(dataclasses.replace(first, measured_s=measured, group=(group,)), predicted)
        for measured, predicted in times
    ]


def test_scores_by_hand() -> None:
    """Errors +50, -30 and 0 %; of three pairs two are in order; the pick takes 2 instead of 1."""
    many = some((1.0, 1.5), (2.0, 1.4), (4.0, 4.0))
    result = score([*many, *some((1.0, float("nan")))])

    assert (result.count, result.refused) == (3, 1)
    assert result.mean == pytest.approx((0.5 + 0.3 + 0) / 3)
    assert result.median == pytest.approx(0.3)
    assert result.most == pytest.approx(0.3 + 0.8 * 0.2)
    assert result.bias == pytest.approx((0.5 - 0.3) / 3)
    assert result.tau == result.order == pytest.approx(1 / 3)
    assert result.regret == result.worst == 1.0


def test_ties_and_near_pairs() -> None:
    """A tie counts 0 and its regret is the mean; pairs within 5 % are in no order."""
    assert order(some((1.0, 2.0), (2.0, 2.0))) == 0
    assert regret(some((1.0, 2.0), (2.0, 2.0))) == pytest.approx(0.5)
    assert order(some((1.0, 2.0), (1.04, 1.0)), 0.05) is None
    assert order(some((1.0, 2.0), (1.06, 1.0)), 0.05) == -1


def test_half_of_the_models_at_most_are_fitted() -> None:
    """By size alone: the second, the fourth and so on."""
    assert steps.fitted_names(list(steps.vtrain())) == {"18.4B", "175B"}
    assert steps.fitted_names(list(steps.llm_foundry())) == {"350m", "1b", "7b", "30b"}


def test_bars_on_what_was_not_fitted(scores: dict[str, Score]) -> None:
    """15 % of each set, 4 % of regret, 0.8 of far pairs in order; every row is taken.

    Held out, pairs miss that bar: docs/accuracy.md says by which rows. So does LoRA, on RTX 4090,
    whose rate was never fitted, and experts whose tokens go by other software than NCCL's.
    """
    above = {title for title, values in scores.items() if values.mean >= 0.15}
    assert above == {QLORA, AUTOMODEL, BRIDGE, ONE_GPU}
    assert scores["SimuMax's B200, experts"].mean < 0.05
    assert scores[QLORA].mean < 0.2
    assert scores[f"{FOUNDRY}, held out"].mean < 0.08
    assert scores["Megatron's tables"].mean < 0.08
    held = scores[f"{VTRAIN}, held out"]
    assert held.regret is not None
    assert held.regret < 0.04
    orders = {title: values.order for title, values in scores.items() if values.order is not None}
    assert orders[f"{VTRAIN}, all"] > 0.8
    assert orders[f"{VTRAIN}, 39.1B, tp 8"] > 0.95
    assert (scores[f"{VTRAIN}, all"].count, scores[f"{FOUNDRY}, all"].count) == (109, 209)
    assert {values.refused for values in scores.values()} == {0}


def test_the_page_has_these_numbers(scores: dict[str, Score]) -> None:
    page = PAGE.read_text(encoding="utf-8")

    for title, values in scores.items():
        assert tables.table((), [time_report._line(title, values)]).splitlines()[-1] in page


@pytest.mark.accuracy
@pytest.mark.slow
def test_the_constants_are_the_fits() -> None:
    """Rounded to two digits, of the rule's half."""
    values = fit.fit(fit.halves()[0])
    product = {field.name: getattr(Speeds(), field.name) for field in dataclasses.fields(Speeds)}
    product |= {"a100": DEVICES["a100-80gb"].sustained, "h100": DEVICES["h100"].sustained}

    assert {name: round(value, 2) for name, value in values.items()} == {
        name: product[name] for name in fit.BEGIN
    }


def test_peaks_of_experts_on_one_gpu() -> None:
    """Within 8 % of torch's allocator, in the mean within 2.5 %; the page says so."""
    errors = {}
    for step in steps.one_gpu():
        memory = memory_of(step.model, step.choice, step.load)
        errors[step.name, step.load.batch] = (memory.peak - memory.overhead) / step.peak_bytes - 1

    sizes = [abs(error) for error in errors.values()]
    assert max(sizes) < 0.08
    assert statistics.mean(sizes) < 0.025
    least, most = (f"{100 * edge:+.1f} %" for edge in (min(errors.values()), max(errors.values())))
    assert f"{least} to {most}" in PAGE.read_text(encoding="utf-8")


def test_a_step_by_other_constants() -> None:
    [first, *_] = steps.torchtitan()
    half = {"a100": DEVICES["a100-80gb"].sustained / 2}

    assert isinstance(first, Step)
    assert first.model == model_of("llama-3-8b")
    assert first.predicted(sustained=half).compute_s > 1.5 * first.predicted().compute_s


@pytest.mark.parametrize("case", published_memory.CASES, ids=lambda case: case.name)
def test_what_ran_out_of_memory_is_not_called_safe(case: MemoryCase) -> None:
    """And the page has each case as it is planned."""
    cells = published_memory.line(case)

    if case.outcome == published_memory.OUT:
        assert cells[-1] != SAFE
    if isinstance(case.outcome, float):
        assert abs(float(cells[4]) / case.outcome - 1) < 0.2
    assert f"| {' | '.join(cells)} |" in PAGE.read_text(encoding="utf-8")


def test_there_are_enough_published_cases() -> None:
    outcomes = [case.outcome for case in published_memory.CASES]

    assert len(outcomes) >= 10
    assert outcomes.count(published_memory.OUT) >= 3
