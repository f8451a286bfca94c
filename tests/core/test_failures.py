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
    """A failure of the user's own code."""
    return RankFailure(rank, "ValueError", message, (f"ValueError: {message}",), at_s)


def follower(rank: int, at_s: float = 0.0, port: int = 5000) -> RankFailure:
    """What a rank meets when its peer has gone."""
    message = PEER_GONE.format(port=port)
    return RankFailure(rank, "RuntimeError", message, (f"RuntimeError: {message}",), at_s)


def test_followers_come_last() -> None:
    """A connection closed by a peer is no root cause, even when it was noticed earlier."""
    failures = [follower(0, at_s=1.0), boom(1, at_s=2.0), follower(2, at_s=0.5)]

    assert [f.rank for f in root_cause_first(failures)] == [1, 2, 0]


def test_causes_are_in_time_order() -> None:
    """Of several own errors the earliest is the root cause; at one time the lowest rank's."""
    failures = [boom(0, at_s=3.0), boom(3, at_s=1.0), boom(1, at_s=2.0), boom(2, at_s=1.0)]

    assert [f.rank for f in root_cause_first(failures)] == [2, 3, 1, 0]


def test_followers_alone_are_in_time_order() -> None:
    """Without a cause the follower that came first leads."""
    failures = [follower(0, at_s=2.0), follower(1, at_s=1.0)]

    assert [f.rank for f in root_cause_first(failures)] == [1, 0]


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


def test_equal_tracebacks_are_one_group() -> None:
    """Failures with the same traceback are told once, with their ranks in order."""
    groups = grouped([boom(3, at_s=1.0), boom(1, at_s=2.0), boom(0, at_s=3.0, message="other")])

    assert [(first.rank, ranks) for first, ranks in groups] == [(3, (1, 3)), (0, (0,))]


def test_addresses_and_colours_make_no_difference() -> None:
    """The same error of two processes is the same whatever its addresses and its colours."""
    first = RankFailure(0, "E", "<f at 0x7f01>", ("\x1b[31mE\x1b[0m: <f at 0x7f01>",))
    two = RankFailure(1, "E", "<f at 0xAB12>", ("E: <f at 0xAB12>",))

    assert [ranks for _, ranks in grouped([first, two])] == [(0, 1)]


def test_ports_make_no_difference_to_followers() -> None:
    """Seven ranks that lost seven connections are one group, with the port of the first."""
    failures = [follower(rank, at_s=rank, port=40000 + rank) for rank in range(7)]
    ((first, ranks),) = grouped(failures)

    assert ranks == tuple(range(7))
    assert first == failures[0]


def test_ports_make_a_difference_to_causes() -> None:
    """Numbers in the user's own errors are not touched."""
    groups = grouped([boom(0, message="host:4000 failed"), boom(1, message="host:4001 failed")])

    assert len(groups) == 2


def test_equal_messages_from_different_lines_are_two_groups() -> None:
    """The same error raised in two places is told twice."""
    first = RankFailure(0, "E", "m", ("line 1", "E: m"))
    two = RankFailure(1, "E", "m", ("line 2", "E: m"))

    assert len(grouped([first, two])) == 2


def test_plain() -> None:
    """Colours go, addresses become alike, all else stays."""
    assert plain("\x1b[1;31mred\x1b[0m at 0x7fFF, 0 and x") == "red at 0x..., 0 and x"


def test_phrases() -> None:
    """One rank is singular, several are plural."""
    assert [ranks_phrase([1]), ranks_phrase([0, 1, 2, 4])] == ["rank 1", "ranks 0-2,4"]
    assert [ranks_are([1]), ranks_are([0, 1])] == ["rank 1 is", "ranks 0-1 are"]


def test_summary_of_one() -> None:
    """One failure is told with its rank, class and message."""
    assert summary([boom(1)]) == "rank 1 raised ValueError: boom"


def test_summary_of_cause_and_followers() -> None:
    """The cause comes first; those that failed because of it come after it."""
    text = summary([follower(0, 1.0, 40001), boom(1, 2.0), follower(2, 1.5, 40002)])

    assert text == (
        "rank 1 raised ValueError: boom; ranks 0,2 then failed with RuntimeError: "
        "Connection closed by peer"
    )


