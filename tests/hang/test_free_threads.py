"""Which threads of a rank may still make a call: neither those in one, nor who joins those."""

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace

from nbdist.hang.rank import main_thread, recorder
from nbdist.hang.rank.source_line import UserFrameFinder

DEADLINE_S = 20.0
Seen = tuple[bool, tuple[str, ...]]


def in_call(wait: Callable[[], object]) -> None:
    """Wait below a frame of the recorder, as every recorded call does."""
    names: dict[str, Callable[[Callable[[], object]], None]] = {}
    source = "def call(wait): wait()"
    exec(compile(source, recorder.__file__, "exec"), names)
    names["call"](wait)


class Held:
    """A thread that is held somewhere until it is let go."""

    def __init__(self, name: str, body: Callable[[Callable[[], object]], object]):
        self.is_there, self.may_go = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: body(self._wait), name=name, daemon=True)

    def _wait(self) -> None:
        self.is_there.set()
        self.may_go.wait(DEADLINE_S)


@contextmanager
def blocked_thread(name: str, body: Callable[[Callable[[], object]], object]) -> Iterator[Held]:
    """A thread that runs `body`, which has reached its wait."""
    blocked = Held(name, body)
    blocked.thread.start()
    try:
        assert blocked.is_there.wait(DEADLINE_S)
        yield blocked
    finally:
        blocked.may_go.set()
        blocked.thread.join(DEADLINE_S)


def is_waiting(frame: FrameType) -> bool:
    """Whether a thread is in a wait or join of the threading module."""
    return frame.f_code.co_filename == threading.__file__


def seen_while(
    main: Callable[[Callable[[], object]], object],
    *release: Held,
    places: UserFrameFinder | None = None,
) -> Seen:
    """What another thread sees while this one, the main thread, is in the wait of `main`.

    Then the wait ends, and so do those of the threads in `release`.
    """
    answers: list[Seen] = []
    looked = threading.Event()
    began: list[bool] = []  # no event: the main thread would be in threading's code to set it
    main_ident = threading.get_ident()
    assert main_ident == threading.main_thread().ident

    def look() -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not began or not is_waiting(sys._current_frames()[main_ident]):
            assert time.monotonic() < end_s
        answers.append(main_thread.free_threads(places or UserFrameFinder(), waits_inside=False))
        looked.set()
        for blocked in release:
            blocked.may_go.set()

    looker = threading.Thread(target=look)
    looker.start()
    began.append(True)
    main(lambda: looked.wait(DEADLINE_S))
    looker.join(DEADLINE_S)
    return answers[0]


def test_a_main_thread_is_free_until_it_makes_a_call() -> None:
    """Alone, it waits in nothing that is recorded, or in a call."""
    assert seen_while(lambda wait: wait()) == (True, ())
    assert seen_while(in_call) == (False, ())


def test_a_thread_of_the_users_is_free_unless_it_is_in_a_call() -> None:
    """By its name; one that runs no code of the user does not count."""
    idle = threading.Event()
    library = threading.Thread(target=idle.wait, name="library", daemon=True)
    library.start()
    with blocked_thread("loader", lambda wait: wait()), blocked_thread("caller", in_call):
        assert seen_while(in_call) == (False, ("loader",))
    idle.set()
    library.join(DEADLINE_S)


def test_who_joins_a_thread_in_a_call_waits_with_it() -> None:
    """Without a timeout: with one it goes on by itself."""
    with blocked_thread("caller", in_call) as caller:
        assert seen_while(lambda _: caller.thread.join(), caller) == (False, ())
    with blocked_thread("caller", in_call) as caller:
        assert seen_while(lambda _: caller.thread.join(DEADLINE_S), caller) == (True, ())
    with blocked_thread("loader", lambda wait: wait()) as caller:
        assert seen_while(lambda _: caller.thread.join(), caller) == (True, ("loader",))


def test_a_task_that_a_cell_has_left_may_call_too() -> None:
    """While the main thread blocks in a call its loop stands still, and so do its tasks."""

    async def later() -> None:
        await asyncio.sleep(DEADLINE_S)

    async def both() -> tuple[Seen, Seen]:
        loop = SimpleNamespace(asyncio_loop=asyncio.get_running_loop())
        places = UserFrameFinder(SimpleNamespace(kernel=SimpleNamespace(io_loop=loop)))
        places.is_users = lambda frame: frame is not None and "later" in frame.f_code.co_name  # type: ignore[method-assign]
        task = asyncio.create_task(later())
        await asyncio.sleep(0)
        answers = seen_while(lambda wait: wait(), places=places), seen_while(in_call, places=places)
        task.cancel()
        return answers

    assert asyncio.run(both()) == ((True, ("task later",)), (False, ()))


class Kept:
    """Something whose end can be seen."""


def test_nothing_that_threads_hold_is_kept() -> None:
    """What a function held while it was looked at goes when it returns, without a collection."""

    def looked_at() -> weakref.ref[Kept]:
        in_frame = Kept()
        thread = threading.Thread(
            target=lambda: main_thread.free_threads(UserFrameFinder(), waits_inside=False)
        )
        thread.start()
        thread.join(DEADLINE_S)
        return weakref.ref(in_frame)

    gc.disable()
    try:
        in_frame = looked_at()

        assert in_frame() is None
    finally:
        gc.enable()
