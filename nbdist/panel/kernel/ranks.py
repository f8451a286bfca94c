"""Asks running ranks for the panel, from any thread, without disturbing their cells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.cluster.kernel.ranks import current_strategy
from nbdist.core.failures import ranks_phrase
from nbdist.hang import diagnose
from nbdist.panel.plan import Limit
from nbdist.panel.state import RankRow, row_of
from nbdist.panel.strategy_form import PreparedModel
from nbdist.planner.devices import device_of_ranks
from nbdist.planner.live_model import LiveModel
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import default_choice

if TYPE_CHECKING:
    from nbdist.cluster.kernel.ranks import RunningCell
    from nbdist.notebook.session import Session

# Who has waited for less is in step with the others.
AFTER_S = 1.0

prepared_sizes: RankFunction[[], tuple[tuple[str, int, int], ...]] = RankFunction(
    "nbdist.planner.rank.describe_prepared:sizes"
)
sketch_models: RankFunction[[], tuple[LiveModel, ...]] = RankFunction(
    "nbdist.planner.rank.describe_prepared:sketches"
)

switch_refusal: RankFunction[[Strategy], str] = RankFunction("nbdist.switch.rank.switch:refusal")


def rows_and_waits(session: Session) -> tuple[tuple[RankRow, ...], tuple[str, ...]]:
    """Every rank as it was sampled last, and who waits for whom; nobody is asked or waited for."""
    samples = {sample.rank: sample for sample in session.monitor.latest()}
    now_s = time.monotonic()
    rows = tuple(row_of(place, samples.get(place.rank), now_s) for place in session.topology.ranks)
    if all(row.kind != "waiting" for row in rows):
        return rows, ()
    findings = diagnose.diagnose(list(session.health.views_now().values()), now_s, AFTER_S)
    return rows, tuple(finding.text for finding in findings)


def interrupt(session: Session) -> tuple[str, str]:
    """Press stop for every cell that runs on ranks.

    Returns:
        What was interrupted of what the notebook waits for, or "" for nothing; and which ranks of
        cells that were given back, and hear of no press, got SIGINT once more, or "".
    """
    running = session.busy.running()
    waited = [cell for cell in running if not cell.is_over]
    for cell in waited:
        cell.press()
    not_back = []
    for cell in running:
        ranks = session.busy.ranks_of(cell) if cell.is_over else ()
        for rank in ranks:
            session.interrupt(rank)
        if ranks:
            verb = "have" if len(ranks) > 1 else "has"
            not_back.append(f"{ranks_phrase(ranks)} {verb} not come back from {_cell_phrase(cell)}")
    return ", ".join(map(_cell_phrase, waited)), "; ".join(not_back)


def _cell_phrase(cell: RunningCell) -> str:
    return "a cell" if cell.number is None else f"cell [{cell.number}]"


@dataclass(frozen=True, slots=True)
class PreparedModels:
    """Report of a rank on its prepared models.

    Attributes:
        sketches: The same models as a plan takes them; empty where that failed.
        problem: Why; a phrase.
    """

    models: tuple[PreparedModel, ...] = ()
    sketches: tuple[LiveModel, ...] = ()
    problem: str = ""


def prepared(
    session: Session, take: Callable[[Strategy, PreparedModels], object]
) -> Callable[[float], object]:
    """Ask a rank for its strategy and models; `take` is called with them, in another thread.

    Ranks that run a cell are not asked, and nothing is waited for. The function that is returned
    waits until they have been taken, so many seconds at most.
    """
    rank = _idle_rank(session)
    if rank is None:
        return lambda _limit_s: None
    is_taken = threading.Event()
    choice = current_strategy(session.call, rank)
    sizes = prepared_sizes(session.call, rank)
    sketches = sketch_models(session.call, rank)

    def arrived(done: Future[Any]) -> None:
        # In its main thread a rank answers in order, so what was asked before is there.
        try:
            if choice.exception() is None and sizes.exception() is None:
                error = done.exception()
                models = tuple(PreparedModel(*row) for row in sizes.result())
                sketched = () if error is not None else done.result()
                problem = "" if error is None else str(getattr(error, "evalue", error))
                take(choice.result(), PreparedModels(models, sketched, problem))
        finally:
            is_taken.set()

    sketches.add_done_callback(arrived)
    return is_taken.wait


def ask_refusal(session: Session, choice: Strategy, take: Callable[[str], object]) -> bool:
    """Ask a rank why its models do not go with a strategy; `take` is called in another thread.

    False if no rank is idle; nobody is asked then. A rank that fails to answer refuses nothing.
    """
    rank = _idle_rank(session)
    if rank is None:
        return False

    def arrived(done: Future[str]) -> None:
        if done.exception() is None:
            take(done.result())

    switch_refusal(session.call, rank, choice).add_done_callback(arrived)
    return True


def _idle_rank(session: Session) -> int | None:
    if session.is_stopped:
        return None
    idle = (r for r in session.ranks if session.is_connected(r) and not session.is_busy(r))
    return next(idle, None)


def limit(session: Session) -> Limit:
    """Return the memory limit of a rank, as %dist_plan takes it."""
    topology = session.topology
    device, _ = device_of_ranks(topology, session.monitor.latest())
    has_gpu = topology.ranks[0].device != "cpu"
    return Limit(0.0 if device is None else device.memory_bytes, has_gpu)


def last_choice(session: Session) -> Strategy:
    """The strategy as far as the notebook knows without asking."""
    return session.strategy_chosen or default_choice(session.topology.world_size)
