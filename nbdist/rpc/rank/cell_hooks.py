"""Hooks run around each cell on a rank: one wrapper of ipykernel's `do_execute`, in order."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class CellContext:
    """A cell that runs now.

    Attributes:
        kernel: This engine's.
        metadata: What came with the cell.
        reply: ipykernel's, once the cell has ended; None where `do_execute` itself raised.
    """

    kernel: Any
    metadata: Mapping[str, Any]
    reply: Any = None


# What a cell runs in. Where the cell is interrupted, that is raised inside.
CellHook = Callable[[CellContext], AbstractContextManager[None]]


def install(kernel: Any, hooks: Sequence[CellHook]) -> None:
    """Let each cell run in these hooks, the first one outermost, in place of earlier ones.

    `do_execute` is what each cell goes through: one with await, one with a syntax error and an
    empty one too, for which IPython's own events differ. Hooks end before the reply is sent.
    A cell whose hooks fail is not run, or has failed: ipykernel would send no reply, and the
    notebook would wait for it for ever.
    """
    execute: Callable[..., Any] = getattr(kernel.do_execute, "execute", kernel.do_execute)

    async def do_execute(*args: Any, **options: Any) -> Any:
        cell = CellContext(kernel, kernel.get_parent("shell").get("metadata", {}))
        try:
            with ExitStack() as stack:
                for hook in hooks:
                    stack.enter_context(hook(cell))
                cell.reply = await execute(*args, **options)
        except Exception as error:  # noqa: BLE001  # it goes where a cell's error goes
            cell.reply = _report(kernel, error)
        return cell.reply

    do_execute.execute = execute  # type: ignore[attr-defined]
    kernel.do_execute = do_execute


def _report(kernel: Any, error: Exception) -> dict[str, Any]:
    """Show an error as that of the cell which runs now, and return the reply that tells it."""
    content = {
        "ename": type(error).__name__,
        "evalue": str(error),
        "traceback": traceback.format_exception(error),
    }
    kernel.send_response(kernel.iopub_socket, "error", content)
    return {"status": "error", "execution_count": kernel.execution_count, **content}
