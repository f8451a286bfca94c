"""Records what a cell allocates on a GPU, by the history that torch's caching allocator keeps."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from nbdist.core.rank import this_rank
from nbdist.memory.categories import categorise
from nbdist.memory.rank.marks import Marks, merge_phases
from nbdist.memory.rank.owners import StorageOwner
from nbdist.memory.rank.profiler_tree import visible_stacks
from nbdist.memory.snapshot import BACKWARD, MemoryOptions, Phase, RankMemory
from nbdist.memory.torch_reader import of_torch
from nbdist.rpc.rank import crash_files

US = 1000
BUSY = (
    "A recording of your own runs on this rank (torch.cuda.memory._record_memory_history), and "
    "torch has one at a time. End it first: torch.cuda.memory._record_memory_history(enabled=None)."
)
NO_HISTORY = "This version of torch keeps no history of a GPU's memory."
_BACKWARDS = ("backward", "grad")


class CudaRecorder:
    """Records from `start` to `stop`. The allocator's counts of its peaks begin anew with it."""

    def __init__(self, options: MemoryOptions) -> None:
        self.problem = ""
        self._options = options
        self._device = torch.device(this_rank().place.device)
        self._times_ns: list[int] = []
        self._backwards = _Backwards()
        self._counted = 0  # events of the allocator's whole life, at the beginning
        self._snapshot: Mapping[str, Any] | None = None
        self._rest: dict[str, Any] = {}  # fields of RankMemory that are known at the end
        self._is_on = False

    def start(self) -> bool:
        """Begin; whether that has worked, or else why not is in `problem`."""
        self.problem = _start(self._options)
        if self.problem:
            return False
        torch.cuda.reset_peak_memory_stats(self._device)
        self._counted = _event_count(torch.cuda.memory_stats(self._device))
        self._backwards.watch()
        self._is_on = True
        return True

    def mark(self) -> int:
        """Note this moment; what stands for it until the history is read."""
        self._times_ns.append(time.time_ns())
        return len(self._times_ns) - 1

    def stop(self) -> None:
        """End it. A second time does nothing."""
        if not self._is_on:
            return
        self._is_on = False
        self._backwards.leave()
        stats = torch.cuda.memory_stats(self._device)
        self._rest = {
            "allocator_peak_bytes": torch.cuda.max_memory_allocated(self._device),
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(self._device),
        }
        try:
            self._snapshot = torch.cuda.memory._snapshot()  # noqa: SLF001
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
        event_count = _event_count(stats) - self._counted
        traces, index = self._snapshot.get("device_traces", []), self._device.index or 0
        kept_count = len(traces[index]) if index < len(traces) else 0
        self._rest["lost"] = (
            max(0, event_count - kept_count) if kept_count >= self._options.most_events else 0
        )

    def read(self, marks: Marks, memory: RankMemory) -> RankMemory:
        """Read the recording into a RankMemory, beside what `memory` says of the rank."""
        if self._snapshot is None:
            return memory
        snapshot, self._snapshot = self._snapshot, None
        recorded = assemble(
            snapshot, marks, memory, self._times_ns, self._backwards.spans_ns, self._device
        )
        return replace(recorded, **_device_fields(self._device), **self._rest)


class _Backwards:
    """Notes when `torch.autograd.backward` and `grad` run, which `Tensor.backward` calls too.

    These are public functions, replaced for as long as a cell is recorded. torch has no hook
    around a backward; the allocator's history does not know of it.
    """

    def __init__(self) -> None:
        self.spans_ns: list[tuple[int, int]] = []
        self._depth = 0
        self._replacements: dict[str, Callable[..., Any]] = {}
        self._originals: dict[str, Callable[..., Any]] = {}

    def watch(self) -> None:
        """Replace the functions that run a backward, until `leave`."""
        for name in _BACKWARDS:
            self._originals[name] = getattr(torch.autograd, name)
            self._replacements[name] = self._around(self._originals[name])
            setattr(torch.autograd, name, self._replacements[name])

    def leave(self) -> None:
        """Put the original functions back, unless another package has replaced them meanwhile."""
        for name, before in self._originals.items():
            if getattr(torch.autograd, name) is self._replacements[name]:
                setattr(torch.autograd, name, before)

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # a part of the outer one, as checkpoints' own
                return call(*args, **kwargs)
            self._depth += 1
            start = time.time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                self.spans_ns.append((start, time.time_ns()))

        return run


