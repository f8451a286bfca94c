"""A cell that the notebook's event loop waits for."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nbdist.cells.kernel.wait import wait_async


class Cell:
    """As CellRun; eight messages arrive during each step, which may wait so long."""

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self.on_item: Callable[[float], object] = lambda _within_s: None
        self.steps = 0

    def step(self, _now_s: float) -> float | None:
        self.steps += 1
        if self.steps == 3:
            return None
        for _ in range(8):
            self.on_item(self.within_s)
        return 60.0

    def finish(self) -> str:
        return "ended"

    def press(self) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


@pytest.mark.parametrize("within_s", [0.0, 0.01])
def test_messages_that_come_together_wake_the_loop_once(
    within_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waking for each step, however many messages there are; none is missed."""
    cell: Any = Cell(within_s)
    wakings = []

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *call: (wakings.append(call), wake(*call))
        )
        return await asyncio.wait_for(wait_async(lambda: cell), 20)

    assert asyncio.run(run()) == "ended"
    assert cell.steps == 3
    assert len(wakings) == 2
