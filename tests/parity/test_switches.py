"""A live model goes from each strategy to each other one, and trains as if nothing had happened."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parity.case import EXACT, Measured, record
from tests.parity.cases import SWITCHED, WALKED, circuit
from tests.parity.texts import SWITCHES
from tests.support.torch_ranks import LIMIT_S, TorchRanks

pytestmark = pytest.mark.engine
# Moments are compared by their largest value, and drift over hundreds of steps; a lost one is 1.
LIMITS = {"loss": EXACT, "parameters": EXACT, "moments": 1e-5}


@pytest.mark.parity  # switch/test_rank has every pair of a smaller model
@pytest.mark.parametrize("n", WALKED)
def test_a_walk_through_strategies(tmp_path: Path, n: int) -> None:
    """Each once, there and back: losses, rates, parameters and moments of an uninterrupted run."""
    names = WALKED[n]
    _walk(tmp_path, n, [*names, names[0]])


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("n", SWITCHED)
def test_every_pair(tmp_path: Path, n: int) -> None:
    """Every ordered pair, mid-training; the optimizer and all of the user's stay the same."""
    found = _walk(tmp_path, n, circuit(SWITCHED[n]), limit_s=880)

    assert {(one.typed, one.after) for one in found} == set(itertools.permutations(SWITCHED[n], 2))
    for one in found:
        record(one)


def test_the_walk_takes_each_pair_once() -> None:
    """And ends where it began."""
    path = circuit("abcd")
    pairs = list(itertools.pairwise(path))

    assert sorted(pairs) == sorted(itertools.permutations("abcd", 2))
    assert path[0] == path[-1] == "a"


def _walk(folder: Path, n: int, path: Sequence[str], limit_s: float = LIMIT_S) -> list[Measured]:
    with TorchRanks(folder, n, SWITCHES, limit_s, SWITCHED=json.dumps(path)) as ranks:
        results = [result["found"] for result in ranks.results()]
    measured = []
    for number, (before, after) in enumerate(itertools.pairwise(path)):
        found = [result[number] for result in results]
        for one in found:
            assert isinstance(one, dict), f"{before} to {after}\n{one}"
        worst = {key: max(one[key] for one in found) for key in found[0]}
        far = {key: value for key, value in worst.items() if value > LIMITS[key]}
        assert not far, (before, after, n, far)
        measured.append(
            Measured(
                "switch", before, "plain", n, worst["loss"], None, worst["parameters"], EXACT, after
            )
        )
    return measured
