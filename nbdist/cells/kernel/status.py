"""What every rank does at one moment: for %dist_status."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist.core.status import RankStatus, Status
from nbdist.hang import diagnose
from nbdist.hang import text as hang_text
from nbdist.hang.records import RankView
from nbdist.rpc.kernel import functions
from nbdist.rpc.kernel.channel import failure_of

if TYPE_CHECKING:
    from nbdist.cells.kernel.session import Session

DEADLINE_S = 2.0


def status(session: Session, *, wants_stacks: bool = False) -> Status:
    """What every rank does now, within DEADLINE_S. A busy rank's cell is not disturbed.

    Args:
        session: The ranks.
        wants_stacks: With every rank's Python stacks, also of ranks blocked in C++.
    """
    session.upkeep.reconnect()
    seen = {} if session.is_stopped else views(session)
    gone = {"ended", "stopped", "running", "busy"}
    idle = [r for r, v in seen.items() if v.state not in gone and session.is_connected(r)]
    asked = {rank: functions.memory_bytes(session.call, rank) for rank in idle}
    stacks = session.health.ask_all(functions.stacks) if wants_stacks and seen else {}
    end_s = time.monotonic() + DEADLINE_S
    shown = []
    for rank in session.ranks:
        one = _rank_status(session, rank, seen.get(rank), asked.get(rank), end_s)
        if wants_stacks and seen:
            one = replace(one, stack=session.health.stack(rank, stacks.get(rank), end_s))
        shown.append(one)
    findings = diagnose.diagnose(list(seen.values()), time.monotonic(), 0.0)
    waits = [one.text for one in findings]
    return Status(tuple(shown), (*waits, *session.checkpoints.status()))


def views(session: Session) -> dict[int, RankView]:
    """As in a running cell; idle ranks have ended the newest cell, or had no part in it."""
    boxes = session.health.boxes()
    busy = session.busy_ranks
    newest = max((boxes[rank].run for rank in busy if rank in boxes), default=0)
    known: dict[int, tuple[str, str]] = {}
    for rank in session.ranks:
        box = boxes.get(rank)
        has_part = box is not None and box.run == newest
        if rank in busy:
            known[rank] = "running" if has_part else "busy", ""
        else:
            known[rank] = box.state if box is not None and has_part else "absent", ""
    return {view.rank: view for view in session.health.views(known)}


def _rank_status(
    session: Session,
    rank: int,
    view: RankView | None,
    asked: Future[dict[str, int]] | None,
    end_s: float,
) -> RankStatus:
    state, text = situation(session, rank, view)
    cell = session.running_cell(rank)
    if state == "idle":
        return _idle_status(rank, asked, end_s)
    if state in {"dead", "stopped"} or cell is None:
        return RankStatus(rank, text, {})
    return RankStatus(rank, text, {}, time.monotonic() - cell[1])


def situation(session: Session, rank: int, view: RankView | None) -> tuple[str, str]:
    """(of monitor.samples.STATES, the same in words) without asking the rank. From any thread.

    Args:
        session: The ranks.
        rank: Which.
        view: Its box and its newest answer; None once the ranks were stopped.
    """
    end = session.health.end_of(rank)
    if end:
        return "dead", f"ended ({end})"
    if view is not None and not session.is_connected(rank):
        return "dead", "ended (its connection is lost)"
    if view is not None and session.health.is_stopped(rank):
        return "stopped", "stopped (SIGSTOP)"
    cell = session.running_cell(rank)
    if cell is None:
        return "idle", "idle"
    state = "running a cell" if cell[0] is None else f"running cell [{cell[0]}]"
    waits = "" if view is None else hang_text.state_of(view.box, view)
    return ("waiting", f"{state}, {waits}") if waits else ("running", state)


def _idle_status(rank: int, asked: Future[dict[str, int]] | None, end_s: float) -> RankStatus:
    try:
        left_s = max(0.0, end_s - time.monotonic())
        memory: Any = asked.result(left_s) if asked is not None else {}
    except TimeoutError:
        return RankStatus(rank, "does not answer", {})
    except Exception as error:  # noqa: BLE001  # it has just ended, or torch has failed there
        name, message, _ = failure_of(error) or ("", str(error), ())
        return RankStatus(rank, f"cannot answer ({name}: {message})", {})
    return RankStatus(rank, "idle", memory)
