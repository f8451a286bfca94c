"""The root cause comes first, and equal failures are told once."""

from __future__ import annotations

import copy
import pickle
import re
import traceback
from dataclasses import replace

import pytest

from nbdist.core.failures import (
    FOLLOWER_PATTERNS,
    RankFailure,
    advice,
    grouped,
    plain,
    ranks_are,
    ranks_on_hosts,
    ranks_phrase,
    root_cause_first,
    summary,
    traceback_text,
)
from nbdist.errors import DistributedError

# As torch 2.13 with Gloo says it on a rank whose peer has gone.
PEER_GONE = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [127.0.0.1]:{port}. This is typically caused by a remote worker crashing."
)


def boom(rank: int, at_s: float = 0.0, message: str = "boom") -> RankFailure:
    return RankFailure(rank, "ValueError", message, (f"ValueError: {message}",), at_s)


def follower(rank: int, at_s: float = 0.0, port: int = 5000) -> RankFailure:
    """What a rank meets when its peer has gone."""
    message = PEER_GONE.format(port=port)
    return RankFailure(rank, "RuntimeError", message, (f"RuntimeError: {message}",), at_s)


@pytest.mark.parametrize(
    ("failures", "order"),
    [
        # A connection closed by a peer is no root cause, even when it was noticed earlier.
        ([follower(0, 1.0), boom(1, 2.0), follower(2, 0.5)], [1, 2, 0]),
        # Of several own errors the earliest leads; at one time the lowest rank's.
        ([boom(0, 3.0), boom(3, 1.0), boom(1, 2.0), boom(2, 1.0)], [2, 3, 1, 0]),
        # Without a cause the follower that came first leads.
        ([follower(0, 2.0), follower(1, 1.0)], [1, 0]),
    ],
)
def test_the_root_cause_comes_first(failures: list[RankFailure], order: list[int]) -> None:
    """Then other causes by time, then followers by time."""
    assert [f.rank for f in root_cause_first(failures)] == order


NCCL_TIMEOUT = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, "
    "NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before "
    "timing out."
)
FOLLOWERS = (
    NCCL_TIMEOUT,
    PEER_GONE.format(port=1),
    "Connection reset by peer",
    "[Errno 32] Broken pipe",
    "Timed out waiting 1800000ms for recv operation to complete",
    "Socket Timeout",
    "NCCL error: remote process exited or there was a network error, NCCL version 2.27",
    "NCCL communicator was aborted on rank 1.",
    "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms",
    "timed out after 3000ms in barrier",
    "rank 0 waited in new_group for other ranks until the wait was aborted.",
    "all_reduce was not called: the collectives of this rank were broken off",
    "NCCL calls of this rank hung and were aborted. What this cell received is void",
    "pipeline stage 1, on rank 3, failed, so this rank's step was cancelled too: ValueError: no",
)


@pytest.mark.parametrize("message", FOLLOWERS)
def test_followers_are_known(message: str) -> None:
    """What torch says when a peer has gone marks a follower."""
    assert RankFailure(0, "RuntimeError", message).is_follower


@pytest.mark.parametrize("pattern", FOLLOWER_PATTERNS)
def test_every_pattern_has_an_example(pattern: str) -> None:
    """No pattern is there that none of the examples above needs."""
    assert any(re.search(pattern, message) for message in FOLLOWERS)


@pytest.mark.parametrize("message", ["", "boom", "connection closed", "timed out", "Timeout"])
def test_own_errors_are_no_followers(message: str) -> None:
    """An error that only sounds alike is a cause."""
    assert not RankFailure(0, "RuntimeError", message).is_follower


def failed(rank: int, message: str, *traceback: str) -> RankFailure:
    return RankFailure(rank, "E", message, traceback)


