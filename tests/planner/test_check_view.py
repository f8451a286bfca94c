"""Tests of the table that sets a prediction beside a measurement."""

import pytest

from nbdist.core.units import compared
from nbdist.planner.check import MeasuredMemory, StepCheck
from nbdist.planner.live_model import LiveModel, ParameterKind
from nbdist.planner.memory import Memory
from nbdist.planner.view.check_view import GLOO, PlanCheckView, shown_check
from nbdist.planner.workload import Workload
from nbdist.strategy.choose import choose

NET = LiveModel("net", "Net", (ParameterKind("float32", True, 600, 2400),), optimizer="AdamW")
PREDICTED = Memory(2400e3, 2400e3, 4800e3, 1000e3, 0, overhead=0, most=5200e3)


def view(strategy: str, *, is_device: bool = False) -> PlanCheckView:
    """A check whose peak was predicted a tenth too low."""
    measured = MeasuredMemory(2400000, 2400000, 4800000, 1000000, 0, 11111111, is_device=is_device)
    choice = choose(strategy, {}, 1 if strategy == "single" else 2)
    return shown_check(StepCheck(NET, choice, Workload(), PREDICTED, measured))


def test_each_row_has_its_error() -> None:
    """States, activations and the peak, in the text and in the page."""
    shown = view("ddp")

    assert [" ".join(line.split()) for line in shown.text.splitlines() if "%" in line] == [
        "parameters 2.400 2.400 +0.0 %",
        "gradients 2.400 2.400 +0.0 %",
        "optimizer 4.800 4.800 +0.0 %",
        "activations 1.000 1.000 +0.0 %",
        "peak 10.000 11.111 -10.0 %",
    ]
    assert "-10.0 %" in shown.html


@pytest.mark.parametrize(
    ("strategy", "is_device", "is_told"),
    [("fsdp", False, True), ("fsdp1", False, True), ("tp", False, True),
     ("ddp", False, False), ("single", False, False), ("fsdp", True, False)],
)  # fmt: skip
def test_what_gloo_copies_is_told_where_it_does(
    strategy: str, is_device: bool, is_told: bool
) -> None:
    """Where pieces are reduced on a CPU; NCCL on a GPU copies nothing."""
    assert (GLOO in view(strategy, is_device=is_device).text) == is_told


def test_stored_checks_of_a_gpu_and_a_cpu_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What measured it, and what Gloo copies, is a matter of the machine."""
    monkeypatch.setenv("NBDIST_TEST", "1")

    assert compared(view("fsdp", is_device=True).text) == compared(view("fsdp").text)
