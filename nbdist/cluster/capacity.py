"""Are there memory and cores for so many ranks."""

from __future__ import annotations

from nbdist.errors import StartError

# Resident, right after the start, torch imported and the group formed: measured 265 MB with
# torch 2.13.0 for the CPU (two ranks), more with a GPU's libraries. A model comes on top.
NEEDED_BYTES_PER_RANK = 250_000_000
# With more, turns take so long that ranks of one step are seconds apart.
MOST_PER_CORE = 4


def check(available_bytes: int, world_size: int, cores: int) -> None:
    """Refuse more ranks than the machine's memory can hold.

    Raises:
        StartError: With the numbers, and how many ranks would fit.
    """
    if world_size * NEEDED_BYTES_PER_RANK <= available_bytes:
        return
    needed_bytes = world_size * NEEDED_BYTES_PER_RANK
    fitting = max(1, available_bytes // NEEDED_BYTES_PER_RANK)
    raise StartError(
        f"{world_size} ranks need about {needed_bytes / 1e9:.1f} GB of memory before there is any "
        f"model; {available_bytes / 1e9:.1f} GB are available. "
        f"Use -n {fitting} or fewer (this machine has {cores} {_noun(cores)}), or free some memory."
    )


def crowding(world_size: int, cores: int) -> str:
    """A note on ranks that share cores; empty up to MOST_PER_CORE for each."""
    if world_size <= MOST_PER_CORE * cores:
        return ""
    return (
        f"{world_size} ranks share {cores} {_noun(cores)} and take turns: every collective waits "
        f"for the last one, and times say nothing. -n {cores} gives each rank a core of its own."
    )


def _noun(cores: int) -> str:
    return "core" if cores == 1 else "cores"
