"""The meaning of the profiler's names: kinds of events, collectives, sizes of types."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nbdist.trace.trace import COMMUNICATION, COMPUTE, COPY, DATA, HOST, MARK, WAIT

# The annotation with which nbdist ends a step, and the one of torch.profiler's schedule.
STEP_END = "nbdist.step"
TORCH_STEP = re.compile(r"ProfilerStep#(\d+)$")
# Annotations of the host once more, by the device's clock.
ON_DEVICE = "gpu_user_annotation"
# Events of the profiler itself, and events that only repeat annotations of the host.
LEFT_OUT = frozenset({"Trace", "overhead", ON_DEVICE})
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
PYTHON = "python_function"

# NCCL 2.27 has kernels for symmetric memory: ncclSymDevKernel_, from 2.28 on ncclSymkDevKernel_.
NCCL = re.compile(r"nccl(?:Symk?)?(?:Dev)?Kernel_?", re.IGNORECASE)
GLOO = re.compile(r"(?:gloo|ucc|mpi):")
ISSUED = re.compile(r"c10d::|_c10d_functional::|c10d_functional::|record_param_comms")
AUTOGRAD = "autograd::engine::evaluate_function"
_LOADER = re.compile(r"enumerate\(DataLoader\)#")
# The host sleeps in these, until a collective or the device has ended.
_WAITS = re.compile(
    r".*wait_tensor$|c10d::.*wait|cuda(?:Stream|Device|Event)Synchronize$|"
    r"cu(?:Stream|Ctx|Event)Synchronize$"
)
_LAUNCHES = frozenset({"cpu_op", "cuda_runtime", "cuda_driver"})
# Kinds by name in some categories; the first that fits.
_BY_NAME = (
    (frozenset({"kernel"}), NCCL, COMMUNICATION),
    # `clone` is one or a kernel, as the layout has it: neither leaves the GPU.
    (frozenset({"gpu_memcpy"}), re.compile("Memcpy DtoD"), COMPUTE),
    (frozenset({"user_annotation"}), GLOO, COMMUNICATION),
    (frozenset({"user_annotation"}), _LOADER, DATA),
    (_LAUNCHES, _WAITS, WAIT),
    (_LAUNCHES, ISSUED, HOST),
)
# Kinds by category otherwise.
_BY_CATEGORY = {
    "gpu_memcpy": COPY,
    "gpu_memset": COMPUTE,
    "kernel": COMPUTE,
    "cuda_runtime": HOST,
    "cuda_driver": HOST,
    PYTHON: HOST,
    "user_annotation": MARK,
}


def kind(category: str, name: str, *, is_device: bool) -> int:
    """The kind of an event, of trace.trace.KINDS; `is_device`: the host's operators only launch."""
    for categories, pattern, event_kind in _BY_NAME:
        if category in categories and pattern.match(name):
            return event_kind
    if category == "cpu_op":
        return HOST if is_device else COMPUTE
    return _BY_CATEGORY.get(category, HOST)


# By the beginning of what torch or NCCL calls it, without anything but letters. The longer first.
_COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "sendrecv": "send",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}


def collective(name: str) -> str:
    """A collective as people write it: "all-reduce", from torch's, Gloo's or NCCL's name.

    Other names stay as they are.
    """
    bare = ISSUED.sub("", GLOO.sub("", NCCL.sub("", name)))
    letters = re.sub(r"[^a-z]", "", bare.lower())
    return next(
        (readable for key, readable in _COLLECTIVES.items() if letters.startswith(key)), name
    )


# As C++ calls them (Gloo's events) and as torch does (NCCL's), in small letters.
_BYTES: Mapping[str, int] = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2,
    "int": 4, "long int": 8, "long": 8, "short int": 2, "short": 2, "signed char": 1, "char": 1,
    "unsigned char": 1, "byte": 1, "bool": 1, "c10::complex<float>": 8, "c10::complex<double>": 16,
    "complexfloat": 8, "complexdouble": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float32": 4, "float64": 8, "float16": 2, "int8": 1, "uint8": 1, "int16": 2, "int32": 4,
    "int64": 8,
}  # fmt: skip


def type_bytes(name: str) -> int:
    """Bytes of one element of a type; 0 for one that is not known."""
    return _BYTES.get(name.lower(), 0)
