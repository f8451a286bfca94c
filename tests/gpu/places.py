"""Ranks that the tests of this folder run on: two on the CPU, or on GPUs as there are some.

A test takes the fixture `ranks` and says on which places it runs: `@on("cpu", "shared", "own")`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from nbdist.notebook.session import Session
from tests.gpu import assumptions, results
from tests.support.ranks import clear_names, started, until

# A certain deadlock is aborted so long after it was told.
GRACE_S = 1.0
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where ranks run.

    Attributes:
        n: Ranks; None for as many as there are GPUs, 8 at most.
        gpus: As in nbdist.start.
        needs: GPUs without which it cannot be had.
        says: For the page.
    """

    n: int | None
    gpus: str | None
    needs: int
    says: str

    @property
    def world_size(self) -> int:
        return min(assumptions.gpu_count(), 8) if self.n is None else self.n


PLACES = {
    "cpu": Place(2, "none", 0, "2 CPU ranks, Gloo"),
    "shared": Place(2, "0", 1, "2 ranks on 1 GPU, Gloo"),
    "four": Place(4, "0", 1, "4 ranks on 1 GPU, Gloo"),
    "one": Place(1, "0", 1, "1 rank, NCCL"),
    "own": Place(2, "0,1", 2, "2 GPUs, NCCL"),
    "all": Place(None, None, 3, "every GPU, NCCL"),
}


def on_places(*names: str, fixture: str = "place", indirect: bool = False) -> Any:
    """The mark of a test that is given the names of these places, one after the other."""
    chosen = [name for name in names if name != "cpu" or results.ON_CPU in os.environ]
    return pytest.mark.parametrize(
        fixture,
        [
            pytest.param(name, id=name, marks=[pytest.mark.gpu(PLACES[name].needs)])
            for name in chosen
        ],
        indirect=indirect,
    )


def on(*names: str) -> Any:
    """The mark of a test that runs on these places with the fixture `ranks`."""
    return on_places(*names, fixture="ranks", indirect=True)


def device_type(session: Session) -> str:
    """The ranks' kind of device: "cuda" or "cpu"."""
    return session.topology.ranks[0].device.split(":")[0]


@contextlib.contextmanager
def strategy_of(session: Session, name: str, **options: object) -> Iterator[None]:
    """A strategy for the models that the block's cells make; they are gone by its end."""
    session.strategy.switch(name, **options)
    assert session.strategy.current().name == name
    yield
    clear_names(session)
    session.run("import gc; gc.collect();")
    session.strategy.switch("ddp")


class Holder:
    """The ranks of one place at a time, started when a test first asks for them."""

    def __init__(self) -> None:
        self.start_s: float | None = None  # of ranks that `get` has just started
        self._name = ""
        self._session: Session | None = None
        self._stack = contextlib.ExitStack()

    def get(self, name: str) -> Session:
        """The ranks of a place, whole and without the names of the tests before."""
        self.start_s = None
        if self._session is None or name != self._name:
            self.drop()
            place, began_s = PLACES[name], time.monotonic()
            self._session = self._stack.enter_context(
                started(place.world_size, gpus=place.gpus, grace_s=GRACE_S, timeout_s=START_S)
            )
            self._name, self.start_s = name, round(time.monotonic() - began_s, 1)
        assert until(lambda: self._session is None or not self._session.busy_ranks)
        clear_names(self._session)
        return self._session

    def drop(self) -> None:
        """End them: the next test starts new ones."""
        self._session = None
        self._stack.close()
