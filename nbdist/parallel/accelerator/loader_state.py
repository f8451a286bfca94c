"""Where a loader is inside its epoch: kept for checkpoints, which go on at the next batch."""

from __future__ import annotations

from typing import Any


class Position:
    """A part of each prepared loader.

    Positions are counted in batches of all data, so they mean the same on any number of ranks.
    A loop that was left early counts as far as it came.
    """

    _used = 0
    _resumed = 0

    def epoch_state(self) -> dict[str, Any]:
        """Which epoch this is and how its order began."""
        raise NotImplementedError

    def set_epoch_state(self, state: dict[str, Any]) -> None:
        """Let the next loop be the epoch in which `state` was taken, from its beginning."""
        raise NotImplementedError

    def position_state(self) -> dict[str, Any]:
        """Which epoch this is, how its order began, and how many batches of it were used."""
        return {**self.epoch_state(), "position": self._used}

    def resume(self, state: dict[str, Any]) -> None:
        """Let the next loop go on where `state` was taken; those after it have all batches."""
        self.set_epoch_state(state)
        self._used = self._resumed = state["position"]

    def _opened_at(self, start: int) -> tuple[int, bool]:
        """Where a loop begins, and whether that is in the middle of an epoch that was loaded."""
        is_resumed = self._resumed > 0
        self._used, self._resumed = max(start, self._resumed), 0
        return self._used, is_resumed