def test_summary_of_two_causes() -> None:
    """Two own errors are both told as raised."""
    assert summary([boom(0, 1.0), boom(1, 2.0, "bang")]) == (
        "rank 0 raised ValueError: boom; rank 1 raised ValueError: bang"
    )


def test_summary_of_many() -> None:
    """After the root cause and three more the ranks of all others are named."""
    failures = [boom(rank, at_s=rank, message=f"m{rank}") for rank in range(8)]

    assert summary(failures) == (
        "rank 0 raised ValueError: m0; rank 1 raised ValueError: m1; rank 2 raised ValueError: m2; "
        "rank 3 raised ValueError: m3; ranks 4-7 failed too"
    )


def test_summary_of_a_death() -> None:
    """A death is told in its own words."""
    died = RankFailure(2, "RankDied", "ended (killed by SIGKILL) while running this cell")

    assert summary([follower(0, 1.0), died]).startswith(
        "rank 2 ended (killed by SIGKILL) while running this cell; rank 0 then failed with "
    )


def test_summary_without_a_message() -> None:
    """An error without a message is its class alone, without a colon."""
    assert summary([RankFailure(0, "AssertionError", "")]) == "rank 0 raised AssertionError"


def test_summary_takes_the_first_line() -> None:
    """Of a message of several lines the first that has text is told; the traceback has all."""
    failure = boom(0, message="\n  first\nsecond\n")

    assert summary([failure]) == "rank 0 raised ValueError: first"
    assert "second" in traceback_text([failure])


@pytest.mark.parametrize(("length", "shown"), [(600, "x" * 600), (601, "x" * 597 + "...")])
def test_summary_cuts_long_messages(length: int, shown: str) -> None:
    """A message of more than 600 characters is cut to 600, with dots."""
    assert summary([boom(0, message="x" * length)]) == f"rank 0 raised ValueError: {shown}"


def test_traceback_text() -> None:
    """Each distinct traceback stands under its ranks, the root cause on top."""
    text = traceback_text([follower(0, 1.0), boom(1, 3.0), boom(2, 2.0)])
    gone = PEER_GONE.format(port=5000)

    assert text == (
        "\x1b[1mranks 1-2 raised ValueError\x1b[0m:\nValueError: boom\n\n"
        f"\x1b[1mrank 0 raised RuntimeError\x1b[0m:\nRuntimeError: {gone}"
    )


def test_traceback_text_of_a_follower_tells_where_its_own_code_was() -> None:
    """Frames of libraries are left out where the cause is known, and only there."""
    frames = (
        "\x1b[31mRuntimeError\x1b[0m      Traceback (most recent call last)",
        "\x1b[36mCell In[3]\x1b[0m, line 1\n----> 1 train()",
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


def test_tracebacks_keep_their_colours() -> None:
    """What is shown is the first rank's own traceback, colours and addresses included."""
    failure = RankFailure(0, "E", "m", ("\x1b[31mat 0x7f\x1b[0m",))

    assert traceback_text([failure]).endswith(":\n\x1b[31mat 0x7f\x1b[0m")


def test_the_error_survives_pickling_and_copying() -> None:
    """A DistributedError that crosses a process boundary keeps its message, ranks and text."""
    error = DistributedError("rank 1 raised E", ranks=(1,), traceback_text="trace")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is DistributedError
        assert (str(twin), twin.ranks, twin.traceback_text) == ("rank 1 raised E", (1,), "trace")


def test_the_error_draws_the_ranks_tracebacks() -> None:
    """IPython shows the ranks' tracebacks and the summary, none of our own frames."""
    error = DistributedError("rank 1 raised E", ranks=(1,), traceback_text="trace")
    bare = DistributedError("rank 1 died")

    assert error._render_traceback_() == ["trace", "", "DistributedError: rank 1 raised E"]
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


def test_error_keeps_its_advice() -> None:
    """Below the error in a notebook and in plain Python, and on its way elsewhere."""
    error = DistributedError("failed", ranks=(1,), traceback_text="frames", advice="do this")
    same = pickle.loads(pickle.dumps(error))

    assert (same.advice, same.ranks, same.traceback_text) == ("do this", (1,), "frames")
    assert error._render_traceback_() == [
        "frames", "", "DistributedError: failed", "", "do this",
    ]  # fmt: skip
    assert DistributedError("failed")._render_traceback_() == ["DistributedError: failed"]
    assert traceback.format_exception_only(error)[-2:] == ["frames\n", "do this\n"]
