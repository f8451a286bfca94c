"""The folder of one run: connection files, the ranks' store, logs, long outputs.

Only its owner can read it, and it is gone when the run is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbdist.core import wire
from nbdist.errors import StartError

CREATE_TRIES = 10
RESERVE = "reserve"
RESERVE_BYTES = 1 << 18


def base() -> Path:
    """The folder that holds the runs of this user, made and checked.

    Raises:
        StartError: If it belongs to somebody else or others may enter it.
    """
    path = Path(tempfile.gettempdir()) / f"nbdist-{os.getuid()}"
    with contextlib.suppress(FileExistsError):  # also where it is no folder: told below
        path.mkdir(mode=0o700)
    status = path.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or status.st_mode & 0o077:
        raise StartError(
            f"{path} is not a folder that only you can enter (owner {status.st_uid}, mode "
            f"{stat.filemode(status.st_mode)}), so keys would not be safe in it. Remove it, or "
            "point TMPDIR elsewhere."
        )
    return path


def create() -> Path:
    """A new folder for one run, with mode 0700.

    Raises:
        StartError: If there is no place for it.
    """
    for _ in range(CREATE_TRIES):
        with contextlib.suppress(FileNotFoundError):
            # Otherwise the last other run has just ended and taken the folder with it.
            return Path(tempfile.mkdtemp(prefix="run-", dir=base()))
    raise StartError(
        f"No folder for the run can be made in {tempfile.gettempdir()}. Make that folder, or point "
        "TMPDIR elsewhere and restart the kernel."
    )


def reserve(run_dir: Path) -> None:
    """Keep some space of the disk for what a recovery has to write, should the disk fill up."""
    path = run_dir / RESERVE
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
    except OSError:  # it is full already: then there is nothing to keep
        path.unlink(missing_ok=True)


def release_reserve(run_dir: Path) -> None:
    """Give the space back, so that ranks can meet in a file although the disk is full."""
    (run_dir / RESERVE).unlink(missing_ok=True)


def write_notebook(run_dir: Path, sys_path: Sequence[object], start: dict[str, Any]) -> None:
    """Leave for the engines what they take over from the notebook.

    Raises:
        StartError: If the folder cannot be written.
    """
    # Python passes over what is no text in sys.path, a Path for example.
    paths = [entry for entry in sys_path if isinstance(entry, str)]
    notebook = {"sys_path": paths, "start": start}
    try:
        (run_dir / "notebook.json").write_text(json.dumps(notebook))
    except OSError as error:
        raise StartError(
            f"The run's folder {run_dir} cannot be written ({error.strerror}). Free some space "
            "there, or point TMPDIR elsewhere and restart the kernel."
        ) from error


def failure(run_dir: Path, rank: int) -> dict[str, Any] | None:
    """Why a rank ended before it was ready, if it could still write that down."""
    try:
        written: dict[str, Any] = json.loads((run_dir / f"failed.{rank}").read_text())
    except (OSError, ValueError):
        return None
    return written


def arrived(run_dir: Path) -> set[int]:
    """The local ranks that have begun to wait for the others."""
    return {int(path.suffix[1:]) for path in run_dir.glob("arrived.*")}


def forget(run_dir: Path, rank: int) -> None:
    """Remove what an earlier process of the rank has left for the notebook, and its sockets."""
    for name in ("failed", "arrived"):
        (run_dir / f"{name}.{rank}").unlink(missing_ok=True)
    shutil.rmtree(run_dir / wire.SCRATCH_FOLDER.format(rank=rank), ignore_errors=True)
