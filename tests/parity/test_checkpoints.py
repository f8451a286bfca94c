"""Training goes on from a checkpoint on other ranks as if nothing had happened."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.parity.case import EXACT, LIMITS, Measured, record, worst_of_ranks
from tests.parity.cases import SAVED
from tests.parity.ranks import checkpoints
from tests.support.torch_ranks import TorchRanks

Jobs = Sequence[Sequence[object]]


def test_what_two_ranks_have_saved_goes_on_on_four_and_on_one(tmp_path: Path) -> None:
    """Fully sharded; then in two dims, and whole. Losses, rates, moments, steps, order of data."""
    _run(tmp_path, 2, [("saved", "fsdp")], blocks=2)
    _run(tmp_path, 4, [("loaded", "fsdp --tp 2", "fsdp", 2)], blocks=2)
    _run(tmp_path, 1, [("loaded", "ddp", "fsdp", 2)], blocks=2)


def test_experts_go_on_on_other_ranks(tmp_path: Path) -> None:
    """Of a Mixtral: two ranks have four each, four ranks two or, twice, four, one rank all."""
    source = "ep", 2
    _run(tmp_path, 2, [("saved", "ep")], kind="mixtral")
    four = ("fsdp --ep 2", "ep")
    _run(tmp_path, 4, [("loaded", name, *source) for name in four], kind="mixtral")
    _run(tmp_path, 1, [("loaded", "ddp", *source)], kind="mixtral")


@pytest.fixture(scope="module", name="saved")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each strategy of SAVED."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for n, names in SAVED.items():
        _run(folder, n, [("saved", name) for name in names])
    return folder


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("n", SAVED)
def test_every_pair(saved: Path, n: int) -> None:
    """Saved on 1, 2 and 4 ranks under each strategy, and loaded on as many under each."""
    there = [(name, size) for size, names in SAVED.items() for name in names]
    jobs = [("loaded", name, *source) for name in SAVED[n] for source in there]
    for (_, after, before, before_n), worst in zip(jobs, _run(saved, n, jobs), strict=True):
        record(
            Measured(
                "checkpoint", before, "plain", n, worst["loss"], None, worst["parameters"], EXACT,
                after, before_n,
            )
        )  # fmt: skip


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_async", [False, True], ids=["while it waits", "while it trains"])
def test_a_tied_model_of_hugging_face(tmp_path: Path, is_async: bool) -> None:
    """GPT-2, saved while training waits or goes on, under each strategy and loaded under each."""
    names = SAVED[2]
    how = {"kind": "gpt2", "is_async": is_async}
    _run(tmp_path, 2, [("saved", name) for name in names], **how)
    jobs = [("loaded", after, before, 2) for after in names for before in names]
    _run(tmp_path, 2, jobs, **how)
    _run(tmp_path, 4, [("loaded", "pp --tp 2", name, 2) for name in names], **how)


def _run(
    folder: Path, n: int, jobs: Jobs, *, is_async: bool = False, **how: Any
) -> list[dict[str, float]]:
    """The worst of all ranks for each job, which is close enough."""
    arguments = {"folder": str(folder / "saved"), "todo": jobs, "is_async": is_async, **how}
    limit_s = 80.0 if len(jobs) == 1 else 200.0 + 20.0 * len(jobs)
    run_dir = folder / f"run{len(list(folder.iterdir()))}"
    with TorchRanks(
        run_dir, n, checkpoints, limit_s, arguments=arguments, HF_HUB_OFFLINE="1"
    ) as ranks:
        return worst_of_ranks(ranks, [(job, LIMITS) for job in jobs])
