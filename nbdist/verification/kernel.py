"""Asks all ranks to compare a step with the same step of one process."""

from __future__ import annotations

from nbdist.cells.kernel import progress
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.errors import Interrupted, NbdistError, OptionError
from nbdist.rpc.kernel import gather
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.verification.verdict import StepRequest, Verification

# Four steps with hooks, and three switches there and back.
VERIFY_S = 1800.0

verify_step: RankFunction[[StepRequest], Verification] = RankFunction(
    "nbdist.verification.rank.verify:verify"
)


def verify(ranks: Ranks, request: StepRequest) -> Verification:
    """Compare a step under the current strategy with the same step of one process.

    Raises:
        OptionError: There is no prepared model, or nobody knows what it is called with; nothing
            was run.
        RankGone, RankBusy, NotRunning: As for a cell.
        NbdistError: What the step raised on a rank; everything was put back.
        Interrupted: If the user interrupted it; likewise.
    """
    ranks.recover_if_needed()
    try:
        with progress.of_ranks(ranks, "verify"):
            results = ranks.call_all(verify_step, request, deadline_s=VERIFY_S, is_collective=True)
    except KeyboardInterrupt as error:
        raise Interrupted(f"{error}; %dist_strategy shows the current strategy") from error
    except NbdistError as error:
        if (refused := gather.remote_error_message(error, OptionError)) is not None:
            raise refused from error
        raise
    verification: Verification = results[0]
    return verification
