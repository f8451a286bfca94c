"""One time for all ranks: clocks of hosts that are known to be apart, with and without jitter."""

import gzip
import json
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
    assert 10_000 < clock.spread_ns < 80_000


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
    assert both.notes[0].startswith(
        "The clock of two was shifted by 90.000 ms to match the ends of 40"
    )


def test_a_host_without_a_call_in_common_keeps_its_clock() -> None:
    """The note names it."""
    alone = RecordedTrace(rank_trace(4, [Did(COMPUTE, 0, 1)], host="three"), _EPOCH_NS)

    both = align([*recordings({}), alone])

    assert both.notes[-1].startswith("The clock of three was not adjusted")


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
