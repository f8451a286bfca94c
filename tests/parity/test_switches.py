"""A live model goes from each strategy to each other one, and trains as if nothing had happened."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parity.case import EXACT, LIMITS, Measured, record, worst_of_ranks
from tests.parity.cases import SWITCHED, WALKS, circuit
from tests.parity.ranks import switches
from tests.support.torch_ranks import TorchRanks

_EVERYWHERE = ["ddp", "tp --sequence-parallel", "fsdp", "tp", "pp", "cp", "single"]
# By the end of its walk, hundreds of steps, one moment was 1.05e-5 off on one of two processors.
_LIMITS_OF_LORA = {**LIMITS, "moments": 2e-5}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("lora everywhere", ["ddp", "tp --sequence-parallel", "fsdp", "pp"]),
        pytest.param("lora everywhere", _EVERYWHERE, marks=pytest.mark.parity),
        pytest.param("lora of gpt2", ["ddp", "tp", "fsdp", "pp"], marks=pytest.mark.parity),
    ],
)
def test_adapters_go_through_every_strategy(tmp_path: Path, model: str, path: list[str]) -> None:
    """Of PEFT, on every kind of layer; what is frozen stays as it is, without moments."""
    pytest.importorskip("peft")
    _walk(tmp_path, 2, model, path, 280)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["", pytest.param(" by Muon", marks=pytest.mark.parity)])
def test_experts_go_from_rank_to_rank(tmp_path: Path, by: str) -> None:
    """With their moments, from whole ones to shared ones and back."""
    path = ["ddp", "ep", "fsdp", "fsdp --ep 2", "pp", "ep", "zero1"]
    _walk(tmp_path, 2, f"experts{by}", path, 280)


@pytest.mark.parity  # switch/test_rank has every pair of a smaller model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("n", "model"), WALKS)
def test_every_pair(tmp_path: Path, n: int, model: str) -> None:
    """Losses, rates, parameters and moments of an uninterrupted run; the user's objects stay."""
    _walk(tmp_path, n, model, circuit(SWITCHED[n]), 880)


def test_the_walk_takes_each_pair_once() -> None:
    """And ends where it began."""
    path = circuit("abcd")
    pairs = list(itertools.pairwise(path))

    assert sorted(pairs) == sorted(itertools.permutations("abcd", 2))
    assert path[0] == path[-1] == "a"


def _walk(folder: Path, n: int, model: str, path: Sequence[str], limit_s: float) -> None:
    pairs = list(itertools.pairwise(path))
    arguments = {"path": path, "kind": model}
    with TorchRanks(folder, n, switches, limit_s, arguments=arguments) as ranks:
        limits = _LIMITS_OF_LORA if model == "lora" else LIMITS
        worst = worst_of_ranks(ranks, [(pair, limits) for pair in pairs])
    for (before, after), off in zip(pairs, worst, strict=True):
        differences = off["loss"], None, off["parameters"]
        record(Measured("switch", before, model, n, *differences, EXACT, after))
