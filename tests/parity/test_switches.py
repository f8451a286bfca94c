"""A live model goes from each strategy to each other one, and trains as if nothing had happened."""

import itertools
import json
from pathlib import Path

import pytest

from tests.parity.case import EXACT, LIMITS, Measured, record, worst_of_ranks
from tests.parity.cases import SWITCHED, circuit
from tests.parity.texts import SWITCHES
from tests.support.torch_ranks import TorchRanks


@pytest.mark.parity  # switch/test_rank has every pair of a smaller model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("n", SWITCHED)
def test_every_pair(tmp_path: Path, n: int) -> None:
    """Losses, rates, parameters and moments of an uninterrupted run; the user's objects stay."""
    path = circuit(SWITCHED[n])
    pairs = list(itertools.pairwise(path))
    with TorchRanks(tmp_path, n, SWITCHES, 880, SWITCHED=json.dumps(path)) as ranks:
        worst = worst_of_ranks(ranks, [(pair, LIMITS) for pair in pairs])
    for (before, after), off in zip(pairs, worst, strict=True):
        differences = off["loss"], None, off["parameters"]
        record(Measured("switch", before, "plain", n, *differences, EXACT, after))


def test_the_walk_takes_each_pair_once() -> None:
    """And ends where it began."""
    path = circuit("abcd")
    pairs = list(itertools.pairwise(path))

    assert sorted(pairs) == sorted(itertools.permutations("abcd", 2))
    assert path[0] == path[-1] == "a"
