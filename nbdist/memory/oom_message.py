"""Errors that say that memory has run out: whose, how much was asked for, and what was free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# The units in which torch (c10/util/StringUtil.h, format_size) and numpy print sizes.
_UNITS = {
    "bytes": 1, "byte": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "pib": 2**50, "eib": 2**60, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40, "eb": 2**60,
}  # fmt: skip
_SIZE = r"([\d.]+) ?([KMGTPE]?i?B|bytes?)"
UNKNOWN = -1
# Kinds of memory.
DEVICE, HOST = "device", "host"


@dataclass(frozen=True, slots=True)
class OomMessage:
    """The contents of an error; UNKNOWN where it does not say.

    Attributes:
        by: The allocator: "CUDA", "HIP", "XPU", "CPU", "Python", "cuBLAS", "cuDNN", "NCCL".
        memory: DEVICE or HOST.
        free_bytes: Free memory for all processes.
        others_bytes: In use by other processes.
        allocated_bytes: In use by tensors.
        unused_bytes: Held by torch's allocator and not in use.
    """

    by: str
    memory: str
    asked_bytes: int = UNKNOWN
    device: int = UNKNOWN
    total_bytes: int = UNKNOWN
    free_bytes: int = UNKNOWN
    others_bytes: int = UNKNOWN
    allocated_bytes: int = UNKNOWN
    unused_bytes: int = UNKNOWN


# torch's message since 2.0 ("capacty" until 2.2), and the one before it.
# Source: c10/cuda/CUDACachingAllocator.cpp, in DeviceCachingAllocator::malloc.
_DEVICE = re.compile(r"\b(CUDA|HIP|XPU) out of memory\.")
_FIELDS: Mapping[str, tuple[re.Pattern[str], ...]] = {
    name: tuple(re.compile(text) for text in texts)
    for name, texts in {
        "asked_bytes": (rf"Tried to allocate (?:more than )?{_SIZE}",),
        "total_bytes": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity"),
        "free_bytes": (rf"of which {_SIZE} is free", rf"; {_SIZE} free"),
        "allocated_bytes": (
            rf"allocated memory {_SIZE} is allocated by PyTorch", rf"; {_SIZE} already allocated",
        ),
        "unused_bytes": (rf"and {_SIZE} is reserved by PyTorch but unallocated",),
    }.items()
}  # fmt: skip
_RESERVED = re.compile(rf"{_SIZE} (?:reserved in total by PyTorch|cached)")
_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_DEVICE_NUMBER = re.compile(r"\bGPU (\d+)\b|\bXPU (\d+)\b")
_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory):"
    r" you tried to allocate \d+ bytes"
)
_NUMPY = re.compile(rf"Unable to allocate {_SIZE} for an array")
_CUBLAS = re.compile(r"CUBLAS_STATUS_ALLOC_FAILED")
_CUDNN = re.compile(
    r"CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
)
_NCCL = re.compile(
    r"NCCL error.*(?:out of memory|Failed to CUDA (?:calloc|malloc|host alloc))", re.DOTALL
)
_DRIVER = re.compile(r"CUDA (?:driver )?error: out of memory|HIP error: out of memory")
# Who says that it has no memory, and whose; and the size, where one of these has it.
_OTHER_ASKERS = (
    (_CPU, "CPU", HOST),
    (_CUBLAS, "cuBLAS", DEVICE),
    (_CUDNN, "cuDNN", DEVICE),
    (_NCCL, "NCCL", DEVICE),
    (_DRIVER, "CUDA", DEVICE),
)
_ASKED = re.compile(r"(?:you tried to allocate|Failed to CUDA \w+(?: async)?) (\d+) bytes")
# Classes of Python itself and numpy, whose text may be empty.
_PYTHON = frozenset({"MemoryError", "_ArrayMemoryError", "ArrayMemoryError"})


def parse_oom(name: str, message: str) -> OomMessage | None:
    """Parse an error of this class if memory ran out; None for any other error."""
    if match := _DEVICE.search(message):
        return _of_device(match, message)
    for pattern, by, memory in _OTHER_ASKERS:
        if pattern.search(message):
            asked = _ASKED.search(message)
            return OomMessage(by, memory, int(asked.group(1)) if asked else UNKNOWN)
    if name in _PYTHON:
        asked = _NUMPY.search(message)
        return OomMessage("Python", HOST, _bytes(*asked.groups()) if asked else UNKNOWN)
    return None


def has_oom(text: str) -> bool:
    """Whether a traceback has such an error, also as the cause of another one."""
    patterns = (_DEVICE, *(pattern for pattern, *_ in _OTHER_ASKERS))
    return any(pattern.search(text) for pattern in patterns) or any(
        re.search(rf"\b{name}\b", text) for name in _PYTHON
    )


def _of_device(match: re.Match[str], message: str) -> OomMessage:
    values = {name: _first(patterns, message) for name, patterns in _FIELDS.items()}
    reserved = _first((_RESERVED,), message)
    if values["unused_bytes"] == UNKNOWN and UNKNOWN not in (reserved, values["allocated_bytes"]):
        values["unused_bytes"] = max(0, reserved - values["allocated_bytes"])
    others = [_bytes(*amount) for amount in _OTHERS.findall(message)]
    number = _DEVICE_NUMBER.search(message)
    return OomMessage(
        by=match.group(1),
        memory=DEVICE,
        device=int(number.group(1) or number.group(2)) if number else UNKNOWN,
        others_bytes=sum(others) if others else UNKNOWN,
        **values,
    )


def _first(patterns: tuple[re.Pattern[str], ...], message: str) -> int:
    for pattern in patterns:
        if match := pattern.search(message):
            return _bytes(*match.groups())
    return UNKNOWN


def _bytes(number: str, unit: str) -> int:
    try:
        return round(float(number) * _UNITS[unit.lower()])
    except (ValueError, KeyError):
        return UNKNOWN
