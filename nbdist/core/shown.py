"""What differs from run to run, shown as a placeholder where outputs are stored and compared.

Notebooks of nbdist are tests: their stored outputs have to be equal on every machine. With
NBDIST_TEST=1 in the environment, hosts, times, rates, memory and the like print as `#`.
"""

from __future__ import annotations

import os

PLACEHOLDER = "#"


def is_stored() -> bool:
    """Whether outputs are going to be stored and compared (NBDIST_TEST=1)."""
    return os.environ.get("NBDIST_TEST") == "1"


def shown(value: object) -> str:
    """The value as text, or `#` where outputs are stored and compared."""
    return PLACEHOLDER if is_stored() else str(value)
