"""The folder of one run: connection files, the ranks' store, logs, long outputs.

Only its owner can read it, and it is gone when the run is.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from nbdist.cluster import run_owner
from nbdist.cluster.run_owner import Detachment, Keep, RunOwner
from nbdist.core.host import started, this_machine
from nbdist.core.units import shown
from nbdist.errors import NbdistError, StartError
from nbdist.rpc import wire

CREATE_TRIES = 10
RESERVE = "reserve"
RESERVE_BYTES = 1 << 18
RANKS = "ranks.json"
PIDS = "pids"  # of each machine, as kernels of two may have held a run: see `_pids_file`
COMMAND = "command.json"
# How a kept run was started, for a kernel that attaches to it.
START = "start.pickle"
# A note that `nbdist stop` in a terminal, not the notebook, has ended the ranks.
STOPPED = "stopped"
WHAT_NOW = "%dist_init starts new ones."


def place() -> Path:
    """Folder of this user's runs, whether it exists or not."""
    return Path(tempfile.gettempdir()) / f"nbdist-{os.getuid()}"


def base() -> Path:
    """The folder that holds the runs of this user, made and checked.

    Raises:
        StartError: If it belongs to another user or others may enter it.
    """
    path = place()
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
            path = Path(tempfile.mkdtemp(prefix="new-", dir=base()))
            try:
                take(path)
            except StartError:
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):  # other runs are in it
                    path.parent.rmdir()
                raise
            # Every process that sees a run can see from the first moment whose it is.
            return path.rename(path.with_name(path.name.replace("new-", "run-", 1)))
    raise StartError(
        f"The run's folder could not be created in {tempfile.gettempdir()}. Create that folder, or "
        "point TMPDIR elsewhere and restart the kernel."
    )


def take(run_dir: Path) -> str:
    """Write this kernel down as the one that holds the run; the mark of this time.

    Raises:
        StartError: If the folder cannot be written.
    """
    owner = _this_owner()
    replace_file(run_dir, run_owner.FILE, json.dumps(asdict(owner)).encode())
    (run_dir / run_owner.DETACHED).unlink(missing_ok=True)
    return owner.hold


def write_start(run_dir: Path, start: dict[str, Any]) -> None:
    """Leave what another kernel needs to attach to the run's ranks.

    Raises:
        StartError: If the folder cannot be written.
    """
    replace_file(run_dir, START, pickle.dumps(start))


def write_keep(run_dir: Path, keep: Keep) -> None:
    """Leave what everybody, the guardian too, has to know of a kept run.

    Raises:
        StartError: If the folder cannot be written.
    """
    for name in (run_owner.KEEP, run_owner.KEEP_COPY):
        replace_file(run_dir, name, json.dumps(asdict(keep)).encode())


def read_keep(run_dir: Path) -> Keep | None:
    """Read how the run's ranks are kept without a notebook; None where they are not."""
    names = (run_owner.KEEP, run_owner.KEEP_COPY)
    return next((keep for name in names if (keep := _read_keep(run_dir / name))), None)


def has_damaged_keep(run_dir: Path) -> bool:
    """Whether something is written of a kept run, and can be read neither there nor in its copy."""
    return read_keep(run_dir) is None and (run_dir / run_owner.KEEP).exists()


