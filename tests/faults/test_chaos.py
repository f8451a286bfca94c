"""A seeded run of random cells with random faults: nothing is lost, nothing is left."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.faults.fault import Fault, happen
from tests.faults.table import DEATHS, HANGS, INTERRUPTS
from tests.support.faults import Ranks

_SEED = "NBDIST_CHAOS_SEED"
_RANKS = "NBDIST_CHAOS_RANKS"
_CELLS = "NBDIST_CHAOS_CELLS"
_SHORT_SEED = 3
_SHORT_CELLS = 15
_LONGEST_DELAY_S = 0.5
# How often each comes. In `make test` a hang costs seconds, and a death a new process.
_WEIGHTS = {"count": 3, "sum": 2, "train": 2, "hang": 2, "interrupt": 3, "death": 1}
_SHORT_WEIGHTS = {"count": 4, "sum": 3, "train": 3, "hang": 1, "interrupt": 3, "death": 1}
_FAULTS = {"hang": HANGS, "interrupt": INTERRUPTS, "death": DEATHS}


class Chaos:
    """Random cells on ranks; after each their variables are as noted here without asking them."""

    def __init__(self, ranks: Ranks, seed: int, weights: dict[str, int]) -> None:
        self._ranks = ranks
        self._random = random.Random(seed)
        self._weights = weights
        # `counter` of each rank, and `trail`: the numbers of the cells that it has run.
        self._counters = [0] * ranks.n
        self._trails: list[list[int]] = [[] for _ in range(ranks.n)]
        self._number = 0
        ranks.ok("%%distributed\ncounter, trail = 0, []")

    def run(self, n_cells: int) -> None:
        """Run that many cells; what each was is printed, for the report of a failure."""
        kinds = self._random.choices(list(self._weights), list(self._weights.values()), k=n_cells)
        for self._number, kind in enumerate(kinds, 1):
            amount = self._random.randrange(1, 100)
            began_s = time.monotonic()
            if kind in _FAULTS:
                name = self._fault(self._random.choice(_FAULTS[kind]), amount)
            else:
                name = {"count": self._count, "sum": self._sum, "train": self._train}[kind](amount)
            self._compare()
            _say(f"{self._number}: {name} ({time.monotonic() - began_s:.1f} s)")

    def _line(self, amount: int) -> str:
        return f"counter += {amount} * (rank + 1); trail.append({self._number})\n"

    def _note(self, ranks: list[int], amount: int) -> None:
        for rank in ranks:
            self._counters[rank] += amount * (rank + 1)
            self._trails[rank].append(self._number)

    def _count(self, amount: int) -> str:
        """An ordinary cell on some ranks."""
        n = self._ranks.n
        some = sorted(self._random.sample(range(n), self._random.randint(1, n)))
        label = ",".join(map(str, some))
        self._ranks.ok(f"%%rank[{label}]\n{self._line(amount)}")
        self._note(some, amount)
        return f"count on {label}"

    def _sum(self, amount: int) -> str:
        """An all_reduce of what every rank has counted."""
        everyone = list(range(self._ranks.n))
        self._note(everyone, amount)
        cell = self._ranks.ok(
            f"%%distributed\n{self._line(amount)}total = torch.tensor([counter])\n"
            "dist.all_reduce(total)\nprint('value', total.item())"
        )
        assert self._ranks.printed(cell) == dict.fromkeys(everyone, sum(self._counters))
        return "sum"

    def _train(self, amount: int) -> str:
        """A step of the DDP and FSDP2 models; the weights are compared in numbers."""
        self._ranks.ok(f"%%distributed\n{self._line(amount)}step()")
        self._note(list(range(self._ranks.n)), amount)
        self._ranks.steps += 1
        return "train"

    def _fault(self, fault: Fault, amount: int) -> str:
        """A fault at a random moment; every rank runs the first line before it."""
        delay_s = self._random.uniform(0, _LONGEST_DELAY_S) if fault.act != "nothing" else 0.0
        _say(f"{self._number}: {fault.name}, {delay_s:.2f} s after its begin ...")
        code = self._line(amount) + fault.code
        outcome = happen(self._ranks, replace(fault, code=code), delay_s)
        self._note(list(range(self._ranks.n)), amount)

        assert outcome.cell.status == "error", outcome.cell.visible
        outcome.cell.check_failure(fault.ename)
        if fault.dead:
            self._revive(fault.dead)
        assert self._ranks.is_right()
        return fault.name

    def _revive(self, dead: tuple[int, ...]) -> None:
        survivors = [rank for rank in range(self._ranks.n) if rank not in dead]
        self._compare(survivors)
        self._ranks.revive(dead)
        label = ",".join(map(str, dead))
        self._ranks.ok(f"%%rank[{label}]\ncounter, trail = 0, []")
        for rank in dead:
            self._counters[rank], self._trails[rank] = 0, []
        self._ranks.note_processes()

    def _compare(self, ranks: list[int] | None = None) -> None:
        chosen = ranks or list(range(self._ranks.n))
        values = self._ranks.values("[counter, trail]", chosen)
        expected = {r: [self._counters[r], self._trails[r]] for r in chosen}
        assert values == expected


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _run(ranks: Ranks, seed: int, n_cells: int, weights: dict[str, int]) -> None:
    Chaos(ranks, seed, weights).run(n_cells)
    ranks.conclude(f"chaos, {n_cells} cells", "chaos", None, None)


@pytest.mark.faults
@pytest.mark.parametrize("n", [2])
def test_a_little_chaos(ranks: Ranks) -> None:
    """Fifteen random cells of a fixed seed, some with faults: every variable is as it has to be."""
    _run(ranks, _SHORT_SEED, _SHORT_CELLS, _SHORT_WEIGHTS)


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_chaos(own_ranks: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]) -> None:
    """Two hundred random cells of a random seed lose no variable and leave no process.

    NBDIST_CHAOS_SEED repeats a run; NBDIST_CHAOS_RANKS and NBDIST_CHAOS_CELLS set its size.
    """
    seed = int(os.environ.get(_SEED) or random.SystemRandom().randrange(10**6))
    n = int(os.environ.get(_RANKS) or 2)
    n_cells = int(os.environ.get(_CELLS) or 200)
    with capsys.disabled():
        _say(f"\n{_SEED}={seed} {_RANKS}={n} {_CELLS}={n_cells}")
    _run(own_ranks(n), seed, n_cells, _WEIGHTS)
