"""Hints: what to do about errors whose reason is how ranks and notebook differ."""

import re
import sys

import pytest

from nbdist.cells.hints import explain, name_of_the_ranks
from nbdist.cluster import capacity
from nbdist.core.failures import RankFailure, summary
from nbdist.errors import StartError


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        # The command that installs it is for the Python that the ranks run.
        (
            "ModuleNotFoundError",
            "No module named 'nosuch'",
            rf". The ranks run {sys.executable}: .*{sys.executable} -m pip install NAME.*",
        ),
        (
            "NameError",
            "name 'data' is not defined",
            r". data exists in the notebook.*or copy it with %dist_push data",
        ),
        # Accelerate's own text says to restart the runtime, which would not help.
        (
            "ValueError",
            "AcceleratorState has already been initialized and cannot ...",
            r".*Run %dist_reset, then create yours before anything uses `accelerator`",
        ),
        (
            "RuntimeError",
            "aten.mul.Tensor got mixed torch.Tensor and DTensor, need to convert all",
            r". Under fsdp and tp parameters are DTensors.*p\.grad\.add_\(p\.detach\(\), alpha.*",
        ),
        (
            "RuntimeError",
            "aten.pow_: in-place operations that require placement changes are not supported.",
            r". Under fsdp and tp .* Adafactor and Rprop .*AdamW.*ddp, zero1 or pp",
        ),
        (
            "RuntimeError",
            "setStorage: sizes [4, 16] requiring 256 are out of bounds for storage of size 0",
            r". Under fsdp .*create_graph=True.*Use tp.*add 0 \* sum\(p\.sum\(\) .*",
        ),
        (
            "RuntimeError",
            "Expected to mark a variable ready only once. This error is caused by one of",
            r".*Instead of two backwards .* add the losses .*accelerator\.reduce\(gradient, .*",
        ),
        (
            "RuntimeError",
            "Expected to have finished reduction in the prior iteration before starting a new one.",
            r".*freeze the others before prepare, take %dist_strategy ddp --find-unused, or.*",
        ),
        (
            "RuntimeError",
            "Tensor on device cpu is not on the expected device meta!",
            r". Under pp a rank has no values of other stages' parameters.*as LBFGS does.*",
        ),
        (
            "RuntimeError",
            "Expected all tensors to be on the same device, but found two devices, meta and cpu!",
            r". Under pp a rank has no values of other stages' parameters.*",
        ),
        (
            "AcceleratorError",
            "CUDA error: device-side assert triggered",
            r". No process comes back from that: .*%dist_restart with its number replaces it.*",
        ),
        (  # the summary of a cell's failure shows the first line
            "AcceleratorError",
            "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://x",
            r". No process comes back from that: .*the other ranks keep theirs",
        ),
        (
            "AcceleratorError",
            "CUDA error: invalid device ordinal",
            r". This rank sees no GPU of that number: .*leave torch\.cuda\.set_device.* out.*",
        ),
        ("AcceleratorError", "CUDA error: out of memory", ""),
        # Nothing is added where nothing is known.
        ("NameError", "name 'dta' is not defined", ""),
        ("NameError", "name 'data' is something else", ""),
        ("ValueError", "boom", ""),
        ("RuntimeError", "No module named 'data'", ""),
        ("RuntimeError", "The size of tensor a (3) must match the size of tensor b (2)", ""),
    ],
)
def test_what_to_do_is_added_where_it_is_known(name: str, message: str, hint: str) -> None:
    """Behind the first line of the error's own message; the notebook has `data`."""
    text = explain(RankFailure(1, name, message), {"data"}.__contains__).message

    first, _, _ = message.partition("\n")
    assert re.fullmatch(re.escape(first) + hint + re.escape(message[len(first) :]), text)


def test_a_program_is_not_sent_to_a_notebook() -> None:
    """Where there is none, nothing is said of its variables and magics."""
    missing = explain(RankFailure(1, "ModuleNotFoundError", "No module named 'nosuch'"), None)
    second = "AcceleratorState has already been initialized and cannot ..."
    names = ("NameError", "name 'data' is not defined")

    assert missing.message.endswith("-m pip install NAME)")
    assert "%" not in explain(RankFailure(1, "ValueError", second), None).message
    assert explain(RankFailure(1, *names), None).message == names[1]


def test_a_name_that_ranks_have_is_told_with_the_ways_to_it() -> None:
    """What cannot be pulled is used where it is."""
    assert name_of_the_ranks("x", {0: "Tensor", 1: "Tensor"}) == (
        "x is on ranks 0-1, not in the notebook: run the cell with %%distributed, or copy it with "
        "%dist_pull x"
    )
    assert name_of_the_ranks("torch", {1: "module"}) == (
        "torch is on rank 1, not in the notebook: run the cell with %%distributed"
    )


def test_a_mismatch_that_each_rank_tells_from_its_own_side_stands_once() -> None:
    """torch's message begins with the rank that tells it; explained, all ranks fail alike."""

    def call(rank: int) -> str:
        return (
            f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=0, "
            f"OpType=ALLGATHER, TensorShape=[{rank + 3}], TensorDtypes=Float"
        )

    failures = []
    for rank, other in [(1, 0), (0, 1)]:
        message = f"Detected mismatch between collectives on ranks. {call(rank)}, but {call(other)}"
        lines = ("Cell In[1], line 1", f"\x1b[31mRuntimeError\x1b[39m: {message}")
        failures.append(explain(RankFailure(rank, "RuntimeError", message, lines), bool))

    assert summary(failures) == (
        "ranks 0-1 raised RuntimeError: the calls of the ranks do not match: rank 0 is in "
        "all_gather(float32[3]), rank 1 is in all_gather(float32[4]) (numbers are those within the "
        "group)"
    )


def test_more_ranks_than_memory_are_refused() -> None:
    """200 ranks at 0.25 GB need 50 GB; 20 GB hold 80."""
    said = r"200 ranks need about 50\.0 GB .*Use -n 80 or fewer \(this machine has 2 cores\)"
    with pytest.raises(StartError, match=said):
        capacity.check(20_000_000_000, 200, 2)
    capacity.check(20_000_000_000, 80, 1)


def test_more_than_four_ranks_a_core_are_told() -> None:
    """Eight on two cores are not."""
    assert capacity.crowding(8, 2) == ""
    assert capacity.crowding(9, 2).startswith("9 ranks share 2 cores and take turns: ")
    assert "-n 1 gives each rank a core of its own" in capacity.crowding(5, 1)
