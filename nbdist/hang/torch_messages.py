"""torch's own message about collectives that do not match (--debug detail), in plain words."""

from __future__ import annotations

import re

# As in: Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE,
# TensorShape=[3], TensorDtypes=Float, ...). Without tensors the rest is left out, comma included.
_CALL = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+,? ?"
    r"OpType=(\w+)(?:, TensorShape=\[([\d, ]*)\], TensorDtypes=([\w ]+))?"
)
_SIGN = "Detected mismatch between collectives on ranks"
_OPS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce_coalesced",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "ALLGATHER_COALESCED": "all_gather_coalesced",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
}
# The flight recorder's names where they are not torch.distributed's
# (ProcessGroupNCCL.cpp; Gloo's names are). The last two: an all_gather of unequal sizes is
# broadcasts, a reduce_scatter is reductions.
_RECORDED = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "allreduce_coalesced": "all_reduce_coalesced",
    "all_reduce_barrier": "barrier",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
}
# C++'s names of types; those that are not Python's in small letters.
DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}


def python_name(recorded: str) -> str:
    """torch.distributed's name for what the flight recorder has: "all_gather_into_tensor"."""
    return _RECORDED.get(recorded, recorded)


def readable(message: str) -> str:
    """The message in one short sentence, or as it is if it is about something else.

    Ranks come in order, whichever rank reports it: the same mismatch then reads the same.
    """
    calls = sorted((int(rank), *rest) for rank, *rest in _CALL.findall(message))
    if _SIGN not in message or len(calls) < 2:
        return message
    parts = []
    for rank, op, shape, dtype in calls:
        tensor = f"({DTYPES.get(dtype, dtype)}[{shape}])" if dtype else ""
        parts.append(f"rank {rank} is in {_OPS.get(op, op.lower().strip('_'))}{tensor}")
    return (
        f"the calls of the ranks do not match: {', '.join(parts)} "
        "(numbers are those within the group)"
    )
