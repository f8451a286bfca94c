"""What `%dist_doctor` knows of a machine before it judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nbdist.cluster.run_owner import Run
from nbdist.core.topology import Gpu

UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU as nvidia-smi tells.

    Attributes:
        used_bytes: Of its memory, by whomever.
        compute_mode: `Default`, `Exclusive_Process` or `Prohibited`.
    """

    gpu: Gpu
    driver: str
    total_bytes: int
    used_bytes: int
    compute_mode: str


@dataclass(frozen=True, slots=True)
class Space:
    """Room in a file system."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found on this machine.

    Attributes:
        packages: Name -> version of what nbdist needs; None where it is not installed.
        gpus: All of this machine, whatever CUDA_VISIBLE_DEVICES leaves out.
        links: (GPU, GPU, how they are connected as `nvidia-smi topo -m` calls it).
        smi_problem: Why nvidia-smi, which is there, could not tell; or "".
        cores: That this process may use.
        available_bytes: Memory that is free for new processes.
        world_size: Ranks that run, or that would be started without -n.
        disk: Where runs have their folders.
        limits: Name as in `ulimit` (files, locked memory, processes) -> (soft, hard), UNLIMITED
            for none; locked memory in bytes.
        launched: Variables that the launcher of the profile local sets for ranks.
        runs: Of this user, as far as this machine knows.
    """

    platform: str = "linux"
    python: str = ""
    executable: str = "python"
    packages: Mapping[str, str | None] = field(default_factory=dict)
    gpus: tuple[GpuFacts, ...] = ()
    links: tuple[tuple[int, int, str], ...] = ()
    smi_problem: str = ""
    cores: int = 1
    available_bytes: int = 0
    world_size: int = 2
    shm: Space | None = None
    disk: Space | None = None
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    launched: Mapping[str, str] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    runs: tuple[Run, ...] = ()
