"""torch's message about calls that do not match, as 2.11 and 2.13 write it, and in plain words."""

import pytest

from nbdist.hang import torch_messages

REST = (
    ", TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, layout=Strided "
    "(default), requires_grad=false (default), pinned_memory=false (default), "
    "memory_format=(nullopt))"
)


def written(first: str, second: str) -> str:
    return (
        f"Detected mismatch between collectives on ranks. {first}), but {second}).Collectives "
        "differ in the following aspects: \t Tensor Tensor shapes: 3vs 4"
    )


def call(rank: int, op: str, shape: str = "3", dtype: str = "Float") -> str:
    return (
        f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType={op}, "
        f"TensorShape=[{shape}], TensorDtypes={dtype}{REST}"
    )


def bare(rank: int, op: str) -> str:
    """As torch writes a call without tensors, the missing comma included."""
    return f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=7OpType={op}"


@pytest.mark.parametrize(
    ("first", "second", "calls"),
    [
        (
            call(0, "ALLREDUCE"),
            call(1, "ALLREDUCE", "4"),
            "rank 0 is in all_reduce(float32[3]), rank 1 is in all_reduce(float32[4])",
        ),
        (
            call(0, "BROADCAST", "2, 3"),
            call(1, "_ALLGATHER_BASE", dtype="Long"),
            "rank 0 is in broadcast(float32[2, 3]), rank 1 is in all_gather_into_tensor(int64[3])",
        ),
        (
            call(2, "ALLREDUCE", "", "Weird"),
            bare(10, "BARRIER"),
            "rank 2 is in all_reduce(Weird[]), rank 10 is in barrier",
        ),
    ],
)
def test_calls_are_named_in_the_order_of_ranks(first: str, second: str, calls: str) -> None:
    """Operation, type and shape as the user writes them; the same from whichever rank."""
    expected = f"the calls of the ranks do not match: {calls} (numbers are those within the group)"

    assert torch_messages.readable(written(first, second)) == expected
    assert torch_messages.readable(written(second, first)) == expected


@pytest.mark.parametrize(
    "message", ["", "boom", "Detected mismatch between collectives on ranks.", call(0, "REDUCE")]
)
def test_other_messages_stay(message: str) -> None:
    """What is not understood is not touched."""
    assert torch_messages.readable(message) == message
