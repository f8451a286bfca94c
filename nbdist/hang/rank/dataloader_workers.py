"""Ends the worker processes of DataLoader loops that a failed cell has left behind.

The failed cell's traceback holds the loop's iterator until the next failure, and its workers
with it. Then Python's collector runs its finalizer, wherever it happens to start, and that waits
5 s for each worker that was interrupted.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch.utils.data import dataloader

from nbdist.core.failures import chain

JOIN_S = 0.2
# Between a frame and its iterator stand a progress bar and enumerate, not more.
MAX_STEPS, MAX_HOLDERS = 4, 50

# Private: torch has no public way to end a loop's workers. A torch that lacks one of these names
# is left to do it by itself, as described above.
_OWN = ("_index_queues", "_persistent_workers", "_shutdown", "_worker_pids_set", "_workers")


def end_abandoned(error: BaseException | None) -> int:
    """End the workers of the iterators that only this error's frames hold; return how many.

    Once its cell has failed, in the main thread; at most 0.5 s. An iterator that a variable of
    the user still holds goes on, as does one with persistent workers.
    """
    frames = list(_frames(error))
    iterators = {id(iterator): iterator for frame in frames for iterator in _iterators(frame)}
    return _end(
        [iterator for iterator in iterators.values() if _is_abandoned(iterator, frames, iterators)]
    )


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yield frames of functions alone: the locals of a cell are the user's variables."""
    for exception in chain(error):
        link = exception.__traceback__
        while link is not None:
            if link.tb_frame.f_locals is not link.tb_frame.f_globals:
                yield link.tb_frame
            link = link.tb_next


def _iterators(frame: FrameType) -> Iterator[Any]:
    kind = getattr(dataloader, "_MultiProcessingDataLoaderIter", None)
    if kind is None:
        return
    for value in list(frame.f_locals.values()):
        if (
            isinstance(value, kind)
            and all(hasattr(value, name) for name in _OWN)
            and not (value._shutdown or value._persistent_workers)  # noqa: SLF001
        ):
            yield value


def _is_abandoned(iterator: Any, frames: list[FrameType], iterators: dict[int, Any]) -> bool:
    """Whether everything that leads to it starts in these frames, which never go on."""
    # Before Python 3.13 a frame keeps the dict in which it shows its locals.
    expected = {id(container) for container in (iterators, frames, *frames)} | {
        id(f.f_locals) for f in frames
    }
    referrers: list[Any] = [iterator]
    for _ in range(MAX_STEPS):
        expected |= {id(referrers), *map(id, referrers)}
        referrers = [
            referrer for referrer in gc.get_referrers(*referrers) if id(referrer) not in expected
        ]
        referrers = [referrer for referrer in referrers if referrer is not sys._getframe()]  # noqa: SLF001
        if not referrers:
            return True
        if len(referrers) > MAX_HOLDERS:
            return False
    return False


def _end(iterators: Sequence[Any]) -> int:
    workers = []
    for iterator in iterators:
        if iterator._worker_pids_set:  # noqa: SLF001
            # Else torch raises in this thread that workers have been killed.
            dataloader._utils.signal_handling._remove_worker_pids(id(iterator))  # noqa: SLF001
            iterator._worker_pids_set = False  # noqa: SLF001
        # The thread that copies to pinned memory, before what it reads from is broken.
        if (thread := getattr(iterator, "_pin_memory_thread", None)) is not None:
            iterator._pin_memory_thread_done_event.set()  # noqa: SLF001
            iterator._worker_result_queue.put((None, None))  # noqa: SLF001
            thread.join(JOIN_S)
        workers += iterator._workers  # noqa: SLF001
        iterator._shutdown = True  # its finalizer has nothing more to do  # noqa: SLF001
    # torch itself notifies them through locks that an interrupted worker may hold for good.
    _end_workers(workers)
    for iterator in iterators:
        for queue in iterator._index_queues:  # noqa: SLF001
            queue.cancel_join_thread()
            queue.close()
    return len(workers)


def _end_workers(workers: Sequence[Any]) -> None:
    for end in ("terminate", "kill"):
        alive = [worker for worker in workers if worker.is_alive()]
        for worker in alive:
            getattr(worker, end)()
        until_s = time.monotonic() + JOIN_S
        for worker in alive:
            worker.join(max(0.0, until_s - time.monotonic()))
