"""A live model, as all ranks describe it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.errors import NbdistError, OptionError
from nbdist.planner import check
from nbdist.planner import live_model as planner_live_model
from nbdist.planner.check import MeasuredMemory
from nbdist.planner.live_model import LiveModel
from nbdist.rpc.kernel import gather
from nbdist.rpc.kernel.functions import RankFunction

DESCRIBE_S = 60.0
# Two steps, on a CPU under torch's profiler.
STEP_S = 600.0

describe_model: RankFunction[[str, str], LiveModel] = RankFunction(
    "nbdist.planner.rank.describe_model:describe_model"
)
check_step: RankFunction[[str, str, int, int], MeasuredMemory] = RankFunction(
    "nbdist.planner.rank.check_step:check_step"
)


def live_model(ranks: Ranks, name: str, inputs: str = "") -> LiveModel:
    """A variable on the ranks that is a model; all ranks are asked, and compared.

    `name` is the variable or a path from one, `inputs` a variable that the model is called with.

    Raises:
        OptionError: There is no such variable, or it is no model; lists those that are.
        NbdistError: Ranks have different ones.
        RankGone, RankBusy, NotRunning: As for a cell.
    """
    with _refusals():
        descriptions = ranks.call_all(describe_model, name, inputs, deadline_s=DESCRIBE_S)
    return planner_live_model.alike(descriptions)


def checked_step(ranks: Ranks, name: str, inputs: str, batch: int, sequence: int) -> MeasuredMemory:
    """A real step's memory on the rank that needed most; everything is put back afterwards.

    All ranks step, under the strategy that counts. `name` and `inputs` are as for `live_model`,
    `batch` and `sequence` those of random tokens, for a language model without inputs.

    Raises:
        OptionError: Nobody knows what the model is called with.
        NbdistError: What a rank raised, the model's own errors too.
        RankGone, RankBusy, NotRunning, Interrupted: As for a cell.
    """
    ranks.recover_if_needed()
    with _refusals():
        measurements = ranks.call_all(
            check_step, name, inputs, batch, sequence, deadline_s=STEP_S, is_collective=True
        )
    return check.largest(measurements)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise what the ranks have refused as it would be raised here."""
    try:
        yield
    except NbdistError as error:
        if (refused := gather.remote_error_message(error, OptionError)) is not None:
            raise refused from error
        raise
