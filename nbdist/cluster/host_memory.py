"""Is there memory for so many ranks."""

from __future__ import annotations

from nbdist.errors import StartError

# Resident, right after the start, torch imported and the group formed: measured 265 MB with
# torch 2.13.0 for the CPU (two ranks), more with a GPU's libraries. A model comes on top.
NEEDED_BYTES_PER_RANK = 250_000_000


def check(available_bytes: int, world_size: int) -> None:
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
        f"Use -n {fitting} or fewer, or free some memory."
    )
