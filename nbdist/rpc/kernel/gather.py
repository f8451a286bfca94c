"""The answers of several ranks to one call, or the one error that tells why there are none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from nbdist.core.failures import is_follower, ranks_phrase
from nbdist.errors import NbdistError, RankGone

PAUSE_S = 0.5
POLL_S = 0.01
# ipyparallel's name for the end of a process that was asked. It may be told some milliseconds
# before the process has been reaped.
ENGINE_DIED = "EngineError"
END_KNOWN_S = 0.5


def gather_results(
    futures: Mapping[int, Future[Any]], deadline_s: float, controller_end: Callable[[], str]
) -> list[Any]:
    """The answers by rank, in the order of the futures, with one deadline for all of them.

    `controller_end` says how the controller ended; empty while it lives. It may raise RankGone.

    Raises:
        RankGone: If the controller, or a rank, ended: answers on their way never come.
        NbdistError: Who has not answered by the deadline; or what a rank raised, the root cause
            of several.
    """
    end_s = time.monotonic() + deadline_s
    unanswered = set(futures.values())
    while unanswered and (left_s := end_s - time.monotonic()) > 0:
        done, unanswered = wait(unanswered, min(left_s, PAUSE_S), FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            end_s = min(end_s, time.monotonic() + PAUSE_S)  # the others may wait for that rank
        if unanswered and (end := controller_end()):
            raise RankGone(
                f"The cluster's controller ended ({end}) while the ranks were answering. Their "
                "variables are kept. Try again: that starts a new controller."
            )
    late = [rank for rank, future in futures.items() if future in unanswered]
    errors = {
        rank: error
        for rank, future in futures.items()
        if rank not in late and (error := future.exception()) is not None
    }
    if errors:
        if any(getattr(error, "ename", "") == ENGINE_DIED for error in errors.values()):
            # Let it be told as the end of a rank, with how it ended, once that is known.
            until_s = time.monotonic() + END_KNOWN_S
            while not controller_end() and time.monotonic() < until_s:
                time.sleep(POLL_S)
        messages = {rank: str(getattr(error, "evalue", error)) for rank, error in errors.items()}
        # A rank whose peer has failed loses its connection: that is no root cause.
        first = min(errors, key=lambda rank: (is_follower(messages[rank]), rank))
        raise NbdistError(f"rank {first}: {messages[first]}") from errors[first]
    if late:
        raise NbdistError(f"{ranks_phrase(late)} did not answer within {deadline_s:g} s")
    return [future.result() for future in futures.values()]


def remote_error_message(error: BaseException, *kinds: type[NbdistError]) -> NbdistError | None:
    """Refusal of a rank, in its own words; None where it failed otherwise.

    It refuses by an error of these kinds, which is the cause of that of `gather_results`.
    """
    cause = error.__cause__
    for kind in kinds:
        if getattr(cause, "ename", "") == kind.__name__:
            return kind(getattr(cause, "evalue", str(cause)))
    return None


def wait_done(futures: Sequence[Future[Any]], patience_s: float) -> None:
    """Wait until all are done, for so long at most; an interrupt ends it."""
    end_s = time.monotonic() + patience_s
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < end_s and not all(future.done() for future in futures):
            time.sleep(POLL_S)
