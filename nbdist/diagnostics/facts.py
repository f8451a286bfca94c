"""Facts on a machine that `%dist_doctor` gathers before it judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nbdist.cells.kept_run import KeptRun
from nbdist.cluster.run_owner import Run
from nbdist.core.gpus import GpuReadings

UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class Space:
    """Room in a file system."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts on this machine.

    Attributes:
        packages: Name -> version of what nbdist needs; None where it is not installed.
        readings: Of all GPUs of this machine, whatever CUDA_VISIBLE_DEVICES leaves out.
        cores: That this process may use.
        available_bytes: Memory that is free for new processes.
        world_size: Ranks that run on this machine, or that would be started without -n.
        rank_hosts: The other hosts that ranks run on.
        disk: Where runs have their folders.
        limits: Name as in `ulimit` (files, locked memory, processes) -> (soft, hard), UNLIMITED
            for none; locked memory in bytes.
        launched: Variables that the launcher of the profile local sets for ranks.
        why_no_fork: Why ranks of this machine are not forked; empty where they are.
        runs: Of this user, as far as this machine knows.
        kept: Those of them that outlive their notebook.
        now_s: When all this was found, in Unix time.
    """

    platform: str = "linux"
    python: str = ""
    executable: str = "python"
    packages: Mapping[str, str | None] = field(default_factory=dict)
    readings: GpuReadings = field(default_factory=GpuReadings)
    cores: int = 1
    available_bytes: int = 0
    world_size: int = 2
    rank_hosts: tuple[str, ...] = ()
    shm: Space | None = None
    disk: Space | None = None
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    launched: Mapping[str, str] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    why_no_fork: str = ""
    runs: tuple[Run, ...] = ()
    kept: tuple[KeptRun, ...] = ()
    now_s: float = 0.0
