"""Is /dev/shm large enough for what torch puts there, and what nbdist's own folders are called."""

from __future__ import annotations

from nbdist.errors import StartError

MIB = 2**20
SHM = "/dev/shm"  # noqa: S108  # only in folders of its owner alone
# torch's own files for one rank (semaphores, small tensors of DataLoader workers).
NEEDED_BYTES_PER_RANK = 4 * MIB
# NCCL's shared-memory transport, per rank: 9.6 MB a channel pair, measured by many users
# who met "No space left on device" with Docker's default of 64 MB and a few GPUs.
NEEDED_NCCL_BYTES_PER_RANK = 32 * MIB
# Docker's default. DataLoader workers pass batches through here and fill it quickly.
SMALL_BYTES = 64 * MIB
REMEDY = (
    "Give the container more: docker run --shm-size=8g, or in Kubernetes an emptyDir volume "
    f"with medium: Memory mounted at {SHM}"
)


def folder_prefix(uid: int, run: str) -> str:
    """The prefix of a run's folders in /dev/shm; `run` is the name of its run folder.

    cluster/agent/guardian.py, which imports nothing, has the same.
    """
    return f"nbdist-{uid}-{run}-"


def check(free_bytes: int, total_bytes: int, world_size: int, *, uses_nccl: bool) -> str:
    """A warning where /dev/shm is small, empty where it is large enough.

    Raises:
        StartError: If the ranks cannot work with the free space.
    """
    per_rank = NEEDED_NCCL_BYTES_PER_RANK if uses_nccl else NEEDED_BYTES_PER_RANK
    needed = per_rank * world_size
    if free_bytes < needed:
        need = "1 rank needs" if world_size == 1 else f"{world_size} ranks need"
        fewer = ", or start fewer ranks (-n)" if world_size > 1 else ""
        raise StartError(
            f"{SHM} has {free_bytes / MIB:.0f} MiB free of {total_bytes / MIB:.0f}; "
            f"{need} {needed / MIB:.0f} MiB. {REMEDY}{fewer}."
        )
    if total_bytes <= SMALL_BYTES:
        return (
            f"{SHM} has only {total_bytes / MIB:.0f} MiB: DataLoader workers will fail with "
            f"'bus error' or 'No space left'. {REMEDY}, or use num_workers=0."
        )
    return ""
