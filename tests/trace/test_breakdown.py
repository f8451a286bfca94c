"""Where the time went: against a count of single nanoseconds, and against small known traces."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from nbdist.core.units import compared
from nbdist.strategy import choose, footprint
from nbdist.trace.breakdown import Slowest, breakdown, self_ns, sent_share
from nbdist.trace.trace import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    DATA,
    HOST,
    MARK,
    WAIT,
    Events,
    RankTrace,
    Step,
    Trace,
    empty,
)
from tests.support import drawn_traces
from tests.support.traces import MS, Did, rank_trace, trace

_SPAN_NS = 400
_PARTS = ("compute_ns", "exposed_ns", "copy_ns", "data_ns", "idle_ns", "overlap_ns", "waited_ns")


def random_rank(rank: int, random: np.random.Generator, world_size: int) -> RankTrace:
    """Random events on three lanes; all ranks make the same collectives in the same order."""
    count, n_calls = int(random.integers(1, 40)), 5
    calls = np.sort(random.integers(0, _SPAN_NS - 60, n_calls))
    others = np.array([COMPUTE, COPY, DATA, WAIT, HOST, MARK])
    start_ns = np.concatenate([calls, random.integers(0, _SPAN_NS - 60, count)])
    kind = np.concatenate([np.full(n_calls, COMMUNICATION), random.choice(others, count)])
    order = np.argsort(start_ns, kind="stable")
    total = count + n_calls
    group = np.where(kind == COMMUNICATION, 0, -1)
    events = Events(
        start_ns[order],
        random.integers(0, 60, total),
        random.integers(0, 3, total).astype(np.int32),
        np.zeros(total, np.int16),
        kind[order].astype(np.int8),
        np.zeros(total, np.int32),
        np.zeros(total, np.int64),
        group[order].astype(np.int32),
    )
    steps = (Step(0, 20, 150), Step(1, 150, 320))
    drawn = drawn_traces.rank_trace(rank, events, names=("all-reduce",), steps=steps)
    return replace(drawn, group_ranks=(tuple(range(world_size)),))


def slow_shares(traces: list[RankTrace]) -> list[Counter[str]]:
    """The same numbers by looking at every nanosecond of both steps, one by one."""
    calls = [[i for i, k in enumerate(t.events.kind) if k == COMMUNICATION] for t in traces]
    last = [
        max(int(t.events.start_ns[places[k]]) for t, places in zip(traces, calls, strict=True))
        for k in range(len(calls[0]))
    ]
    counts = []
    for rank, places in zip(traces, calls, strict=True):
        counted: Counter[str] = Counter()
        e = rank.events
        spans = [
            (int(a), int(a + d), int(k), int(lane))
            for a, d, k, lane in zip(e.start_ns, e.duration_ns, e.kind, e.lane, strict=True)
        ]
        for now in range(20, 320):
            on = [(kind, lane) for a, b, kind, lane in spans if a <= now < b]
            kinds = {kind for kind, _ in on}
            blocked = {lane for kind, lane in on if kind == WAIT}
            computes = any(kind == COMPUTE and lane not in blocked for kind, lane in on)
            waits = any(e.start_ns[i] <= now < end for i, end in zip(places, last, strict=True))
            counted["overlap_ns"] += computes and COMMUNICATION in kinds
            if computes:
                counted["compute_ns"] += 1
            elif COMMUNICATION in kinds:
                counted["exposed_ns"] += 1
                counted["waited_ns"] += waits
            elif COPY in kinds:
                counted["copy_ns"] += 1
            elif DATA in kinds:
                counted["data_ns"] += 1
            else:
                counted["idle_ns"] += 1
        counts.append(counted)
    return counts


def slowest(*did: list[Did], end: float, world_size: int = 2) -> Slowest:
    """Of ranks that did this in one step."""
    ranks = (rank_trace(r, each, [0, end], world_size=world_size) for r, each in enumerate(did))
    slowest = breakdown(trace(*ranks)).slowest

    assert slowest is not None
    return slowest


def all_reduce(start: float, end: float, name: str = "all-reduce") -> Did:
    return Did(COMMUNICATION, start, end, name, 1, 8)


def test_shares_are_those_of_a_count_of_every_nanosecond() -> None:
    """On random events that overlap in every way; the parts make up the whole."""
    random = np.random.default_rng(1)
    for _ in range(30):
        world_size = int(random.integers(2, 5))
        traces = [random_rank(rank, random, world_size) for rank in range(world_size)]

        result = breakdown(Trace(tuple(traces)))

        for rank, slow in zip(result.ranks, slow_shares(traces), strict=True):
            assert {part: getattr(rank, part) for part in _PARTS} == {p: slow[p] for p in _PARTS}
            assert rank.window_ns == 300
            assert rank.steps_ns == (130, 170)
            parts = (rank.compute_ns, rank.exposed_ns, rank.copy_ns, rank.data_ns, rank.idle_ns)
            assert sum(parts) == rank.window_ns


def test_a_rank_that_comes_late_costs_the_wait_of_the_others() -> None:
    """Rank 2 comes 3 ms after rank 1, the last of the others: 3 of 10 ms."""
    did = [
        [Did(COMPUTE, 0, arrival), all_reduce(arrival, 9), Did(COMPUTE, 9, 10)]
        for arrival in (2, 5, 8)
    ]

    assert slowest(*did, end=10, world_size=3) == Slowest(
        2, 3 * MS, 0.3, 1, 0, "this may be chance: fewer than 3 steps"
    )


def test_a_wait_under_which_others_compute_costs_nothing() -> None:
    """Rank 0 has begun its all-reduce long before rank 1, and computes until that has come."""
    early = [Did(COMPUTE, 0, 8), all_reduce(1, 9)]
    late = [Did(COMPUTE, 0, 8), all_reduce(8, 9)]

    result = breakdown(trace(rank_trace(0, early, [0, 10]), rank_trace(1, late, [0, 10])))

    assert result.slowest is None
    assert result.ranks[0].waited_ns == 0


def test_two_collectives_that_wait_at_once_count_once() -> None:
    """Two buckets wait for rank 1 from 2 to 6 ms: that is 4 ms, and not 8."""
    early = [all_reduce(2, 7), all_reduce(2, 7, "all-gather")]
    late = [Did(COMPUTE, 0, 6), all_reduce(6, 7), all_reduce(6, 7, "all-gather")]
    late_rank = slowest(early, late, end=8)

    assert (late_rank.rank, late_rank.cost_ns) == (1, 4 * MS)


def test_self_time_is_the_duration_without_what_is_inside() -> None:
    """The self times of nested operators add up to the time of the outermost."""
    rank = rank_trace(
        0,
        [
            Did(COMPUTE, 0, 10, "outer"),
            Did(COMPUTE, 1, 4, "middle"),
            Did(COMPUTE, 2, 3, "inner"),
            Did(COMPUTE, 5, 7, "middle"),
            Did(COMPUTE, 0, 9, "elsewhere", lane=1),
            Did(MARK, 11, 12, "mine"),
        ],
    )

    operations = {o.name: (o.count, o.self_ns / MS) for o in breakdown(trace(rank)).operations}

    assert operations == {
        "outer": (1, 5), "middle": (2, 4), "inner": (1, 1), "elsewhere": (1, 9),
    }  # fmt: skip
    assert self_ns(rank.events).sum() == (10 + 9 + 1) * MS


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_bytes_of_a_strategy_are_those_of_its_formula(name: str, n: int) -> None:
    """Ranks that send just what footprint says a strategy sends are told to have sent so."""
    n_parameters = 1000 * n
    size_bytes = 4 * n_parameters
    did = {"ddp": ["all-reduce"], "fsdp": ["all-gather", "all-gather", "reduce-scatter"]}[name]
    steps = 3
    ranks = [
        rank_trace(
            rank,
            [
                Did(COMMUNICATION, 10 * step + k, 10 * step + k + 1, name, 1, size_bytes)
                for step in range(steps)
                for k, name in enumerate(did)
            ],
            [0, 10, 20, 30],
            world_size=n,
        )
        for rank in range(n)
    ]

    result = breakdown(trace(*ranks))

    choice = choose.choose(name, {}, n)
    assert result.sent_bytes == pytest.approx(footprint.sent_bytes(choice, n_parameters))
    assert {row.name: row.count for row in result.traffic} == Counter(did)


def test_every_collective_sends_what_a_ring_does() -> None:
    """Of a message of 1; who only receives sends nothing."""
    shares = {name: sent_share(name, 4) for name in ("all-reduce", "reduce", "receive", "barrier")}

    assert shares == {"all-reduce": 1.5, "reduce": 0.75, "receive": 0.0, "barrier": 0.0}
    assert sent_share("something else", 4) == 0.0


def test_many_sizes_of_a_collective_are_one_row() -> None:
    """Of tokens on their way to experts, with their mean; few sizes are told apart."""

    def rows(n_sizes: int) -> list[tuple[int, float, float]]:
        did = [
            Did(COMMUNICATION, at, at + 1, "all-to-all", 1, 100 * (1 + at % n_sizes))
            for at in range(2 * n_sizes)
        ]
        result = breakdown(trace(rank_trace(0, did), rank_trace(1, did)))
        return [(row.size_bytes, row.count, row.sent_bytes) for row in result.traffic]

    # A rank of two sends a quarter of what all have.
    assert rows(2) == [(200, 2.0, 100.0), (100, 2.0, 50.0)]
    assert rows(9) == [(500, 18.0, 2250.0)]


def test_a_recording_without_steps_is_told_whole() -> None:
    """From the first event's start to the last one's end, and a note says so."""
    result = breakdown(trace(rank_trace(0, [Did(COMPUTE, 2, 4), Did(COMPUTE, 5, 7)])))

    [rank] = result.ranks
    assert (result.step_ns, rank.window_ns, rank.idle_ns) == (0, 5 * MS, 1 * MS)
    assert result.notes[0].startswith("No step ended, so the numbers cover the whole recording.")
    assert "No collective was recorded." in result.notes


def test_ranks_with_different_numbers_of_steps_are_compared_by_those_of_both() -> None:
    """The first two; a note has the numbers."""
    did = [Did(COMPUTE, 0, 30)]
    both = trace(rank_trace(0, did, [0, 10, 20, 30]), rank_trace(1, did, [0, 10, 20]))

    result = breakdown(both)

    assert [rank.window_ns for rank in result.ranks] == [20 * MS, 20 * MS]
    assert result.notes[0] == (
        "Ranks recorded different step counts (rank 0: 3, rank 1: 2); the first 2 are counted."
    )


def test_a_rank_without_steps_lets_all_be_counted_whole() -> None:
    """The note names the rank, and all ranks are measured over the whole recording."""
    did = [Did(COMPUTE, 0, 30)]

    result = breakdown(trace(rank_trace(0, did, [0, 10]), rank_trace(1, did)))

    assert [rank.window_ns for rank in result.ranks] == [30 * MS, 30 * MS]
    assert result.notes[0].startswith("No step ended on rank 1, so")


def test_a_rank_of_which_there_is_nothing_is_named_with_its_reason() -> None:
    """The others are counted."""
    rank = rank_trace(0, [Did(COMPUTE, 0, 2)], [0, 2])

    result = breakdown(trace(rank, empty(1, "one", "It ended before its trace was read.")))

    assert [each.rank for each in result.ranks] == [0]
    assert result.notes[0] == "Rank 1: It ended before its trace was read."


def test_nothing_at_all_gives_no_numbers() -> None:
    """Neither of no rank nor of ranks without events."""
    for empty_trace in (trace(), trace(empty(0, "one", "Nothing was recorded."))):
        result = breakdown(empty_trace)

        assert (result.ranks, result.operations) == ((), ())
        assert (result.step_ns, result.slowest) == (0, None)


def test_a_first_step_that_is_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With how many times as long it took; not where outputs are stored and compared."""
    slow = trace(rank_trace(0, [Did(COMPUTE, 0, 50)], [0, 30, 40, 50]))

    result = breakdown(slow)

    assert result.step_ns == 10 * MS
    assert result.notes[1].startswith("The first step took 3.0 times as long as the others")
    monkeypatch.setenv("NBDIST_TEST", "1")
    assert not any("first step" in compared(note) for note in breakdown(slow).notes)


def test_the_device_is_told_in_notes_but_not_in_stored_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stored trace of CPU ranks has the notes of one of GPUs."""
    did, steps = [Did(COMPUTE, 0, 30), Did(COMMUNICATION, 5, 9, "reduce-scatter")], [0, 10, 20, 30]
    on_cpus, on_gpus = (
        trace(*(rank_trace(n, did, steps, device=device) for n in range(2)))
        for device in ("cpu", "cuda")
    )
    notes = [*breakdown(on_cpus).notes]
    monkeypatch.setenv("NBDIST_TEST", "1")

    assert [note[:8] for note in notes] == ["On a CPU", "Gloo run"]
    assert [*map(compared, breakdown(on_cpus).notes)] == ["#"]
    assert [*map(compared, breakdown(on_gpus).notes)] == ["#"]
