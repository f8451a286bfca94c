"""Files in the run folder for when a rank cannot answer: stacks, and which cell is which.

Imports no torch: armed before that is loaded, so that a crash in its start is told too.
"""

from __future__ import annotations

import contextlib
import faulthandler
from pathlib import Path
from typing import IO, Any

from nbdist.core.exit_cause import CELLS_FILE, CRASH_FILE, DUMP_SIGNAL, STACKS_FILE

# File name of a cell's code -> the cell's number, for every cell of this rank.
cells: dict[str, int] = {}

# faulthandler keeps the bare descriptors; the files must not be closed under it.
_files: list[IO[bytes]] = []


def arm(run_dir: Path, rank: int) -> None:
    """Let a crash, and DUMP_SIGNAL, write all threads' stacks into the run folder.

    The second works while C code holds the GIL. Once per process, in its main thread.

    Raises:
        OSError: If the files cannot be made.
    """
    if _files:
        return
    crash = (run_dir / CRASH_FILE.format(rank=rank)).open("wb", buffering=0)
    stacks = (run_dir / STACKS_FILE.format(rank=rank)).open("wb", buffering=0)
    _files.extend((crash, stacks))
    faulthandler.enable(file=crash, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True, chain=False)


def note_cells(compiler: Any, run_dir: Path | None, rank: int) -> None:
    """Note of every cell from now on which number its code's file name stands for.

    faulthandler writes file names only. Wraps `get_code_name`, which IPython calls with the
    cell's number before it compiles a cell (a hook of its compiler class, IPython 8 and 9). The
    notebook cannot read it on another host: the run folder is None there.

    Raises:
        OSError: If the file cannot be made.
    """
    name_of = compiler.get_code_name
    file = None
    if run_dir is not None:
        file = (run_dir / CELLS_FILE.format(rank=rank)).open("ab", buffering=0)

    def get_code_name(raw_code: str, code: str, number: int) -> str:
        name = str(name_of(raw_code, code, number))
        if cells.get(name) != number:
            cells[name] = number
            # A full disk must not fail the cell: a crash is then told without its line.
            with contextlib.suppress(OSError):
                if file is not None:
                    file.write(f"{number} {name}\n".encode())
        return name

    compiler.get_code_name = get_code_name
