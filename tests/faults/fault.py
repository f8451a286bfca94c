"""A fault as a record, and how one is made to happen."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from nbdist.core.failures import ranks_phrase
from tests.support.cells import Cell, Handle
from tests.support.faults import ABORT_S, BACK_S, GRACE_S, TOLD_S, Ranks


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a cell on ranks goes wrong.

    In the texts `{waiting}` stands for the ranks that wait ("ranks 0,2-3 wait"), `{place}` for
    the line of `source` in the cell.

    Attributes:
        name: As in the table of docs/reliability.md.
        kind: The class of faults that it belongs to.
        code: The cell, without its first line.
        on_stderr: Stands there while the cell runs, in one line; empty where nothing is said.
        source: The line of the cell in which the ranks wait.
        waiting: Who waits; None for all ranks but rank 1.
        unnamed: Ranks that the line must not name.
        ename: The error's name that the cell fails with.
        error: Stands in the error's text.
        said: Stands on stderr when the cell has ended.
        act: What the user, or the world, does: a name in ACTS.
        dead: The ranks that do not survive.
        is_short: Runs in `make test` too.
        promise_s: Within which time the line has to come.
    """

    name: str
    kind: str
    code: str
    on_stderr: tuple[str, ...] = ("{waiting} in", "{place}", "rank 1")
    source: str = ""
    waiting: tuple[int, ...] | None = None
    unnamed: tuple[int, ...] = ()
    ename: str = "Deadlock"
    error: tuple[str, ...] = ("back", "variables kept")
    said: str = ""
    act: str = "nothing"
    dead: tuple[int, ...] = ()
    is_short: bool = False
    promise_s: float = TOLD_S

    def fragments(self, world_size: int, cell_number: int | None) -> list[str]:
        """What the told line has to contain."""
        waiting = self.waiting or tuple(rank for rank in range(world_size) if rank != 1)
        verb = "wait" if len(waiting) > 1 else "waits"
        lines = ["%%distributed", *self.code.splitlines()]
        place = f"line {1 + next((i for i, line in enumerate(lines) if self.source in line), -1)}"
        if cell_number is not None:
            place += f" of cell [{cell_number}]: {self.source}"
        named = {"waiting": f"{ranks_phrase(waiting)} {verb}", "place": place}
        return [fragment.format(**named) for fragment in self.on_stderr]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fault came to.

    Attributes:
        cell: The cell as it ended.
        line: The line that told of it; "" where none did.
        told_s: From its begin until the line; None without one.
        back_s: Until the notebook was back: from the interrupt, or from the fault's begin.
    """

    cell: Cell
    line: str
    told_s: float | None
    back_s: float


def cases(short: tuple[object, ...], *axes: Iterable[object]) -> list[Any]:
    """Every combination as parameters of a test; all but the short one run by `make faults`."""
    return [
        pytest.param(*case, marks=() if case == short else pytest.mark.faults)
        for case in itertools.product(*axes)
    ]


def short_and_whole(faults: Iterable[Fault]) -> list[Any]:
    """Faults on 2 and on 4 ranks as parameters of a test; the short ones on 2 in `make test`."""
    return [
        pytest.param(
            n,
            fault,
            id=f"{n}-{fault.name}",
            marks=() if fault.is_short and n == 2 else pytest.mark.faults,
        )
        for n in (2, 4)
        for fault in faults
    ]


def _press(times: int, gap_s: float, ranks: Ranks, handle: Handle) -> float:
    pressed_s = time.monotonic()
    for _ in range(times):
        if ranks.kernel.so_far(handle).status != "running":
            break
        ranks.kernel.interrupt()
        signal.sigtimedwait([], gap_s)
    return pressed_s


def _kill(which: signal.Signals, ranks: Ranks, _handle: Handle) -> float:
    killed_s = time.monotonic()
    ranks.engines[1].send_signal(which)
    return killed_s


# Each does something to a cell that has begun, and returns when, by the host's clock.
ACTS: dict[str, Callable[[Ranks, Handle], float]] = {
    "nothing": Ranks.begin_s,
    "press": partial(_press, 1, 0.0),
    "press twice": partial(_press, 2, 0.05),
    "press on": partial(_press, 100, 0.05),
    "SIGKILL": partial(_kill, signal.SIGKILL),
    "SIGSEGV": partial(_kill, signal.SIGSEGV),
}


def happen(ranks: Ranks, fault: Fault, delay_s: float = 0.0) -> Outcome:
    """Let a fault happen, see it told, do what has to be done, and wait for the cell's end.

    A press comes after the line, everything else before it, both this long after the begin.
    """
    (ranks.folder / "end").unlink(missing_ok=True)
    handle = ranks.kernel.start(f"%%distributed\n{fault.code}")
    begun_s = ranks.begin_s(handle)
    signal.sigtimedwait([], delay_s)
    if fault.act.startswith("press"):
        line, told_s = _reported(ranks, fault, handle, begun_s)
        begun_s = ACTS[fault.act](ranks, handle)
    else:
        begun_s = max(begun_s, ACTS[fault.act](ranks, handle))
        line, told_s = _reported(ranks, fault, handle, begun_s)
    (ranks.folder / "end").touch()
    cell = ranks.finish(handle)
    return Outcome(cell, line, told_s, time.monotonic() - begun_s)


def happen_as_promised(ranks: Ranks, fault: Fault) -> Outcome:
    """Let a fault happen that is told once and in time, and whose cell fails as it says."""
    outcome = happen(ranks, fault)
    assert outcome.cell.status == "error"
    _assert_told(ranks, fault, outcome)
    _assert_error(fault, outcome)
    # From the press, or from the fault's begin. Also where a rank died it is the latter: Gloo tells
    # only those who are connected to it, others wait.
    allowed_s = BACK_S if fault.act.startswith("press") else TOLD_S + GRACE_S + ABORT_S
    assert outcome.back_s < allowed_s + ranks.load_s
    return outcome


def _assert_told(ranks: Ranks, fault: Fault, outcome: Outcome) -> None:
    if outcome.told_s is None:
        return
    cell = outcome.cell
    for fragment in fault.fragments(ranks.n, cell.execution_count):
        assert fragment in outcome.line, cell.visible
    for rank in fault.unnamed:
        assert f"rank {rank}" not in outcome.line
        assert f"ranks {rank}" not in outcome.line
    assert cell.stderr.count(outcome.line) == 1, cell.visible
    assert outcome.told_s < fault.promise_s + ranks.load_s


def _assert_error(fault: Fault, outcome: Outcome) -> None:
    error = outcome.cell.failure
    assert error.ename == fault.ename, outcome.cell.visible
    assert fault.said in outcome.cell.stderr, outcome.cell.visible
    for fragment in fault.error:
        assert fragment in error.evalue, error.evalue
    if fault.ename == "Deadlock":
        assert error.evalue.startswith(outcome.line), error.evalue
    elif fault.ename == "DistributedError" and not fault.dead:
        assert outcome.line in error.evalue, error.evalue


def _reported(
    ranks: Ranks, fault: Fault, handle: Handle, begun_s: float
) -> tuple[str, float | None]:
    """The line that tells of a fault, and how long after its begin it came."""
    if not fault.on_stderr:
        return "", None
    first = fault.fragments(ranks.n, None)[0]
    cell = ranks.kernel.wait_output(handle, first, fault.promise_s + 20)
    told_s = time.monotonic() - begun_s
    line = next((line for line in cell.stderr.splitlines() if first in line), "")
    return line, told_s
