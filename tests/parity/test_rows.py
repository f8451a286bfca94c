"""One cell of plain Accelerate gives, under every strategy and option, what one process gives."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nbdist.strategy.options import OPTIONS
from tests.parity.case import Case, Measured, record, worst_of_ranks
from tests.parity.cases import DEEPSPEED, LEFT_OUT, LONG, NAMES, SHORT
from tests.parity.ranks import rows
from tests.support.torch_ranks import LIMIT_S, NEEDS_DEEPSPEED, TorchRanks


@pytest.mark.parametrize("n", SHORT)
def test_every_strategy_once(tmp_path: Path, n: int) -> None:
    """Loss, gradients and parameters of two steps; the ranks' seeds differ."""
    _compare(tmp_path, n, SHORT[n], steps=2, blocks=4)


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("n", "what"), LONG, ids=str)
def test_every_option(tmp_path: Path, n: int, what: str) -> None:
    """The same with each option of each row, on more ranks, and with models of Hugging Face."""
    _record(tmp_path, n, LONG[n, what], limit_s=880)


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.timeout(300)
@NEEDS_DEEPSPEED
@pytest.mark.parametrize("case", DEEPSPEED, ids=lambda case: case.typed)
def test_deepspeed(tmp_path: Path, case: Case) -> None:
    """Each stage, in a process of its own."""
    _record(tmp_path, 2, [case], limit_s=280)


def test_the_cases_have_every_row_and_option() -> None:
    """A row or an option that comes is compared, or left out by name."""
    typed = [case.typed for part in LONG.values() for case in part]
    flags = [row.flag for name, row in OPTIONS.items() if name not in LEFT_OUT | {"precision"}]

    assert {case.typed.split()[0] for case in SHORT[2]} == set(NAMES)
    for name in NAMES:
        assert {name, f"{name} --bf16", f"{name} --fp16"} <= set(typed)
    for flag in flags:
        assert any(flag in words for words in typed), flag


def _record(folder: Path, n: int, cases: Sequence[Case], limit_s: float) -> None:
    """Adds a line for each to the page."""
    for case, off in zip(cases, _compare(folder, n, cases, limit_s), strict=True):
        differences = off["loss"], off["gradients"], off["parameters"]
        loss = case.tolerance.loss
        record(Measured("row", case.typed, case.model, n, *differences, loss))


def _compare(
    folder: Path,
    n: int,
    cases: Sequence[Case],
    limit_s: float = LIMIT_S,
    steps: int = 3,
    blocks: int = 0,
) -> list[dict[str, Any]]:
    """The worst of all ranks for each, which is close enough."""
    typed = [(case.typed, case.model) for case in cases]
    arguments = {"cases": typed, "steps": steps, "blocks": blocks}
    allowed = [case.tolerance for case in cases]
    limits = [
        {**asdict(tolerance), "rate": 1e-12, "norm": tolerance.parameters} for tolerance in allowed
    ]
    with TorchRanks(folder, n, rows, limit_s, arguments=arguments) as ranks:
        return worst_of_ranks(ranks, list(zip(cases, limits, strict=True)))