def _start(options: MemoryOptions) -> str:
    """Let the allocator keep its history; return why it cannot.

    Private, as all of torch's recording is; its own tools and documentation use it so. Without it
    a snapshot of the moment is all that there is.
    """
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None:
        return NO_HISTORY
    is_on = getattr(torch._C, "_cuda_isHistoryEnabled", None)  # noqa: SLF001
    if is_on is not None and is_on():
        return BUSY
    # Frames of C++ would need seconds to be named. The history of an earlier recording, which
    # has ended, goes with this one's beginning.
    context = "all" if options.has_stacks else None
    record(
        enabled="all", context=context, stacks="python", max_entries=options.most_events,
        clear_history=True,
    )  # fmt: skip
    return ""


def _event_count(stats: Mapping[str, Any]) -> int:
    """Events that a history would have of the allocator's whole life, by its own counts.

    Allocations; frees, which are noted as they are asked for and as they are done; segments.
    """
    names = (
        "allocation.all.allocated", "allocation.all.freed", "active.all.freed",
        "segment.all.allocated", "segment.all.freed",
    )  # fmt: skip
    return sum(int(stats.get(name, 0)) for name in names)


def assemble(
    snapshot: Mapping[str, Any],
    marks: Marks,
    memory: RankMemory,
    times_ns: Sequence[int],
    backwards_ns: Iterable[tuple[int, int]],
    device: torch.device,
) -> RankMemory:
    """The rank's memory from torch's snapshot and what the objects claimed.

    `times_ns` of the marks, and start and end of each backward, are by the host's clock, which the
    allocator's history has too. The device has its index.
    """
    zero_ns = times_ns[marks.first]
    times = {number: time_ns - zero_ns for number, time_ns in enumerate(times_ns)}
    backwards = [
        Phase(BACKWARD, max(0, start_ns - zero_ns), end_ns - zero_ns)
        for start_ns, end_ns in backwards_ns
        if end_ns > zero_ns
    ]
    recorded = of_torch(
        snapshot, rank=memory.rank, host=memory.host, device_index=device.index or 0,
        start_us=zero_ns // US, end_us=max(times_ns) // US,
    )  # fmt: skip
    recorded = replace(
        _with_cells(recorded),
        version=memory.version,
        zero_ns=zero_ns,
        phases=merge_phases([*backwards, *marks.stepping(times)]),
        step_ends_ns=marks.step_ends(times),
    )
    return categorise(recorded, list(marks.claims(times, str(device))))


def of_now(
    owners: Iterable[StorageOwner], memory: RankMemory, before: Mapping[str, Any] | None = None
) -> RankMemory:
    """The memory with its owners now, or `before`, by torch's snapshot; without a history."""
    device = torch.device(this_rank().place.device)
    ask = getattr(torch.cuda.memory, "_snapshot", None)
    empty: Mapping[str, Any] = {"segments": []}
    torch_snapshot = before or (empty if ask is None else ask())
    segments_only = {**torch_snapshot, "device_traces": []}
    current = of_torch(
        segments_only, rank=memory.rank, host=memory.host, device_index=device.index or 0
    )
    current = replace(_with_cells(current), **_device_fields(device), version=memory.version)
    return categorise(current, list(Marks(before=tuple(owners)).claims({0: 0}, str(device))))


def _device_fields(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {"device_name": str(properties.name), "limit_bytes": int(properties.total_memory)}


def _with_cells(memory: RankMemory) -> RankMemory:
    """With stacks as they are shown: cells by their numbers, without lines that say nothing."""
    stacks, places = visible_stacks(memory.stacks, crash_files.cells)
    # The last entry stands for a place of -1: not known.
    blocks = replace(memory.blocks, stack=places[memory.blocks.stack])
    failures = tuple(
        replace(failure, stack=int(places[failure.stack])) for failure in memory.failures
    )
    return replace(memory, stacks=stacks, blocks=blocks, failures=failures)
