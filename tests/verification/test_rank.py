"""Steps on real ranks: right ones are called right, and planted bugs are named at their module."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.programs.rank import user
from tests.programs.verifying import check_right, put_back, reset, start, step, verified
from tests.support.torch_ranks import on_ranks, run_ranks
from tests.verification.bugs import BUGS
from tests.verification.steps import IN_TEST, STEPS

# Each on two ranks, with the options of `choose`.
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {}),
    "tp": ("tp", {"sequence_parallel": True}),
    "pp": ("pp", {"accumulate": 2}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "single": ("single", {}),
    "zero1": ("zero1", {}),
    "cp": ("cp", {}),
    "ulysses": ("ulysses", {}),
    "pp interleaved": ("pp", {"schedule": "interleaved"}),
    "ddp accumulate": ("ddp", {"accumulate": 2}),
    "ddp checkpoint": ("ddp", {"checkpoint": "full"}),
    "ddp bf16": ("ddp", {"precision": "bf16"}),
    "fsdp bf16": ("fsdp", {"precision": "bf16"}),
    "tp bf16": ("tp", {"precision": "bf16"}),
    "pp bf16": ("pp", {"precision": "bf16"}),
    "cp bf16": ("cp", {"precision": "bf16"}),
}
FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp tp": ("fsdp", {"dp": 2, "tp": 2}),
    "pp dp": ("pp", {"pp": 2, "dp": 2}),
    "pp tp": ("pp", {"pp": 2, "tp": 2}),
    "cp dp": ("cp", {"cp": 2, "dp": 2}),
    "ddp": ("ddp", {}),
    "hybrid": ("fsdp", {"shard": "hybrid", "replicas": 2}),
    "fsdp tp bf16": ("fsdp", {"dp": 2, "tp": 2, "precision": "bf16"}),
}


def check_strategy(name: str, options: dict[str, Any]) -> None:
    """A step in the middle of training is right, and nothing is lost by asking."""
    start(name, **options)
    step()
    user.model.eval()
    user.model.train()
    with put_back():
        check_right(verified())
    reset()


def check_step(name: str) -> None:
    check_right(STEPS[name]())
    reset()


def check_bug(name: str) -> None:
    """It is named at its module, by its kind; from the numbers, which know no list of bugs."""
    bug = BUGS[name]
    shown = replace(bug.program(), rows=())
    said = " ".join([shown.kind, *(finding.found for finding in shown.findings)])
    assert bug.kind in said, (name, shown)
    assert shown.place.module == bug.module, (name, shown)
    assert shown.first is not None or shown.findings, (name, shown)
    reset()


@on_ranks(2)
def test_right_steps_are_right() -> None:
    """One pair of ranks; everything is as it was after each."""
    gc.freeze()  # what torch brings is not looked at again and again
    for case in RIGHT.values():
        check_strategy(*case)
    for name in IN_TEST:
        check_step(name)


@on_ranks(2)
def test_a_bug_of_each_kind_is_named() -> None:
    """At its module, by its numbers."""
    gc.freeze()
    for name in [name for name, bug in BUGS.items() if bug.in_test]:
        check_bug(name)


@pytest.mark.parity
@pytest.mark.parametrize("case", MORE)
@on_ranks(2)
def test_no_false_alarm(case: str) -> None:
    """Every strategy of two ranks, and bf16."""
    check_strategy(*MORE[case])


@pytest.mark.parity
@pytest.mark.parametrize("name", [name for name in STEPS if name not in IN_TEST])
@on_ranks(2)
def test_no_false_alarm_of_steps(name: str) -> None:
    """Code around the model, and models, that are easily taken for wrong."""
    check_step(name)


@pytest.mark.parity
@pytest.mark.parametrize("case", FOUR)
@on_ranks(4)
def test_no_false_alarm_of_products(case: str) -> None:
    """Products on four ranks."""
    check_strategy(*FOUR[case])


@pytest.mark.parity
@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if not bug.in_test])
def test_bug_is_named(tmp_path: Path, name: str) -> None:
    """The other planted bugs."""
    run_ranks(tmp_path, BUGS[name].n, check_bug, arguments={"name": name})
