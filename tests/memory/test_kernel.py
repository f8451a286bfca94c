"""What a session takes in of its ranks' memory, when some of them give nothing."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from nbdist.errors import SnapshotError
from nbdist.memory.kernel.recordings import COST, Memories
from nbdist.memory.snapshot import MemoryOptions, empty
from nbdist.variables import pack
from tests.trace.test_kernel import Ranks, answered


def parcel(rank: int, duration_ns: int = 5, strategy: str = "ddp") -> Future[Any]:
    memory = replace(empty(rank, f"host {rank}", ""), duration_ns=duration_ns)
    return answered(pack.send(pack.pack({"memory": memory, "strategy": strategy}), ()))


def memories(answers: dict[int, Callable[[], Future[Any]]]) -> tuple[Memories, Ranks]:
    ranks = Ranks(answers)
    return Memories(ranks, ranks.variables), ranks  # type: ignore[arg-type]


def test_ranks_that_give_nothing_are_named_with_their_reasons() -> None:
    """One has ended, one still runs its cell, one raised; the others' memory is there."""
    recordings, ranks = memories({
        0: lambda: parcel(0),
        1: Future,
        2: Future,
        3: lambda: answered(SnapshotError("Nothing was recorded on this rank.")),
        4: lambda: answered(pack.PackedValue((3,), (), b"no", "")),
    })  # fmt: skip
    ranks.gone, ranks.busy = {1}, {2}
    recordings.begin(MemoryOptions())
    snapshot = recordings.finish()

    assert [(r.rank, r.host, r.duration_ns) for r in snapshot.ranks] == [
        (0, "host 0", 5), (1, "host 1", 0), (2, "host 2", 0), (3, "host 3", 0), (4, "host 4", 0),
    ]  # fmt: skip
    problems = [r.problem for r in snapshot.ranks]
    assert problems[:4] == [
        "",
        "It ended (exit code 1) before its memory was read.",
        "It is still running its cell, so its memory was not read.",
        "Nothing was recorded on this rank.",
    ]
    assert problems[4].startswith("Its memory did not arrive: ")
    assert (snapshot.strategy, snapshot.notes) == ("ddp", (COST,))
    assert recordings.last is snapshot
    assert recordings.token == ""


def test_before_a_recording_the_memory_of_this_moment_is_given_and_not_kept() -> None:
    """Nothing was recorded: that is an error only where the record itself is asked for."""
    recordings, _ = memories({0: lambda: parcel(0, 0, ""), 1: lambda: parcel(1, 0, "")})
    current = recordings.last_or_now()

    assert [r.rank for r in current.ranks] == [0, 1]
    assert (current.strategy, current.notes) == ("", ())
    with pytest.raises(SnapshotError, match=r"recorded yet\..*%%dist_memory"):
        _ = recordings.last
    recordings.begin(MemoryOptions())
    recorded = recordings.finish()
    assert recordings.last_or_now() is recorded
