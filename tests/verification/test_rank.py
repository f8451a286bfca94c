"""Steps on real ranks: right ones are called right, and planted bugs are named at their module."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.torch_ranks import run_ranks
from tests.verification.bugs import BUGS
from tests.verification.texts import SETUP

pytestmark = pytest.mark.engine

# Each on two ranks, with the options of `choose`.
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "tp": ("tp", {"sequence_parallel": True}),
    "pp": ("pp", {"accumulate": 2}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
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
# Options of the step under ddp that change nothing that one process would do otherwise.
STEPS: dict[str, str] = {
    "flipped at random": "call=lambda x: model(x.flip(-1) if torch.rand(()) < 0.5 else x)",
    "one rank prints": "backward=lambda loss: (rank or print(loss.exp()),"
    "accelerator.backward(loss))",
    "labels over all ranks": "ignore=12 * rank, loss=lambda logits, tokens: F.cross_entropy("
    "logits.reshape(-1, 24), tokens.reshape(-1), reduction='sum') / 40",
    "half of a loss": "loss=lambda logits, tokens: 0.5 * loss_of(logits, tokens)",
    "penalty": "loss=lambda logits, tokens: loss_of(logits, tokens) + 0.01 * sum("
    "p.square().sum() for p in model.parameters())",
}
RUN = """
    out = {}
    for case, options in json.loads(os.environ["STEPS"]).items():
        start("ddp")
        out[case] = shown(eval(f"verified({options})")) | {"is_back": True}
        reset()
    for case, (name, options) in json.loads(os.environ["RIGHT"]).items():
        start(name, **options)
        step()
        model.eval(); model.train()
        before = state()
        out[case] = shown(verified())
        out[case]["is_back"] = state() == before
        reset()
    for case in json.loads(os.environ["BUGS"]):
        out[case] = shown(globals()[f"run_{case}"]())
        reset()
    done(**out)
"""


def results(
    folder: Path,
    n: int,
    right: dict[str, Any],
    bugs: list[str],
    steps: dict[str, str] | None = None,
) -> list[dict[str, dict[str, Any]]]:
    functions = "".join(
        f"\n    def run_{name}():\n" + textwrap.indent(textwrap.dedent(BUGS[name].code), " " * 8)
        for name in bugs
    )
    text = SETUP + functions + RUN
    cases = {"RIGHT": right, "BUGS": bugs, "STEPS": steps or {}}
    return run_ranks(folder, n, text, **{name: json.dumps(case) for name, case in cases.items()})


def check_right(shown: dict[str, Any]) -> None:
    assert shown["first"] is None, shown
    assert shown["findings"] == []
    assert shown["not_compared"] == {}
    assert shown["is_back"]
    assert shown["n_steps"] == 1


def check_bug(name: str, shown: dict[str, Any]) -> None:
    """It is named at its module, by its kind; from the numbers, which know no list of bugs."""
    bug = BUGS[name]
    said = " ".join([shown["kind"], *shown["findings"]])
    assert bug.kind in said, (name, shown)
    assert shown["module"] == bug.module, (name, shown)
    assert shown["first"] is not None or shown["findings"], (name, shown)


def test_right_steps_are_right_and_a_bug_of_each_kind_is_named(tmp_path: Path) -> None:
    """One pair of ranks; everything is as it was after each."""
    bugs = [name for name, bug in BUGS.items() if bug.in_test]

    for shown in results(tmp_path, 2, RIGHT, bugs):
        for case in RIGHT:
            check_right(shown[case])
        for name in bugs:
            check_bug(name, shown[name])


@pytest.mark.parity
@pytest.mark.parametrize("case", MORE)
def test_no_false_alarm(tmp_path: Path, case: str) -> None:
    """Every strategy of two ranks, and bf16."""
    for shown in results(tmp_path, 2, {case: MORE[case]}, []):
        check_right(shown[case])


@pytest.mark.parity
def test_no_false_alarm_of_losses(tmp_path: Path) -> None:
    """Code around the model that all ranks have, whatever it draws or prints."""
    for shown in results(tmp_path, 2, {}, [], STEPS):
        for case in STEPS:
            check_right(shown[case])


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
