"""%pip and its like in distributed cells: once per host, as its ranks share one environment."""

from __future__ import annotations

import functools
import importlib
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from nbdist.core.rank import this_rank
from nbdist.errors import NbdistError
from nbdist.hang.rank import rendezvous
from nbdist.rpc.wire import CELL_RUN

# Magics that run a Python module, and IPython's own that find a program.
MODULES = ("pip", "uv")
PROGRAMS = ("conda", "mamba", "micromamba")
# A build from source can take most of that.
LONGEST_S = 3600.0

_calls: Counter[tuple[Any, str]] = Counter()


def install(shell: Any) -> None:
    """Replace these magics of a rank's shell."""
    magics = shell.magics_manager.magics["line"]
    for name in (*MODULES, *PROGRAMS):
        if name in magics:
            run = functools.partial(_run, shell, name, magics[name])
            shell.register_magic_function(run, "line", name)


def _run(shell: Any, name: str, original: Callable[[str], object], line: str) -> None:
    """Run the command on the first rank of this host that comes to it; the others wait for it.

    Raises:
        NbdistError: It took longer than LONGEST_S on another rank.
    """
    this = this_rank()
    run = shell.kernel.get_parent("shell").get("metadata", {}).get(CELL_RUN)
    command = f"%{name} {line}".strip()
    _calls[run, command] += 1
    key = f"packages/{this.place.node_rank}/{run}/{_calls[run, command]}/{command}"
    try:
        if this.store.add(f"{key}/came", 1) > 1:
            _await(key, command)
            return
        try:
            if name in MODULES:
                shell.system(f"{shlex.quote(sys.executable)} -m {name} {line}")
            else:
                original(line)
        finally:
            this.store.set(f"{key}/done", "done")
        if this.place.local_world_size > 1:
            print(  # noqa: T201  # it belongs to the cell
                f"%{name} ran once for the {this.place.local_world_size} ranks of this host, on "
                f"rank {this.place.rank}. A package that a rank has imported stays as it is until "
                "%dist_reset."
            )
    finally:
        importlib.invalidate_caches()


def _await(key: str, command: str) -> None:
    if rendezvous.await_keys(this_rank().store, [f"{key}/done"], LONGEST_S):
        raise NbdistError(
            f"{command} has not ended within {LONGEST_S:.0f} s on another rank of this host. "
            "Run it in a terminal with the ranks' Python, then %dist_reset."
        )
