"""Work that takes long in this notebook now, and its progress, for those who show it.

core.progress says how work reports. Work that ends within SHOW_S is not shown.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Protocol

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.progress import Progress, together
from nbdist.rpc.kernel.functions import RankFunction

SHOW_S = 0.5
PERIOD_S = 0.25

Listener = Callable[[Progress | None], object]

newest_of_rank: RankFunction[[], Progress | None] = RankFunction("progress")


class Tell(Protocol):
    """Takes the progress of the work."""

    def __call__(self, what: str, done: float = 0.0, total: float = 0.0, unit: str = "") -> None:
        """Say how far the work is; the arguments are those of Progress."""


# Called with each record, and with None when nothing takes long any more; in a thread of its own,
# in the context of the cell that began the work. Must not raise.
listeners: list[Listener] = []
_lock = threading.RLock()
_works: list[_Work] = []  # the inner ones last
_last_told: Progress | None = None


class _Work:
    """Work that may take long, and the thread that reports it."""

    def __init__(self, name: str, ask: Callable[[], Progress | None], period_s: float):
        self._newest = Progress(name, "", phase=1)
        self._ask = ask
        self._period_s = period_s
        self.ended = threading.Event()
        # Output displayed in another thread than the main one belongs to its cell all the same.
        self._context = contextvars.copy_context()

    def tell(self, what: str, done: float = 0.0, total: float = 0.0, unit: str = "") -> None:
        """How far the notebook's own part is."""
        self._newest = Progress(self._newest.name, what, done, total, unit).after(self._newest)

    def run(self) -> None:
        """Tell how far it is again and again, until it has ended."""
        pause_s = SHOW_S
        while not self.ended.wait(pause_s):
            newest = self._ask() or self._newest
            with _lock:
                if not self.ended.is_set() and _works and _works[-1] is self:
                    self._context.run(_tell, newest)
            pause_s = self._period_s


def _tell(newest: Progress | None) -> None:
    global _last_told  # noqa: PLW0603  # there is one main thread
    if newest != _last_told:
        _last_told = newest
        for listener in tuple(listeners):
            listener(newest)


@contextlib.contextmanager
def during(
    name: str,
    ask: Callable[[], Progress | None] = lambda: None,
    period_s: float = PERIOD_S,
) -> Iterator[Tell]:
    """Report the work done inside, such as a "plan", if it takes longer than SHOW_S.

    `ask` is called in another thread for the progress; None stands for the last report.
    """
    work = _Work(name, ask, period_s)
    with _lock:
        # An interrupt can come in the moment of an end, and leave one that has ended.
        _works[:] = [*(running for running in _works if not running.ended.is_set()), work]
    threading.Thread(target=work.run, name="nbdist-progress", daemon=True).start()
    try:
        yield work.tell
    finally:
        with _lock:
            work.ended.set()
            _works[:] = [running for running in _works if not running.ended.is_set()]
            if not _works:
                _tell(None)


def of_ranks(
    ranks: Ranks, name: str, chosen: Sequence[int] | None = None, period_s: float = PERIOD_S
) -> AbstractContextManager[Tell]:
    """Report work of ranks likewise: their control threads are asked, which wait for no rank.

    The notebook's reports count where no rank reports.
    """
    return during(name, _Newest(ranks, chosen), period_s)


class _Newest:
    """The newest records of ranks; a rank that does not answer does not delay the others."""

    def __init__(self, ranks: Ranks, chosen: Sequence[int] | None):
        self._ranks = ranks
        self._chosen = chosen
        self._pending: dict[int, Future[Progress | None]] = {}
        self._newest: dict[int, Progress | None] = {}

    def __call__(self) -> Progress | None:
        for rank in self._ranks.ranks if self._chosen is None else self._chosen:
            pending = self._pending.get(rank)
            if pending is not None and not pending.done():
                continue
            if pending is not None:
                self._newest[rank] = None if pending.exception() is not None else pending.result()
            future = self._ranks.ask(newest_of_rank, rank)
            if future is None:  # it has ended
                self._pending.pop(rank, None)
                self._newest.pop(rank, None)
            else:
                self._pending[rank] = future
        return together(self._newest)
