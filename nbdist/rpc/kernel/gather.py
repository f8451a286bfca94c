"""The answers of several ranks to one call, or the one error that tells why there are none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
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
    """The answers, in the order of the futures.

    Args:
        futures: By rank.
        deadline_s: For all of them.
        controller_end: How the controller ended; empty while it lives. May raise RankGone.

    Raises:
        RankGone: If the controller, or a rank, ended: answers on their way never come.
        NbdistError: Who has not answered by the deadline; or what a rank raised, the root cause
            of several.
    """
    end_s = time.monotonic() + deadline_s
    answers: list[Any] = []
    errors: dict[int, Exception] = {}
    for rank, future in futures.items():
        try:
            answers.append(_result(future, end_s, controller_end, futures))
        except TimeoutError as error:
            if errors or _has_failure(futures):
                continue  # it waits for the rank that has failed
            late = [rank_ for rank_, other in futures.items() if not other.done()]
            raise NbdistError(
                f"{ranks_phrase(late)} did not answer within {deadline_s:g} s"
            ) from error
        except RankGone:
            raise
        except Exception as error:  # noqa: BLE001  # whatever a rank raised is told
            errors[rank] = error
            end_s = min(end_s, time.monotonic() + PAUSE_S)
    if errors:
        if any(getattr(error, "ename", "") == ENGINE_DIED for error in errors.values()):
            _tell_end(controller_end)
        messages = {rank: str(getattr(error, "evalue", error)) for rank, error in errors.items()}
        # A rank whose peer has failed loses its connection: that is no root cause.
        first = min(errors, key=lambda rank: (is_follower(messages[rank]), rank))
        raise NbdistError(f"rank {first}: {messages[first]}") from errors[first]
    return answers


def remote_error_message(error: BaseException, *kinds: type[NbdistError]) -> NbdistError | None:
    """What a rank has refused, in its own words; None where it failed otherwise.

    Args:
        error: Of `gather_results`, whose cause is the rank's.
        kinds: Errors that a rank raises to refuse.
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


def _tell_end(controller_end: Callable[[], str]) -> None:
    """Let it be told as the end of a rank, with how it ended, once that is known."""
    until_s = time.monotonic() + END_KNOWN_S
    while not controller_end() and time.monotonic() < until_s:
        time.sleep(POLL_S)


def _has_failure(futures: Mapping[int, Future[Any]]) -> bool:
    return any(future.done() and future.exception() for future in futures.values())


def _result(
    future: Future[Any],
    end_s: float,
    controller_end: Callable[[], str],
    futures: Mapping[int, Future[Any]],
) -> Any:
    """One answer; TimeoutError after the deadline, or soon after another rank has failed."""
    while True:
        left_s = max(0.0, end_s - time.monotonic())
        try:
            return future.result(min(left_s, PAUSE_S))
        except TimeoutError:
            end = controller_end()
            if end:
                raise RankGone(
                    f"The cluster's controller ended ({end}) while the ranks were "
                    "answering. Their variables are kept. Try again: that starts a new controller."
                ) from None
            if left_s <= PAUSE_S or _has_failure(futures):
                raise
