"""The state of one rank at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank at one moment.

    Attributes:
        state: "idle", "running cell [12]" or "ended (signal SIGKILL)".
        memory_bytes: Memory by kind (resident, allocated, reserved); empty while the rank is busy.
        busy_s: How long its cell has been running; 0 when it is idle.
        stack: Python stacks of its threads, main thread first; empty unless they were asked for.
    """

    rank: int
    state: str
    memory_bytes: Mapping[str, int]
    busy_s: float = 0.0
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """All ranks at one moment.

    Attributes:
        ranks: In rank order.
        waits: Who waits for whom, a line for each cause; how far a save beside training is;
            the batch system's job and its time.
    """

    ranks: tuple[RankStatus, ...]
    waits: tuple[str, ...] = ()
