"""The state of every rank at one moment: for %dist_status."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from nbdist.cluster.kernel.ranks import Ranks, RunningCell, memory_bytes
from nbdist.cluster.status import RankStatus, Status
from nbdist.hang import diagnose
from nbdist.hang import text as hang_text
from nbdist.hang.kernel.health import Health
from nbdist.hang.records import CallLog, RankView
from nbdist.rpc.kernel.channel import failure_of
from nbdist.rpc.kernel.functions import RankFunction

DEADLINE_S = 2.0

python_stacks: RankFunction[[], str] = RankFunction("stacks")


def status(ranks: Ranks, health: Health, *, wants_stacks: bool = False) -> Status:
    """Ask what every rank does now, within DEADLINE_S. A busy rank's cell is not disturbed.

    If wanted with every rank's Python stacks, also of ranks blocked in C++.
    """
    end_s = time.monotonic() + DEADLINE_S
    if not ranks.is_stopped:
        health.refresh(DEADLINE_S / 2)
    views = {} if ranks.is_stopped else health.views_now()
    stopped = health.stopped() if views else frozenset[int]()
    situations = {
        rank: situation(ranks, health, rank, views.get(rank), stopped) for rank in ranks.ranks
    }
    # The control thread answers: an idle rank may be importing modules that cells use later.
    memory_futures = {
        rank: ranks.ask(memory_bytes, rank) for rank in views if situations[rank][0] == "idle"
    }
    stacks = ranks.ask_all(python_stacks) if wants_stacks and views else {}
    statuses = []
    for rank, (state, text) in situations.items():
        cell = ranks.running_cell(rank)
        if state == "idle":
            rank_status = _idle_status(rank, memory_futures.get(rank), end_s)
        elif state in {"dead", "stopped"} or cell is None:
            rank_status = RankStatus(rank, text, {})
        else:
            rank_status = RankStatus(rank, text, {}, time.monotonic() - cell[1])
        if wants_stacks and views:
            rank_status = replace(rank_status, stack=health.stack(rank, stacks.get(rank), end_s))
        statuses.append(rank_status)
    findings = diagnose.diagnose(list(views.values()), time.monotonic(), 0.0)
    return Status(tuple(statuses), tuple(finding.text for finding in findings))


def situation(
    ranks: Ranks, health: Health, rank: int, view: RankView | None, stopped: Collection[int]
) -> tuple[str, str]:
    """(of monitor.samples.STATES, the same in words) without asking the rank. From any thread.

    The view has its log and its newest answer; None once the ranks were stopped. Which processes
    a signal has stopped Health.stopped tells.
    """
    end = health.end_of(rank)
    if end:
        return "dead", f"ended ({end})"
    if view is not None and not ranks.is_connected(rank):
        return "dead", "ended (its connection is lost)"
    if view is not None and rank in stopped:
        return "stopped", "stopped (SIGSTOP)"
    cell, _ = ranks.cells.get(rank, (None, 0.0))
    log = None if view is None else view.log
    if not _is_in_a_cell(cell, log, ranks.ended_runs.get(rank)):
        return "idle", "idle"
    number = None if cell is None else cell.number
    state = "running a cell" if number is None else f"running cell [{number}]"
    waits = "" if view is None else hang_text.state_of(view.log, view)
    return ("waiting", f"{state}, {waits}") if waits else ("running", state)


def _is_in_a_cell(cell: RunningCell | None, log: CallLog | None, ended_run: int | None) -> bool:
    """By the newest of what the notebook and the call log know.

    A rank may run a cell that this notebook has not sent; the reply of one that it has ended may
    be on its way; and the log of a rank on another host may be older than that reply.
    """
    if cell is not None:
        return log is None or log.run != cell.run_id or log.state == "running"
    return log is not None and log.state == "running" and log.run != ended_run


def _idle_status(
    rank: int, memory_future: Future[dict[str, int]] | None, end_s: float
) -> RankStatus:
    try:
        left_s = max(0.0, end_s - time.monotonic())
        memory: Any = memory_future.result(left_s) if memory_future is not None else {}
    except TimeoutError:
        return RankStatus(rank, "does not answer", {})
    except Exception as error:  # noqa: BLE001  # it has just ended, or torch has failed there
        name, message, _ = failure_of(error) or ("", str(error), ())
        return RankStatus(rank, f"cannot answer ({name}: {message})", {})
    return RankStatus(rank, "idle", memory)
