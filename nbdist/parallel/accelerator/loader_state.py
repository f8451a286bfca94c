"""The position of a loader inside its epoch, and the shape of its batches."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from nbdist.parallel.base import events
from nbdist.parallel.base.training_state import PutBack, keep_generators
from nbdist.parallel.live import registry

# What models of tokens call them: a batch may have other tensors before.
_TOKENS = "input_ids"
_last_batch: tuple[tuple[int, ...], str] = ((), "")


@dataclass(slots=True)
class Place:
    """The position of a loop over a loader.

    Attributes:
        is_live: It has begun and has not ended.
        iteration: Its epoch.
        order: The state that its order was drawn from; None where no generator is known.
        used: How many batches of all data came before, those of this epoch that it left out too.
        is_resumed: It began in the middle of an epoch.
        feed: What comes then, where that can be copied: a `BatchQueue`.
        share: Which part of the data `ahead` is.
        ahead: The batch that is read already.
    """

    is_live: bool = False
    iteration: int = 0
    order: torch.Tensor | None = None
    used: int = 0
    is_resumed: bool = False
    feed: Any = None
    share: Any = None
    ahead: Any = None

    def copy(self) -> Place:
        """The same place; what either loop draws then is not missing in the other."""
        feed = None if self.feed is None else self.feed.copy()
        return replace(self, feed=feed, ahead=copy.deepcopy(self.ahead))


class Loop(Iterator[Any]):
    """A loop over a prepared loader, which can be put back where it was."""

    def __init__(self, loader: Position) -> None:
        """Begin with the first `next`; as for a generator, nothing is drawn before."""
        self.loader = loader
        self.number = next(_numbers)
        self.go_to(Place())
        _loops.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._steps)

    def go_to(self, place: Place) -> None:
        """Go on at a place; at a new one with what a new loop begins with."""
        self.place = place
        self._steps = self.loader.steps(place)

    def keep(self) -> PutBack:
        """A function that puts it back where it is now, if it has moved."""
        place, was = self.place, self.place.copy()

        def put_back() -> None:
            if self.place is not place or (place.used, place.is_live) != (was.used, was.is_live):
                self.go_to(was.copy())

        return put_back


_numbers = itertools.count()
_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


def keep_loops() -> list[PutBack]:
    """Functions that put this rank's loops, and their loaders, back where they are now."""
    return [put for loop in list(_loops) for put in (loop.loader.keep_position(), loop.keep())]


class Position:
    """A part of each prepared loader.

    Positions are counted in batches of all data, so they mean the same on any number of ranks.
    What counts is the newest loop that somebody still holds: without one, the next loop is
    another epoch, also where the last one was left early.
    """

    # Accelerate's loaders have these.
    iteration: int
    set_epoch: Callable[[int], None]
    begin: Callable[[], None]
    end: Callable[[], None]
    # Ours have these; what is given for each step, and the same without the first steps.
    _batches: Callable[[Place], Iterator[Any]]
    skip: Callable[[int], Any]
    # The dataset as the user gave it, and what draws its indices: None for a stream.
    source: Callable[[], tuple[Any, Any]]
    # Where a loop goes on that was loaded and has not begun.
    _pending: Place | None = None

    def epoch_state(self) -> dict[str, Any]:
        """Which epoch this is, and how its order began where a generator is known."""
        return _epoch_of(self._place())

    def set_epoch_state(self, state: dict[str, Any]) -> None:
        """Let the next loop be the epoch in which `state` was taken, from its beginning.

        Loops that live go on, and count no more.
        """
        self.set_epoch(state["iteration"])
        generator = self._generator()
        if generator is not None and "order" in state:
            generator.set_state(state["order"].cpu())
        self._pending = None
        for loop in self._live_loops():
            loop.place = Place()

    def position_state(self) -> dict[str, Any]:
        """Which epoch this is, how its order began, how much of it was used; and what is next."""
        place = self._place()
        return {**_epoch_of(place), "position": place.used, "next": _epoch_of(self._new_place())}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: the newest loop that lives, else the next one.

        Others that begin have all batches of the epoch that would have been the next one.
        """
        loops = self._live_loops()
        self.set_epoch_state(state.get("next", state))
        place = Place()
        if state["position"]:
            place = self._pending = Place(
                iteration=state["iteration"], order=state.get("order"), used=state["position"],
                is_resumed=True,
            )  # fmt: skip
        for loop in loops[-1:]:
            loop.go_to(place)

    def keep_position(self) -> PutBack:
        """A function that lets the next loop be the one that it would be now."""
        iteration, pending = self.iteration, self._pending and self._pending.copy()
        generators = keep_generators([self._generator(), getattr(self, "generator", None)])

        def put_back() -> None:
            self.iteration, self._pending = iteration, pending and pending.copy()
            for put_generator_back in generators:
                put_generator_back()

        return put_back

    def steps(self, place: Place) -> Iterator[Any]:
        """The batches of one epoch, or those that are left of it; `place` is kept up to date."""
        self._enter(place)
        self.begin()
        self.set_epoch(place.iteration)
        try:
            yield from self._batches(place)
        finally:
            self.end()
            place.is_live = False
        self.iteration += 1

    def _enter(self, place: Place) -> None:
        """Begin at a place, unless a loop goes on there: what is pending, or a new epoch."""
        if place.is_live:
            return
        pending = self._pending
        if pending is not place and any(loop.place is pending for loop in list(_loops)):
            pending = None  # the loop that it is for is still held
        begun = pending or self._new_place()
        place.is_live, place.iteration, place.order = True, begun.iteration, begun.order
        place.used, place.is_resumed = begun.used, begun.is_resumed
        if pending is not None:
            self._pending = None
        if registry.data_choice().name != "single":
            for act in events.on_loop:
                act(self, *self.source())

    @contextmanager
    def _as_it_began(self, place: Place) -> Iterator[None]:
        """Draw the first batches of a loaded epoch again, as they were drawn then."""
        generator = self._generator()
        if generator is None or place.order is None or not place.is_resumed:
            yield
            return
        now = generator.get_state()
        generator.set_state(place.order.cpu())
        try:
            yield
        finally:
            if not torch.equal(now, place.order):  # a state of an older version says nothing of now
                generator.set_state(now)

    def _place(self) -> Place:
        """Find the position of the loop that counts."""
        places = [loop.place for loop in self._live_loops()]
        return (places or [self._pending or self._new_place()])[-1]

    def _new_place(self) -> Place:
        return Place(iteration=self.iteration, order=self._order())

    def _live_loops(self) -> list[Loop]:
        """Return loops that user code holds and that have begun and not ended, the newest last."""
        loops = [loop for loop in list(_loops) if loop.loader is self and loop.place.is_live]
        return sorted(loops, key=lambda loop: loop.number)

    def _generator(self) -> Any:
        """Find the generator of the order, if ranks know it."""
        return getattr(self, "synchronized_generator", None)

    def _order(self) -> torch.Tensor | None:
        generator = self._generator()
        return None if generator is None else generator.get_state()


def _epoch_of(place: Place) -> dict[str, Any]:
    order = {} if place.order is None else {"order": place.order}
    return {"iteration": place.iteration, **order}


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
