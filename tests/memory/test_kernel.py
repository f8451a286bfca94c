"""What the notebook takes in of its ranks' memory, and says where memory ran out on one of them."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nbdist.core.failures import RankFailure
from nbdist.errors import SnapshotError
from nbdist.memory.kernel import recordings
from nbdist.memory.kernel.recordings import COST, Memories
from nbdist.memory.oom_message import HOST, OomMessage
from nbdist.memory.oom_remedies import OomReport
from nbdist.memory.snapshot import (
    BACKWARD,
    BEFORE,
    CATEGORIES,
    STAYS,
    BlockRow,
    MemoryOptions,
    OutOfMemory,
    Phase,
    Reserved,
    empty,
    make_blocks,
)
from nbdist.variables import pack
from tests.recording.test_kernel import Ranks, answered, memory_parcel


def test_before_a_recording_the_memory_of_this_moment_is_given_and_not_kept() -> None:
    """Nothing was recorded: that is an error only where the record itself is asked for."""
    ranks = Ranks({0: lambda: memory_parcel(0, 0), 1: lambda: memory_parcel(1, 0)})
    memories = Memories(ranks, ranks.variables)  # type: ignore[arg-type]
    current = memories.last_or_now()

    assert [r.rank for r in current.ranks] == [0, 1]
    assert (current.strategy, current.notes) == ("", ())
    with pytest.raises(SnapshotError, match=r"recorded yet\..*%%dist_memory"):
        _ = memories.last
    ranks.answers[0] = lambda: memory_parcel(0)
    memories.begin(MemoryOptions())
    recorded = memories.finish()
    assert (recorded.strategy, recorded.notes) == ("ddp", (COST,))
    assert memories.last_or_now() is recorded


def test_ranks_have_one_zero_however_late_each_began() -> None:
    """That of the first; times that stand for no moment stay as they are."""
    rows = [BlockRow(1, 8, BEFORE, 5), BlockRow(2, 8, 3, STAYS)]
    parts = {
        "duration_ns": 9,
        "blocks": make_blocks(rows),
        "phases": (Phase(BACKWARD, 1, 2),),
        "step_ends_ns": (4,),
        "reserved": Reserved(np.array([0]), np.array([64])),
        "failures": (OutOfMemory(6, 8),),
    }

    def parcel(rank: int, zero_ns: int) -> Future[Any]:
        memory = replace(empty(rank, "one", ""), zero_ns=zero_ns, **parts)
        return answered(pack.send(pack.pack({"memory": memory, "strategy": ""}), ()))

    ranks = Ranks({0: lambda: parcel(0, 10**18 + 300), 1: lambda: parcel(1, 10**18)})
    memories = Memories(ranks, ranks.variables)  # type: ignore[arg-type]
    memories.begin(MemoryOptions())
    late, first = memories.finish().ranks

    assert (first.step_ends_ns, first.duration_ns) == ((4,), 9)
    assert (late.step_ends_ns, late.duration_ns, late.zero_ns) == ((304,), 309, first.zero_ns)
    assert late.blocks.start_ns.tolist() == [BEFORE, 303]
    assert late.blocks.end_ns.tolist() == [305, STAYS]
    assert late.phases == (Phase(BACKWARD, 301, 302),)
    assert (late.reserved.time_ns.tolist(), late.failures[0].time_ns) == ([300], 306)


MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)"
)
FAILURE = RankFailure(1, "RuntimeError", MESSAGE)
SHORTAGE = OomReport(
    1, OomMessage("CPU", HOST, 4 * 10**9), "", tuple(0 for _ in CATEGORIES), (), 0, 10**9, None
)


def advice(
    answer: Callable[[], Future[Any]] = Future,
    failure: RankFailure = FAILURE,
    *,
    is_gone: bool = False,
    is_busy: bool = False,
) -> tuple[str, tuple[int, ...]]:
    """What is said, and the ranks whose memory is to be shown next."""
    ranks = Ranks({1: answer})
    ranks.gone, ranks.busy = ({1} if is_gone else set()), ({1} if is_busy else set())
    memories = Memories(ranks, None)  # type: ignore[arg-type]
    return memories.advice(failure), memories._oom_ranks


def test_rank_that_knows() -> None:
    """Its block; its memory is asked for when it is wanted."""
    text, noted = advice(lambda: answered(SHORTAGE))

    assert text.startswith("rank 1 ran out of the host's memory: 4.0 GB requested; 1.0 GB")
    assert noted == (1,)


def test_other_failures_are_not_asked_about() -> None:
    """A mistake costs no call."""
    failure = RankFailure(1, "ValueError", "boom", ("ValueError: boom",))

    assert advice(pytest.fail, failure)[0] == ""


def test_failure_that_came_from_a_shortage() -> None:
    """Known by its traceback, where the rank confirms it."""
    failure = RankFailure(1, "ValueError", "no batch", (f"\x1b[31mRuntimeError\x1b[0m: {MESSAGE}",))

    assert advice(lambda: answered(SHORTAGE), failure)[0].startswith("rank 1 ran out of")
    assert advice(lambda: answered(None), failure)[0] == ""


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        ({"is_gone": True}, "the rank has ended"),
        ({"is_busy": True}, "the rank is still running"),
        ({"answer": lambda: answered(None)}, "nothing was recorded"),
        ({"answer": lambda: answered(RuntimeError("no such module"))}, "no such module"),
        ({}, "the rank did not answer within"),
    ],
)
def test_rank_that_does_not_tell(
    rank: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message's own numbers, and why there are no others."""
    monkeypatch.setattr(recordings, "ASK_S", 0.0)
    text, noted = advice(**rank)

    assert text.startswith("rank 1 ran out of the host's memory: 4.0 GB requested; what held it")
    assert why in text
    assert noted == ()
