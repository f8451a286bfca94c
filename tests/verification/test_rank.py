"""Steps on real ranks: right ones are called right, and planted bugs are named at their module."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.torch_ranks import run_ranks
from tests.verification.bugs import BUGS
from tests.verification.steps import STEPS
from tests.verification.texts import SETUP

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
RUN = """
    out = {}
    for case, (name, options) in json.loads(os.environ["RIGHT"]).items():
        start(name, **options)
        step()
        model.eval(); model.train()
        before = state()
        out[case] = shown(verified())
        out[case]["is_back"] = state() == before
        reset()
    for case in json.loads(os.environ["CODES"]):
        out[case] = shown(globals()[f"run_{case}"]())
        reset()
    done(**out)
"""


def results(
    folder: Path, n: int, right: dict[str, Any], codes: list[str]
) -> list[dict[str, dict[str, Any]]]:
    """What verify says of right steps, and of `codes`, which are those of BUGS and of STEPS."""
    functions = "".join(
        f"\n    def run_{name}():\n" + textwrap.indent(textwrap.dedent(_code(name)), " " * 8)
        for name in codes
    )
    text = SETUP + functions + RUN
    return run_ranks(folder, n, text, RIGHT=json.dumps(right), CODES=json.dumps(codes))


def _code(name: str) -> str:
    return BUGS[name].code if name in BUGS else STEPS[name].code


def check_right(shown: dict[str, Any]) -> None:
    assert shown["first"] is None, shown
    assert shown["findings"] == [], shown
    assert shown["not_compared"] == {}, shown
    assert shown["n_steps"] == 1


def check_bug(name: str, shown: dict[str, Any]) -> None:
    """It is named at its module, by its kind; from the numbers, which know no list of bugs."""
    bug = BUGS[name]
    said = " ".join([shown["kind"], *shown["findings"]])
    assert bug.kind in said, (name, shown)
    assert shown["module"] == bug.module, (name, shown)
    assert shown["first"] is not None or shown["findings"], (name, shown)


def test_right_steps_are_right(tmp_path: Path) -> None:
    """One pair of ranks; everything is as it was after each."""
    steps = [name for name, step in STEPS.items() if step.in_test]

    for shown in results(tmp_path, 2, RIGHT, steps):
        for case in (*RIGHT, *steps):
            check_right(shown[case])
        assert all(shown[case]["is_back"] for case in RIGHT)


def test_a_bug_of_each_kind_is_named(tmp_path: Path) -> None:
    """At its module, by its numbers."""
    bugs = [name for name, bug in BUGS.items() if bug.in_test]

    for shown in results(tmp_path, 2, {}, bugs):
        for name in bugs:
            check_bug(name, shown[name])


@pytest.mark.parity
@pytest.mark.parametrize("case", MORE)
def test_no_false_alarm(tmp_path: Path, case: str) -> None:
    """Every strategy of two ranks, and bf16."""
    for shown in results(tmp_path, 2, {case: MORE[case]}, []):
        check_right(shown[case])


@pytest.mark.parity
@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if not step.in_test])
def test_no_false_alarm_of_steps(tmp_path: Path, name: str) -> None:
    """Code around the model, and models, that are easily taken for wrong."""
    for shown in results(tmp_path, 2, {}, [name]):
        check_right(shown[name])


@pytest.mark.parity
@pytest.mark.parametrize("case", FOUR)
def test_no_false_alarm_of_products(tmp_path: Path, case: str) -> None:
    """Products on four ranks."""
    for shown in results(tmp_path, 4, {case: FOUR[case]}, []):
        check_right(shown[case])


@pytest.mark.parity
@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if not bug.in_test])
def test_bug_is_named(tmp_path: Path, name: str) -> None:
    """The other planted bugs."""
    for shown in results(tmp_path, BUGS[name].n, {}, [name]):
        check_bug(name, shown[name])
