"""Usage and activity of ranks, second by second: one sample of a rank, the history of all."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbdist.core import units
from nbdist.core.gpus import GpuReading
from nbdist.monitor.process_usage import Usage

# What a rank can be doing, in the order of the codes in a history.
STATES = ("idle", "running", "waiting", "stopped", "dead", "unknown")
# Rows of a rank's history. At one per second half an hour as sampled, and before it all the time
# since the beginning in as many rows.
CAPACITY = 3600

Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Allocator:
    """Numbers of torch's allocator on a rank's GPU memory, in bytes.

    Attributes:
        allocated_bytes: In tensors.
        reserved_bytes: Taken from the GPU.
        peak_bytes: The most that was in tensors since the rank began, or since its peak was reset.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a rank's control thread on its use.

    Attributes:
        now_s: Its host's monotonic clock.
        usage: Its process with its children; None where it was not asked for.
        gpu: Its GPU; None without one, or where nothing can be read of it.
        gpu_age_s: How old that reading is.
        allocator: None on a CPU, and before CUDA is used.
        allocator_age_s: How old these numbers are: it is not asked while the rank waits for its
            GPU in a collective.
        expert_load: Tokens that its experts computed in the cell, by those that it routed to any
            experts; None where it trains no mixture under ep.
    """

    now_s: float
    usage: Usage | None = None
    gpu: GpuReading | None = None
    gpu_age_s: float = 0.0
    allocator: Allocator | None = None
    problems: tuple[str, ...] = ()
    allocator_age_s: float = 0.0
    expert_load: float | None = None


@dataclass(frozen=True, slots=True)
class Doing:
    """A rank's state, the call that it waits in, and its last collective.

    Attributes:
        state: Of STATES. "waiting": inside a call of torch.distributed.
        text: "running cell [12], waiting in all_reduce(float32[3]) at line 7 of cell [12]".
        since_s: Since when it is in that state, by the notebook's monotonic clock; None if unknown.
        cell_s: How long it has been running its cell, in seconds; 0 without one.
        last_collective: The newest call that has ended: "all_reduce(float32[3])"; empty if none
            is known. With NCCL a call ends when it is launched.
        collective_age_s: How long ago it ended; None if none is known.
    """

    state: str
    text: str
    since_s: float | None = None
    cell_s: float = 0.0
    last_collective: str = ""
    collective_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One rank at one moment; None is what nobody could tell.

    Attributes:
        time_s: When, by the monotonic clock of the notebook's host.
        cpu_percent: Processor time since the sample before, as a part of the cores that are its
            share (RankPlace.threads); over 100 where it uses more of them, as loaders' workers do.
        gpu: Its GPU, with all who use it.
        allocator: torch's own numbers of that GPU's memory, of this rank alone.
        age_s: How old the oldest of `usage` and `gpu` is. A rank on another host whose C code
            holds the GIL answers when it lets go.
        expert_load: As its answer says.
    """

    rank: int
    time_s: float
    doing: Doing
    usage: Usage | None = None
    cpu_percent: float | None = None
    gpu: GpuReading | None = None
    allocator: Allocator | None = None
    age_s: float = 0.0
    expert_load: float | None = None

    @property
    def doing_text(self) -> str:
        """`running cell [12], waiting in barrier() at line 7 of cell [12] for 3.0 s`."""
        text = self.doing.text
        return text if self.doing_s is None else f"{text} for {units.seconds(self.doing_s)}"

    @property
    def doing_s(self) -> float | None:
        """Seconds that the rank has been running or waiting; None if neither or unknown."""
        doing = self.doing
        if doing.since_s is None or doing.state not in {"running", "waiting"}:
            return None
        return max(0.0, self.time_s - doing.since_s)

    @property
    def utilisation(self) -> float | None:
        """In percent: of the GPU, the time in which a kernel ran; without one, of its cores."""
        return self.cpu_percent if self.gpu is None else self.gpu.busy_percent

    @property
    def device_part(self) -> float | None:
        """The part of device memory that is in use, 0 to 1."""
        gpu = self.gpu
        if gpu is None or gpu.used_bytes is None or not gpu.total_bytes:
            return None
        return gpu.used_bytes / gpu.total_bytes

    @property
    def host_part(self) -> float | None:
        """The part of the host's memory, or of its control group's limit, that is in use."""
        usage = self.usage
        return None if usage is None else usage.host_used_bytes / max(1, usage.host_limit_bytes)


@dataclass(frozen=True, slots=True)
class Column:
    """A number that a history keeps.

    Attributes:
        of: The number in a sample; None where it is not known.
        merge: One value for two rows of long ago, of which the first stands for this share of
            both: the mean of rates, the most of what can be too much, the last of states.
    """

    of: Callable[[Sample], float | None]
    merge: Callable[[float, float, float], float]


def _mean(first: float, second: float, share: float) -> float:
    if math.isnan(first) or math.isnan(second):  # what is not known does not count as 0
        return second if math.isnan(first) else first
    return first * share + second * (1 - share)


def _most(first: float, second: float, _share: float) -> float:
    return float(np.fmax(first, second))


def read_of(path: str, convert: Callable[[Any], float] = float) -> Callable[[Sample], float | None]:
    """Make a reader of a sample's number, as `gpu.power_w`; None where any of it is not known."""

    def read(sample: Sample) -> float | None:
        value: Any = sample
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        return None if value is None else convert(value)

    return read


