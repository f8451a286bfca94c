"""Measures collectives between a session's ranks, and keeps the model fitted to them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nbdist.bandwidth.results import (
    LEAST_RUNS,
    OPS,
    BandwidthRow,
    Bench,
    LinkModel,
    Timing,
    caveat,
    dumps,
    loads,
    merge_timings,
    parse_ops,
    too_long,
    unfitting,
)
from nbdist.bandwidth.sizes import DEFAULT_SIZES, parse_sizes, size_text
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.topology import Topology
from nbdist.errors import Interrupted, NbdistError, OptionError
from nbdist.rpc.kernel.functions import RankFunction

BENCH_S = 10.0
# Connections are made in the first call; beyond this, and what the runs themselves may take, a
# rank does not answer any more.
DEADLINE_S = 60.0
SLACK = 20
# So many shares of an operation's time are kept for its last sizes.
LATER = 3
# More runs than fit into this say nothing new, and an interrupt waits for the end of them.
LONGEST_S = 1.0
PATIENCE_S = 4.0
# What a measurement may take of the memory that is free: torch and the backend need some, too.
SHARE = 0.5

begin_measuring: RankFunction[[], dict[str, int]] = RankFunction("nbdist.bandwidth.rank:begin")
measure: RankFunction[[str, int, float], Timing] = RankFunction("nbdist.bandwidth.rank:measure")


class Bandwidth:
    """Measures bandwidth between a session's ranks, and keeps the newest measurement.

    Attributes:
        last: The newest measurement; None before the first.
    """

    def __init__(self, ranks: Ranks):
        self.last: Bench | None = None
        self._ranks = ranks

    @property
    def model(self) -> LinkModel:
        """The latency-bandwidth model of the newest measurement.

        Raises:
            OptionError: If nothing was measured yet.
        """
        if self.last is None:
            raise OptionError(
                "Nothing has been measured yet. Run %dist_bench, or load a file with --load FILE."
            )
        return self.last.model

    def load(self, path: str | Path) -> Bench:
        """Take a measurement from a file as the newest.

        Raises:
            OptionError: If it cannot be read, or is something else.
        """
        self.last = load(path)
        return self.last

    def measure(
        self,
        ops: str | Sequence[str] | None = None,
        sizes: str | Sequence[int] | None = None,
        limit_s: float = BENCH_S,
        progress: Callable[[str], None] = lambda _text: None,
    ) -> Bench:
        """Measure operations at sizes between all ranks, and keep the result as `last`.

        Args:
            ops: Names of bandwidth.results.OPS, with commas or as a list; None for all.
            sizes: As bandwidth.sizes.parse_sizes takes them; None for 1K:1G with NCCL, 1K:64M with
            Gloo.
            limit_s: For all of it. Each operation gets an equal share; sizes that would take more
                than is left of it are left out, the smallest never.
            progress: Told what is measured.

        Raises:
            OptionError: If an operation or size does not exist, or there is one rank.
            RankGone, RankBusy, NotRunning: As for a cell.
            NbdistError: What a rank raised, or who has not answered.
            Interrupted: If the user interrupted it; nothing is kept, the ranks are back.
        """
        topology = self._ranks.topology
        if topology.world_size == 1:
            raise OptionError(
                "Only 1 rank runs, so there is nothing to measure. Start more: %dist_init -n 2"
            )
        named = parse_ops(ops)
        sizes = DEFAULT_SIZES[topology.backend] if sizes is None else sizes
        measurement = _Measurement(self._ranks, parse_sizes(sizes, topology.world_size), progress)
        self._ranks.recover_if_needed()
        try:
            measurement.run(named, limit_s)
        except KeyboardInterrupt as error:
            self._ranks.settle()
            raise Interrupted(
                f"the measurement was interrupted at {measurement.doing}; its results are discarded"
            ) from error
        except NbdistError:
            self._ranks.settle()
            # Its peers fail as soon as a rank ends, before its end is known.
            self._ranks.check_death(self._ranks.ranks)
            raise
        self.last = Bench(
            world_size=topology.world_size,
            n_hosts=topology.n_hosts,
            backend=topology.backend,
            device=", ".join(dict.fromkeys(p.device_name or "CPU" for p in topology.ranks)),
            caveat=caveat(topology),
            rows=tuple(measurement.rows),
            left_out=tuple(measurement.left_out),
        )
        return self.last


class _Measurement:
    """One measurement while it runs.

    Attributes:
        rows, left_out: As of `Bench`, so far.
        doing: What is measured now, for people.
    """

    def __init__(self, ranks: Ranks, sizes: Sequence[int], progress: Callable[[str], None]):
        self.rows: list[BandwidthRow] = []
        self.left_out: list[str] = []
        self.doing = "its beginning"
        self._ranks = ranks
        self._sizes = sizes
        self._progress = progress

    def run(self, ops: Sequence[str], limit_s: float) -> None:
        """Measure all operations at all sizes."""
        free_by_rank = self._ranks.call_all(begin_measuring, deadline_s=DEADLINE_S)
        end_s = time.monotonic() + limit_s
        free = shares(self._ranks.topology, free_by_rank)
        n = self._ranks.topology.world_size
        for number, op in enumerate(ops):
            fitting = [s for s in self._sizes if s * OPS[op].buffers(n) <= min(free)]
            if too_large := self._sizes[len(fitting) :]:
                self.left_out.append(unfitting(op, too_large, n, free))
            left_s = max(0.0, end_s - time.monotonic())
            self._measure(op, fitting, left_s / (len(ops) - number))

    def _measure(self, op: str, sizes: Sequence[int], limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        costs: list[tuple[int, float]] = []
        for number, size in enumerate(sizes):
            left_s = max(0.0, end_s - time.monotonic())
            least_s = next_cost_s(costs, size)
            if least_s > left_s:
                self.left_out.append(too_long(op, sizes[number:], least_s))
                return
            self.doing = f"{op} of {size_text(size)}"
            self._progress(self.doing)
            # Later sizes take longer: what the last ones need is not to be spent before.
            share_s = min(left_s / (len(sizes) - number + LATER), LONGEST_S)
            timings: list[Timing] = self._ranks.call_all(
                measure, op, size, share_s, deadline_s=DEADLINE_S + SLACK * (share_s + least_s),
                is_collective=True, patience_s=PATIENCE_S,
            )  # fmt: skip
            if problem := timings[0].problem:
                self.left_out.append(f"{op}: {problem}")
                return
            row = merge_timings(op, size, timings)
            self.rows.append(row)
            beside_s = max(timing.beside_s for timing in timings)
            costs.append((size, beside_s + LEAST_RUNS * row.time_s))


def next_cost_s(costs: Sequence[tuple[int, float]], size: int) -> float:
    """Least seconds a size will take, on the line through the last two; 0 for fewer than two.

    Noise makes such lines steep: never more than in proportion to the size. `costs` are smaller
    sizes, rising, and the seconds that each would have taken at least.
    """
    if len(costs) < 2:
        return 0.0
    (before, before_s), (last, last_s) = costs[-2:]
    line_s = last_s + max(0.0, last_s - before_s) / (last - before) * (size - last)
    return min(line_s, last_s * size / last)


def shares(topology: Topology, free: Sequence[Mapping[str, int]]) -> list[float]:
    """Bytes that each rank may take, in rank order.

    What is free is of each rank that of its "host", and of its "device" where that is a GPU.
    """
    on_host = Counter(place.node_rank for place in topology.ranks)
    on_device = Counter(place.device_uuid for place in topology.ranks)
    allowed = []
    for place, its in zip(topology.ranks, free, strict=True):
        limits = []
        if "device" in its:
            limits.append(its["device"] / on_device[place.device_uuid])
        if topology.backend != "nccl":  # Gloo brings what is on a GPU to the host
            limits.append(its["host"] / on_host[place.node_rank])
        allowed.append(SHARE * min(limits))
    return allowed


def check_target(path: str | Path) -> None:
    """Refuse a file that `save` could not write, or that it would be wrong to replace.

    Raises:
        OptionError: If its folder is missing, or it is another kind of file.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise OptionError(f"There is no folder {path.parent} to save {path.name} in.")
    if path.exists():
        try:
            load(path)
        except OptionError as error:
            raise OptionError(f"{path} exists and was not replaced. {error}") from error


def save(bench: Bench, path: str | Path) -> None:
    """Write a measurement as JSON; `load` reads it.

    Raises:
        OptionError: If the file cannot be written; see also `check_target`.
    """
    check_target(path)
    try:
        Path(path).write_text(dumps(bench), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be written ({error.strerror}).") from error


def load(path: str | Path) -> Bench:
    """Read a measurement that `save` has written.

    Raises:
        OptionError: If it cannot be read, or is something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise OptionError(f"{path} cannot be read ({why}).") from error
    try:
        return loads(text)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error
