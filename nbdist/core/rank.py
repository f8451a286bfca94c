"""The rank that this process is: its place, all places, and the store that ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.core.interface import InterfaceChoice
from nbdist.core.topology import RankPlace, Topology
from nbdist.errors import StartError

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Rank:
    """Record of the group that this process has joined."""

    place: RankPlace
    topology: Topology
    store: dist.Store
    interface: InterfaceChoice | None = None  # None: the launcher of one host has set it


_joined: Rank | None = None


def this_rank() -> Rank:
    """Return the rank that this process is.

    Raises:
        StartError: Before it has joined a group.
    """
    if _joined is None:
        raise StartError("This engine has not joined a group of ranks yet.")
    return _joined


def has_joined() -> bool:
    """Whether this process is a rank by now."""
    return _joined is not None


def joined(rank: Rank) -> None:
    """Remember the group that has been joined, in place of an earlier one."""
    global _joined  # noqa: PLW0603  # one rank per process
    _joined = rank
