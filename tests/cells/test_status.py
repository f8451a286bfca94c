"""Whether a rank is in a cell: the newest of what the notebook has heard and its call log says."""

from types import SimpleNamespace as Record
from typing import Any

import pytest

from nbdist.cells.kernel.status import situation
from nbdist.hang.records import CallLog, RankView

THIS_CELL, EARLIER_CELL = 8, 7


def log(run: int, state: str) -> CallLog:
    return CallLog(0, 1, 0, run, state, 0.0, {}, {}, (), ())


@pytest.mark.parametrize(
    ("sent", "ended", "last_log", "state"),
    [
        (THIS_CELL, EARLIER_CELL, log(EARLIER_CELL, "finished"), "running cell [3]"),
        (THIS_CELL, EARLIER_CELL, log(THIS_CELL, "running"), "running cell [3]"),
        (THIS_CELL, EARLIER_CELL, log(THIS_CELL, "finished"), "idle"),  # its reply is on its way
        (THIS_CELL, EARLIER_CELL, None, "running cell [3]"),
        (None, THIS_CELL, log(THIS_CELL, "finished"), "idle"),
        (None, THIS_CELL, log(THIS_CELL, "running"), "idle"),  # an answer of before its end
        (None, EARLIER_CELL, log(THIS_CELL, "running"), "running a cell"),  # another notebook's
        (None, None, log(THIS_CELL, "running"), "running a cell"),
        (None, None, None, "idle"),
    ],
)
def test_a_rank_runs_a_cell_by_the_newest_that_is_known(
    sent: int | None, ended: int | None, last_log: CallLog | None, state: str
) -> None:
    ranks: Any = Record(
        cells={} if sent is None else {0: (Record(run_id=sent, number=3), 0.0)},
        ended_runs={} if ended is None else {0: ended},
        is_connected=lambda rank: True,
    )
    health: Any = Record(end_of=lambda rank: "")
    view = RankView(0, "running", "", last_log, None, 0.0)

    assert situation(ranks, health, 0, view, ())[1] == state