@pytest.mark.parametrize(
    ("failures", "groups"),
    [
        ([boom(3, 1.0), boom(1, 2.0), boom(0, 3.0, "other")], [(1, 3), (0,)]),
        # Addresses and colours make no difference.
        ([failed(0, "<f at 0x7f01>", "\x1b[31mE\x1b[0m: <f at 0x7f01>"),
          failed(1, "<f at 0xAB12>", "E: <f at 0xAB12>")], [(0, 1)]),
        # Nor do the ports of seven connections that seven ranks have lost.
        ([follower(rank, rank, 40000 + rank) for rank in range(7)], [tuple(range(7))]),
        # Numbers in the user's own errors are not touched.
        ([boom(0, message="host:4000 failed"), boom(1, message="host:4001 failed")], [(0,), (1,)]),
        # The same error raised in two places is told twice.
        ([failed(0, "m", "line 1", "E: m"), failed(1, "m", "line 2", "E: m")], [(0,), (1,)]),
    ],
)  # fmt: skip
def test_equal_failures_are_one_group(
    failures: list[RankFailure], groups: list[tuple[int, ...]]
) -> None:
    """Told once, by the root cause first, with the ranks in order."""
    grouped_failures = grouped(failures)

    assert [ranks for _, ranks in grouped_failures] == groups
    assert grouped_failures[0][0] == failures[0]


def test_plain() -> None:
    """Colours go, addresses become alike, all else stays."""
    assert plain("\x1b[1;31mred\x1b[0m at 0x7fFF, 0 and x") == "red at 0x..., 0 and x"


def test_phrases() -> None:
    """One rank is singular, several are plural."""
    assert [ranks_phrase([1]), ranks_phrase([0, 1, 2, 4])] == ["rank 1", "ranks 0-2,4"]
    assert [ranks_are([1]), ranks_are([0, 1])] == ["rank 1 is", "ranks 0-1 are"]
    assert ranks_on_hosts({0: "a", 1: "a", 3: "b"}) == "ranks 0-1 on a, rank 3 on b"


LINES = boom(0, message="\n  first\nsecond\n")
DIED = RankFailure(2, "RankDied", "ended (killed by SIGKILL) while running this cell")


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([boom(1)], "rank 1 raised ValueError: boom"),
        ([follower(0, 1.0, 40001), boom(1, 2.0), follower(2, 1.5, 40002)],
         ("rank 1 raised ValueError: boom; ranks 0,2 then failed with RuntimeError: Connection "
         "closed by peer")),
        ([boom(0, 1.0), boom(1, 2.0, "bang")],
         "rank 0 raised ValueError: boom; rank 1 raised ValueError: bang"),
        ([boom(rank, at_s=rank, message=f"m{rank}") for rank in range(8)],
         ("rank 0 raised ValueError: m0; rank 1 raised ValueError: m1; rank 2 raised ValueError: "
         "m2; rank 3 raised ValueError: m3; ranks 4-7 failed too")),
        # A death is told in its own words.
        ([follower(0, 1.0), DIED], ("rank 2 ended (killed by SIGKILL) while running this cell; "
         "rank 0 then failed with RuntimeError: Connection closed by peer")),
        ([RankFailure(0, "AssertionError", "")], "rank 0 raised AssertionError"),
        # Of several lines the first that has text; the traceback has all.
        ([LINES], "rank 0 raised ValueError: first"),
        ([boom(0, message="x" * 600)], f"rank 0 raised ValueError: {'x' * 600}"),
        ([boom(0, message="x" * 601)], f"rank 0 raised ValueError: {'x' * 597}..."),
    ],
)  # fmt: skip
def test_summary(failures: list[RankFailure], expected: str) -> None:
    """One line: the cause first, then three more and who else; long messages are cut."""
    assert summary(failures) == expected


def test_traceback_text() -> None:
    """Each distinct traceback stands under its ranks, the root cause on top."""
    text = traceback_text([follower(0, 1.0), boom(1, 3.0), boom(2, 2.0)])
    gone = PEER_GONE.format(port=5000)

    assert text == (
        "\x1b[1mranks 1-2 raised ValueError\x1b[0m:\nValueError: boom\n\n"
        f"\x1b[1mrank 0 raised RuntimeError\x1b[0m:\nRuntimeError: {gone}"
    )


