"""Snapshot of the ranks' allocations while a cell ran, as columns: allocator history.

Made by `memory.rank.record`, or read from a file by `memory.file`; judged by `memory.peak` and
`memory.findings`; drawn by `memory.view.report`. Times are integers in nanoseconds since the
beginning of the recording, the same zero on every rank of a `Snapshot`. All sizes are bytes that a
storage or the allocator holds, not what a tensor shows of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

# What memory is for, as `Blocks.category` has it: its place in this tuple.
PARAMETER, GRADIENT, OPTIMIZER, BUFFER, ACTIVATION, COMMUNICATION, TEMPORARY, UNKNOWN = range(8)
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",  # a model's, as registered: running means, masks, tables of positions
    "activations",  # made in forward, kept until backward has used them
    "communication",  # what is gathered, reduced or sent: DDP's buckets, FSDP's gathered parameters
    "temporary",  # made and freed in one phase of a step
    "unknown",
)
# The phases of a step, as `Phase.kind` has them.
FORWARD, BACKWARD, STEPPING = "forward", "backward", "optimizer"

# `Blocks.start_ns` of what was there when the recording began, `Blocks.end_ns` of what was there
# when it ended.
BEFORE = -1
STAYS = np.iinfo(np.int64).max

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AllocationFrame:
    """A line of Python that was under way.

    Attributes:
        file: As Python names it; a notebook's cell as `core.places` shows it.
        line: From 1; of the function's first line where `is_line_known` is false.
        is_line_known: Whether `line` is the one that ran.
    """

    file: str
    line: int
    function: str
    is_line_known: bool = True


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pieces of memory, an entry for each in each column, sorted by start.

    Attributes:
        size_bytes: Over 0.
        start_ns: When it was allocated; BEFORE for what was there already.
        end_ns: When it was freed; STAYS where it was not.
        category: Place in CATEGORIES.
        is_exact: Whether the category was read off the object that owns the memory; otherwise it
            is inferred from when, and from where in the program, it was allocated and freed.
        stack: Place in RankMemory.stacks; -1 where it is not known.
        name: Place in RankMemory.names: the parameter, the variable; -1 where it has none.
        operator: Place in RankMemory.names: what allocated it; -1 where it is not known.
    """

    address: Integers
    size_bytes: Integers
    start_ns: Integers
    end_ns: Integers
    category: npt.NDArray[np.int8]
    is_exact: npt.NDArray[np.bool_]
    stack: npt.NDArray[np.int32]
    name: npt.NDArray[np.int32]
    operator: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.address)

    def take(self, which: npt.NDArray[np.bool_] | Integers) -> Blocks:
        """The blocks of a mask, or those at these places in their order."""
        return Blocks(*(getattr(self, column.name)[which] for column in fields(self)))


