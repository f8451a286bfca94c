"""Exchanges values of ranks within a step of the reference, which may end early on some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from nbdist.core.ranks import rank_label
from nbdist.errors import NbdistError
from nbdist.parallel.base.consensus import all_gather_object, one_line

T = TypeVar("T")
# What the CPU's allocator says; torch has an exception of its own for devices only.
_NO_HOST_MEMORY = "can't allocate memory"


class ReferenceMemoryError(NbdistError):
    """A rank ran out of memory while it made the reference; every rank raises it."""


@dataclass(frozen=True, slots=True)
class _End:
    """Message of a rank that has ended the step: why, where it has failed."""

    why: str = ""
    is_memory: bool = False


class Exchange:
    """The meetings of ranks in one step of the reference.

    A rank that is through with its step, or has failed in it, comes to one last meeting. Those
    that still compute and wait for it there learn it, and end too. So no rank is left waiting.
    """

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order. Collective: every rank.

        Raises:
            ReferenceMemoryError, NbdistError: Other ranks make the step no longer.
        """
        gathered = all_gather_object(value)
        if any(isinstance(shown, _End) for shown in gathered):
            raise _Ended(_failure(gathered))
        return gathered

    def run(self, step: Callable[[], T]) -> T:
        """Run the step and return its result. Collective: every rank.

        Raises:
            ReferenceMemoryError: A rank ran out of memory in it; on all ranks.
            Exception: What it raised here.
            NbdistError: It failed on other ranks; says why.
        """
        try:
            result = step()
        except _Ended as error:  # all ranks have met already
            raise error.shown from None
        except Exception as error:
            end = _End(one_line(error), is_memory=is_memory_error(error))
            ends: Sequence[object] = all_gather_object(end)
            if any(isinstance(other, _End) and other.is_memory for other in ends):
                raise _failure(ends) from error
            raise
        others: Sequence[object] = all_gather_object(_End())
        if any(other != _End() for other in others):
            raise _failure(others)
        return result


class _Ended(Exception):
    """Other ranks have ended; `shown` is what the user is told."""

    def __init__(self, shown: NbdistError) -> None:
        super().__init__(str(shown))
        self.shown = shown


def is_memory_error(error: BaseException) -> bool:
    """Whether a device, or the host, had no room for a tensor."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and _NO_HOST_MEMORY in str(error)
    )


def _failure(gathered: Sequence[object]) -> NbdistError:
    ends = {rank: value for rank, value in enumerate(gathered) if isinstance(value, _End)}
    failures = {rank: end.why for rank, end in ends.items() if end.why}
    kind = ReferenceMemoryError if any(end.is_memory for end in ends.values()) else NbdistError
    if failures:
        listing = "; ".join(f"rank {rank}: {why}" for rank, why in failures.items())
        return kind(
            f"The step of the reference failed on rank {rank_label(list(failures))}. {listing}"
        )
    return NbdistError(
        f"Rank {rank_label(list(ends))} ended its step, and the other ranks still call the model: "
        "every rank must call it equally often. Let each rank make the same number of forwards."
    )
