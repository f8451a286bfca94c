"""Kept runs with their newest cell, read from their folders: no rank is asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from nbdist.cells import journal
from nbdist.cells.journal import Glance
from nbdist.cells.kept_run import KeptRun, NewestCell
from nbdist.cluster.agent import guardian
from nbdist.cluster.kernel import runs
from nbdist.cluster.run_owner import KEPT, Run
from nbdist.core import host


def find() -> tuple[KeptRun, ...]:
    """All kept runs of this user that this machine knows of."""
    return look(runs.kept())


def look(those: Iterable[Run]) -> tuple[KeptRun, ...]:
    """Return the runs that are kept."""
    return tuple(
        KeptRun(run, _newest_cell(run), has_guardian=_has_guardian(run))
        for run in those
        if run.keep is not None and run.keep.keep_s
    )


def journals(folder: Path) -> dict[int, Path]:
    """Rank -> its journal, where this machine sees it.

    The journal of an agent's rank is in the agent's folder, which is beside the run's if its host
    is this machine.
    """
    places = [folder, *map(Path, guardian.agents_folders(str(folder)))]
    paths = [path for place in places for path in (place / journal.FOLDER).glob("*")]
    return {int(path.name): path for path in paths if path.name.isdigit()}


def is_here(run: Run) -> bool:
    """Whether process ids in the run's journals are this machine's."""
    return run.owner is not None and run.owner.machine == host.this_machine()


def _has_guardian(run: Run) -> bool:
    if run.state != KEPT or not run.detachment or not run.detachment.pid or not is_here(run):
        return True
    return host.started(run.detachment.pid) is not None


def _newest_cell(run: Run) -> NewestCell | None:
    seen = {rank: journal.glance(path) for rank, path in journals(Path(run.folder)).items()}
    glances = {rank: its for rank, its in seen.items() if its is not None}
    if not glances:
        return None
    head = max((its.head for its in glances.values()), key=lambda head: head.run)
    newest = {rank: its for rank, its in glances.items() if its.head.run == head.run}
    gone = _gone(newest) if is_here(run) else ()
    is_over = all(its.has_ended or rank in gone for rank, its in newest.items())
    return NewestCell(
        head.number,
        head.code,
        min(its.head.at_s for its in newest.values()),
        max(its.changed_s for its in newest.values()) if is_over else None,
        tuple(sorted(rank for rank, its in newest.items() if its.status == "error")),
        gone,
        tuple(rank for rank in head.ranks if rank not in newest),
    )


def _gone(glances: Mapping[int, Glance]) -> tuple[int, ...]:
    """The ranks whose processes are gone though their cell has not ended."""
    return tuple(
        sorted(
            rank
            for rank, its in glances.items()
            if not its.has_ended and host.started(its.head.pid) is None
        )
    )
