"""What the process may use of its machine."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The CPUs that this process may use (its affinity, not the machine's count)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
