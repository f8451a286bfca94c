"""A new engine's first work of its own: to join the local cluster's group.

The controller counts an engine as there after its first heartbeat, which needs no Python. The
join goes on meanwhile, and the notebook waits for both.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path


def join_when_ready() -> None:
    """Join once the engine's heart beats, unless this process replaces a rank.

    ipyparallel runs it when it has made the engine's shell (cluster/kernel/launcher.py). In the
    place of a rank that has ended it joins later, when the others make room for it.
    """
    if os.environ.pop("NBDIST_REPLACES", None) is None:
        asyncio.get_running_loop().call_soon(_join)


def _join() -> None:
    from nbdist.engine import join  # takes a moment, in which the heart is to beat already

    run_dir = Path(os.environ["NBDIST_RUN"])
    start = json.loads((run_dir / "notebook.json").read_text())["start"]
    join.join_at_start(run_dir, start)
    (run_dir / f"joined.{os.environ['RANK']}").touch()
