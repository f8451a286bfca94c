"""The recordings of the ranks' profilers of one cell, as columns.

Made by `trace.read` from the files that ranks write; judged by `trace.breakdown` and
`trace.findings`; drawn by `trace.view.report`. Times are integers in nanoseconds since the
beginning of the recording, the same zero on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# The kinds of events; `Events.kind` is a place in this tuple.
COMPUTE, COMMUNICATION, COPY, DATA, WAIT, HOST, MARK = range(7)
KINDS = (
    "compute",  # what a GPU does within itself; operators of main thread and autograd on a CPU
    "communication",  # NCCL kernels; Gloo's own annotations on its threads
    "copy",  # between host and device, and between devices
    "data",  # the next batch: DataLoader iterations
    "wait",  # the host waits for a collective or for the device
    "host",  # Python, launches and operators of the host where a GPU computes
    "mark",  # annotations of the user's: record_function
)

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a rank: a thread of the host, or a stream of a device.

    Attributes:
        name: The name for people: "main thread", "autograd", "gloo 1", "stream 7".
        is_device: Whether its events ran on a GPU.
    """

    name: str
    is_device: bool = False


@dataclass(frozen=True, slots=True)
class Events:
    """The events of one rank, an entry for each in each column, sorted by start.

    Attributes:
        start_ns: Since the beginning of the recording.
        duration_ns: At least 0.
        lane: Place in RankTrace.lanes.
        depth: How many events of the same lane enclose it.
        kind: Place in KINDS.
        name: Place in RankTrace.names.
        size_bytes: A collective's whole message, which all ranks make or get; 0 for all else.
        group: Place in RankTrace.groups; -1 for all else, and where it is unknown.
    """

    start_ns: Integers
    duration_ns: Integers
    lane: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int16]
    kind: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    size_bytes: Integers
    group: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True)
class Step:
    """The time between the ends of two training steps.

    Attributes:
        number: From 0, as the rank counted them.
        start_ns: Where the last one ended.
        end_ns: After `optimizer.step()` or `nbdist.step()`; on a GPU when it has done so.
    """

    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The recording of one rank.

    Attributes:
        rank, host: Whose, and where it ran.
        device: "cuda" or "cpu": which lanes compute.
        lanes: In the order in which they are drawn.
        groups, group_ranks: Process groups, as the user calls them, and the ranks of each.
        steps: In order; empty where the cell made none.
        problem: Why something is missing, as a sentence; empty when nothing is.
        cpus: Numbers of the CPUs that it may use; empty where the file does not tell.
        has_device_steps: Whether steps are cut by the device's clock, and not by the host's.
    """

    rank: int
    host: str
    device: str
    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    groups: tuple[str, ...]
    group_ranks: tuple[tuple[int, ...], ...]
    events: Events
    steps: tuple[Step, ...] = ()
    problem: str = ""
    cpus: tuple[int, ...] = ()
    has_device_steps: bool = False


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options of a recording.

    Attributes:
        steps: Stop after so many, one more of which comes first and is left out; None for all.
        has_memory: Note what is allocated, for the saved files.
        has_stacks: Note the lines of Python.
    """

    steps: int | None = None
    has_memory: bool = False
    has_stacks: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Recording of one cell on all ranks.

    Attributes:
        ranks: In rank order.
        strategy: What models were under, as `strategy.choice.described` says it.
        formula: What a rank sends in a step under it, as `strategy.footprint.sent_phrases` says it.
        formula_bytes: The same in bytes, of parameters and gradients; None where it is unknown.
        notes: What is skipped, merged or guessed, as sentences.
    """

    ranks: tuple[RankTrace, ...]
    strategy: str = ""
    formula: tuple[str, ...] = ()
    formula_bytes: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def duration_ns(self) -> int:
        """From the first event's start to the last one's end, over all ranks."""
        ends = [int((r.events.start_ns + r.events.duration_ns).max(initial=0)) for r in self.ranks]
        return max(ends, default=0)


def empty(rank: int, host: str, problem: str) -> RankTrace:
    """The trace of a rank of which there is nothing, and why."""
    long, short = np.empty(0, np.int64), np.empty(0, np.int32)
    depth, kind = np.empty(0, np.int16), np.empty(0, np.int8)
    events = Events(long, long, short, depth, kind, short, long, short)
    return RankTrace(rank, host, "cpu", (), (), (), (), events, (), problem)
