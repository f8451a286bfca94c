"""Ranks meet before they form a group: what follows blocks in C++ where nothing ends it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.core.ranks import rank_label

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.02
DEFAULT_DEADLINE = timedelta(minutes=30)  # torch's own for Gloo

_cancelled = 0
_anew = 0
_met: Counter[tuple[int, ...]] = Counter()


def cancel_meetings() -> None:
    """End every wait of this rank for others, with a RuntimeError there. From any thread."""
    global _cancelled  # noqa: PLW0603  # a count: a meeting sees that it has changed
    _cancelled += 1


def forget_meetings() -> None:
    """Number meetings from 0 again; on every rank, with a new generation."""
    global _anew  # noqa: PLW0603  # what was cancelled before belongs to older groups
    _anew = _cancelled
    _met.clear()


def age() -> int:
    """The age of work issued now, as `is_over` takes it."""
    return _anew


def is_over(age: int) -> bool:
    """Whether work issued at this age can never end: the groups were aborted since."""
    return _cancelled != age


def is_broken_off() -> bool:
    """Whether this rank's groups were aborted, and have not been made anew yet."""
    return _cancelled != _anew


def meet(ranks: Sequence[int], generation: int, deadline: timedelta | None, what: str) -> None:
    """Return once each of these ranks, of which this is one, has come to the same meeting.

    Collective: these ranks. It goes through the store; an interrupt and `cancel_meetings` end it.

    Raises:
        RuntimeError: When it was cancelled, or after the deadline (None: torch's own), naming
            what it waited in and who has not come.
    """
    # torch hands out the default group's store, in which its members' groups are formed as well,
    # by a private function alone. Without it there is no meeting.
    getter = getattr(c10d, "_get_default_store", None)
    if getter is None or not dist.is_initialized() or len(ranks) < 2:
        return
    store: dist.Store = getter()
    deadline_s = (deadline or DEFAULT_DEADLINE).total_seconds()
    members = tuple(sorted(ranks))
    number = _met[members]
    label = f"nbdist/meet/{generation}/{','.join(map(str, members))}/{number}"
    keys = [f"{label}/{rank}" for rank in members]
    own_key = f"{label}/{dist.get_rank()}"
    waited = f"rank {dist.get_rank()} waited in {what} for other ranks"
    cancelled = _cancelled

    def check_cancelled() -> None:
        if cancelled != _cancelled:
            raise RuntimeError(f"{waited} until the wait was aborted. Every rank has to call it.")

    store.set(own_key, "here")
    absent = list(range(len(keys)))
    try:
        absent = await_keys(store, keys, deadline_s, check_cancelled)
    finally:
        if absent:  # else the next one to come would think that this rank is here
            store.delete_key(own_key)
    if absent:
        raise RuntimeError(
            f"{waited} for {deadline_s:g} s; rank(s) {rank_label([members[p] for p in absent])} "
            "did not come. Every rank has to call it."
        )
    _met[members] += 1


def await_keys(
    store: dist.Store,
    keys: Sequence[str],
    deadline_s: float,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """The places of the keys that no rank has written by the deadline.

    It looks again and again instead of waiting inside the store, so that an interrupt ends it, and
    whatever `check` raises.
    """
    end_s = time.monotonic() + deadline_s
    pause_s = FIRST_PAUSE_S
    while not store.check(list(keys)):
        check()
        if time.monotonic() > end_s:
            return [place for place, key in enumerate(keys) if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return []
