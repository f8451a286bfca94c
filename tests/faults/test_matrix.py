"""Each fault in a cell is told in time, ends as promised, and costs no variable."""

from collections.abc import Iterator

import pytest

from tests.faults.fault import Fault, Outcome, happen
from tests.faults.table import FAULTS
from tests.support.faults import ABORT_S, BACK_S, GRACE_S, TOLD_S, Ranks

pytestmark = [pytest.mark.cluster, pytest.mark.engine]


def _cases() -> Iterator[object]:
    for n in (2, 4):
        for fault in FAULTS:
            marks = () if fault.is_short and n == 2 else (pytest.mark.faults,)
            yield pytest.param(n, fault, id=f"{n}-{fault.name}", marks=marks)


@pytest.mark.parametrize(("n", "fault"), list(_cases()))
def test_a_fault(n: int, fault: Fault, ranks: Ranks) -> None:
    """It is told once, in time; the cell fails as promised; survivors and models go on."""
    outcome = happen(ranks, fault)

    assert outcome.cell.status == "error"
    assert_told(ranks, fault, outcome)
    assert_error(fault, outcome)
    # From the press, or from the fault's begin. Also where a rank died it is the latter: Gloo tells
    # only those who are connected to it, others wait.
    allowed_s = BACK_S if fault.act.startswith("press") else TOLD_S + GRACE_S + ABORT_S
    assert outcome.back_s < allowed_s + ranks.load_s
    if fault.dead:
        # A group that the dead rank is no member of works before the restart.
        survivors = [rank for rank in range(n) if rank not in fault.dead]
        code = "(dist.all_reduce(x := torch.ones(1), group=rest), x.item())[1]"
        assert ranks.values(code, survivors) == dict.fromkeys(survivors, len(survivors))
        ranks.revive(fault.dead)
    ranks.conclude(fault.name, fault.kind, outcome.told_s, outcome.back_s)


def assert_told(ranks: Ranks, fault: Fault, outcome: Outcome) -> None:
    """Its line has all that it should, once, and came in time."""
    if outcome.told_s is None:
        return
    cell = outcome.cell
    for fragment in fault.fragments(ranks.n, cell.execution_count):
        assert fragment in outcome.line, cell.visible
    for rank in fault.unnamed:
        assert f"rank {rank}" not in outcome.line
        assert f"ranks {rank}" not in outcome.line
    assert cell.stderr.count(outcome.line) == 1, cell.visible
    assert outcome.told_s < fault.promise_s + ranks.load_s


def assert_error(fault: Fault, outcome: Outcome) -> None:
    """The cell's error is the one that it should be, and says what is on record."""
    error = outcome.cell.failure
    assert error.ename == fault.ename, outcome.cell.visible
    assert fault.said in outcome.cell.stderr, outcome.cell.visible
    for fragment in fault.error:
        assert fragment in error.evalue, error.evalue
    if fault.ename == "Deadlock":
        assert error.evalue.startswith(outcome.line), error.evalue
    elif fault.ename == "DistributedError" and not fault.dead:
        assert outcome.line in error.evalue, error.evalue
