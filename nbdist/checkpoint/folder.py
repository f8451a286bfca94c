"""The folder of a checkpoint: made beside its place, put there by renames, whole at every moment.

 prepare   .NAME.nbdist-lock, whose it is; .NAME.nbdist-new, empty
 commit    all of it on disk; NAME -> .NAME.nbdist-old; .NAME.nbdist-new -> NAME; the rest goes

A process that ends between any two of these leaves the earlier checkpoint or the new one at NAME,
or, between the two renames, both beside it: the next save or load puts the new one there, which was
complete before the first rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from nbdist.checkpoint import manifest
from nbdist.cluster import run_owner
from nbdist.cluster.run_owner import RunOwner
from nbdist.core import host
from nbdist.core.host import Machine
from nbdist.errors import CheckpointError

_LOCK, _NEW, _OLD = "lock", "new", "old"
_MARK = ".nbdist-"
# The files that each checkpoint has, even if its manifest is torn.
_CHECKPOINT_NAMES = (manifest.MANIFEST, ".metadata", "*.distcp", "states.pt")
# How long one waits for others that judge locks in the same folder.
_TURN_S, _PAUSE_S = 60, 0.02
# To remove a folder into which others still write.
_TRIES = 5
_ENDED = (run_owner.DEAD, None)
# No file system allows longer names; ours are longer than the checkpoint's by this.
_MAX_NAME_BYTES = 255 - len(f".{_MARK}lock")


def resolve(path: str | os.PathLike[str]) -> Path:
    """A path as typed, made absolute: `~`, relative ones, and links to where they point.

    Raises:
        CheckpointError: It is empty, cannot be followed, is too long, or is the file system's root.
    """
    if not os.fspath(path):
        raise CheckpointError("The path is empty. Name the checkpoint's folder.")
    try:
        absolute = Path(path).expanduser().resolve()
    except (OSError, RuntimeError) as error:  # a circle of links, an unknown user
        raise CheckpointError(f"{path} cannot be followed: {error}.") from error
    if len(os.fsencode(absolute.name)) > _MAX_NAME_BYTES:
        raise CheckpointError(
            f"The name {absolute.name[:20]}... is too long. Choose a shorter one."
        )
    if not absolute.name:
        raise CheckpointError(f"{absolute} is the root of the file system. Name a folder in it.")
    return absolute


def prepare(path: Path, where: str = "") -> Path:
    """Make an empty folder beside a checkpoint's place, in which the next one is written.

    Remains of saves whose processes have ended are removed. One process only, and it calls
    `commit` or `abandon` for each. The path is as `resolve` gives it; folders above it are made.
    `where` is the notebook, named to others who save to the same path meanwhile.

    Raises:
        CheckpointError: Another save to this path is going on, there is a file or a folder that
            is no checkpoint, or it cannot be written. Nothing was changed.
    """
    with explain_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent) as is_alone:
            _sweep(path.parent, is_alone=is_alone)
            _check_place(path)
            _lock(path, where, is_alone=is_alone)
            new = _beside(path, _NEW)
            try:
                new.mkdir()
            except OSError:
                _beside(path, _LOCK).unlink(missing_ok=True)
                raise
            return new


def is_saved_by(path: Path, process: tuple[Machine, int, str]) -> bool:
    """Whether this host sees what `prepare` has made for a process: (machine, pid, when started).

    Another host may have a folder of that name for itself, and what an ended save has left there.
    """
    owner = _saver(_beside(path, _LOCK), is_alone=False)[1]
    return owner is not None and (owner.machine, owner.pid, owner.start) == process


def commit(new: Path, path: Path) -> None:
    """Move the new folder to the checkpoint's path. The process of `prepare` alone.

    Raises:
        CheckpointError: It has no manifest, or could not be written to disk or renamed. The
            earlier checkpoint is at its path; `abandon` removes the new one.
    """
    old = _beside(path, _OLD)
    with explain_errors(path):
        saved = manifest.read(new)
        manifest.check_files(new, saved)
        for parent, _, names in os.walk(new):
            for name in (*names, ""):
                flush(Path(parent) / name)
        with _alone(path.parent):
            _check_place(path)
            if path.is_dir():
                path.rename(old)
            try:
                new.rename(path)
            except OSError:
                if old.is_dir():
                    old.rename(path)
                raise
            flush(path.parent)
    # The new one is in its place whatever happens now; what cannot go now goes with the next save.
    with contextlib.suppress(OSError):
        _remove(old)
    with contextlib.suppress(OSError):
        _beside(path, _LOCK).unlink(missing_ok=True)


def abandon(path: Path) -> None:
    """Remove the folder of `prepare`; the path stays as it is. The process of `prepare` alone."""
    for _ in range(_TRIES):
        with contextlib.suppress(OSError):  # another rank may put a file there meanwhile
            _remove(_beside(path, _NEW))
            break
    with contextlib.suppress(OSError):
        _beside(path, _LOCK).unlink(missing_ok=True)


def recover(path: Path) -> bool:
    """Put a checkpoint in its place whose save was stopped between two renames.

    Anyone who reads calls it first. It leaves alone what a living process saves.

    Returns:
        Whether there was such a one.

    Raises:
        CheckpointError: It is there, and cannot be renamed.
    """
    if path.exists() or not _beside(path, _OLD).is_dir():
        return False
    with explain_errors(path), _alone(path.parent) as is_alone:
        state, owner = _saver(_beside(path, _LOCK), is_alone=is_alone)
        if path.exists():  # somebody else was faster
            return False
        if state not in _ENDED:
            raise CheckpointError(_busy(path, owner))
        _settle(path)
        return True


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}{_MARK}{what}")


def _sweep(folder: Path, *, is_alone: bool) -> None:
    """Remove what saves into this folder have left whose processes have ended."""
    names = {
        entry.name[1:].rpartition(_MARK)[0]
        for entry in folder.iterdir()
        if entry.name.startswith(".") and entry.name.rpartition(_MARK)[2] in (_LOCK, _NEW, _OLD)
    } - {""}
    for path in (folder / name for name in names):
        if _saver(_beside(path, _LOCK), is_alone=is_alone)[0] in _ENDED:
            with contextlib.suppress(OSError):  # another user's stays
                _settle(path)


def _settle(path: Path) -> None:
    """Finish or undo a save that was stopped. Its owner has ended."""
    old, new = _beside(path, _OLD), _beside(path, _NEW)
    if not path.exists():
        # Both are there: the new one was complete before the old one was moved.
        for whole in (new, old):
            if old.is_dir() and (whole / manifest.MANIFEST).is_file():
                whole.rename(path)
                break
        flush(path.parent)
    for remaining in (old, new):
        _remove(remaining)
    _beside(path, _LOCK).unlink(missing_ok=True)


def _check_place(path: Path) -> None:
    """Refuse to replace a folder that is not a checkpoint, or has other files too."""
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is a file of {path.stat().st_size:,} bytes, but a checkpoint is a folder. "
            "Choose another path."
        )
    names = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}
    foreign = sorted(
        n for n in names if not any(fnmatch(n, pattern) for pattern in _CHECKPOINT_NAMES)
    )
    if foreign and manifest.MANIFEST in names:
        with contextlib.suppress(CheckpointError):  # torn: its files are known by their names
            listed = {file.name for file in manifest.read(path).files}
            foreign = [name for name in foreign if name not in listed]
    if names and (foreign or manifest.MANIFEST not in names):
        holds = manifest.first_few(foreign) if foreign else ", ".join(sorted(names)[:3])
        raise CheckpointError(
            f"{path} has files that do not belong to a checkpoint ({holds}), and saving "
            "would remove them. Choose another path, or move them."
        )


def _lock(path: Path, where: str, *, is_alone: bool) -> None:
    owner = RunOwner(
        os.getpid(), host.started(os.getpid()) or "", host.this_machine(), time.time(), where
    )
    lock = _beside(path, _LOCK)
    try:
        file = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        raise CheckpointError(_busy(path, _saver(lock, is_alone=is_alone)[1])) from None
    try:
        os.write(file, json.dumps(asdict(owner)).encode())
    except OSError:
        lock.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def _saver(lock: Path, *, is_alone: bool) -> tuple[str | None, RunOwner | None]:
    """The state of the process that saves there (None without one), and its owner record."""
    try:
        owner = run_owner.read(lock)
    except FileNotFoundError:
        return None, None
    except OSError:  # another user's
        return run_owner.UNKNOWN, None
    except (ValueError, TypeError, KeyError):  # its writer ended over it, or is still writing
        return (run_owner.DEAD if is_alone else run_owner.UNKNOWN), None
    return run_owner.state(owner, host.this_machine(), host.started(owner.pid)), owner


def _busy(path: Path, owner: RunOwner | None) -> str:
    lock = _beside(path, _LOCK)
    if owner is None:
        return f"{path} is being saved by another process. If that is no longer so, remove {lock}."
    since = time.strftime("%H:%M:%S", time.localtime(owner.since_s))
    notebook = f" ({owner.where})" if owner.where else ""
    if owner.pid == os.getpid() and owner.machine == host.this_machine():
        return (
            f"{path} is still being saved, since {since}. Wait until it is done, or choose another "
            "path."
        )
    elsewhere = "" if owner.machine == host.this_machine() else f" on {owner.machine.host}"
    end = f" If that process has ended, remove {lock}." if elsewhere else ""
    return (
        f"{path} is being saved by another run{notebook}, process {owner.pid}{elsewhere}, since "
        f"{since}. Wait until it is done, or choose another path.{end}"
    )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Lock out other processes of this machine; False where locks are not supported."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _has_turn(handle, folder)
    finally:
        # Not by closing alone: a process that was forked meanwhile has the handle too.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _has_turn(handle: int, folder: Path) -> bool:
    end_s = time.monotonic() + _TURN_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise CheckpointError(
                    f"Another process has held {folder} for {_TURN_S} s: it removes or renames "
                    "checkpoints there. Try again when it is done."
                ) from None
            time.sleep(_PAUSE_S)
        except OSError:  # a file system without locks
            return False
        else:
            return True


@contextlib.contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Turn system errors into a CheckpointError of what could not be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(problem(error, path)) from error


def problem(error: OSError, path: Path) -> str:
    """Why a checkpoint could not be written, with numbers, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            usage = shutil.disk_usage(next(parent for parent in path.parents if parent.is_dir()))
            room = f"{usage.free:,} of {usage.total:,} bytes are free there"
        except OSError:
            room = "free space unknown"
        why = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "your quota is used up",
            errno.EFBIG: "a file would exceed this process's size limit (ulimit -f)",
        }[error.errno]
        return f"{path} cannot be written: {why} ({room}). Free some space, or choose another path."
    named = f" ({error.filename})" if error.filename else ""
    return f"{path} cannot be written: {error.strerror or error}{named}. Choose another path."


def _remove(folder: Path) -> None:
    """Remove a folder, its manifest first: one that is half removed is no checkpoint."""
    (folder / manifest.MANIFEST).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
