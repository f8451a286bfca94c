"""Workers of a loop that has failed are ended, and those of loops that may go on are not."""

import gc
import multiprocessing
import multiprocessing.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, dataloader

from nbdist.hang.rank import dataloader_workers

pytestmark = pytest.mark.slow

more = pytest.mark.faults
N_WORKERS = 2
ENDED_S = 4.0  # in no time; a finalizer that has a worker to wait for takes 5 s for each


class Rows(Dataset[int]):
    """Numbers, of which one cannot be read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise LookupError(index)
        return index


def loader(**options: Any) -> "DataLoader[int]":
    """A loader with workers that fails in its second batch, in the process that iterates."""
    return DataLoader(Rows(), batch_size=4, num_workers=N_WORKERS, **options)


def failure(loop: Callable[[], object]) -> LookupError:
    """The error of a loop, its frames alive as a notebook's last error keeps them."""
    try:
        loop()
    except LookupError as error:
        return error
    raise AssertionError("it did not fail")


def workers() -> int:
    """How many processes this one has."""
    return len(multiprocessing.active_children())


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    assert workers() == 0
    # Workers share it, and this process removes it; each would make one and leave it when killed.
    multiprocessing.util.get_temp_dir()
    yield
    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join()
    gc.collect()


def in_a_function() -> None:
    """A loop whose iterator only this function's frame holds."""
    for _ in loader():
        pass


def below_others() -> None:
    """A loop over what stands before the iterator, in variables."""
    batches = iter(loader())
    numbered = enumerate(batches)
    for _ in map(str, numbered):
        pass


def in_a_generator() -> None:
    """As accelerate and progress bars do."""

    def handed_on() -> Iterator[torch.Tensor]:
        yield from loader()

    for _ in handed_on():
        pass


@pytest.mark.parametrize(
    "loop", [below_others, *(pytest.param(f, marks=more) for f in (in_a_function, in_a_generator))]
)
def test_what_only_the_error_holds_is_ended(loop: Callable[[], None]) -> None:
    """At once, the error keeps its frames, and the finalizer has nothing left to wait for."""
    error = failure(loop)
    remaining, began_s = workers(), time.monotonic()
    ended = dataloader_workers.end_abandoned(error)
    took_s = time.monotonic() - began_s

    assert remaining == ended == N_WORKERS
    assert workers() == 0
    assert took_s < ENDED_S
    assert dataloader_workers.end_abandoned(error) == 0
    began_s = time.monotonic()
    del error
    gc.collect()
    assert time.monotonic() - began_s < ENDED_S


def test_an_error_that_came_of_it_counts_too() -> None:
    """`raise ... from` as frameworks do it."""

    def wrapped() -> None:
        try:
            in_a_function()
        except LookupError as error:
            raise LookupError("in training") from error

    assert dataloader_workers.end_abandoned(failure(wrapped)) == N_WORKERS


def a_loop_over(batches: Any) -> None:
    """A loop in a function of the user's, called with what stands in the cell."""
    for _ in batches:
        pass


@pytest.mark.parametrize(
    ("setup", "looped"),
    [
        ("own = iter(loader())", "own"),
        ("own = iter(loader()); kept = Trainer(); kept.batches = own", "kept.batches"),
        pytest.param("own = iter(loader()); kept = [own]", "kept[0]", marks=more),
        pytest.param("own = iter(loader()); kept = enumerate(own)", "kept", marks=more),
    ],
)
def test_what_a_variable_still_holds_goes_on(setup: str, looped: str) -> None:
    """Its next batch comes from the same workers."""
    cell: dict[str, Any] = {"loader": loader, "Trainer": type("Trainer", (), {})}
    exec(setup, cell)
    if "kept" in cell:
        del cell["own"]
    pids = [worker.pid for worker in multiprocessing.active_children()]
    cell["a_loop_over"] = a_loop_over
    error = failure(lambda: exec(f"a_loop_over({looped})", cell))

    assert dataloader_workers.end_abandoned(error) == 0
    assert [worker.pid for worker in multiprocessing.active_children()] == pids
    following = eval(f"next({looped})", cell)
    batch = following[1] if isinstance(following, tuple) else following
    assert batch.tolist() == [8, 9, 10, 11]


def test_persistent_workers_stay() -> None:
    """They belong to the loader, which the user still has."""
    batches = loader(persistent_workers=True)

    def loop() -> None:
        for _ in batches:
            pass

    error = failure(loop)
    assert dataloader_workers.end_abandoned(error) == 0
    assert workers() == N_WORKERS
    assert next(iter(batches)).tolist() == [0, 1, 2, 3]
    del error


def test_a_torch_without_these_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ended then, and nothing fails."""
    error = failure(in_a_function)
    with monkeypatch.context() as patch:
        patch.setattr(dataloader_workers, "_OWN", ("_no_such_name",))
        assert dataloader_workers.end_abandoned(error) == 0
        patch.undo()
        patch.delattr(dataloader, "_MultiProcessingDataLoaderIter")
        assert dataloader_workers.end_abandoned(error) == 0
    assert workers() == N_WORKERS
    assert dataloader_workers.end_abandoned(error) == N_WORKERS
    assert dataloader_workers.end_abandoned(None) == 0
