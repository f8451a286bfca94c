"""All ranks go on together, or none does: what fails on one is raised on all."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.core.ranks import rank_label
from nbdist.errors import NbdistError

T = TypeVar("T")

# How long ranks wait for each other's commits, which meet nobody and take milliseconds.
COMMIT_DEADLINE_S = 60.0
_LONGEST_PAUSE_S = 0.02
# The most that objects take when they are gathered in one call: all ranks' together, each one's.
_ROUND_BYTES, _SLOT_BYTES = 1 << 18, 1 << 14
_LENGTH_BYTES = 8


def world_size() -> int:
    """Ranks; 1 in a process without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def default_store() -> dist.Store:
    """The store with which all ranks have formed their group. torch hands it out privately."""
    store: dist.Store = c10d._get_default_store()  # noqa: SLF001
    return store


def all_or_none(what: str, function: Callable[[], T]) -> list[T]:
    """Every rank's result of a function that meets no rank. Collective: every rank.

    Raises:
        BaseException: What the function raised on this rank, an interrupt too.
        NbdistError: It failed on other ranks only; says what was tried, where, and why.
    """
    value: Any = None
    error = None
    try:
        value = function()
    except BaseException as caught:  # noqa: BLE001  # raised below, once the others know
        error = caught
    outcomes = all_gather_object((value, "" if error is None else one_line(error)))
    if error is not None:
        raise error
    raise_failures(what, {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure})
    return [rank_value for rank_value, _ in outcomes]


def all_gather_object(obj: T) -> list[T]:
    """Every rank's object, in order. Collective: every rank.

    torch's all_gather_object asks for the lengths first, in a call of its own, and most of what a
    call takes is waiting for the last rank's processor. Here objects of some kilobytes come with
    their lengths; where one is longer, all are sent again with as much room as it needs.
    """
    size = world_size()
    if size == 1:
        return [obj]
    if "cpu:gloo" not in str(dist.get_backend_config()):
        gathered = [obj] * size
        dist.all_gather_object(gathered, obj)
        return gathered
    data = pickle.dumps(obj)
    room = min(_SLOT_BYTES, _ROUND_BYTES // size)
    slots = _slots(data, room)
    longest = max(length for length, _ in slots)
    if longest > room:
        slots = _slots(data, longest)
    return [pickle.loads(memoryview(slot)[:length]) for length, slot in slots]  # noqa: S301


def _slots(data: bytes, room: int) -> list[tuple[int, bytes]]:
    """Length of every rank's data, and as much of it as there is room for. Collective."""
    slot = bytearray(_LENGTH_BYTES + room)
    slot[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
    slot[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data[:room]
    everyone = torch.empty(world_size(), _LENGTH_BYTES + room, dtype=torch.uint8, device="cpu")
    dist.all_gather(list(everyone.unbind()), torch.frombuffer(slot, dtype=torch.uint8))
    rows = [row.numpy().tobytes() for row in everyone]
    return [(int.from_bytes(row[:_LENGTH_BYTES], "little"), row[_LENGTH_BYTES:]) for row in rows]


def raise_failures(what: str, failures: dict[int, str]) -> None:
    """Raise for other ranks' failures, if there are any.

    Raises:
        NbdistError: Names the ranks.
    """
    if failures:
        first = next(iter(failures.values()))
        raise NbdistError(
            f"{what} failed on rank {rank_label(sorted(failures))}, so no rank went on and nothing "
            f"was changed. There: {first}"
        )


class CommitVote:
    """One question that every rank answers without a collective: did its part go well?

    It goes through the ranks' store. A collective could be aborted on one rank when the other
    has its answer already, and then they would not agree.
    """

    def __init__(self, label: str) -> None:
        """Ask, under a label that is new and the same on all ranks."""
        self._store = default_store() if world_size() > 1 else None
        self._keys = [f"nbdist/ballot/{label}/{rank}" for rank in range(world_size())]

    def answer(self, failure: str, *, is_waiting: bool = True) -> dict[int, str]:
        """The ranks whose part failed, with the reason; an empty text is none. Every rank.

        A rank that gives no answer within COMMIT_DEADLINE_S has failed; without `is_waiting` one
        that has given none yet.
        """
        if self._store is None:
            return {0: failure} if failure else {}
        self._store.set(self._keys[dist.get_rank()], f"-{failure}")
        until_s = time.monotonic() + (COMMIT_DEADLINE_S if is_waiting else 0.0)
        pause_s = 0.0005
        while not self._store.check(self._keys) and time.monotonic() < until_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        failures = {
            rank: self._store.get(key).decode()[1:]
            if self._store.check([key])
            else f"no answer within {COMMIT_DEADLINE_S:.0f} s"
            for rank, key in enumerate(self._keys)
        }
        return {rank: failure for rank, failure in failures.items() if failure}


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT back in here; it comes at the end. Nothing to do outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def one_line(error: BaseException) -> str:
    """Word a failure for another rank's user."""
    text = str(error)
    if isinstance(error, NbdistError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