@dataclass(slots=True)
class BlockRow:
    """One block while a history is read; the columns of `Blocks`, as far as they are known then."""

    address: int
    size_bytes: int
    start_ns: int
    end_ns: int
    stack: int = -1
    operator: int = -1


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step; what no phase covers is forward.

    Attributes:
        kind: BACKWARD or STEPPING.
    """

    kind: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes of the device held by the allocator, whether in use or not: a change per entry.

    Attributes:
        time_ns: When; 0 for the beginning.
        size_bytes: From then on.
    """

    time_ns: Integers
    size_bytes: Integers


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece that the allocator got from the device, at the end of the recording.

    Attributes:
        allocated_bytes: In use of it.
        stream: The stream's address; 0 for the default one.
        kind: "large", "small" or "expandable".
    """

    address: int
    size_bytes: int
    allocated_bytes: int
    stream: int
    kind: str


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that failed.

    Attributes:
        size_bytes: Asked for.
        free_bytes: Free on the device then; -1 where it is not known.
        stack: Place in RankMemory.stacks, or -1.
    """

    time_ns: int
    size_bytes: int
    free_bytes: int = -1
    stack: int = -1


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Allocations of one rank.

    Attributes:
        rank, host: Whose, and where it ran.
        device: "cuda" or "cpu": whose memory.
        device_name: As its driver calls it; empty for a CPU.
        limit_bytes: What the device has; 0 where it is not known.
        duration_ns: When the recording ended; 0 for a snapshot of one moment, without a history.
        zero_ns: When its times are 0, since 1970 by the host's clock; 0 where it is not known.
        stacks: Innermost frame first.
        names: Of owners and operators.
        reserved: Of a GPU; empty on a CPU, whose allocator gives everything back.
        segments: Of a GPU.
        allocator_peak_bytes: What the allocator itself says was the most in use; 0 where it does
            not count (on a CPU).
        reserved_peak_bytes: The same of what it held.
        lost: Events that no longer fitted the history's bound; the oldest ones.
        problem: Why data is missing, as a sentence; empty when all is there.
    """

    rank: int
    host: str
    device: str
    blocks: Blocks
    device_name: str = ""
    limit_bytes: int = 0
    duration_ns: int = 0
    zero_ns: int = 0
    stacks: tuple[tuple[AllocationFrame, ...], ...] = ()
    names: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    step_ends_ns: tuple[int, ...] = ()
    reserved: Reserved = field(
        default_factory=lambda: Reserved(np.empty(0, np.int64), np.empty(0, np.int64))
    )
    segments: tuple[Segment, ...] = ()
    allocator_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    failures: tuple[OutOfMemory, ...] = ()
    lost: int = 0
    version: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Allocations of all ranks.

    Attributes:
        ranks: In rank order.
        strategy: What models were under, as `strategy.choice.described` says it.
        notes: What is skipped, merged or guessed, as sentences.
    """

    ranks: tuple[RankMemory, ...]
    strategy: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of a recording of memory: what it notes, and for how long.

    Attributes:
        steps: Stop after so many; None for the whole cell.
        has_stacks: Note the lines of Python.
        most_events: The history's bound: the oldest are lost beyond it.
    """

    steps: int | None = None
    has_stacks: bool = True
    most_events: int = 1_000_000


def make_blocks(rows: Iterable[BlockRow] = ()) -> Blocks:
    """Columns of blocks in any order, whose categories and names are not known yet."""
    table = np.array(
        [(r.address, r.size_bytes, r.start_ns, r.end_ns, r.stack, r.operator) for r in rows],
        np.int64,
    ).reshape(-1, 6)
    address, size_bytes, start_ns, end_ns, stack, operator = table[
        np.argsort(table[:, 2], kind="stable")
    ].T.copy()
    return Blocks(
        address, size_bytes, start_ns, end_ns,
        category=np.full(len(table), UNKNOWN, np.int8),
        is_exact=np.zeros(len(table), np.bool_),
        stack=stack.astype(np.int32),
        name=np.full(len(table), -1, np.int32),
        operator=operator.astype(np.int32),
    )  # fmt: skip


def shift(memory: RankMemory, by_ns: int) -> RankMemory:
    """The same, by a clock whose zero is so much earlier."""
    blocks, reserved = memory.blocks, memory.reserved
    moved = replace(
        blocks,
        start_ns=np.where(blocks.start_ns == BEFORE, BEFORE, blocks.start_ns + by_ns),
        end_ns=np.where(blocks.end_ns == STAYS, STAYS, blocks.end_ns + by_ns),
    )
    return replace(
        memory,
        blocks=moved,
        duration_ns=memory.duration_ns + by_ns,
        zero_ns=memory.zero_ns - by_ns,
        phases=tuple(
            Phase(phase.kind, phase.start_ns + by_ns, phase.end_ns + by_ns)
            for phase in memory.phases
        ),
        step_ends_ns=tuple(end_ns + by_ns for end_ns in memory.step_ends_ns),
        reserved=Reserved(reserved.time_ns + by_ns, reserved.size_bytes),
        failures=tuple(replace(each, time_ns=each.time_ns + by_ns) for each in memory.failures),
    )


def empty(rank: int, host: str, problem: str) -> RankMemory:
    """The memory of a rank of which there is nothing, and why."""
    return RankMemory(rank, host, "cpu", make_blocks(), problem=problem)
