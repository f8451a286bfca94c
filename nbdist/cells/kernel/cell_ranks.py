"""Ranks that run cells: their health, who is busy, and what features do with each cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nbdist.cells import hints
from nbdist.cells.kernel.busy_ranks import BusyRanks
from nbdist.cells.kernel.cell_request import CellHook
from nbdist.cluster.kernel.cluster import Cluster
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.cluster.kernel.start import DEFAULT_GRACE_S
from nbdist.core.failures import RankFailure
from nbdist.core.topology import Topology
from nbdist.hang.kernel.health import Health
from nbdist.hang.kernel.maintenance import Maintenance
from nbdist.hang.kernel.watchdog import Watchdog
from nbdist.rpc.kernel import gather


class CellRanks(Ranks):
    """Ranks, with what one cell on them needs.

    Attributes:
        grace_s: A certain deadlock is aborted this long after its report.
        has_name: Whether the notebook itself has a variable of a name, for hints; None where there
            is no notebook.
        hooks: Work of features with each cell, in this order.
        is_leaving: Whether the kernel of kept ranks is about to end; None for other ranks.
    """

    def __init__(
        self,
        cluster: Cluster,
        topology: Topology,
        *,
        grace_s: float = DEFAULT_GRACE_S,
        seed: int | None = None,
    ):
        super().__init__(cluster, topology, seed=seed)
        self.grace_s = grace_s
        self.has_name: Callable[[str], bool] | None = None
        self.hooks: tuple[CellHook, ...] = ()
        self.is_leaving: Callable[[], bool] | None = None
        self.health = Health(self)
        self.busy = BusyRanks(self, self.health)
        self.maintenance = Maintenance(self, self.health)
        self.make_whole = self.maintenance.make_whole
        self.check_ready = self.busy.check
        self.recover_if_needed = self.maintenance.recover_if_needed
        self.settle = self.maintenance.settle
        self.release = self.maintenance.release

    def watchdog(self, began_s: float, *, is_quiet: bool) -> Watchdog:
        """Make the watchdog of a cell of these ranks."""
        return Watchdog(self.health, began_s, self.grace_s, is_quiet=is_quiet)

    def rank_states(self) -> dict[int, tuple[str, str]]:
        """Every rank as far as no cell is asked: "busy" or "absent", as hang.records says it."""
        return {rank: ("busy" if self.is_busy(rank) else "absent", "") for rank in self.ranks}

    def death(self, rank: int, *, is_program: bool = False) -> str:
        """How a rank ended, as a sentence."""
        self.cluster.processes.exit_of(self.topology.engine_of_rank(rank), gather.END_KNOWN_S)
        end = self.end_of(rank)
        how = f" ({end})" if end else ""
        doing = self.health.last_words_of(rank)
        last = f"; {doing}" if doing else ""
        if is_program:
            return f"ended{how} while running this program{last}"
        return f"ended{how} while running this cell{last}; variables there are lost"

    def explain(self, failure: RankFailure) -> RankFailure:
        """The failure, with what to do where that is known: names, modules, memory."""
        hinted = hints.explain(failure, self.has_name)
        advice = "\n".join(filter(None, (hook.advice(failure) for hook in self.hooks)))
        return replace(hinted, advice=advice)

    def end_of(self, rank: int) -> str:
        """Say how a rank's process ended, with the cause; empty while it lives."""
        return self.health.end_of(rank)
