"""Programs as people write them for GPUs, judged by plain torch; steps judged by %dist_verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nbdist.notebook.session import Session
from nbdist.verification.verdict import StepRequest
from tests.gpu.places import device_type, on, strategy_of

ROOT = Path(__file__).resolve().parents[2]
ROWS = ("ddp", "zero1", "fsdp", "tp", "pp", "cp", "ulysses")
# Functions of tests/gpu/programs.py: under ddp, and under each row with options of it.
PROGRAMS = (
    "random_state", "batch_norm", "side_stream", "captured_graph", "compiled", "by_hand",
    "trained_by_trainer", "metrics",
)  # fmt: skip
UNDER_EACH: dict[str, dict[str, object]] = {
    "overflow": {"fp16": True},
    "fused_overflow": {"fp16": True},
    "whole_half": {},
    "recomputation": {},
    "dropout_of_recomputation": {},
}
# These programs look at all parameters and gradients, and under pp a rank has those of its stage.
_WITHOUT_PP = tuple(row for row in ROWS if row != "pp")
_RUN = """
import sys
sys.path.insert(0, {root!r})
from tests.gpu import programs
programs.run({name!r})
"""
_LLAMA = """
import sys
sys.path.insert(0, {root!r})
from tests.gpu import programs
net = programs.llama()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
net, optimizer = accelerator.prepare(net, optimizer)
words, labels = programs.samples().tensors
part = slice(rank * 4, rank * 4 + 4) if {splits} else slice(0, 8)
words, labels = words[part].to(device), labels[part].to(device)
def step():
    accelerator.backward(net(input_ids=words, labels=labels).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


def assert_right(session: Session, name: str) -> None:
    for rank in session.run(_RUN.format(root=str(ROOT), name=name)).ranks:
        checks = json.loads(rank.text.splitlines()[-1])
        wrong = {check: value for check, value in checks.items() if value is not True}
        assert not wrong, (rank.rank, wrong)


@pytest.mark.parametrize("name", PROGRAMS)
@on("cpu", "shared", "one", "own")
def test_a_program(ranks: Session, name: str) -> None:
    assert_right(ranks, name)


@pytest.mark.parametrize("name", UNDER_EACH)
@pytest.mark.parametrize("row", _WITHOUT_PP)
@on("cpu", "shared", "own")
def test_a_program_under(ranks: Session, row: str, name: str) -> None:
    if (row, name) == ("cp", "dropout_of_recomputation"):
        pytest.skip("ring attention has no dropout, and says so")
    with strategy_of(ranks, row, **UNDER_EACH[name]):
        assert_right(ranks, name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("row", ROWS)
@on("cpu", "shared", "own")
def test_a_right_step_is_right(ranks: Session, row: str, precision: str, measured: Any) -> None:
    """Kernels of a GPU round otherwise for other shapes: %dist_verify gives no false alarm."""
    splits = row in {"ddp", "zero1", "fsdp"}
    with strategy_of(ranks, row, **({"bf16": True} if precision == "bf16" else {})):
        ranks.run(_LLAMA.format(root=str(ROOT), splits=splits))
        verification = ranks.verify(StepRequest(code="step()"))
    measured("step, s", round(verification.step_s, 2))
    measured("reference, s", round(verification.reference_s, 2))

    assert verification.is_right, (verification.first, verification.findings)
    assert len(verification.rows) > 50


@on("shared", "own")
def test_switches_keep_no_memory(ranks: Session) -> None:
    """What a live model has allocated after each circle of switches is what it had before it."""
    with strategy_of(ranks, "ddp"):
        ranks.run(_LLAMA.format(root=str(ROOT), splits=False) + "\nstep()")
        held = []
        for _ in range(3):
            for name in ("fsdp", "tp", "ddp"):
                ranks.strategy.switch(name)
                ranks.run("step()")
            held.append(
                [r.text for r in ranks.run(
                    "import gc; gc.collect(); print(torch.cuda.memory_allocated())").ranks]
            )  # fmt: skip
    assert device_type(ranks) == "cuda"
    assert held[1] == held[2]
