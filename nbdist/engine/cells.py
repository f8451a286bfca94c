"""What makes a cell on a rank behave as in the notebook: numbers, await, refusals."""

from __future__ import annotations

import sys
import threading
from typing import Any, NoReturn

from nbdist.core.wire import CELL_NUMBER
from nbdist.errors import NbdistError


class NoKeyboard(NbdistError):
    """The cell asks for typed input, which a rank cannot get."""


def install(shell: Any) -> None:
    """Prepare this engine's shell for distributed cells. Once per engine."""
    number_cells(shell)
    refuse_input(shell.kernel)
    allow_top_level_await(shell.kernel)
    # Out[...] would keep every displayed tensor alive, on the GPU too. `_` still works.
    shell.displayhook.do_full_cache = False
    # Cell numbers are the notebook's here, so one can come twice; the database of inputs
    # refuses that, and no rank needs one.
    shell.history_manager.enabled = False


def number_cells(shell: Any) -> None:
    """Let tracebacks say `Cell In[12]`, the notebook's number, and not the engine's count."""

    def take_number(lines: list[str]) -> list[str]:
        number = shell.kernel.get_parent("shell").get("metadata", {}).get(CELL_NUMBER)
        if isinstance(number, int):
            shell.execution_count = number
        return lines

    # IPython reads its counter before pre_run_cell, so the last hook before that is the
    # transformation of the source.
    shell.input_transformers_cleanup.append(take_number)


def refuse_input(kernel: Any) -> None:
    """Let input(), getpass() and breakpoint() fail at once with a sentence."""

    def refuse(*_args: Any, **_options: Any) -> NoReturn:
        raise NoKeyboard(
            "A rank has no keyboard: input(), getpass() and pdb do not work in distributed cells. "
            "Read the value in a plain cell of the notebook and write it into the cell; to look at "
            "a failure, print what you need, or see the traceback again with %tb."
        )

    # ipykernel puts these in the place of builtins.input and getpass.getpass for each cell;
    # pdb reads its commands through them, so post-mortem debugging is refused as well.
    kernel.raw_input = refuse
    kernel.getpass = refuse
    sys.breakpointhook = refuse


class _MainThread:
    """What ipykernel asks of a shell-channel thread when it runs an async cell."""

    parent_thread = threading.main_thread()


def allow_top_level_await(kernel: Any) -> None:
    """Let `await` at a cell's top level work on an ipyparallel engine.

    ipykernel 7 compares the current thread with `shell_channel_thread.parent_thread` when
    it runs an async cell. In an ipyparallel engine that attribute is None, so the request
    dies without an answer and the cell hangs (ipykernel 7.4, ipyparallel 9.2). A stand-in is
    there while a cell runs, and only then: between cells the attribute decides how messages
    are dispatched. ipykernel 6 has no such attribute and needs nothing, nor does a version
    that sets it or does not ask for it; this then changes nothing.
    """
    if getattr(kernel, "shell_channel_thread", kernel) is not None:
        return
    execute = kernel.do_execute

    async def do_execute(*args: Any, **options: Any) -> Any:
        kernel.shell_channel_thread = _MainThread
        try:
            return await execute(*args, **options)
        finally:
            kernel.shell_channel_thread = None

    kernel.do_execute = do_execute
