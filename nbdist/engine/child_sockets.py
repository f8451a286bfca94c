"""Keeps sockets of a rank's child processes in the run folder, which is removed."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from nbdist.rpc.wire import SCRATCH_FOLDER

# The part that multiprocessing adds to its folder, and the limit of macOS and Linux (108).
SOCKET_NAME = "/listener-12345678"
LONGEST_ADDRESS = 103


def use(run_dir: Path, rank: int) -> bool:
    """Let multiprocessing keep its files in the run folder; whether it does.

    Otherwise a killed rank, and each worker of its DataLoaders, leaves a folder pymp-* in TMPDIR
    for ever: each removes its own when it ends by itself. Once per process, before it has
    children; they take it over. Where the address of a socket there would be too long, or the
    folder cannot be made, all stays as it is.
    """
    folder = run_dir / SCRATCH_FOLDER.format(rank=rank)
    if len(os.fsencode(folder)) + len(SOCKET_NAME) > LONGEST_ADDRESS:
        return False
    # multiprocessing.util.get_temp_dir asks here (3.11 to 3.14); nothing public sets it, and
    # TMPDIR would change the user's own temporary files as well.
    config = getattr(multiprocessing.current_process(), "_config", None)
    if not isinstance(config, dict) or config.get("tempdir"):
        return False
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    config["tempdir"] = str(folder)
    return True
