"""One time for all ranks: clocks of hosts that are known to be apart, with and without jitter."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nbdist.trace.chrome_writer import write_merged
from nbdist.trace.clock_sync import align, offsets
from nbdist.trace.read import RecordedTrace, read
from nbdist.trace.trace import COMMUNICATION, COMPUTE, empty
from tests.support.traces import MS, Did, rank_trace, trace

_EPOCH_NS = 1_700_000_000 * 1_000_000_000


def recordings(offset_ns: dict[str, int], jitter_ns: float = 0.0) -> list[RecordedTrace]:
    """Four ranks on two hosts, 40 all-reduces that all leave at the same true time."""
    random = np.random.default_rng(2)
    ends = np.cumsum(random.uniform(1, 3, 40)) + 5
    recordings = []
    for rank, host in enumerate(("one", "one", "two", "two")):
        begin = random.uniform(0, 1)  # each rank's first event is at another time
        noted = ends + random.normal(0, jitter_ns / MS, len(ends)) - begin
        came = noted - random.uniform(0.1, 0.9, len(ends))
        did = [Did(COMPUTE, 0, 1)] + [
            Did(COMMUNICATION, a, b, "all-reduce", 1, 8) for a, b in zip(came, noted, strict=True)
        ]
        trace = rank_trace(rank, did, [0, noted[-1]], world_size=4, host=host)
        recordings.append(
            RecordedTrace(trace, _EPOCH_NS + round(begin * MS) - offset_ns.get(host, 0))
        )
    return recordings


@pytest.mark.parametrize("offset_ns", [0, 1, 250_000, -3_600_000_000_000])
def test_a_clock_that_is_apart_is_found_exactly(offset_ns: int) -> None:
    """To a nanosecond or two, from none to an hour."""
    clocks = offsets(recordings({"two": offset_ns}))

    assert clocks["one"].offset_ns == 0
    assert clocks["two"].offset_ns == pytest.approx(offset_ns, abs=2)
    assert clocks["two"].count == 40


def test_jitter_of_the_ends_averages_out() -> None:
    """Ends that are noted 50 us too early or late move the clock by less than 20 us."""
    clock = offsets(recordings({"two": 7 * MS}, jitter_ns=50_000))["two"]

    assert abs(clock.offset_ns - 7 * MS) < 20_000
    assert clock.low_ns < 7 * MS < clock.high_ns
    assert 50_000 < clock.high_ns - clock.low_ns < 500_000


# Milliseconds: (how late ends are noted, of host "two" so many times as late, the time that a call
# takes, how long ranks wait for the last one)
GPUS = (0.02, 1.0, 20.0, 0.3)
FEW_CORES = (2.5, 1.0, 1.0, 3.0)
ONE_HOST_LATE = (2.5, 3.0, 1.0, 3.0)


def noisy(seed: int, offset_ms: float, how: tuple[float, ...]) -> list[RecordedTrace]:
    """Twelve all-reduces of four ranks on two hosts whose processes wait for a core."""
    late_ms, times, latency_ms, wait_ms = how
    random = np.random.default_rng(seed)
    came = np.cumsum(random.uniform(5, 9, 12)) + random.uniform(0, wait_ms, (4, 12))
    done = came.max(axis=0) + latency_ms
    recordings = []
    for rank, host in enumerate(("one", "one", "two", "two")):
        ended = done + random.exponential(late_ms * (times if host == "two" else 1), 12)
        did = [
            Did(COMMUNICATION, a, b, "all-reduce", 1, 8)
            for a, b in zip(came[rank], ended, strict=True)
        ]
        zero_ns = _EPOCH_NS - round(offset_ms * MS) * (host == "two")
        recordings.append(RecordedTrace(rank_trace(rank, did, world_size=4, host=host), zero_ns))
    return recordings


def allowed_ms(recordings: list[RecordedTrace]) -> tuple[float, float]:
    """The offsets with which no rank ends a call before another has begun it, one by one."""
    spans = [
        [
            ((start + zero) / MS, (start + duration + zero) / MS)
            for start, duration in zip(events.start_ns, events.duration_ns, strict=True)
        ]
        for events, zero in (
            (recording.trace.events, recording.zero_ns - _EPOCH_NS) for recording in recordings
        )
    ]
    pairs = [
        (a, b) for near in spans[:2] for far in spans[2:] for a, b in zip(near, far, strict=True)
    ]
    return max(a[0] - b[1] for a, b in pairs), min(a[1] - b[0] for a, b in pairs)


@pytest.mark.parametrize("how", [GPUS, FEW_CORES, ONE_HOST_LATE])
def test_hosts_of_one_time_stay_as_they_are(how: tuple[float, ...]) -> None:
    """However late ranks note the ends of calls: none of 60 recordings is shifted."""
    shifted = [seed for seed in range(60) if offsets(noisy(seed, 0, how))["two"].offset_ns]

    assert shifted == []


@pytest.mark.parametrize("how", [GPUS, FEW_CORES, ONE_HOST_LATE])
@pytest.mark.parametrize("offset_ms", [0.05, 0.5, 2.7, 10, 50, -50])
def test_a_shift_is_as_good_as_it_says(offset_ms: float, how: tuple[float, ...]) -> None:
    """The true offset lies where the note says, or is too small to be told from none."""
    for seed in range(20):
        made = noisy(seed, offset_ms, how)
        at_least, at_most = allowed_ms(made)
        clock = offsets(made)["two"]
        low, high = clock.low_ns / MS, clock.high_ns / MS

        assert at_least < offset_ms < at_most  # of the made calls themselves
        assert low < offset_ms < high
        if clock.offset_ns:
            assert low <= clock.offset_ns / MS <= high
            assert abs(clock.offset_ns / MS - offset_ms) < high - low
        else:
            assert low <= 0 <= high
        if not at_least <= 0 <= at_most and abs(offset_ms) >= 10:
            assert clock.offset_ns  # with the clocks as they are, calls end before they begin


@pytest.mark.parametrize(
    ("offset_ms", "how", "error_ms"),
    [(0.5, GPUS, 0.02), (50, GPUS, 0.02), (10, FEW_CORES, 2), (50, ONE_HOST_LATE, 4)],
)
def test_the_error_of_a_shift(offset_ms: float, how: tuple[float, ...], error_ms: float) -> None:
    """A twentieth of a millisecond where ends are noted at once; else what they are late by."""
    errors = [
        abs(offsets(noisy(seed, offset_ms, how))["two"].offset_ns / MS - offset_ms)
        for seed in range(20)
    ]

    assert max(errors) < error_ms


def test_one_wrong_match_moves_no_clock() -> None:
    """A call of another time, taken for the same one, is outvoted."""
    made = noisy(1, 50, GPUS)
    events = made[2].trace.events
    events.start_ns[5] += 900 * MS

    assert offsets(made)["two"].offset_ns / MS == pytest.approx(50, abs=0.02)


def test_joined_traces_have_one_time() -> None:
    """Ends of the same call are equal on all ranks, whatever the clocks said; a note tells."""
    both = align(recordings({"two": 90 * MS}))

    ends = np.stack([
        (rank.events.start_ns + rank.events.duration_ns)[rank.events.kind == COMMUNICATION]
        for rank in both.ranks
    ])  # fmt: skip
    assert np.ptp(ends, axis=0).max() <= 4
    assert min(int(rank.events.start_ns.min()) for rank in both.ranks) == 0
    assert np.ptp([rank.steps[0].end_ns for rank in both.ranks]) <= 4
    (note,) = both.notes
    assert note == (
        "The clock of two was shifted by 90.000 ms to match 40 collectives, which allow 90.000 to "
        "90.000 ms."
    )


def test_clocks_that_agree_are_told_in_one_line() -> None:
    """However many hosts and ranks there are."""
    made = noisy(3, 0, FEW_CORES)
    hosts = ("one", "two", "three", "three")
    four = [
        replace(recording, trace=replace(recording.trace, host=host))
        for recording, host in zip(made, hosts, strict=True)
    ]

    (pair,), (all_hosts,) = align(made).notes, align(four).notes

    assert re.fullmatch(
        r"The clocks of one and of two agree as far as their collectives show, within [0-9.]+ ms: "
        r"nothing was shifted\.", pair,
    )  # fmt: skip
    assert all_hosts.startswith("The clocks of one and of 2 hosts agree as far as")


def test_a_host_without_a_call_in_common_keeps_its_clock() -> None:
    """The note names it."""
    alone = RecordedTrace(rank_trace(4, [Did(COMPUTE, 0, 1)], host="three"), _EPOCH_NS)

    both = align([*recordings({}), alone])

    assert both.notes[0].startswith("The clock of three was not adjusted")


def test_a_clock_is_found_by_way_of_another_host() -> None:
    """Host three shares no group with host one, but with two."""
    first = recordings({"two": 5 * MS})[:3]
    times = first[2].trace.events
    ends = (times.start_ns + times.duration_ns)[times.kind == COMMUNICATION] / MS
    pair = [Did(COMMUNICATION, end - 0.05, end, "barrier", 1) for end in ends]
    near = rank_trace(2, pair, world_size=4, host="two")
    far = rank_trace(3, pair, world_size=4, host="three")
    zero_ns = first[2].zero_ns

    clocks = offsets([*first, RecordedTrace(near, zero_ns), RecordedTrace(far, zero_ns + 3 * MS)])

    assert clocks["two"].offset_ns == pytest.approx(5 * MS, abs=2)
    assert clocks["three"].offset_ns == pytest.approx(2 * MS, abs=4)


def test_files_that_do_not_tell_their_time_begin_together() -> None:
    """And a note says so; a rank of which there is nothing stays in its place."""
    ranks = [RecordedTrace(rank_trace(rank, [Did(COMPUTE, 3, 4)]), 0) for rank in (2, 0)]

    both = align(ranks, [empty(1, "one", "It ended.")])

    assert [rank.rank for rank in both.ranks] == [0, 1, 2]
    assert both.notes == ("The files have no start time: each rank begins at 0.",)
    assert align([]).ranks == ()


def test_the_merged_file_has_all_ranks_by_one_clock(tmp_path: Path) -> None:
    """A process per rank, its lanes as threads, every event to the nanosecond."""
    ranks = [
        rank_trace(
            rank,
            [
                Did(COMPUTE, rank, 4.5, 'a "quoted" name'),
                Did(COMMUNICATION, 5, 6, "all-reduce", 1, 8),
            ],
            [0, 7],
        )
        for rank in (0, 1)
    ]
    path = tmp_path / "all.json.gz"

    write_merged(trace(*ranks, empty(2, "one", "It ended.")), path)

    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    metadata = [
        (e["pid"], e["tid"], e["name"], e["cat"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    ]
    assert metadata == [
        entry
        for rank in (0, 1)
        for entry in (
            (rank, 2, "step 0", "step", 0, 7000),
            (rank, 0, 'a "quoted" name', "compute", 1000 * rank, 4500 - 1000 * rank),
            (rank, 1, "all-reduce", "communication", 5000, 1000),
        )
    ]
    assert [e["args"] for e in events if e.get("cat") == "communication"] == [
        {"bytes": 8, "group": "all ranks"}
    ] * 2
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[1, 1] == "stream 7"
    assert read(path).trace.events.start_ns.tolist() == sorted([0, 0, 0, MS, 5 * MS, 5 * MS])
