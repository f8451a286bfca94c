"""What the notebook says where memory ran out on a rank that can, or cannot, be asked."""

from concurrent.futures import Future
from typing import Any

import pytest

from nbdist.core.failures import RankFailure
from nbdist.memory.kernel import recordings
from nbdist.memory.kernel.recordings import Memories
from nbdist.memory.oom_message import HOST, OomMessage
from nbdist.memory.oom_remedies import OomReport
from nbdist.memory.snapshot import CATEGORIES

MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)"
)
FAILURE = RankFailure(1, "RuntimeError", MESSAGE)
SHORTAGE = OomReport(
    1, OomMessage("CPU", HOST, 4 * 10**9), "", tuple(0 for _ in CATEGORIES), (), 0, 10**9, None
)


class Ranks:
    """A session whose rank answers as it is told to."""

    def __init__(self, answer: Any = None, *, is_gone: bool = False, is_busy: bool = False):
        self.asked = 0
        self._answer = answer
        self.is_connected = lambda _rank: not is_gone
        self.is_busy = lambda _rank: is_busy

    def call(self, _rank: int, _name: str) -> Future[Any]:
        self.asked += 1
        future: Future[Any] = Future()
        if isinstance(self._answer, BaseException):
            future.set_exception(self._answer)
        elif self._answer is not ...:
            future.set_result(self._answer)
        return future


def advice(ranks: Ranks, failure: RankFailure = FAILURE) -> tuple[str, tuple[int, ...]]:
    """What is said, and the ranks whose memory is to be shown next."""
    memories = Memories(ranks, None)  # type: ignore[arg-type]
    return memories.advice(failure), memories._oom_ranks


def test_rank_that_knows() -> None:
    """Its block; its memory is asked for when it is wanted."""
    text, noted = advice(Ranks(SHORTAGE))

    assert text.startswith("rank 1 ran out of the host's memory: 4.0 GB requested; 1.0 GB")
    assert noted == (1,)


def test_other_failures_are_not_asked_about() -> None:
    """A mistake costs no call."""
    ranks = Ranks(SHORTAGE)

    assert advice(ranks, RankFailure(1, "ValueError", "boom", ("ValueError: boom",)))[0] == ""
    assert ranks.asked == 0


def test_failure_that_came_from_a_shortage() -> None:
    """Known by its traceback, where the rank confirms it."""
    failure = RankFailure(1, "ValueError", "no batch", (f"\x1b[31mRuntimeError\x1b[0m: {MESSAGE}",))

    assert advice(Ranks(SHORTAGE), failure)[0].startswith("rank 1 ran out of")
    assert advice(Ranks(None), failure)[0] == ""


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (Ranks(is_gone=True), "the rank has ended"),
        (Ranks(is_busy=True), "the rank is still running"),
        (Ranks(None), "nothing was recorded"),
        (Ranks(RuntimeError("no such module")), "no such module"),
        (Ranks(...), "the rank did not answer within"),
    ],
)
def test_rank_that_does_not_tell(ranks: Ranks, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message's own numbers, and why there are no others."""
    monkeypatch.setattr(recordings, "ASK_S", 0.0)
    text, noted = advice(ranks)

    assert text.startswith("rank 1 ran out of the host's memory: 4.0 GB requested; what held it")
    assert why in text
    assert noted == ()
