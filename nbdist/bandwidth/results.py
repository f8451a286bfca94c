"""Bandwidth of collectives: what was measured, its definitions, and the model fitted to it.

The definitions are those of nccl-tests: https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
Bandwidths are bytes per second.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from nbdist.bandwidth.latency import Fit, fit
from nbdist.bandwidth.sizes import size_text
from nbdist.core import units
from nbdist.core.topology import Topology
from nbdist.core.units import shown
from nbdist.errors import OptionError, no_such

# However long a run takes, there are so many.
LEAST_RUNS = 3


@dataclass(frozen=True, slots=True)
class Op:
    """One operation, and how its bus bandwidth follows from size and time.

    Attributes:
        factor: The same as a function of the number of ranks: of each byte of the size, how many
            the busiest rank sends at least, however the operation is carried out.
        buffers: Bytes of memory that a rank needs for each byte of the size, with n ranks.
    """

    text: str
    factor: Callable[[int], float]
    buffers: Callable[[int], float] = lambda _n: 1.0


# Source: nccl-tests, doc/PERFORMANCE.md, "Summary"; sendrecv there sends once around a ring.
OPS: Mapping[str, Op] = {
    "all_reduce": Op("2(n-1)/n", lambda n: 2 * (n - 1) / n),
    "all_gather": Op("(n-1)/n", lambda n: (n - 1) / n, lambda n: 1 + 1 / n),
    "reduce_scatter": Op("(n-1)/n", lambda n: (n - 1) / n, lambda n: 1 + 1 / n),
    "all_to_all": Op("(n-1)/n", lambda n: (n - 1) / n, lambda _n: 2.0),
    "broadcast": Op("1", lambda _n: 1.0),
    "reduce": Op("1", lambda _n: 1.0),
    "send_recv": Op("1", lambda _n: 1.0, lambda _n: 2.0),
}


def parse_ops(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """The operations that are named, each once, in the order typed; all without a name.

    Raises:
        OptionError: If one does not exist.
    """
    if text is None:
        return tuple(OPS)
    words = text.split(",") if isinstance(text, str) else list(text)
    named = dict.fromkeys(str(word).strip() for word in words)
    if unknown := [word for word in named if word not in OPS]:
        raise no_such("operation", unknown[0], OPS, ", several with commas")
    return tuple(named)


@dataclass(frozen=True, slots=True)
class Timing:
    """Measurement of one operation and size by one rank.

    Attributes:
        times_s: Of each run, in order.
        beside_s: What came before the runs: tensors, connections, the check of the values.
        is_right: Whether its result had the values that it should have.
        problem: Why it was not run, the same on all ranks; then there are no times.
    """

    times_s: tuple[float, ...] = ()
    beside_s: float = 0.0
    is_right: bool = True
    problem: str = ""


@dataclass(frozen=True, slots=True)
class BandwidthRow:
    """One operation at one size.

    Attributes:
        op: A name of OPS.
        size_bytes: Of a rank's tensor or input; of all_gather, of the whole result.
        time_s: A run ends with its slowest rank; the median of all runs.
    """

    op: str
    size_bytes: int
    time_s: float
    runs: int
    wrong: tuple[int, ...] = ()

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth in bytes per second: size over time."""
        return self.size_bytes / self.time_s

    def busbw(self, n: int) -> float:
        """Bus bandwidth in bytes per second, comparable with a link whatever n is."""
        return self.algbw * OPS[self.op].factor(n)


def merge_timings(op: str, size_bytes: int, timings: Sequence[Timing]) -> BandwidthRow:
    """Merge all ranks' timings of the same runs, given in rank order, into one row."""
    slowest = [max(run) for run in zip(*(timing.times_s for timing in timings), strict=True)]
    wrong = tuple(rank for rank, timing in enumerate(timings) if not timing.is_right)
    return BandwidthRow(op, size_bytes, statistics.median(slowest), len(slowest), wrong)


@dataclass(frozen=True, slots=True)
class LinkModel:
    """How long collectives take between these ranks, by what was measured between them.

    Attributes:
        fits: By operation; those whose time was seen to grow with the size.
        world_size: How many ranks it was measured with.
    """

    fits: Mapping[str, Fit]
    world_size: int

    def seconds(self, op: str, size_bytes: float, n: int | None = None) -> float:
        """The estimated time of one operation of OPS, its size as of `BandwidthRow`.

        Of n ranks that take part, all without it: the bytes on the wire follow n, the latency stays
        that of all ranks.

        Raises:
            OptionError: If there is no model of the operation.
        """
        n = self.world_size if n is None else n
        if op not in self.fits:
            there = ", ".join(self.fits) or "none"
            raise OptionError(
                f"{op!r} has no bandwidth model (these have one: {there}). Measure it, at large "
                f"sizes too: %dist_bench --ops {op}"
            )
        fit = self.fits[op]
        return 0.0 if n == 1 else fit.alpha_s + size_bytes * OPS[op].factor(n) * fit.beta_s


