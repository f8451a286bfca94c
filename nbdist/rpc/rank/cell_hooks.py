"""What runs around each cell on a rank: one wrapper of ipykernel's `do_execute`, hooks in order."""

from __future__ import annotations

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
    """
    execute: Callable[..., Any] = getattr(kernel.do_execute, "execute", kernel.do_execute)

    async def do_execute(*args: Any, **options: Any) -> Any:
        cell = CellContext(kernel, kernel.get_parent("shell").get("metadata", {}))
        with ExitStack() as stack:
            for hook in hooks:
                stack.enter_context(hook(cell))
            cell.reply = await execute(*args, **options)
        return cell.reply

    do_execute.execute = execute  # type: ignore[attr-defined]
    kernel.do_execute = do_execute
