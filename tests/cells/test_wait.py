"""A cell that the notebook's event loop waits for."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nbdist.cells.kernel.wait import wait_async


class Cell:
    """As CellRun; eight messages arrive during its first step."""

    def __init__(self) -> None:
        self.on_item: Callable[[], object] = lambda: None
        self.steps = 0

    def step(self, _now_s: float) -> float | None:
        self.steps += 1
        if self.steps == 3:
            return None
        for _ in range(8):
            self.on_item()
        return 60.0

    def finish(self) -> str:
        return "ended"

    def press(self) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


def test_messages_that_come_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One waking for each step, however many messages there are; none is missed."""
    cell: Any = Cell()
    wakings = []

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda call: (wakings.append(call), wake(call))
        )
        return await asyncio.wait_for(wait_async(lambda: cell), 20)

    assert asyncio.run(run()) == "ended"
    assert cell.steps == 3
    assert len(wakings) == 2
