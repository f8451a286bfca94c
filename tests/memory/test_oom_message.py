"""Messages of memory that has run out, as they were written by real programs."""

import pytest

from nbdist.memory.oom_message import DEVICE, HOST, UNKNOWN, OomMessage, has_oom, parse_oom

MIB, GIB = 2**20, 2**30
NEW = (
    "CUDA out of memory. Tried to allocate 226.00 MiB. GPU 3 has a total capacity of 15.50 GiB of "
    "which 210.00 MiB is free. Process 1957120 has 7.00 GiB memory in use. Process 8 has 512.00 "
    "MiB memory in use. Including non-PyTorch memory, this process has 7.50 GiB memory in use. "
    "12.00 GiB allowed; Of the allocated memory 6.75 GiB is allocated by PyTorch, with 1.50 GiB "
    "allocated in private pools (e.g., CUDA Graphs), and 336.00 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html)"
)
OLD = (
    "CUDA out of memory. Tried to allocate 2.25 GiB (GPU 0; 6.00 GiB total capacity; 781.50 MiB "
    "already allocated; 3.00 GiB free; 1.25 GiB reserved in total by PyTorch) If reserved memory "
    "is >> allocated memory try setting max_split_size_mb"
)
OLDEST = (
    "CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.50 GiB total capacity; 8.50 MiB "
    "already allocated; 9.25 GiB free; 4.50 MiB cached)"
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
_CASES = {
    "new": ("OutOfMemoryError", NEW, OomMessage(
        "CUDA", DEVICE, 226 * MIB, 3, int(15.5 * GIB), 210 * MIB, 7 * GIB + 512 * MIB,
        int(6.75 * GIB), 336 * MIB,
    )),
    "capacty": ("OutOfMemoryError", (
        "CUDA out of memory. Tried to allocate 27.00 GiB. GPU 0 has a total capacty of 12.00 GiB "
        "of which 0 bytes is free. Of the allocated memory 16.00 GiB is allocated by PyTorch, and "
        "144.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is"
    ), OomMessage("CUDA", DEVICE, 27 * GIB, 0, 12 * GIB, 0, UNKNOWN, 16 * GIB, 144 * MIB)),
    "old": ("RuntimeError", OLD, OomMessage(
        "CUDA", DEVICE, int(2.25 * GIB), 0, 6 * GIB, 3 * GIB, UNKNOWN,
        int(781.5 * MIB), int(1.25 * GIB) - int(781.5 * MIB),
    )),
    "oldest": ("RuntimeError", OLDEST, OomMessage(
        "CUDA", DEVICE, int(12.5 * MIB), 0, int(10.5 * GIB), int(9.25 * GIB), UNKNOWN,
        int(8.5 * MIB), 0,
    )),
    "more than 1EB": ("OutOfMemoryError", (
        "CUDA out of memory. Tried to allocate more than 1EB memory."
    ), OomMessage("CUDA", DEVICE, 2**60)),
    "HIP": ("OutOfMemoryError", (
        "HIP out of memory. Tried to allocate 1.00 GiB. GPU 1 has a total capacity of 64.00 GiB "
        "of which 512.00 KiB is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, "
        "and 3.00 GiB is reserved by PyTorch but unallocated."
    ), OomMessage(
        "HIP", DEVICE, GIB, 1, 64 * GIB, 512 * 2**10, UNKNOWN, 60 * GIB, 3 * GIB
    )),
    "CPU": ("RuntimeError", CPU, OomMessage("CPU", HOST, 4 * 10**15)),
    "Windows": ("RuntimeError", (
        "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 512 bytes."
    ), OomMessage("CPU", HOST, 512)),
    "Python": ("MemoryError", "", OomMessage("Python", HOST)),
    "numpy": ("_ArrayMemoryError", (
        "Unable to allocate 7.50 TiB for an array with shape (1000000000000,) and data type float64"
    ), OomMessage("Python", HOST, int(7.5 * 2**40))),
    "cuBLAS": ("RuntimeError", (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ), OomMessage("cuBLAS", DEVICE)),
    "cuDNN": (
        "RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", OomMessage("cuDNN", DEVICE),
    ),
    "NCCL": ("DistBackendError", (
        "NCCL error in: /pytorch/torch/csrc/NCCLUtils.cpp:77, unhandled cuda error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nncclUnhandledCudaError: Call "
        "to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 6291456 bytes"
    ), OomMessage("NCCL", DEVICE, 6291456)),
    "NCCL too": ("DistBackendError", (
        "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nncclUnhandledCudaError: Call to "
        "CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ), OomMessage("NCCL", DEVICE)),
    "driver": ("AcceleratorError", (
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
    ), OomMessage("CUDA", DEVICE)),
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES)
def test_messages(case: str) -> None:
    """Every number that a message has, and nothing else."""
    name, message, expected = _CASES[case]

    assert parse_oom(name, message) == expected
    assert has_oom(f"Traceback\n{name}: {message}\nValueError: x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RuntimeError", "CUDA error: device-side assert triggered"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        ("DistBackendError", "NCCL error in: x.cpp:1, unhandled system error"),
        ("RuntimeError", "Connection closed by peer [127.0.0.1]:1234"),
        ("ValueError", "MemoryErrors are not raised here"),
        ("RuntimeError", "CUDNN_STATUS_NOT_SUPPORTED"),
    ],
)
def test_other_errors(name: str, message: str) -> None:
    """Are not about memory."""
    assert parse_oom(name, message) is None
    assert not has_oom(f"{name}: {message}")


def test_odd_numbers() -> None:
    """A number that is none is not known."""
    message = parse_oom("OutOfMemoryError", "CUDA out of memory. Tried to allocate 1.2.3 GiB.")
    assert message == OomMessage("CUDA", DEVICE)
