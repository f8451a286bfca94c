"""Saves a checkpoint in a process that ends, without a word, before its n-th file operation.

    python -m tests.support.stopping FOLDER OLD_STEP

For n = 1, 2, ... until one save comes through: the folder is laid out anew with a checkpoint of
step OLD_STEP (none where that is 0), a forked process saves step 2 and ends, and what is there is
written to standard output as a line of JSON: n, the operation, the step of the checkpoint that is
found, whether it was whole, and what is left beside it after the next save.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from nbdist.checkpoint import folder as checkpoint_checkpoint_folder
from nbdist.checkpoint import manifest
from nbdist.checkpoint.manifest import Checkpoint, SavedFile, Versions
from nbdist.strategy.choose import choose

_DATA = "__0_0.distcp"
# Nothing tells a hook of these.
_SILENT = ("write", "fsync", "close")
_STOPPED = 9


def save(path: Path, step: int) -> None:
    new = checkpoint_checkpoint_folder.prepare(path)
    content = f"values of step {step}".encode() * step
    (new / _DATA).write_bytes(content)
    (new / ".metadata").write_bytes(b"what torch writes")
    files = tuple(
        SavedFile(name, (new / name).stat().st_size, manifest.checksum(new / name))
        for name in (_DATA, ".metadata")
    )
    saved = Checkpoint(
        (), (), Versions("0", "2", "1", "3"), 1, choose("ddp", {}, 1), 0.0, files, step=step
    )
    (new / manifest.MANIFEST).write_text(manifest.text(saved))
    checkpoint_checkpoint_folder.commit(new, path)


def read_step(path: Path) -> tuple[int, bool]:
    """The step of the checkpoint that a reader finds (0 without one), and whether it is whole."""
    checkpoint_checkpoint_folder.recover(path)
    if not path.exists():
        return 0, True
    saved = manifest.read(path)
    manifest.check_files(path, saved, reads_all=True)
    return saved.step, True


def _stop_before(number: int, report: int) -> None:
    """Let this process end before its n-th operation on files, whichever code makes it."""
    count = 0

    def tick(name: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.write(report, name.encode())  # before it is wrapped: see below
            os._exit(_STOPPED)

    def hook(name: str, _: Any) -> None:
        if name == "open" or name.startswith(("os.", "shutil.", "fcntl.")):
            tick(name)

    def ticking(plain: Any, name: str, *args: Any) -> Any:
        # The report itself is no operation of a save.
        if args[0] != report:
            tick(name)
        return plain(*args)

    for name in _SILENT:
        setattr(os, name, functools.partial(ticking, getattr(os, name), f"os.{name}"))
    sys.addaudithook(hook)


def _try(folder: Path, old_step: int, number: int) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    path = folder / "ckpt"
    if old_step:
        save(path, old_step)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _stop_before(number, writing)
        save(path, 2)
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        operation = pipe.read()
    step, is_whole = read_step(path)
    save(path, 3)
    last, _ = read_step(path)
    left = sorted(beside.name for beside in folder.iterdir() if beside != path)
    return {
        "number": number, "operation": operation, "step": step, "is_whole": is_whole,
        "last": last, "left": left, "code": os.waitstatus_to_exitcode(status),
    }  # fmt: skip


def main() -> None:
    folder, old_step = Path(sys.argv[1]), int(sys.argv[2])
    for number in itertools.count(1):
        outcome = _try(folder, old_step, number)
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()
        if outcome["code"] != _STOPPED:
            break


if __name__ == "__main__":
    main()
