"""Ranks that wait for one that failed are freed, again if need be; a press ends a recovery."""

import os
import signal
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nbdist.errors import DistributedError, Interrupted, NbdistError
from nbdist.hang.kernel.health import Health
from nbdist.hang.kernel.maintenance import RELEASE_S, Maintenance
from nbdist.hang.kernel.restart import await_idle
from nbdist.notebook.session import Session

# Rank 0 fails while it packs this, when rank 1 waits for what it sends.
UNSENDABLE = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
optimizer.state[model.module.weight]["hook"] = lambda: None
"""
# What follows meets in the store, where there is no connection to shut down.
CAUGHT = """
if rank == 0:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        dist.new_group([0, 1])
"""


class FakeHealth:
    """Ranks that never answer a recovery."""

    needs_recovery = False
    aborts = 0

    def begin_recovery(self) -> dict[int, Future[Any]]:
        return {0: Future()}

    def abort(self) -> None:
        self.aborts += 1


def upkeep(health: FakeHealth) -> Maintenance:
    ranks: Any = SimpleNamespace(busy_ranks=(), is_connected=lambda _rank: True)
    return Maintenance(ranks, cast("Health", health))


def test_ranks_that_answer_by_themselves_are_not_broken_off() -> None:
    """An abort would cost the gradients of all models."""
    health, late = FakeHealth(), Future[Any]()
    timer = threading.Timer(RELEASE_S / 10, late.set_result, [None])
    timer.start()
    upkeep(health).release([late])
    timer.join()

    assert health.aborts == 0
    upkeep(health).release([Future()])
    assert health.aborts == 1


def test_a_press_ends_a_recovery_that_hangs() -> None:
    """It is left to the next cell."""
    health = FakeHealth()
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    began_s = time.monotonic()
    timer.start()
    with pytest.raises(Interrupted, match="before the next cell"):
        upkeep(health).recover()
    timer.join()

    assert time.monotonic() - began_s < 3.0
    assert health.needs_recovery


def test_a_rank_that_fails_to_send_its_model_leaves_no_rank_waiting(pair: Session) -> None:
    """Said with its reason; then all groups work."""
    pair.run(UNSENDABLE)
    with pytest.raises(NbdistError, match=r"rank 0: .*lambda"):
        pair.sync_model(0)
    result = pair.run("x = torch.ones(1); dist.all_reduce(x); print(x.item())", timeout_s=20)

    assert [rank.text.strip() for rank in result.ranks] == ["2.0", "2.0"]


def test_a_rank_that_catches_the_abort_and_waits_again_is_aborted_again(pair: Session) -> None:
    """The cell ends with the first reason; then all groups work."""
    pair.grace_s = 0.5
    with pytest.raises(DistributedError, match=r"rank 0 waits in all_reduce"):
        pair.run(CAUGHT, timeout_s=30)
    result = pair.run("x = torch.ones(1); dist.all_reduce(x); print(x.item())", timeout_s=20)

    assert [rank.text.strip() for rank in result.ranks] == ["2.0", "2.0"]


def test_idle_ranks_are_asked_until_they_hear_a_new_controller() -> None:
    """What is sent before that is lost. One that is in a cell is not waited for."""
    asked: list[int] = []

    def call(rank: int, _name: str) -> Future[str]:
        asked.append(rank)
        answer: Future[str] = Future()
        if len(asked) > 2:
            answer.set_result("MainThread")
        return answer

    ranks: Any = SimpleNamespace(
        cluster=SimpleNamespace(unheard={0, 1}), ranks=(0, 1), call=call, exit_of=lambda _: None
    )
    states = {0: SimpleNamespace(state="finished"), 1: SimpleNamespace(state="running")}
    health: Any = SimpleNamespace(refresh=lambda _s: None, logs=lambda: states)

    assert await_idle(ranks, health) == ()
    assert asked == [0, 0, 0]
