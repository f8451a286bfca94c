"""Records what a cell allocates of the host's memory, by torch.profiler.

torch's allocator for CPUs keeps no history of its own. The profiler sees what the thread of the
cell allocates, and the backends' threads; not what other threads of Python do.
"""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nbdist.memory.blocks import Event, pair_events
from nbdist.memory.categories import categorise, with_foreign
from nbdist.memory.rank import profiler_tree
from nbdist.memory.rank.marks import Marks, merge_phases
from nbdist.memory.rank.owners import StorageOwner, live_storages
from nbdist.memory.rank.profiler_tree import MARK, ProfilerHistory
from nbdist.memory.snapshot import BACKWARD, MemoryOptions, Phase, RankMemory
from nbdist.recording.rank.steps import is_profiling, start_profiler
from nbdist.rpc.rank import crash_files

DEVICE = "cpu"
BUSY = "Another profiler runs on this rank, and torch has one at a time. End it first."
TAKEN = (
    "The cell has used a profiler of its own, which ended the recording: torch has one at a time."
)
NO_TREE = "This version of torch reports no stacks of CPU allocations."


class _StorageFrees:
    """Notes when memory goes that is older than a recording: torch's profiler does not report it.

    Storages are not kept alive by it.
    """

    def __init__(self) -> None:
        # By address: the reference, whose callback is called when the storage goes.
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._freed: list[tuple[int, int, int]] = []

    def watch(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """From now on. A storage goes with its last tensor, also one that only autograd holds."""
        for storage in storages:
            address = storage.data_ptr()
            if storage.device.type == "cpu" and address not in self._watched:
                gone = functools.partial(self._gone, address, storage.nbytes())
                self._watched[address] = weakref.ref(storage, gone)

    def leave(self) -> None:
        """Forget all storages: what goes from now on is not noted."""
        self._watched = {}

    def events(self) -> list[Event]:
        """Frees, by the host's clock."""
        return [Event(time_ns, address, -size) for time_ns, address, size in self._freed]

    def _gone(self, address: int, size_bytes: int, _reference: object) -> None:
        if self._watched.pop(address, None) is not None:
            self._freed.append((time.time_ns(), address, size_bytes))


class CpuRecorder:
    """Records from `start` to `stop`."""

    def __init__(self, options: MemoryOptions) -> None:
        self.problem = ""
        self._options = options
        self._numbers = itertools.count()
        self._ends = _StorageFrees()
        self._profiler: profile | None = None

    def start(self) -> bool:
        """Begin; whether that has worked, or else why not is in `problem`."""
        if is_profiling(unknown=False):
            self.problem = BUSY
            return False
        self._ends.watch(live_storages())
        profiler = profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            with_stack=self._options.has_stacks,
        )
        start_profiler(profiler)
        self._profiler = profiler
        return True

    def mark(self) -> int:
        """Note this moment; what stands for it until the history is read."""
        number = next(self._numbers)
        with record_function(f"{MARK}{number}"):
            pass
        return number

    def stop(self) -> None:
        """End it. A second time does nothing."""
        profiler, is_ours = self._profiler, is_profiling(unknown=True)
        self._ends.leave()
        if profiler is None:
            return
        if not is_ours:
            self.problem, self._profiler = TAKEN, None
            return
        profiler.stop()

    def read(self, marks: Marks, memory: RankMemory) -> RankMemory:
        """Read the recording into a RankMemory, beside what `memory` says of the rank."""
        if self._profiler is None:
            return memory
        history = _history(self._profiler)
        self._profiler = None
        return assemble(history, marks, memory, self._ends.events(), self._options.most_events)


def _history(profiler: profile) -> ProfilerHistory:
    """Read the profiler's events.

    Private: the tree is the only place where allocations have their stacks. Without it they come
    from the file for Chrome, which has none.
    """
    results = getattr(getattr(profiler, "profiler", None), "kineto_results", None)
    ask = getattr(results, "experimental_event_tree", None)
    if ask is not None:
        return profiler_tree.read(ask(), crash_files.cells)
    with tempfile.TemporaryDirectory(prefix="nbdist-memory-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        whole = json.loads(path.read_text())
    return of_chrome(whole["traceEvents"], int(whole.get("baseTimeNanoseconds", 0)))


def of_chrome(events: Iterable[Mapping[str, Any]], base_ns: int) -> ProfilerHistory:
    """Read the CPU's memory from a trace for Chrome: no stacks, and no operators.

    `base_ns` is added to the times of its events.
    """
    allocations, marks_ns, backwards = [], {}, []
    for event in events:
        name, args = str(event.get("name", "")), event.get("args", {})
        time_ns = base_ns + round(float(event.get("ts", 0)) * 1000)
        if name == "[memory]" and args.get("Device Type") == 0:
            allocations.append(Event(time_ns, int(args["Addr"]), int(args["Bytes"])))
        elif name.startswith(MARK):
            marks_ns[int(name.removeprefix(MARK))] = time_ns
        elif name.startswith("autograd::engine::evaluate_function"):
            end_ns = time_ns + round(float(event.get("dur", 0)) * 1000)
            backwards.append(Phase(BACKWARD, time_ns, end_ns))
    allocations.sort(key=lambda allocation: allocation.time_ns)
    return ProfilerHistory(tuple(allocations), tuple(backwards), marks_ns, problem=NO_TREE)


def assemble(
    history: ProfilerHistory,
    marks: Marks,
    memory: RankMemory,
    ends: Sequence[Event],
    most_events: int,
) -> RankMemory:
    """The rank's memory from what the profiler saw and what the objects claimed.

    `ends` are frees of what is older than the recording, by the host's clock.
    """
    zero_ns = history.marks_ns.get(marks.first, 0)
    times = {number: time_ns - zero_ns for number, time_ns in history.marks_ns.items()}
    duration_ns = max([*times.values(), *(event.time_ns - zero_ns for event in history.events), 0])
    events = [
        Event(event.time_ns - zero_ns, event.address, event.size_bytes, event.stack, event.operator)
        for event in history.events
        if event.time_ns >= zero_ns
    ]
    before = [(owner.address, owner.size_bytes) for owner in marks.before if owner.device == DEVICE]
    # Apart: by another clock a free may seem to come after the next allocation at its address.
    gone_ns = {event.address: max(1, event.time_ns - zero_ns) for event in ends}
    blocks, lost = pair_events(before, events, most_events, gone_ns)
    claims = list(marks.claims(times, DEVICE))
    backwards = [
        Phase(backward.kind, max(0, backward.start_ns - zero_ns), max(0, backward.end_ns - zero_ns))
        for backward in history.backwards
    ]
    recorded = replace(
        memory,
        blocks=blocks,
        duration_ns=max(1, duration_ns),
        zero_ns=zero_ns,
        stacks=history.stacks,
        names=history.names,
        phases=merge_phases([*backwards, *marks.stepping(times)]),
        step_ends_ns=marks.step_ends(times),
        lost=lost,
        problem=history.problem,
    )
    return categorise(with_foreign(recorded, claims), claims)


def of_now(owners: Iterable[StorageOwner], memory: RankMemory) -> RankMemory:
    """The memory with its owners at this moment, without a history."""
    marks = Marks(before=tuple(owners))
    claims = list(marks.claims({0: 0}, DEVICE))
    blocks, _ = pair_events([(claim.address, claim.size_bytes) for claim in claims], (), 0)
    return categorise(replace(memory, blocks=blocks), claims)