def fit_model(rows: Iterable[BandwidthRow], n: int) -> LinkModel:
    """The model that fits these rows of n ranks best."""
    by_op: dict[str, list[BandwidthRow]] = {}
    for row in rows:
        by_op.setdefault(row.op, []).append(row)
    fits = {
        op: fit([row.size_bytes * OPS[op].factor(n) for row in its], [row.time_s for row in its])
        for op, its in by_op.items()
        if len({row.size_bytes for row in its}) > 1
    }
    # Of small messages alone the bandwidth is not known.
    fits = {op: op_fit for op, op_fit in fits.items() if op_fit.beta_s > 0}
    return LinkModel(fits, n)


@dataclass(frozen=True, slots=True)
class Bench:
    """Result of `%dist_bench`.

    Attributes:
        world_size, n_hosts: Ranks, and on how many hosts.
        backend: "nccl" or "gloo".
        device: What the ranks run on, for people.
        caveat: Why these are not speeds of links, a sentence; empty where they are.
        rows: By operation, sizes rising.
        left_out: What was asked for and not measured, and why, a sentence each.
    """

    world_size: int
    n_hosts: int
    backend: str
    device: str
    caveat: str
    rows: tuple[BandwidthRow, ...]
    left_out: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations that were measured, in order."""
        return tuple(dict.fromkeys(row.op for row in self.rows))

    @property
    def model(self) -> LinkModel:
        """The model fitted to the rows."""
        return fit_model(self.rows, self.world_size)


def caveat(topology: Topology) -> str:
    """Why what is measured between these ranks says nothing of links; empty where it does."""
    if topology.backend == "nccl":
        return ""
    where = "through the memory of one host"
    if topology.n_hosts > 1:
        where = f"in TCP connections between {topology.n_hosts} hosts"
    copied = "" if topology.ranks[0].device == "cpu" else ", and are copied from each GPU and back"
    return (
        f"These are not speeds of links between GPUs: messages go {where}{copied}. {topology.why}"
    )


def unfitting(op: str, sizes: Sequence[int], n: int, free_bytes: Sequence[float]) -> str:
    """Why sizes, rising, are not measured with n ranks: the memory that each of them may take."""
    least = min(range(len(free_bytes)), key=free_bytes.__getitem__)
    needed = sizes[0] * OPS[op].buffers(n)
    return (
        f"{op} {_from(sizes)}: rank {least} would need {units.size(needed)} and may "
        f"take {units.size(free_bytes[least])} (half of the free memory, shared among the ranks "
        "there)"
    )


def too_long(op: str, sizes: Sequence[int], least_s: float) -> str:
    """Why sizes, rising, are not measured: the time that the first of them would take at least."""
    return (
        f"{op} {_from(sizes)}: about {shown(f'{least_s:.2g}')} s, longer than its share of the "
        "time; allow more with --seconds"
    )


def _from(sizes: Sequence[int]) -> str:
    return size_text(sizes[0]) if len(sizes) == 1 else f"from {size_text(sizes[0])} up"


_FORMAT = "nbdist bench 1"


def dumps(bench: Bench) -> str:
    """The measurement as JSON."""
    return json.dumps({"format": _FORMAT, **asdict(bench)}, indent=1)


def loads(text: str) -> Bench:
    """Read a result from the text that `dumps` has written.

    Raises:
        OptionError: If it is something else, or incomplete.
    """
    try:
        record = json.loads(text)
        if record.pop("format") != _FORMAT:
            raise ValueError(_FORMAT)  # noqa: TRY301  # told below like any other form
        rows = tuple(
            BandwidthRow(**{**row, "wrong": tuple(row["wrong"])}) for row in record.pop("rows")
        )
        bench = Bench(**{**record, "rows": rows, "left_out": tuple(record["left_out"])})
        _check(bench)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(
            "This is not a complete measurement written by %dist_bench --save "
            f"({type(error).__name__}: {error})."
        ) from error
    return bench


def _check(bench: Bench) -> None:
    """ValueError for numbers that no measurement has."""
    if bench.world_size < 2:
        raise ValueError(f"world_size {bench.world_size}")
    for row in bench.rows:
        if row.op not in OPS or not row.size_bytes > 0 or not row.time_s > 0:
            raise ValueError(f"{row.op!r}, {row.size_bytes} bytes, {row.time_s} s")
