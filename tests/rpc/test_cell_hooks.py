"""Tests of what runs around cells: the order, what is raised inside, hooks in place of others."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nbdist.engine import join
from nbdist.rpc.rank import cell_hooks
from nbdist.rpc.rank.cell_hooks import CellContext, CellHook


class Kernel:
    """As ipykernel's: a cell is "ok", "error", or an interrupt of the kernel itself."""

    iopub_socket, execution_count = None, 7

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.sent: list[tuple[str, str]] = []

    def send_response(self, _socket: object, kind: str, content: dict[str, str]) -> None:
        self.sent.append((kind, content["ename"]))

    def get_parent(self, channel: str) -> dict[str, object]:
        return {"metadata": {"channel": channel}}

    async def do_execute(self, status: str) -> dict[str, str]:
        self.noted.append(status)
        if status == "interrupt":
            raise KeyboardInterrupt
        return {"status": status}

    def hook(self, name: str) -> CellHook:
        """A hook that notes when it is entered and left, and what it sees of the cell."""

        @contextmanager
        def around(cell: CellContext) -> Iterator[None]:
            self.noted.append(f"{name} {cell.metadata['channel']}")
            try:
                yield
            finally:
                self.noted.append(f"{name} {cell.reply and cell.reply['status']}")

        return around

    def run(self, status: str) -> list[str]:
        """What is noted of one cell."""
        self.noted.clear()
        reply: Any = asyncio.run(self.do_execute(status))
        assert reply == {"status": status}
        return self.noted


def test_the_first_hook_is_the_outermost_and_all_see_the_reply() -> None:
    """Of a cell that fails too: it has a reply."""
    kernel = Kernel()
    cell_hooks.install(kernel, [kernel.hook("a"), kernel.hook("b")])

    for status in ("ok", "error"):
        assert kernel.run(status) == ["a shell", "b shell", status, f"b {status}", f"a {status}"]


def test_hooks_end_where_the_kernel_itself_raises() -> None:
    """There is no reply then, and what was raised goes on."""
    kernel = Kernel()
    cell_hooks.install(kernel, [kernel.hook("a"), kernel.hook("b")])

    with pytest.raises(KeyboardInterrupt):
        kernel.run("interrupt")

    assert kernel.noted == ["a shell", "b shell", "interrupt", "b None", "a None"]


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_a_hook_that_fails_is_a_failure_of_the_cell(moment: str) -> None:
    """Told as the cell's error, with a reply; the hooks outside of it end as always."""
    kernel = Kernel()

    @contextmanager
    def broken(cell: CellContext) -> Iterator[None]:
        if moment == "before":
            raise OSError("no space left")
        yield
        raise OSError("no space left")

    cell_hooks.install(kernel, [kernel.hook("a"), broken])
    reply: Any = asyncio.run(kernel.do_execute("ok"))

    assert (reply["status"], reply["ename"], reply["evalue"]) == (
        "error",
        "OSError",
        "no space left",
    )
    assert kernel.sent == [("error", "OSError")]
    run = [] if moment == "before" else ["ok"]
    assert kernel.noted == ["a shell", *run, "a None" if moment == "before" else "a ok"]


def test_hooks_are_put_in_the_place_of_earlier_ones() -> None:
    """Never around them: a cell would be counted twice."""
    kernel = Kernel()
    cell_hooks.install(kernel, [kernel.hook("a")])
    cell_hooks.install(kernel, [kernel.hook("b")])

    assert kernel.run("ok") == ["b shell", "ok", "b ok"]


def test_a_rank_knows_the_order_of_its_hooks() -> None:
    """A cell is over in the box when its lints are sent, its recording is, its memory is noted."""
    order = [hook.__module__.removeprefix("nbdist.") for hook in join.CELL_HOOKS]

    assert order == [
        "engine.journal",
        "hang.rank.call_log",
        "lints.rank.watch",
        "recording.rank.cell_hook",
        "memory.rank.oom_hook",
        "engine.shell_hooks",
    ]
