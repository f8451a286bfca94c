"""Records what a cell allocates on this rank, and whose it is.

`begin` arms the next cell (recording/rank/cell_hook.py); `finish` gives what came of it; `now` says
whose the memory is at this moment. Objects are asked whose memory they hold before and after the
cell, and around each step of an optimizer.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nbdist.core.rank import this_rank
from nbdist.errors import SnapshotError
from nbdist.memory.rank import cpu, cuda, owners
from nbdist.memory.rank.cpu import CpuRecorder
from nbdist.memory.rank.cuda import CudaRecorder
from nbdist.memory.rank.marks import Marks
from nbdist.memory.rank.owners import StorageOwner
from nbdist.memory.snapshot import MemoryOptions, RankMemory, empty
from nbdist.parallel.live import registry
from nbdist.recording.rank import cell_hook
from nbdist.recording.rank.steps import CellRecording
from nbdist.rpc.rank import progress
from nbdist.strategy import choice
from nbdist.variables import pack
from nbdist.variables.pack import PackedValue

NOTHING = "Nothing was recorded on this rank."


NOUN = "memory"


class _Recording(CellRecording):
    noun = NOUN

    def __init__(self, options: MemoryOptions, token: str):
        # A recording of one step ends with the first one that ends.
        wanted = None if options.steps is None else options.steps - 1
        super().__init__(token, wanted, self._end_step)
        self._marks = Marks()
        self._end_marks: list[int] = []  # the mark of each end that was counted
        self._recorder = CpuRecorder(options) if _device() == "cpu" else CudaRecorder(options)
        self._began: dict[int, int] = {}  # optimizer -> the mark at which it began to step
        self._memory: RankMemory | None = None

    def start(self) -> None:
        """Record from now on."""
        try:
            self._marks.before = owners.owners()
            self._is_on = self._recorder.start()
            if self._is_on:
                self._marks.first = self._recorder.mark()
        except Exception as error:  # noqa: BLE001  # the cell itself is to run
            self.problem = f"The recording could not start: {error}."
            return
        if self._is_on:
            self._hooks = [
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ]

    def after_step(self) -> None:
        """End a step here: the cell has called `nbdist.step()`."""
        if self._is_on and self.steps.take_explicit():
            self.stop()

    def memory(self) -> RankMemory:
        """Memory as recorded.

        Raises:
            SnapshotError: Nothing was.
        """
        if self._memory is None:
            if self._is_on:
                raise SnapshotError("The cell still runs.")
            self._marks.ends = [self._end_marks[number] for number in self.steps.ends]
            memory = self._recorder.read(self._marks, _here())
            problem = self.problem or self._recorder.problem
            if not memory.duration_ns:
                raise SnapshotError(problem or NOTHING)
            problems = " ".join(filter(None, [problem, memory.problem]))
            self._memory = replace(memory, problem=problems)
        return self._memory

    def _end_step(self) -> None:
        self._end_marks.append(self._recorder.mark())

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_on:
            # The mark comes after: looking for the owners takes a while the first time.
            current = self._owners(optimizer)
            mark = self._began[id(optimizer)] = self._recorder.mark()
            self._marks.owners.append((mark, current))

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_on:
            return
        mark = self._recorder.mark()
        self._marks.owners.append((mark, self._owners(optimizer)))
        began = self._began.pop(id(optimizer), None)
        if began is not None:
            self._marks.steppings.append((began, mark))
        if self.steps.take_optimizer(id(optimizer)):
            self.stop()

    def _owners(self, optimizer: Optimizer) -> tuple[StorageOwner, ...]:
        """Find owners of what an optimizer steps. A failure is reported later; the step goes on."""
        try:
            return owners.of_optimizer(optimizer)
        except Exception as error:  # noqa: BLE001  # the cell itself is to run
            self.problem = (
                f"What {type(optimizer).__name__} holds could not be determined: {error}."
            )
            return ()

    def _end(self) -> None:
        super()._end()
        if self._is_on:
            mark = self._recorder.mark()
            try:
                self._recorder.stop()
            except KeyboardInterrupt:
                self._recorder.stop()
                raise
            finally:
                self._is_on = False
            # Afterwards: looking for them is a hundred thousand calls, which would be recorded.
            self._marks.owners.append((mark, owners.owners()))


@dataclass(slots=True)
class _State:
    """The recording that was armed last, or what was in use when memory ran out since."""

    last: _Recording | RankMemory | None = None


_state = _State()


def keep(memory: RankMemory) -> None:
    """Let `finish` give what was in use when memory ran out; a recording that runs tells more."""
    if cell_hook.state.running is None:
        _state.last = memory


def begin(options: MemoryOptions, token: str) -> None:
    """Record the cell that brings this token; what was recorded before is forgotten."""
    cell_hook.state.armed = _state.last = _Recording(options, token)


def finish(folders: Sequence[str]) -> PackedValue:
    """Pack the last recording of this rank, as {"memory": RankMemory, "strategy": text}.

    Args:
        folders: As variables.pack.send takes them.

    Raises:
        SnapshotError: If nothing was recorded.
    """
    last = _state.last
    if last is None:
        raise SnapshotError(f"{NOTHING[:-1]}: its process has replaced another.")
    if cell_hook.state.armed is last:  # its cell was never sent
        cell_hook.state.armed = None
        raise SnapshotError(NOTHING)
    with progress.during(NOUN):
        progress.tell("sorting what was allocated")
        return pack_memory(last if isinstance(last, RankMemory) else last.memory(), folders)


def now(folders: Sequence[str]) -> PackedValue:
    """Pack the memory in use at this moment, as `finish` does."""
    return pack_memory(memory_in_use(owners.owners()), folders)


def memory_in_use(
    current: Iterable[StorageOwner], before: Mapping[str, Any] | None = None
) -> RankMemory:
    """Memory in use and its owners: at this moment, or `before`, by torch's snapshot of a GPU."""
    if _device() == "cpu":
        return cpu.of_now(current, _here())
    return cuda.of_now(current, _here(), before)


def pack_memory(memory: RankMemory, folders: Sequence[str]) -> PackedValue:
    """A rank's memory on its way to the notebook, with the strategy."""
    strategy = choice.described(registry.current()) if registry.prepared() else ""
    return pack.send(pack.pack({"memory": memory, "strategy": strategy}), folders)


def _device() -> str:
    return str(this_rank().place.device)


def _here() -> RankMemory:
    """Who and where, without blocks."""
    nothing = empty(this_rank().place.rank, socket.gethostname(), "")
    return replace(nothing, version=str(torch.__version__))
