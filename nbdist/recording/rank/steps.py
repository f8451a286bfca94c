"""Parts common to recordings of a cell: the ends of its steps, and one profiler at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.rpc.rank import progress


@dataclass(slots=True)
class Steps:
    """Counts the steps of a cell; each mark in the trace may end one.

    Attributes:
        wanted: Enough are so many beside the first one; None for never.
        mark: Puts a mark into the trace.
        ends: Numbers of the marks that end a step.
        stepped: Optimizers that have stepped since the step before ended.
        per_step: So many optimizers make a step together, as far as one has been seen whole.
        is_explicit: `nbdist.step()` was called, and optimizers no longer count.
    """

    wanted: int | None
    mark: Callable[[], None]
    ends: list[int] = field(default_factory=list)
    marks: int = 0
    stepped: set[int] = field(default_factory=set)
    per_step: int = 1
    is_explicit: bool = False

    def take_optimizer(self, optimizer: int) -> bool:
        """An optimizer has stepped; whether enough is recorded.

        Several optimizers of one loop make one step together. It ends with the last of them, which
        is known once the first one comes again. A step that GradScaler leaves out, and gradients
        that are still accumulated, belong to the step that comes then.
        """
        if self.is_explicit:
            return False
        if optimizer in self.stepped:
            self.per_step = len(self.stepped)
            self.stepped.clear()
        elif self.stepped:
            self.ends.pop()
        self.stepped.add(optimizer)
        self._mark()
        return self._is_enough() and len(self.stepped) >= self.per_step

    def take_explicit(self) -> bool:
        """`nbdist.step()` was called; whether enough is recorded."""
        if not self.is_explicit:
            self.is_explicit, self.ends = True, []
        self._mark()
        return self._is_enough()

    def _mark(self) -> None:
        self.mark()
        self.ends.append(self.marks)
        self.marks += 1
        # The first step is left out, and counts no further than the others are wanted.
        wanted = 0 if self.wanted is None else self.wanted + 1
        progress.tell("recording", min(len(self.ends), wanted or len(self.ends)), wanted, "steps")

    def _is_enough(self) -> bool:
        return self.wanted is not None and len(self.ends) > self.wanted


class CellRecording:
    """Records one cell, up to the last step that is wanted.

    Attributes:
        noun: What it is called: "trace".
        token: What that cell brings.
        problem: Why nothing, or not all, was recorded.
    """

    noun: str

    def __init__(self, token: str, wanted: int | None, mark: Callable[[], None]):
        self.token = token
        self.problem = ""
        self.steps = Steps(wanted, mark)
        self._is_on = False
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Begin: the cell is about to run. A failure leaves it alone, and is reported later."""
        raise NotImplementedError

    def after_step(self) -> None:
        """End a step here: the cell has called `nbdist.step()`."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the recording, whatever became of its cell. Can be called twice."""
        try:
            self._end()
        except KeyboardInterrupt:
            self._end()
            self.problem = "The recording was interrupted while it was being stopped."
        except Exception as error:  # noqa: BLE001  # the cell is over, and has its own result
            self.problem = f"The recording could not be stopped: {error}."

    def _end(self) -> None:
        """Stop, and raise what goes wrong; after an interrupt it is called again."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()


def is_profiling(*, unknown: bool) -> bool:
    """Whether a profiler runs in this process; `unknown` where torch does not say.

    Private: torch 2.13 starts a second profiler without an error, and then neither gives a trace.
    Without it that shows as a file that could not be written.
    """
    is_enabled = getattr(torch.autograd, "_profiler_enabled", None)
    return unknown if is_enabled is None else bool(is_enabled())


def start_profiler(profiler: torch.profiler.profile) -> None:
    """Start it, without torch 2.11's warning that a second cycle drops the first one's events.

    What that warning asks for, acc_events=True, reads every event's name when the profiler stops.
    Names of code that is gone cannot be decoded (torch 2.13), and the recording would be lost.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
        profiler.start()
