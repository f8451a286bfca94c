"""Every strategy, option, switch and checkpoint of docs/parity.md on GPUs, beside one process.

The process by itself computes on the rank's GPU too, with the same kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.places import PLACES, on_places
from tests.parity.case import LIMITS, Case, worst_of_ranks
from tests.parity.cases import LONG, NAMES, SAVED, SWITCHED, circuit
from tests.parity.ranks import checkpoints, rows, switches
from tests.support.torch_ranks import Program, TorchRanks

STEPS = 3
LIMIT_S = 170.0
pytestmark = pytest.mark.timeout(2 * LIMIT_S)
# Kernels of a GPU add in other orders than the same kernels do for another shape.
MORE = 5.0


def cases_of(n: int, row: str, *, on_cpu: bool) -> list[Case]:
    """Everything that docs/parity.md compares of a row of the strategies on so many ranks."""
    every = itertools.chain(*(LONG[key] for key in LONG if key[0] == n))
    cases = [case for case in dict.fromkeys(every) if case.typed.split()[0] == row]
    return cases if on_cpu else list(itertools.chain(*map(_on_gpu, cases)))


def _on_gpu(case: Case) -> Iterable[Case]:
    """A GPU's flash kernel takes half precision alone."""
    if "--sdpa flash" not in case.typed:
        return [case]
    typed = case.typed.replace(" --sdpa flash", ""), f"{case.typed} --bf16"
    return [replace(case, typed=words) for words in typed]


@pytest.mark.parametrize("row", NAMES)
@on_places("cpu", "shared", "four", "own")
def test_a_row_as_one_process(tmp_path: Path, place: str, row: str, measured: Any) -> None:
    """Loss, norm, gradients and parameters of three steps, with each option of the row."""
    cases = cases_of(PLACES[place].world_size, row, on_cpu=place == "cpu")
    limits = []
    for case in cases:
        tolerance = case.tolerance
        loss, gradients, parameters = (each and MORE * each for each in astuple(tolerance))
        limits.append({"loss": loss, "gradients": gradients, "parameters": parameters})
    typed = [(case.typed, case.model) for case in cases]
    with _ranks(tmp_path, place, rows, cases=typed, steps=STEPS) as ranks:
        worst = worst_of_ranks(ranks, list(zip(cases, limits, strict=True)))
    measured("cases", len(cases))
    exact = [
        off for case, off in zip(cases, worst, strict=True)
        if case.tolerance.parameters is not None
    ]  # fmt: skip
    for what in ("loss", "gradients", "parameters"):
        measured(f"fp32, worst {what}", _worst(off[what] for off in exact))


@on_places("cpu", "shared", "own")  # four on one GPU take minutes: all of it goes by the host
def test_each_switch_to_each_strategy(tmp_path: Path, place: str, measured: Any) -> None:
    """A live model walks through every ordered pair, three steps after each."""
    path = circuit(SWITCHED[PLACES[place].world_size])
    pairs = list(itertools.pairwise(path))
    with _ranks(tmp_path, place, switches, path=path) as ranks:
        _measure(worst_of_ranks(ranks, [(pair, _LIMITS) for pair in pairs]), measured)


@on_places("cpu", "shared", "own")
def test_a_checkpoint_of_each_strategy_under_each(
    tmp_path: Path, place: str, measured: Any
) -> None:
    """Training goes on from it as if nothing had happened."""
    names = SAVED[PLACES[place].world_size]
    runs: Sequence[list[tuple[object, ...]]] = (
        [("saved", name) for name in names],
        [("loaded", after, before, 2) for after in names for before in names],
    )
    for number, jobs in enumerate(runs):
        given = {"folder": str(tmp_path / "saved"), "todo": jobs, "is_async": True}
        with _ranks(tmp_path / str(number), place, checkpoints, **given) as ranks:
            worst = worst_of_ranks(ranks, [(job, _LIMITS) for job in jobs])
    _measure(worst, measured)


_LIMITS = {name: MORE * limit for name, limit in LIMITS.items()}


def _measure(worst: Sequence[dict[str, Any]], measured: Any) -> None:
    measured("cases", len(worst))
    for what in LIMITS:
        measured(f"worst {what}", _worst(off[what] for off in worst))


def _worst(values: Iterable[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    return f"{max(numbers):.1e}" if numbers else "not looked at"


def _ranks(folder: Path, place: str, program: Program, /, **arguments: Any) -> TorchRanks:
    """Ranks on a place's GPUs. Their processes are new: a fork has no use of a GPU."""
    where = PLACES[place]
    visible = {"CUDA_VISIBLE_DEVICES": "" if where.gpus == "none" else where.gpus or ""}
    return TorchRanks(
        folder, where.world_size, program, LIMIT_S, arguments=arguments, is_new=True,
        HF_HUB_OFFLINE="1", **visible,
    )  # fmt: skip