def _read_keep(path: Path) -> Keep | None:
    try:
        written = json.loads(path.read_text())
        # Another version may have written more.
        named = {field.name: written[field.name] for field in fields(Keep) if field.name in written}
        tuples = {name: tuple(v) for name, v in named.items() if isinstance(v, list)}
        return Keep(**{**named, **tuples, "keep_s": float(named["keep_s"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_start(run_dir: Path) -> dict[str, Any]:
    """Read the content that `write_start` has written.

    Raises:
        OSError, pickle.PickleError: It is not there.
    """
    # Only this user can write there, and the version was compared.
    written: dict[str, Any] = pickle.loads((run_dir / START).read_bytes())  # noqa: S301
    return written


def read_detachment(run_dir: Path) -> Detachment | None:
    """Since when the run has no notebook; None while it has one."""
    try:
        return Detachment(**json.loads((run_dir / run_owner.DETACHED).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def note_detached(run_dir: Path, keep_s: float) -> None:
    """Write down that no kernel holds the run from now on; the guardian does so again."""
    now_s = time.time()
    with contextlib.suppress(StartError):  # on a full disk: the guardian ends it all the same
        detachment = Detachment(now_s, now_s + keep_s, 0)
        replace_file(run_dir, run_owner.DETACHED, json.dumps(asdict(detachment)).encode())


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
    # Python skips entries of sys.path that are not text, a Path for example.
    paths = [entry for entry in sys_path if isinstance(entry, str)]
    _write(run_dir, "notebook.json", json.dumps({"sys_path": paths, "start": start}))


def write_ranks(run_dir: Path, hosts: Sequence[str]) -> None:
    """Leave for `nbdist status` which host each rank is on; no disk, no line there."""
    with contextlib.suppress(StartError):
        _write(run_dir, RANKS, json.dumps({"hosts": list(hosts)}))


def note_pid(run_dir: Path, pid: int, start: str) -> None:
    """Note a process that the kernel has started, for a process that ends the run from outside.

    On a full disk it is not noted: then only its mark (NBDIST_RUN) says whose it is.
    """
    with contextlib.suppress(OSError), _pids_file(run_dir).open("a") as file:
        file.write(f"{pid} {start}\n")


def pids(run_dir: Path) -> dict[int, str]:
    """The processes that the run's kernels have started on this machine, with their start times."""
    try:
        lines = _pids_file(run_dir).read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines]  # the last may be cut: the kernel was killed
    return {int(part[0]): part[1] for part in parts if len(part) == 2 and part[0].isdigit()}


def _pids_file(run_dir: Path) -> Path:
    machine = this_machine()
    pid_space = "".join(filter(str.isdigit, machine.pid_space))
    return run_dir / f"{PIDS}.{machine.host}.{pid_space}"


def note_command(run_dir: Path, command: Sequence[str]) -> None:
    """Note what ends the part of the run that is elsewhere, such as a batch system's job."""
    with contextlib.suppress(StartError):
        _write(run_dir, COMMAND, json.dumps(list(command)))


def command(run_dir: Path) -> list[str]:
    """The command that `note_command` has noted last; empty without."""
    try:
        return [str(word) for word in json.loads((run_dir / COMMAND).read_text())]
    except (OSError, ValueError):
        return []


def owner(run_dir: Path) -> RunOwner | None:
    """The kernel whose run it is; None where that cannot be read."""
    try:
        return run_owner.read(run_dir / run_owner.FILE)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def hosts(run_dir: Path) -> tuple[str, ...]:
    """The host of each rank; empty before they are up."""
    try:
        return tuple(json.loads((run_dir / RANKS).read_text())["hosts"])
    except (OSError, ValueError, KeyError):
        return ()


def _this_owner() -> RunOwner:
    notebook = os.environ.get("JPY_SESSION_NAME", "")  # set by Jupyter's server
    if not notebook:
        with contextlib.suppress(FileNotFoundError):
            notebook = os.getcwd()  # noqa: PTH109  # a string
    start = started(os.getpid()) or ""
    return RunOwner(os.getpid(), start, this_machine(), time.time(), notebook, uuid.uuid4().hex)


def replace_file(run_dir: Path, name: str, content: bytes) -> None:
    """Write a file that others read at any time: they see it whole, or as it was before.

    Raises:
        StartError: If it cannot be written.
    """
    new = f"{name}.new"
    _write(run_dir, new, content)
    (run_dir / new).replace(run_dir / name)


def _write(run_dir: Path, name: str, content: str | bytes) -> None:
    try:
        (run_dir / name).write_bytes(content.encode() if isinstance(content, str) else content)
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


def arrived_ranks(run_dir: Path) -> set[int]:
    """The local ranks that have begun to wait for the others."""
    return {int(path.suffix[1:]) for path in run_dir.glob("arrived.*")}


def joined_ranks(run_dir: Path) -> set[int]:
    """The local ranks that are in their group."""
    return {int(path.suffix[1:]) for path in run_dir.glob("joined.*")}


def forget(run_dir: Path, rank: int) -> None:
    """Remove what an earlier process of the rank has left for the notebook, and its sockets."""
    for name in ("failed", "arrived", "joined"):
        (run_dir / f"{name}.{rank}").unlink(missing_ok=True)
    shutil.rmtree(run_dir / wire.SCRATCH_FOLDER.format(rank=rank), ignore_errors=True)


def leave_note(run_dir: Path) -> None:
    """Leave word for the run's notebook, before anything of it ends.

    Raises:
        NbdistError: If the run's folder cannot be written.
    """
    note = {"pid": os.getpid(), "at_s": time.time()}
    new = run_dir / f"{STOPPED}.new"
    try:
        new.write_text(json.dumps(note))
        new.replace(run_dir / STOPPED)
    except OSError as error:
        raise NbdistError(
            f"The notebook could not be notified: {run_dir} cannot be written ({error.strerror}). "
            "Nothing was ended. Free some space there, or stop the ranks in the notebook with "
            "%dist_shutdown."
        ) from error


def ended_from_outside(run_dir: Path) -> str:
    """Say that the ranks were ended from outside, without a full stop; or "".

    A missing folder counts as one without that note.
    """
    try:
        note = json.loads((run_dir / STOPPED).read_text())
    except (OSError, ValueError):
        return ""
    clock = shown(time.strftime("%H:%M:%S", time.localtime(note["at_s"])))
    return f"The ranks are gone: `nbdist stop` in a terminal ended them at {clock}"
