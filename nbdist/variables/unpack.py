"""Unpacks sent values: memory first, then what refers to it."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from nbdist.core import madvise
from nbdist.errors import TransferError
from nbdist.variables.pack import (
    STEP_BYTES,
    PackedValue,
    TensorRecord,
    memory_of,
    one_line,
    tensor_at,
)

# From here on page faults cost more than the copy (500 MB: 0.41 s, with large pages 0.20 s).
LARGE_PAGES_BYTES = 4 * 2**20
_COMPLEX = {"complex64", "complex128"}
_FLOATS = {"float16", "float32", "float64"}
_INTEGERS = {f"{sign}int{size}" for sign in ("", "u") for size in (8, 16, 32, 64)}
_SAME_IN_NUMPY = frozenset({"bool"} | _INTEGERS | _FLOATS | _COMPLEX)
# Torch's types that only ml_dtypes adds to numpy, by the same names; float32 holds them exactly.
AS_FLOAT32 = frozenset(
    ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
     "float8_e8m0fnu")
)  # fmt: skip

Fill = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class UnpackedMemory:
    """Contents of a parcel, in the receiver's own memory, before any value is made of them.

    Attributes:
        buffers: Arrays that it refers to.
        tensors: torch's, or numpy arrays in their place.
    """

    pickled: memoryview
    buffers: tuple[memoryview, ...]
    tensors: tuple[Any, ...]


class _Unpacker(pickle.Unpickler):
    """Puts the tensors back, and refuses what would load a module that must not be."""

    def __init__(
        self, file: Any, tensors: Sequence[Any], refused: Mapping[str, str], **options: Any
    ):
        super().__init__(file, **options)
        self._tensors, self._refused = tensors, refused

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a global that a pickle names, or refuse its package."""
        if (module, name) == (tensor_at.__module__, tensor_at.__name__):
            return self._tensors.__getitem__
        for package, why in self._refused.items():
            if not f"{module}.".startswith(f"{package}."):
                continue
            if (module, name) == ("torch", "Size"):
                return tuple
            raise TransferError(f"it contains {module}.{name}: {why}")
        try:
            return super().find_class(module, name)
        except AttributeError as error:
            if module != "__main__":
                raise
            raise TransferError(
                f"{name} is defined in a notebook cell and cannot be sent; run that cell here too "
                "(on ranks with %%distributed)"
            ) from error


def unpack(
    parcel: PackedValue, torch: Any = None, refused: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The values by name, in memory of their own. A file stays where it is.

    Args:
        parcel: What was sent.
        torch: The module; without it tensors become arrays, float32 where numpy has no such type.
        refused: Packages that must not be loaded -> what to say where one is needed.

    Raises:
        TransferError: If it cannot be read, or a value cannot be unpacked.
    """
    return make_values(read(parcel, torch), refused)


def read(
    parcel: PackedValue, torch: Any = None, check: Callable[[], None] = lambda: None
) -> UnpackedMemory:
    """The memory of a parcel, copied. Runs nothing of the sender's, so in any thread.

    `check` is called often, and may raise to break off; `torch` is as in `unpack`.

    Raises:
        TransferError: If it cannot be read.
    """
    arrays = parcel.sizes[: len(parcel.sizes) - len(parcel.tensors)]
    try:
        path = parcel.path
        with Path(path).open("rb", buffering=0) if path else io.BytesIO(parcel.data) as source:
            fill = functools.partial(_fill, source, check)
            pickled, *buffers = (np.empty(size_bytes, np.uint8).data for size_bytes in arrays)
            for block in (pickled, *buffers):
                fill(block)
            tensors = [_tensor(record, fill, torch) for record in parcel.tensors]
    except Exception as error:
        raise _failure(error) from error
    return UnpackedMemory(pickled, tuple(buffers), tuple(tensors))


def make_values(
    contents: UnpackedMemory, refused: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The values by name of what was read, to whose memory they refer; `refused` as in `unpack`.

    Raises:
        TransferError: If a value cannot be unpacked.
    """
    try:
        pickled, buffers = io.BytesIO(contents.pickled), contents.buffers
        unpacker = _Unpacker(pickled, contents.tensors, refused, buffers=buffers)
        values: dict[str, Any] = unpacker.load()
    except Exception as error:
        raise _failure(error) from error
    return values


def _failure(error: Exception) -> TransferError:
    return TransferError(f"the value cannot be unpacked: {one_line(error)}")


def _fill(source: Any, check: Callable[[], None], memory: memoryview) -> None:
    offset = 0
    while offset < memory.nbytes:
        check()
        count = source.readinto(memory[offset : offset + STEP_BYTES])
        if not count:
            raise TransferError(f"{memory.nbytes - offset} bytes are missing")
        offset += count


def _tensor(record: TensorRecord, fill: Fill, torch: Any) -> Any:
    if torch is None:
        return _array(record, fill)
    tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="cpu")
    memory = memory_of(tensor)
    if memory.nbytes >= LARGE_PAGES_BYTES:  # in pages of 2 MB, as numpy does
        madvise.advise(tensor.data_ptr(), memory.nbytes, madvise.LARGE)
    fill(memory)
    if record.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=record.requires_grad)
    return tensor.requires_grad_(record.requires_grad)


def _array(record: TensorRecord, fill: Fill) -> np.ndarray:
    if record.dtype in _SAME_IN_NUMPY:
        array = np.empty(record.shape, record.dtype)
    elif record.dtype in AS_FLOAT32:
        import ml_dtypes  # 14 ms, and few notebooks need it

        array = np.empty(record.shape, getattr(ml_dtypes, record.dtype))
    else:
        raise TransferError(
            f"numpy has no type for torch.{record.dtype}: `import torch` in the notebook first"
        )
    fill(array.reshape(-1).view(np.uint8).data)
    return array if record.dtype in _SAME_IN_NUMPY else array.astype(np.float32)


def non_numpy_types(parcel: PackedValue) -> list[str]:
    """Torch's types in it that numpy does not have."""
    return sorted({record.dtype for record in parcel.tensors} - _SAME_IN_NUMPY)
