"""What a strategy's runs come to in one row, against numbers made by hand."""

from dataclasses import replace

import pytest

from nbdist.comparison.comparison import PARTS, CellMemory, HeldMemory, row
from nbdist.strategy.choose import choose
from nbdist.trace.breakdown import TimeBreakdown, breakdown
from nbdist.trace.trace import COMMUNICATION, COMPUTE, DATA
from tests.support.traces import Did, rank_trace, trace

KB = 1000
# 10 ms of computing, of communication 6 ms, 2 of them under it; data for 3 ms, idle for 3.
STEPS = [
    Did(COMPUTE, 0, 10),
    Did(COMMUNICATION, 8, 14, "all-reduce", 1, 100 * KB),
    Did(DATA, 14, 17, "enumerate"),
]
SEEN = CellMemory(
    HeldMemory(400, 400, 800), 5_000, is_device=False, n_parameters=100, has_adam=True
)


def traced(*ends: float, formula_bytes: float | None = None) -> TimeBreakdown:
    ranks = [rank_trace(rank, STEPS, [0, *ends]) for rank in range(2)]
    return breakdown(replace(trace(*ranks), formula_bytes=formula_bytes))


def test_a_row_has_time_overlap_memory_and_bytes() -> None:
    """Of a step of 20 ms on two ranks that do the same; an all-reduce of two sends it once."""
    result = row("ddp", choose("ddp", {}, 2), traced(20, formula_bytes=7.0), [SEEN] * 2, [SEEN] * 2)

    assert (result.step_ns, result.has_steps) == (20_000_000, True)
    assert dict(zip(PARTS, result.parts, strict=True)) == pytest.approx(
        {"compute": 0.5, "communication": 0.2, "copy": 0.0, "data": 0.15, "idle": 0.15}
    )
    assert result.overlap == pytest.approx(2 / 6)
    assert (result.sent_bytes, result.sent_formula_bytes) == (100 * KB, 7.0)
    assert (result.held.total_bytes, result.held_formula_bytes) == (1600, 1600)
    assert (result.strategy, result.dp, result.problem) == ("ddp, dp 2", 2, "")


def test_memory_is_that_of_the_rank_with_the_most() -> None:
    """On the CPU the warm-up's peak, without the profiler; on a GPU that of the record."""
    more = replace(SEEN, held=HeldMemory(500, 500, 1000), peak_bytes=6_000)
    large = replace(SEEN, peak_bytes=9_000)
    chosen, numbers = choose("fsdp", {}, 2), traced(20)
    on_cpu = row("fsdp", chosen, numbers, [SEEN, more], [more, large])
    on_gpu = row(
        "fsdp", chosen, numbers, [SEEN, more],
        [replace(more, is_device=True), replace(large, is_device=True)],
    )  # fmt: skip

    assert (on_cpu.held.total_bytes, on_cpu.peak_bytes, on_cpu.is_device) == (2000, 6_000, False)
    assert (on_gpu.peak_bytes, on_gpu.is_device) == (9_000, True)
    assert on_cpu.held_formula_bytes == 800


def test_what_is_not_known_is_none() -> None:
    """A peak that one rank's system does not tell; the formula without Adam, or without a model."""
    unknown = replace(SEEN, peak_bytes=None, has_adam=False)
    ddp = choose("ddp", {}, 2)
    result = row("ddp", ddp, traced(20), [SEEN, unknown], [unknown] * 2)
    none = [replace(SEEN, n_parameters=0)] * 2
    without = row("ddp", ddp, traced(20), none, none)

    assert (result.peak_bytes, result.held_formula_bytes) == (None, None)
    assert (result.sent_formula_bytes, without.held_formula_bytes) == (None, None)


def test_a_cell_without_steps_or_communication_is_told_whole() -> None:
    """Its time is what was recorded; there is nothing that could be hidden."""
    ranks = [rank_trace(0, [Did(COMPUTE, 0, 10)]), rank_trace(1, [Did(COMPUTE, 0, 12)])]
    result = row(
        "single", choose("single", {}, 2), breakdown(trace(*ranks)), [SEEN] * 2, [SEEN] * 2
    )

    assert (result.step_ns, result.has_steps, result.overlap) == (12_000_000, False, None)
    assert (result.dp, result.parts[0]) == (1, 1.0)
    # Nothing was recorded: such as where every rank's profiler was taken by the cell.
    empty = row("ddp", choose("ddp", {}, 2), breakdown(trace()), [SEEN] * 2, [SEEN] * 2)
    assert (empty.step_ns, empty.parts) == (0, (0.0,) * len(PARTS))
