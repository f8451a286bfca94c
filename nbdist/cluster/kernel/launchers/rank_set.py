"""The questions of nbdist to each launcher of engines, its own or ipyparallel's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipyparallel.cluster.launcher import LocalProcessLauncher, SSHLauncher

from nbdist.cluster.hosts import HostCheck

# Ranks of this machine; of hosts with an agent each, which may be a Slurm job's; of launchers that
# are ipyparallel's alone.
LOCAL, AGENTS, SLURM, OTHER = "local", "agents", "slurm", "other"


def is_own(candidate: Any) -> bool:
    """Whether this launcher's process is a child of this kernel (SSH's pids are elsewhere)."""
    return (
        isinstance(candidate, LocalProcessLauncher)
        and not isinstance(candidate, SSHLauncher)
        and candidate.pid > 0
    )


class RankSet:
    """The answers of a launcher that does no more than start engines.

    It is the last base of a launcher, whose own answers come first.

    Attributes:
        kind: LOCAL, AGENTS, SLURM or OTHER.
        is_on_this_machine: All of its ranks are on the notebook's machine.
        world_size: The number of ranks, where the launcher decides on it.
        checks: The results of looks at its hosts.
        launchers: Number -> what has started that engine alone, or stands for it.
    """

    kind = OTHER
    is_on_this_machine = False
    world_size = 0
    checks: Sequence[HostCheck] = ()
    launchers: dict[str, Any] = {}  # noqa: RUF012  # nothing is put into this one

    def engine_launchers(self) -> dict[int, Any]:
        """Number -> launcher of each engine that lives and is watched from here."""
        # ipyparallel takes a launcher out of this when its process ends.
        launchers = [*self.launchers.items()]
        return {int(number): engine for number, engine in launchers if is_own(engine)}

    async def attach(self) -> None:
        """Reach the ranks that another kernel has left."""

    def keep(self, seconds: float) -> None:
        """Let the ranks live this many seconds without a kernel; 0: not."""

    def leave(self) -> None:
        """Let go of the ranks, which live on as long as they are kept."""

    def ending(self) -> list[str] | None:
        """The command that ends ranks elsewhere without this kernel; None where none is needed."""
        return None

    def take_notes(self) -> list[str]:
        """Return news of the ranks' hosts for the user, each line once."""
        return []

    def status_lines(self) -> list[str]:
        """Lines of a status on the hosts beside their ranks."""
        return []
