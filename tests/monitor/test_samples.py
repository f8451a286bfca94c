"""Histories of samples: bounded, thinned, and the same numbers as a plain list gives."""

import math

import numpy as np
import pytest

from nbdist.core.gpus import GpuReading
from nbdist.monitor.process_usage import Usage
from nbdist.monitor.samples import STATES, Doing, Sample, SampleHistory

GIB = 2**30


def sample(rank: int, time_s: float, busy: float | None, used: int = GIB) -> Sample:
    gpu = GpuReading(0, "GPU-a", "H", used, 4 * GIB, busy, 10.0, 50.0, 100.0)
    usage = Usage(1.0, 5, 4, 30, 40)
    return Sample(rank, time_s, Doing("running", "running cell [1]"), usage, 3.0, gpu)


def test_a_series_is_what_was_appended() -> None:
    """Before it is full a history gives back every sample, rank by rank."""
    history = SampleHistory(8)
    for second in range(5):
        history.append([sample(0, second, 10.0 * second), sample(1, second, None)])
    times, values = history.series(0, "utilisation")
    _, unknown = history.series(1, "utilisation")
    _, states = history.series(0, "state")

    assert history.ranks == (0, 1)
    assert len(history) == 5
    assert times.tolist() == [0, 1, 2, 3, 4]
    assert values.tolist() == [0, 10, 20, 30, 40]
    assert np.isnan(unknown).all()
    assert {STATES[int(code)] for code in states} == {"running"}
    assert history.series(7, "utilisation")[0].size == 0


def test_a_full_history_keeps_the_newest_half_and_all_of_the_time() -> None:
    """However long it records it stays bounded; mean, peak and the newest rows are exact."""
    capacity, count = 16, 1000
    history = SampleHistory(capacity)
    busy = [float((37 * n) % 101) for n in range(count)]
    used = [GIB + (7919 * n) % GIB for n in range(count)]
    for second in range(count):
        history.append([sample(0, second, busy[second], used[second])])
        times, _ = history.series(0, "utilisation")
        assert len(times) <= capacity
        assert (np.diff(times) > 0).all()
    times, values = history.series(0, "utilisation")
    _, held = history.series(0, "device_used")
    newest = [value for value, time in zip(values, times, strict=True) if time > count - 8]
    summary = history.summary(0, "utilisation")

    assert len(history) == count
    assert newest == busy[-len(newest) :]
    assert len(newest) >= 7
    gaps = np.diff(times[: capacity // 2])
    assert times[0] <= 2 * count / (capacity // 2), "it reaches back to the beginning"
    assert gaps.max() <= 4 * gaps[:-1].min(), "evenly coarse"
    assert summary.now == busy[-1]
    assert summary.mean == pytest.approx(sum(busy) / count)
    assert summary.peak == max(busy)
    assert history.summary(0, "device_used").peak == max(used)
    assert set(held) <= set(map(float, used)), "of what can be too much the most is kept"


def test_rates_that_are_merged_are_means_of_what_is_known() -> None:
    """A second in which nothing was known does not count as 0."""
    history = SampleHistory(4)
    for second, busy in enumerate([10.0, 30.0, None, None, 50.0]):
        history.append([sample(0, second, busy)])
    _, values = history.series(0, "utilisation")

    assert values[0] == 20.0
    assert math.isnan(values[1])
    assert values[-1] == 50.0
    assert history.summary(0, "utilisation").mean == 30.0


def test_a_clock_that_goes_backwards_leaves_the_history_in_order() -> None:
    """A sample that is not newer than the last is left out."""
    history = SampleHistory(8)
    for second in (5.0, 6.0, 6.0, 2.0, 7.0):
        history.append([sample(0, second, second)])
    times, values = history.series(0, "utilisation")

    assert times.tolist() == [5, 6, 7]
    assert values.tolist() == [5, 6, 7]


def test_windows_of_several_columns_belong_together() -> None:
    """A window is the same rows of each column, those of the last seconds."""
    history = SampleHistory(100)
    for second in range(20):
        history.append([sample(0, second, float(second), GIB + second)])
    busy, used = history.window(0, 3.0, "utilisation", "device_used")

    assert busy.tolist() == [16, 17, 18, 19]
    assert (used - GIB).tolist() == busy.tolist()
    assert history.span_s(0) == 19.0
    assert [part.size for part in history.window(9, 3.0, "cpu", "state")] == [0, 0]


def test_what_nobody_could_tell_is_none() -> None:
    """A rank without a GPU has its cores' utilisation and no device memory."""
    bare = Sample(0, 1.0, Doing("idle", "idle"), cpu_percent=12.0)
    full = sample(0, 1.0, 80.0, 3 * GIB)

    assert (bare.utilisation, bare.device_part, bare.host_part) == (12.0, None, None)
    assert (full.utilisation, full.device_part, full.host_part) == (80.0, 0.75, 0.75)
    assert SampleHistory().summary(0, "cpu").peak is None
