"""Where a loader is inside its epoch, for checkpoints; and the shape of the batches it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

# What models of tokens call them: a batch may have other tensors before.
_TOKENS = "input_ids"
_last_batch: tuple[tuple[int, ...], str] = ((), "")


class Position:
    """A part of each prepared loader.

    Positions are counted in batches of all data, so they mean the same on any number of ranks.
    A loop that was left early counts as far as it came.
    """

    # Accelerate's loaders have these.
    iteration: int
    set_epoch: Callable[[int], None]
    begin: Callable[[], None]
    end: Callable[[], None]
    # Ours have these; what is given for each step, and the same without the first steps.
    _batches: Callable[[], Iterator[Any]]
    skip: Callable[[int], Any]
    _used = 0
    _resumed = 0

    def epoch_state(self) -> dict[str, Any]:
        """Which epoch this is; of a loader that knows it also how its order began."""
        return {"iteration": self.iteration}

    def set_epoch_state(self, state: dict[str, Any]) -> None:
        """Let the next loop be the epoch in which `state` was taken, from its beginning."""
        self.set_epoch(state["iteration"])

    def position_state(self) -> dict[str, Any]:
        """Which epoch this is, how its order began, and how many batches of it were used."""
        return {**self.epoch_state(), "position": self._used}

    def resume(self, state: dict[str, Any]) -> None:
        """Let the next loop go on where `state` was taken; those after it have all batches."""
        self.set_epoch_state(state)
        self._used = self._resumed = state["position"]

    def _loop(self) -> Iterator[Any]:
        """One epoch, or what is left of it."""
        self.begin()
        self.set_epoch(self.iteration)
        try:
            yield from self._batches()
        finally:
            self.end()
        self._used = 0
        self.iteration += 1

    def _find_start(self, start: int) -> tuple[int, bool]:
        """Where a loop begins, and whether that is in the middle of an epoch that was loaded."""
        is_resumed = self._resumed > 0
        self._used, self._resumed = max(start, self._resumed), 0
        return self._used, is_resumed


def note_batch(batch: Any) -> None:
    """Remember the shape of a loop's first batch; the last one of an epoch may be smaller."""
    global _last_batch  # noqa: PLW0603  # one process is one rank
    tensor = _first(batch)
    if tensor is not None and tensor.dim():
        _last_batch = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def last_batch() -> tuple[tuple[int, ...], str]:
    """Shape and type of the last loop's first batch; empty before one."""
    return _last_batch


def _first(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, Mapping):
        if isinstance(batch.get(_TOKENS), torch.Tensor):
            tokens: torch.Tensor = batch[_TOKENS]
            return tokens
        batch = batch.values()
    if isinstance(batch, str | bytes) or not isinstance(batch, Iterable):
        return None
    return next((tensor for item in list(batch) if (tensor := _first(item)) is not None), None)
