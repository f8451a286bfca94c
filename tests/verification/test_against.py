"""fsdp as the reference: right steps are right, and it stands in where one process has no room."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.torch_ranks import run_ranks
from tests.verification.texts import SETUP

TEXT = (
    SETUP
    + """
    from nbdist.planner.rank import shortage
    from nbdist.rpc.rank import progress

    def against(name):
        globals()["planted"] = {}
        return verify(StepRequest(code="step(**planted)", against=name))
    out, names = {}, set()
    real, record = shortage._host_free_bytes, progress.Progress
    progress.Progress = lambda *values, **more: names.add(values[0]) or record(*values, **more)
    def beside_fsdp(case, reference="fsdp"):
        before = state()
        v = against(reference)
        out[case] = shown(v) | {
            "reference": v.reference, "note": v.note, "host_bytes": v.host_bytes,
            "is_back": state() == before}
    def begin(case):
        start(case, **({"accumulate": 2} if case == "pp" else {}))
        step()
    for case in os.environ["CASES"].split():
        begin(case)
        beside_fsdp(case)
        reset()
    if os.environ["CASES"] != "ddp":
        done(**out)

    begin("ddp")
    with torch.no_grad():
        unwrapped().blocks[1].up.bias.add_(0.01 * rank)
        moment = optimizer.state[unwrapped().head.weight]["exp_avg"]
        moment.add_(rank)
    out["apart"] = shown(against("fsdp"))
    reset()

    start("tp")
    out["refused"] = {name: refusal(lambda: against(name)) for name in ("tp", "ddp", "nothing")}
    shortage._host_free_bytes = lambda: 1000.0
    beside_fsdp("short", "")

    def full(module, args):
        if registry.current().name == "single" and rank == 1:
            raise torch.OutOfMemoryError("no room here")
    handle = unwrapped().blocks[1].register_forward_pre_hook(full)
    before = state()
    out["oom_asked"] = refusal(lambda: against("single"))  # also where formulas have no room
    out["oom_back"] = state() == before
    shortage._host_free_bytes = real
    beside_fsdp("oom", "")
    handle.remove()
    out["names"] = sorted(names)
    done(**out)
"""
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(tmp_path_factory.mktemp("against"), 2, TEXT, limit_s=280.0, CASES="ddp")


def test_a_right_step_is_right_beside_fsdp(results: list[dict[str, Any]]) -> None:
    """Of copies, and of parts under tp; every parameter is compared; all is put back."""
    for shown in results:
        check_right(shown["ddp"])
        check_right(shown["short"])
        assert shown["names"] == ["verify"]  # nobody is told of switches


@pytest.mark.parity
def test_so_it_is_under_other_strategies(tmp_path: Path) -> None:
    """fsdp itself too."""
    cases = "fsdp tp pp zero1"
    for shown in run_ranks(tmp_path, 2, TEXT, limit_s=280.0, CASES=cases):
        for case in cases.split():
            check_right(shown[case])


def check_right(verification: dict[str, Any]) -> None:
    assert verification["first"] is None, verification
    assert verification["findings"] == []
    assert verification["not_compared"] == {}
    assert verification["reference"].startswith("fsdp, dp 2")
    assert {"gradient", "value after the step"} <= set(verification["worst"])
    assert verification["host_bytes"] > 0
    assert verification["is_back"]


def test_copies_that_went_apart_are_rank_0s_beside_fsdp(results: list[dict[str, Any]]) -> None:
    """A parameter that differs between copies is named, which takes one of them as right."""
    for shown in results:
        apart = shown["apart"]
        assert apart["module"] == "blocks.1.up"
        assert "trained apart" in apart["kind"]
        assert "on rank 1 " in apart["kind"]
        assert apart["first"][6] == [1]


def test_other_strategies_are_refused_as_references(results: list[dict[str, Any]]) -> None:
    """The text says why, lists the choices, and how such a one is verified."""
    for shown in results:
        assert "single, fsdp" in shown["refused"]["tp"]
        assert "%dist_strategy tp, then %dist_verify" in shown["refused"]["tp"]
        assert "There is no reference 'ddp'" in shown["refused"]["ddp"]
        assert "%dist_strategy NAME" in shown["refused"]["nothing"]


def test_fsdp_is_the_reference_where_one_process_has_no_room(
    results: list[dict[str, Any]],
) -> None:
    """By the formulas before the step, and where the step runs out; not where single was asked."""
    for shown in results:
        short, oom = shown["short"], shown["oom"]
        assert short["reference"] == oom["reference"] == "fsdp, dp 2"
        assert oom["first"] is None
        assert short["note"].startswith("as one process the model would need ")
        assert short["note"].endswith(" is free: the reference is fsdp, one block at a time")
        assert "rank 1: OutOfMemoryError: no room here" in oom["note"]
        assert oom["is_back"]
        assert "no room here" in shown["oom_asked"]
        assert shown["oom_back"]
