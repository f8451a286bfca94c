"""Whether this rank's GPU has done its work, and whether it still can do any.

A wait for a GPU cannot be interrupted, so each is made in a thread of its
own: one that never ends is left behind, and ends with the abort of the calls that it waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from nbdist.core.rank import this_rank
from nbdist.core.ranks import rank_label
from nbdist.core.topology import RankPlace
from nbdist.errors import NbdistError
from nbdist.hang.rank import rendezvous
from nbdist.hang.recovery import DEADLINE_S

# Work of a healthy GPU that is in flight, before its communicators are aborted.
DRAIN_S = 2.0
# One small kernel, once nothing hangs.
ANSWER_S = 5.0
_FINE = "fine"


def drain() -> None:
    """Let a healthy GPU finish what it was given; DRAIN_S at most.

    An abort would cut it off, and leave anything at all in its results.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _error_within(DRAIN_S, lambda: torch.cuda.synchronize(this_rank().place.device))


def refuse_broken(store: dist.Store, place: RankPlace, living: Sequence[int]) -> None:
    """Compute on every rank's GPU before any rank connects.

    Collective: the living ranks, and those that take the place of dead ones.

    A rank whose GPU is in an error that CUDA does not come back from would fail, and the others
    would wait for it in NCCL, where nothing ends a wait.

    Args:
        store: The store of this recovery.
        place: This rank's place.
        living: Global ranks.

    Raises:
        NbdistError: A GPU does not work, or a rank gave no answer within DEADLINE_S; on every rank.
    """
    store.set(f"gpu/{place.rank}", _find_problem(place.device) or _FINE)
    keys = [f"gpu/{rank}" for rank in living]
    silent = rendezvous.await_keys(store, keys, DEADLINE_S)
    if silent:
        raise NbdistError(
            f"rank(s) {rank_label([living[index] for index in silent])} did not say within "
            f"{DEADLINE_S:.0f} s whether their GPU works. %dist_restart replaces them."
        )
    problems = {rank: store.get(key).decode() for rank, key in zip(living, keys, strict=True)}
    broken = {rank: problem for rank, problem in problems.items() if problem != _FINE}
    if broken:
        label = rank_label(list(broken))
        raise NbdistError(
            f"the GPU of rank(s) {label} cannot be used any more by its process: "
            f"{next(iter(broken.values()))}. Its variables there are lost. "
            f"%dist_restart {label} replaces it; the other ranks keep theirs."
        )


def _find_problem(device: str) -> str:
    """Why a kernel does not run; empty if it does, and on a CPU."""
    if device == "cpu":
        return ""
    error = _error_within(ANSWER_S, lambda: torch.ones(1, device=device).sum().item())
    return "" if error is None else (str(error).splitlines() or [type(error).__name__])[0]


def _error_within(limit_s: float, function: Callable[[], object]) -> BaseException | None:
    """Exception of a function in another thread; TimeoutError where it has not ended by then."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # handed on below
            errors.append(error)

    thread = threading.Thread(target=run, name="nbdist-gpu-health", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        return TimeoutError(f"it did not compute within {limit_s:g} s")
    return errors[0] if errors else None