def test_traceback_text_of_a_follower_tells_where_its_own_code_was() -> None:
    """Frames of libraries are left out where the cause is known; colours and addresses stay."""
    frames = (
        "\x1b[31mRuntimeError\x1b[0m      Traceback (most recent call last)",
        "\x1b[36mCell In[3]\x1b[0m, line 1\n----> 1 train(<a at 0x7f>)",
        "\x1b[36mFile \x1b[32m/env/lib/python3.11/site-packages/accelerate/a.py:5\x1b[0m, in f()",
        "File ~/work/trainer.py:7, in step()",
        "RuntimeError: Connection closed by peer",
    )
    late = RankFailure(0, "RuntimeError", "Connection closed by peer", frames, 2.0)
    died = RankFailure(1, "RankDied", "ended", (), 1.0)
    head = "\x1b[1mrank 0 raised RuntimeError\x1b[0m:\n"

    assert traceback_text([late, died]) == head + "\n".join([*frames[:2], *frames[3:]])
    assert traceback_text([late]) == head + "\n".join(frames)


def test_traceback_text_of_many() -> None:
    """From the fourth distinct traceback on one line each has to do."""
    failures = [boom(rank, rank, f"m{rank}\nmore of {rank}") for rank in range(5)]
    parts = traceback_text(failures).split("\n\n")

    assert len(parts) == 5
    assert parts[2] == "\x1b[1mrank 2 raised ValueError\x1b[0m:\nValueError: m2\nmore of 2"
    assert parts[3] == "\x1b[1mrank 3\x1b[0m raised ValueError: m3"


def test_traceback_text_without_a_traceback() -> None:
    """Where there is no traceback the whole message stands in its place; a death needs none."""
    died = RankFailure(1, "RankDied", "ended while running this cell")
    bare = RankFailure(0, "ValueError", "one\ntwo", (), 5.0)

    assert traceback_text([died, bare]) == "\x1b[1mrank 0\x1b[0m raised ValueError: one\ntwo"
    assert traceback_text([died]) == ""


def test_the_error_survives_pickling_and_copying() -> None:
    """Across a process boundary it keeps its message, ranks, text and advice."""
    error = DistributedError("failed", ranks=(1,), traceback_text="trace", advice="do this")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is DistributedError
        facts = (str(twin), twin.ranks, twin.traceback_text, twin.advice)
        assert facts == ("failed", (1,), "trace", "do this")


def test_the_error_draws_the_ranks_tracebacks() -> None:
    """Tracebacks, summary and advice, also in plain Python; none of our own frames."""
    error = DistributedError("failed", ranks=(1,), traceback_text="frames", advice="do this")
    bare = DistributedError("rank 1 died")

    assert error._render_traceback_() == [
        "frames", "", "DistributedError: failed", "", "do this",
    ]  # fmt: skip
    assert traceback.format_exception_only(error)[-2:] == ["frames\n", "do this\n"]
    assert bare._render_traceback_() == ["DistributedError: rank 1 died"]


def test_advice_is_of_the_first_cause() -> None:
    """Others that have the like are named; failures without advice say nothing."""
    late = replace(boom(1, 3.0), advice="rank 1 ran out")
    early = replace(boom(2, 2.0), advice="rank 2 ran out")

    assert advice([boom(0, 1.0)]) == ""
    assert advice([late, boom(0, 1.0)]) == "rank 1 ran out"
    assert advice([late, early]) == "rank 2 ran out\nrank 1 ran out of memory too"


def test_rank_without_memory_stands_before_those_that_waited_for_it() -> None:
    """Also where a clock that is behind says that they failed first."""
    short = RankFailure(
        1, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", (), 9
    )
    waited = [RankFailure(rank, "DistBackendError", NCCL_TIMEOUT, (), 1.0) for rank in (0, 2)]

    assert root_cause_first([*waited, short])[0] is short
    assert summary([*waited, short]) == (
        "rank 1 raised OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.; "
        "ranks 0,2 then failed with DistBackendError: Watchdog caught collective operation timeout"
    )
