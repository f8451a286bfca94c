"""fsdp as the reference: right steps are right, and it stands in where one process has no room."""

from typing import Any

import pytest

from tests.support.torch_ranks import run_ranks
from tests.verification.texts import SETUP

TEXT = (
    SETUP
    + """
    from nbdist.planner.rank import shortage
    from nbdist.verification.rank import verify as verify_module

    def against(name):
        globals()["planted"] = {}
        return verify(StepRequest(code="step(**planted)", against=name))
    out = {}
    real = shortage._host_free_bytes
    for case in ("ddp", "fsdp", "tp", "pp", "zero1"):
        start(case, **({"accumulate": 2} if case == "pp" else {}))
        step()
        before = state()
        v = against("fsdp")
        out[case] = shown(v) | {
            "reference": v.reference, "host_bytes": v.host_bytes, "is_back": state() == before}
        reset()

    start("ddp")
    step()
    with torch.no_grad():
        unwrapped().blocks[1].up.bias.add_(0.01 * rank)
        moment = optimizer.state[unwrapped().head.weight]["exp_avg"]
        moment.add_(rank)
    out["apart"] = shown(against("fsdp"))
    reset()

    from nbdist.rpc.rank import progress
    names = set()
    record = progress.Progress
    progress.Progress = lambda *values, **more: names.add(values[0]) or record(*values, **more)
    start("tp")
    against("fsdp")
    reset()
    progress.Progress = record
    out["names"] = sorted(names)
    start("tp")
    out["refused"] = {name: refusal(lambda: against(name)) for name in ("tp", "ddp", "nothing")}
    before = state()
    shortage._host_free_bytes = lambda: 1000.0
    v = against("")
    out["short"] = shown(v) | {"reference": v.reference, "note": v.note,
                               "is_back": state() == before}
    out["asked"] = against("single").reference
    shortage._host_free_bytes = real
    out["enough"] = [(v := against("")).reference, v.note]

    def full(module, args):
        if registry.current().name == "single" and rank == 1:
            raise torch.OutOfMemoryError("no room here")
    handle = unwrapped().blocks[1].register_forward_pre_hook(full)
    v = against("")
    out["oom"] = shown(v) | {"reference": v.reference, "note": v.note, "is_back": state() == before}
    out["oom_asked"] = refusal(lambda: against("single"))
    out["oom_back"] = state() == before
    handle.remove()
    done(**out)
"""
)

# All cases are one text, which takes 65 s on two free cores.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(tmp_path_factory.mktemp("against"), 2, TEXT, limit_s=280.0)


def test_a_right_step_is_right_beside_fsdp(results: list[dict[str, Any]]) -> None:
    """Under each strategy, fsdp itself too; every parameter is compared; all is put back."""
    for shown in results:
        for case in ("ddp", "fsdp", "tp", "pp", "zero1"):
            verification = shown[case]
            assert verification["first"] is None, verification
            assert verification["findings"] == []
            assert verification["not_compared"] == {}
            assert verification["reference"].startswith("fsdp, dp 2")
            assert {"gradient", "value after the step"} <= set(verification["worst"])
            assert verification["host_bytes"] > 0
            assert verification["is_back"]
        assert shown["names"] == ["verify"]  # nobody is told of switches


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
        assert short["first"] is None
        assert oom["first"] is None
        assert short["note"].startswith("as one process the model would need ")
        assert short["note"].endswith(" is free: the reference is fsdp, one block at a time")
        assert "rank 1: OutOfMemoryError: no room here" in oom["note"]
        assert short["is_back"]
        assert oom["is_back"]
        assert shown["asked"] == "single"
        assert shown["enough"] == ["single", ""]
        assert "no room here" in shown["oom_asked"]
        assert shown["oom_back"]
