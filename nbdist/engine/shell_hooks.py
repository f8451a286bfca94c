"""Hooks that make a cell on a rank behave as in the notebook: numbers, await, refusals."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn

import torch.distributed as dist
from IPython.core import page

from nbdist.core import stacks
from nbdist.core.failures import chain
from nbdist.engine import error_notes, packaging, raw_output, script
from nbdist.errors import NoKeyboard, RankStays
from nbdist.hang.rank import main_thread
from nbdist.rpc.rank.cell_hooks import CellContext
from nbdist.rpc.wire import CELL_NUMBER, CELL_RUN


def install(shell: Any) -> None:
    """Prepare this engine's shell for distributed cells. Once per engine."""
    number_cells(shell)
    if dist.is_nccl_available():
        finish_device_calls(shell)
    refuse_input(shell.kernel)
    refuse_exit(shell)
    wake_on_signals(asyncio.get_running_loop())
    release_signals_in_forks()
    name_code_alike(shell.compile)
    hide_own_frames(shell.InteractiveTB)
    error_notes.install(shell)
    raw_output.install(shell)
    leave_out_unread(shell.kernel)
    packaging.install(shell)
    # `model?` asks for a pager, which only the notebook's own kernel could open.
    shell.set_hook("show_in_pager", page.as_hook(page.display_page), 0)
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


def leave_out_unread(kernel: Any) -> None:
    """Make no records of each message for the log, and send no message that has no reader.

    The execute_input of a cell reports its begin, a moment after the status "busy" and once the
    rank takes an interrupt; the begin of a call matters to no reader. RankState has when a cell of
    the notebook was started, which ipyparallel's client would only parse, slowly.
    """
    if kernel.log.level <= logging.DEBUG and kernel.parent.log_level >= logging.INFO:
        kernel.log.setLevel(logging.WARNING)
    send = kernel.session.send

    def send_read(stream: Any, kind: Any, content: Any = None, *args: Any, **options: Any) -> Any:
        if kind == "status" and content == {"execution_state": "busy"}:
            return None
        if kind == "execute_reply" and args and CELL_RUN in args[0].get("metadata", {}):
            options.get("metadata", {}).pop("started", None)
        return send(stream, kind, content, *args, **options)

    kernel.session.send = send_read


def finish_device_calls(shell: Any) -> None:
    """Let a cell end once the GPU has done its collective calls; see main_thread.

    The wait is a part of the cell: an interrupt, or an abort of the calls, is the cell's failure.
    """
    run_nodes = shell.run_ast_nodes
    finish = compile(f"__import__('sys').modules[{main_thread.__name__!r}].finish_device_calls()",
                     "<nbdist>", "exec")  # fmt: skip

    async def run_ast_nodes(*args: Any, **options: Any) -> bool:
        has_raised = await run_nodes(*args, **options)
        return bool(has_raised or await shell.run_code(finish, options.get("result")))

    shell.run_ast_nodes = run_ast_nodes


def wake_on_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Let an interrupt end a cell that awaits at once. In the main thread, its loop running.

    ipykernel's handler cancels the cell's task, but Python goes on with the interrupted select()
    (PEP 475), so that the loop would not hear of it before its next event. With a wake-up
    descriptor the signal itself is one.
    """
    waking, woken = socket.socketpair()
    waking.setblocking(False)
    woken.setblocking(False)
    before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    if before != -1:  # somebody wakes this process already, asyncio's own handlers for example
        signal.set_wakeup_fd(before)
        return
    _wakers.extend([waking, woken])
    loop.add_reader(woken, woken.recv, 4096)


def release_signals_in_forks() -> None:
    """Give forked children the signals of a fresh Python: they are no engines.

    With the engine's own handlers SIGTERM would not end them, so that multiprocessing.Pool waits
    for ever, and each of their signals would wake the engine's loop. A signal that comes before a
    child has its handlers waits until it has.
    """
    forking = threading.local()
    taken: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }

    def hold() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)

    def go_on() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def release() -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in taken.items():
            signal.signal(number, handler)
        go_on()

    os.register_at_fork(before=hold, after_in_parent=go_on, after_in_child=release)


# Open as long as the process.
_wakers: list[socket.socket] = []


def name_code_alike(compiler: Any) -> None:
    """Leave the process id out of the file names in warnings and printed tracebacks.

    A cell's code is /tmp/ipykernel_PID/HASH.py to ipykernel, another one on each rank, so that
    equal lines would not be merged.
    """
    name_of = compiler.get_code_name

    def get_code_name(*args: Any) -> str:
        return re.sub(r"ipykernel_\d+", "ipykernel", name_of(*args))

    compiler.get_code_name = get_code_name


def hide_own_frames(tracebacks: Any) -> None:
    """Leave nbdist's frames around torch's functions out of the tracebacks of cells.

    One at the very end stays where nbdist itself has raised.
    """
    structured = tracebacks.structured_traceback

    @functools.wraps(structured)
    def structured_traceback(kind: Any, error: Any, *args: Any, **options: Any) -> Any:
        for raised in chain(error):
            _unlink_script_cell(raised.__traceback__)
            _unlink_own(raised.__traceback__)
        return structured(kind, error, *args, **options)

    tracebacks.structured_traceback = structured_traceback


def _unlink_script_cell(first: TracebackType | None) -> None:
    """Leave out the cell that only runs a program (`nbdist run`), and what runs it."""
    # The first frame is IPython's own, which IPython leaves out; the cell's is the next.
    runner = first and first.tb_next and first.tb_next.tb_next
    if first and runner and runner.tb_next and runner.tb_frame.f_code is script.run.__code__:
        first.tb_next = runner.tb_next


def _unlink_own(link: TracebackType | None) -> None:
    while link is not None:
        following = link.tb_next
        while following is not None and _is_around_others(following):
            following = following.tb_next
        link.tb_next = following
        link = following


def _is_around_others(link: TracebackType) -> bool:
    """Whether it is a frame of nbdist in which another package's function has raised.

    A wrapper of the recorder can be the last Python frame: what it calls, `original`, may be C++.
    """
    code = link.tb_frame.f_code
    is_last = link.tb_next is None
    return stacks.is_ours(code.co_filename) and (not is_last or "original" in code.co_freevars)


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
    # The shell's prompt shows programs that they run interactively: Lightning then refuses ddp.
    vars(sys).pop("ps1", None)


def refuse_exit(shell: Any) -> None:
    """Let exit() and quit() fail: they would end the engine a moment after the cell passed."""

    def refuse() -> NoReturn:
        raise RankStays(
            "exit() and quit() do not end a rank. %dist_shutdown in a cell of its own ends all; to "
            "leave a cell early, raise an exception."
        )

    shell.ask_exit = refuse


@contextmanager
def top_level_await(cell: CellContext) -> Iterator[None]:
    """Let `await` at a cell's top level work on an ipyparallel engine.

    ipykernel 7 compares the current thread with `shell_channel_thread.parent_thread` when
    it runs an async cell. In an ipyparallel engine that attribute is None, so the request
    dies without an answer and the cell hangs (ipykernel 7.4, ipyparallel 9.2). A stand-in is
    there while a cell runs, and only then: between cells the attribute decides how messages
    are dispatched. ipykernel 6 has no such attribute and needs nothing, nor does a version
    that sets it or does not ask for it; this then changes nothing.
    """
    kernel = cell.kernel
    if getattr(kernel, "shell_channel_thread", kernel) is not None:
        yield
        return
    kernel.shell_channel_thread = SimpleNamespace(parent_thread=threading.main_thread())
    try:
        yield
    finally:
        kernel.shell_channel_thread = None
