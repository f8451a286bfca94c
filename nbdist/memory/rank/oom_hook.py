"""Notices that a cell has failed because memory ran out, and keeps what held it.

A GPU's allocator reports at the moment itself; memory of CPU tensors is looked at when the cell
has ended, while the traceback still holds them. What looks at the memory
(memory/rank/oom_report.py) is loaded when it is first needed: a rank starts without it. The
shortage is kept until the next cell begins, the memory in the place of a recording
(memory/rank/record.py).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.core.failures import chain
from nbdist.memory import oom_message
from nbdist.memory.oom_remedies import OomReport
from nbdist.rpc.rank.cell_hooks import CellContext


@dataclass(slots=True)
class _State:
    """The last cell's shortage of memory.

    Attributes:
        shortage: None where its memory did not run out.
        device: torch's snapshot of the GPU when an allocation of this cell failed last.
        is_watching: The GPU's allocator reports failures.
    """

    shortage: OomReport | None = None
    device: Mapping[str, Any] | None = None
    is_watching: bool = False


_state = _State()


def last() -> OomReport | None:
    """The last cell's shortage; None where its memory did not run out."""
    return _state.shortage


def note(error: BaseException) -> None:
    """A cell has failed; nothing happens unless memory ran out, here or where it came from."""
    for cause in chain(error):
        message = oom_message.parse_oom(type(cause).__name__, str(cause))
        if message is not None:
            from nbdist.memory.rank import oom_report

            _state.shortage = oom_report.make_report(message, cause, _state.device)
            return


@contextmanager
def around_cell(cell: CellContext) -> Iterator[None]:
    """Note what a cell lacked, before the notebook hears of the failure; let it go at the next.

    Python keeps the last traceback, and so the locals of its functions. The same cell with half
    the batch would not find room beside them.
    """
    if _state.shortage is not None:
        _let_go(getattr(sys, "last_value", None))
    _state.shortage = _state.device = None
    watch_device()
    before = getattr(sys, "last_value", None)
    yield
    error = getattr(sys, "last_value", None)
    if cell.reply.get("status") == "error" and error is not None and error is not before:
        try:
            note(error)
        except (Exception, KeyboardInterrupt):  # noqa: BLE001  # the cell has its own error
            _state.shortage = None
    _state.device = None


def _let_go(error: BaseException | None) -> None:
    """Drop the locals of the functions that an error has gone through."""
    for cause in chain(error):
        traceback.clear_frames(cause.__traceback__)
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            # Before Python 3.13 a frame that was looked into keeps a copy until the next look.
            _ = frame.f_locals


def watch_device() -> None:
    """Let the GPU's allocator report its failures, once CUDA is in use. Once per process.

    Private: nothing public is called at that moment. Without it the memory is looked at when the
    cell has ended, without what C++ has let go of by then.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)  # noqa: SLF001
    is_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_in_use and attach is not None and not _state.is_watching:
        _state.is_watching = True
        with suppress(RuntimeError):  # a GPU that does not work any more: the cell will say so
            attach(_at_failure)


def _at_failure(*_device_and_sizes: int) -> None:
    """The allocator has failed, and raises its error after this; nothing may be raised here."""
    ask = getattr(torch.cuda.memory, "_snapshot", None)
    try:
        _state.device = None if ask is None else {**ask(), "device_traces": []}
    except Exception:  # noqa: BLE001  # the cell's own error is the one to be seen
        _state.device = None
