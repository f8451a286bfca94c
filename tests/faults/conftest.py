"""One kernel with ranks at a time, shared by the faults that leave it whole."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.faults import Ranks

# It has what every fault has to come to.
pytest.register_assert_rewrite("tests.faults.fault")


class Holder:
    """Starts ranks when they are first asked for, and again after a test has broken them."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._queued = ""

    def get(self, n: int, *, queued: str = "") -> Ranks:
        """Ranks that are whole; not whole again until the test says so."""
        if self._ranks is None or (self._ranks.n, self._queued) != (n, queued):
            self.drop()
            self._ranks, self._queued = Ranks.start(n, queued=queued), queued
        self._ranks.is_whole = False
        self._ranks.set_kept()
        return self._ranks

    def drop(self) -> None:
        """End the ranks; nothing of them may be left."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            assert ranks.end() == []


@pytest.fixture(scope="session")
def _holder() -> Iterator[Holder]:
    holder = Holder()
    yield holder
    holder.drop()


@pytest.fixture
def ranks(n: int, _holder: Holder) -> Iterator[Ranks]:
    """As many ranks as the test's `n` says; `conclude` leaves them to the next test."""
    ranks = _holder.get(n)
    yield ranks
    if not ranks.is_whole:
        _holder.drop()


@pytest.fixture
def queued_ranks(n: int, _holder: Holder) -> Iterator[Ranks]:
    """The same with a device that works off a queue."""
    ranks = _holder.get(n, queued="QueuedNccl")
    yield ranks
    if not ranks.is_whole:
        _holder.drop()


@pytest.fixture
def own_ranks() -> Iterator[Callable[..., Ranks]]:
    """`own_ranks(n, ...)`: ranks for one test alone, as `Ranks.start` makes them."""
    started: list[Ranks] = []

    def start(*args: object, **options: object) -> Ranks:
        started.append(Ranks.start(*args, **options))  # type: ignore[arg-type]
        started[-1].set_kept()
        return started[-1]

    yield start
    leftovers = [line for ranks in started for line in ranks.end()]

    assert leftovers == []
