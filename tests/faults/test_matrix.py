"""Each fault in a cell is told in time, ends as promised, and costs no variable."""

import pytest

from tests.faults.fault import Fault, happen_as_promised, short_and_whole
from tests.faults.table import FAULTS
from tests.support.faults import Ranks


@pytest.mark.parametrize(("n", "fault"), short_and_whole(FAULTS))
def test_a_fault(n: int, fault: Fault, ranks: Ranks) -> None:
    """It is told once, in time; the cell fails as promised; survivors and models go on."""
    outcome = happen_as_promised(ranks, fault)

    if fault.dead:
        # A group that the dead rank is no member of works before the restart.
        survivors = [rank for rank in range(n) if rank not in fault.dead]
        code = "(dist.all_reduce(x := torch.ones(1), group=rest), x.item())[1]"
        assert ranks.values(code, survivors) == dict.fromkeys(survivors, len(survivors))
        ranks.revive(fault.dead)
    ranks.conclude(fault.name, fault.kind, outcome.told_s, outcome.back_s)
