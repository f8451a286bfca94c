"""fsdp as the reference: right steps are right, and it stands in where one process has no room."""

from unittest import mock

import pytest
import torch

from nbdist.planner.rank import shortage
from nbdist.rpc.rank import progress
from nbdist.verification.verdict import StepRequest, Verification
from tests.programs.rank import rank, refusal, user
from tests.programs.verifying import (
    check_right,
    put_back,
    reset,
    start,
    step,
    strategy,
    unwrapped,
    verified,
)
from tests.support.torch_ranks import on_ranks

pytestmark = pytest.mark.timeout(300)


def against(reference: str) -> Verification:
    return verified(StepRequest(code="typed()", against=reference))


def beside_fsdp(reference: str = "fsdp") -> Verification:
    """A right step is right, every parameter is compared, and all is put back."""
    with put_back(), mock.patch.object(progress, "Progress", wraps=progress.Progress) as shown:
        verification = against(reference)
    assert {call.args[0] for call in shown.call_args_list} == {"verify"}  # not told of switches
    check_right(verification)
    assert verification.reference.startswith("fsdp, dp 2")
    assert {"gradient", "value after the step"} <= {row.key.what for row in verification.rows}
    assert verification.host_bytes > 0
    return verification


def check_case(name: str) -> None:
    start(name, **({"accumulate": 2} if name == "pp" else {}))
    step()
    beside_fsdp()
    reset()


@pytest.mark.parity
@on_ranks(2, limit_s=280.0)
def test_so_it_is_under_other_strategies() -> None:
    """fsdp itself too."""
    for name in ("fsdp", "tp", "pp", "zero1"):
        check_case(name)


def check_copies_that_went_apart() -> None:
    """A parameter that differs between copies is named, which takes one of them as right."""
    start("ddp")
    step()
    with torch.no_grad():
        unwrapped().blocks[1].up.bias.add_(0.01 * rank)
        user.optimizer.state[unwrapped().head.weight]["exp_avg"].add_(rank)
    apart = against("fsdp")
    assert apart.place.module == "blocks.1.up"
    assert "trained apart" in apart.kind
    assert "on rank 1 " in apart.kind
    assert apart.first is not None
    assert apart.first.outside == (1,)


@on_ranks(2, limit_s=280.0)
def test_a_right_step_is_right_beside_fsdp_and_copies_are_rank_0s() -> None:
    """Under ddp."""
    check_case("ddp")
    check_copies_that_went_apart()


def check_refusals() -> None:
    """The text says why, lists the choices, and how such a one is verified."""
    refused = {n: refusal(lambda n=n: against(n)) for n in ("tp", "ddp", "nothing")}
    assert "single, fsdp" in refused["tp"]
    assert "%dist_strategy tp, then %dist_verify" in refused["tp"]
    assert "There is no reference 'ddp'" in refused["ddp"]
    assert "%dist_strategy NAME" in refused["nothing"]


@on_ranks(2)
def test_fsdp_is_the_reference_where_one_process_has_no_room() -> None:
    """By the formulas before the step, and where the step runs out; not where another was asked."""

    def full(module, args):
        if strategy() == "single" and rank == 1:
            raise torch.OutOfMemoryError("no room here")

    start("tp")
    check_refusals()
    with mock.patch.object(shortage, "_host_free_bytes", return_value=1000.0):
        short = beside_fsdp("")
        assert short.note.startswith("as one process the model would need ")
        assert short.note.endswith(" is free: the reference is fsdp, one block at a time")
        unwrapped().blocks[1].register_forward_pre_hook(full)
        with put_back():  # also where formulas have no room
            assert "no room here" in refusal(lambda: against("single"))
    ran_out = beside_fsdp("")
    assert short.reference == ran_out.reference == "fsdp, dp 2"
    assert "rank 1: OutOfMemoryError: no room here" in ran_out.note