COLUMNS: Mapping[str, Column] = {
    "utilisation": Column(read_of("utilisation"), _mean),
    "cpu": Column(read_of("cpu_percent"), _mean),
    "device_used": Column(read_of("gpu.used_bytes"), _most),
    "device_part": Column(read_of("device_part"), _most),
    "memory_busy": Column(read_of("gpu.memory_busy_percent"), _mean),
    "rss": Column(read_of("usage.rss_bytes"), _most),
    "host_part": Column(read_of("host_part"), _most),
    "temperature": Column(read_of("gpu.temperature_c"), _most),
    "power": Column(read_of("gpu.power_w"), _mean),
    "allocated": Column(read_of("allocator.allocated_bytes"), _most),
    "allocated_peak": Column(read_of("allocator.peak_bytes"), _most),
    "reserved": Column(read_of("allocator.reserved_bytes"), _most),
    "expert_load": Column(read_of("expert_load"), _mean),
    "collective_age": Column(read_of("doing.collective_age_s"), _most),
    "state": Column(read_of("doing.state", STATES.index), lambda _first, last, _share: last),
}
_NUMBERS = {name: number for number, name in enumerate(COLUMNS)}


@dataclass(frozen=True, slots=True)
class Summary:
    """One column of one rank over all that was recorded, each sample alike.

    None is what was not known.
    """

    now: float | None
    mean: float | None
    peak: float | None


class _Rows:
    """The rows of one rank, oldest first."""

    def __init__(self, capacity: int):
        width = len(COLUMNS)
        self.capacity = capacity
        self.size = self.n_samples = 0
        self.times = np.empty(capacity)
        self.values = np.empty((capacity, width))
        self.counts = np.empty(capacity)  # of the samples that a row stands for
        self.total, self.count = np.zeros(width), np.zeros(width)
        self.peak: Reals = np.full(width, np.nan)

    def append(self, time_s: float, row: Reals) -> None:
        if self.size == self.capacity:
            self._thin()
        at = self.size
        self.times[at], self.values[at], self.counts[at] = time_s, row, 1
        self.size += 1
        self.n_samples += 1
        self.total += np.nan_to_num(row)
        self.count += ~np.isnan(row)
        self.peak = np.fmax(self.peak, row)

    def _thin(self) -> None:
        """Merge the two neighbours of the older half that stand for the fewest samples.

        So the newer half is as it was sampled, and the older half reaches back to the beginning,
        evenly coarse.
        """
        counts = self.counts[: self.capacity // 2]
        at = int(np.argmin(counts[:-1] + counts[1:]))
        first, second = self.values[at], self.values[at + 1]
        share = counts[at] / (counts[at] + counts[at + 1])
        self.values[at + 1] = [
            column.merge(float(first[number]), float(second[number]), float(share))
            for number, column in enumerate(COLUMNS.values())
        ]
        self.counts[at + 1] += self.counts[at]
        for rows in (self.times, self.values, self.counts):
            rows[at : self.size - 1] = rows[at + 1 : self.size].copy()
        self.size -= 1


class SampleHistory:
    """The samples of all ranks as columns, bounded: when it is full the older half is thinned.

    One thread appends; others may read at the same time. `capacity` is rows of each rank, from 4.
    """

    def __init__(self, capacity: int = CAPACITY):
        self._capacity = capacity
        self._rows: dict[int, _Rows] = {}
        self._lock = threading.Lock()

    def append(self, samples: Sequence[Sample]) -> None:
        """Take in one sample of each rank; one that is not newer than the last is left out."""
        for sample in samples:
            values = [column.of(sample) for column in COLUMNS.values()]
            row = np.array([math.nan if value is None else value for value in values], float)
            with self._lock:
                rows = self._rows.setdefault(sample.rank, _Rows(self._capacity))
                if not rows.size or sample.time_s > rows.times[rows.size - 1]:
                    rows.append(sample.time_s, row)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of which there is anything."""
        with self._lock:
            return tuple(sorted(self._rows))

    def __len__(self) -> int:
        """Samples that were taken of the rank that has most, those merged since as well."""
        with self._lock:
            return max((rows.n_samples for rows in self._rows.values()), default=0)

    def series(self, rank: int, name: str) -> tuple[Reals, Reals]:
        """(times, values) of a column of COLUMNS, oldest first; both empty for an unknown rank.

        Times are those of the samples, monotonic seconds; values are NaN where nothing was known.
        """
        number = _NUMBERS[name]
        with self._lock:
            rows = self._rows.get(rank)
            if rows is None:
                return np.empty(0), np.empty(0)
            return rows.times[: rows.size].copy(), rows.values[: rows.size, number].copy()

    def window(self, rank: int, length_s: float, *names: str) -> tuple[Reals, ...]:
        """Columns over the last `length_s` seconds before the rank's newest sample, row by row."""
        with self._lock:
            rows = self._rows.get(rank)
            if rows is None or not rows.size:
                return tuple(np.empty(0) for _ in names)
            times = rows.times[: rows.size]
            since = int(np.searchsorted(times, times[-1] - length_s))
            return tuple(rows.values[since : rows.size, _NUMBERS[name]].copy() for name in names)

    def span_s(self, rank: int) -> float:
        """How far the rank's samples go back from the newest, in seconds."""
        times, _ = self.series(rank, "state")
        return float(times[-1] - times[0]) if len(times) else 0.0

    def summary(self, rank: int, name: str) -> Summary:
        """Newest, mean and peak of a column since the recording began."""
        number = _NUMBERS[name]
        with self._lock:
            rows = self._rows.get(rank)
            if rows is None:
                return Summary(None, None, None)
            count = rows.count[number]
            mean = rows.total[number] / count if count else math.nan
            newest = rows.values[rows.size - 1, number]
            numbers = (newest, mean, rows.peak[number])
            return Summary(*(None if math.isnan(value) else float(value) for value in numbers))
