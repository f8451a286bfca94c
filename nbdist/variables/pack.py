"""Values on their way between notebook and ranks: one pickle, and large memory beside it.

The memory of tensors and arrays is never pickled: it is written once, as it lies, and each
receiver reads it into memory of its own. torch is handed in by whoever has loaded it; without
it tensors become numpy arrays.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbdist.core.failures import plain as plain_text
from nbdist.core.units import size
from nbdist.errors import TransferError

# From here on through a file in /dev/shm; what is smaller goes with the call.
LARGE_BYTES = 1_000_000
# An array below this is pickled: it costs less than a piece of its own.
PIECE_BYTES = 4096
# Left to whatever else lives in /dev/shm (NCCL, DataLoader workers).
SPARE_BYTES = 16 * 2**20
# One system call copies so much: between two of them an interrupt is seen.
STEP_BYTES = 64 * 2**20
# What means something on a rank alone -> why it is refused.
OURS = dict.fromkeys(
    ("nbdist.parallel", "nbdist.engine"),
    "it belongs to its rank. Pull its contents, such as a state_dict()",
)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor without its memory.

    Attributes:
        dtype: torch's name, without `torch.`.
        requires_grad: Whether it is a leaf that collects gradients.
    """

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False
    is_parameter: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """A value taken apart; its pieces are still the value's own memory.

    Attributes:
        pieces: The pickle, arrays that it refers to, then one piece for each tensor.
        tensors: In the order of their pieces.
        held: Keeps the pieces' memory from being freed.
        uses: Variables that functions in it use, by name; see variables.definitions.
    """

    pieces: tuple[memoryview, ...]
    tensors: tuple[TensorRecord, ...]
    held: tuple[Any, ...] = ()
    uses: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """The size of all pieces together."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class PackedValue:
    """A packed value as it is sent.

    Attributes:
        sizes: Of the pieces, in bytes.
        tensors: As in Packed.
        data: The pieces one behind the other, or nothing where they are in a file.
        path: That file; empty without one.
        remarks: What there is to say about it, a sentence each.
    """

    sizes: tuple[int, ...]
    tensors: tuple[TensorRecord, ...]
    data: bytes
    path: str
    remarks: tuple[str, ...] = ()


def tensor_at(number: int) -> Any:
    """Stands in a pickle for the tensor of this number; variables/unpack.py gives it."""
    raise TransferError(f"tensor {number} is not in its pickle: use nbdist.variables.unpack.unpack")


class Packer(pickle.Pickler):
    """Pickles everything but the memory of tensors and arrays."""

    def __init__(self, torch: Any, plain: Callable[[Any], Any], *, keeps_memory: bool):
        self.file = io.BytesIO()
        self.arrays: list[memoryview] = []
        self.held: list[Any] = []
        self.memories: list[memoryview] = []
        self.tensors: list[TensorRecord] = []
        self.uses: dict[str, Any] = {}
        self._torch, self._plain, self._keeps_memory = torch, plain, keeps_memory
        super().__init__(self.file, protocol=5, buffer_callback=self._keep)

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Take the memory of an array out of the pickle, unless it is small."""
        raw = buffer.raw()
        if raw.nbytes < PIECE_BYTES:
            return True
        self.arrays.append(raw if self._keeps_memory else raw[:0])
        return False

    def reducer_override(self, value: Any) -> Any:
        """Take the memory of a tensor out of the pickle; refuse what belongs to a rank."""
        for package, why in OURS.items():
            if type(value).__module__.startswith(f"{package}."):
                raise TransferError(f"it contains {type(value).__name__}: {why}")
        if self._torch is None or not isinstance(value, self._torch.Tensor):
            return NotImplemented
        plain = self._plain(value)
        if plain.is_meta:
            raise TransferError("a tensor on the device meta has no elements")
        if plain.is_nested or plain.layout is not self._torch.strided or plain.is_quantized:
            raise TransferError(
                "it contains a nested, sparse or quantized tensor: convert it first, for example "
                "with to_dense() or dequantize()"
            )
        whole = plain.detach().cpu().resolve_conj().resolve_neg().contiguous()
        self.tensors.append(
            TensorRecord(
                dtype=str(value.dtype).removeprefix("torch."),
                shape=tuple(plain.shape),
                requires_grad=bool(value.requires_grad and value.is_leaf),
                is_parameter=isinstance(value, self._torch.nn.Parameter),
            )
        )
        if self._keeps_memory:
            self.held.append(whole)
            self.memories.append(memory_of(whole))
        return tensor_at, (len(self.tensors) - 1,)


def pack(
    variables: Mapping[str, object],
    torch: Any = None,
    *,
    plain: Callable[[Any], Any] = lambda tensor: tensor,
    keeps_memory: bool = True,
    finds_culprit: bool = True,
    packer_type: Callable[..., Packer] = Packer,
) -> Packed:
    """Take values apart; they must not change until they are sent.

    Args:
        variables: By name. What is the same object twice stays so.
        torch: The module, where it is loaded.
        plain: Gives an ordinary tensor for one of a subclass.
        keeps_memory: Without it only `plain` is called on all there is.
        finds_culprit: Take the values apart once more, one by one, to name the one that fails.
            Not where `plain` is collective: the other ranks would not do so.
        packer_type: Makes what pickles.

    Raises:
        TransferError: If one of them cannot be pickled; the message names it.
    """
    try:
        packer = packer_type(torch, plain, keeps_memory=keeps_memory)
        packer.dump(dict(variables))
    except Exception as error:
        if len(variables) > 1 and finds_culprit:
            for name, value in variables.items():  # raises for the one that it is
                pack({name: value}, torch, plain=plain, packer_type=packer_type)
        problem = one_line(error)
        raise TransferError(f"{', '.join(variables)} cannot be sent: {problem}.") from error
    pieces = (packer.file.getbuffer(), *packer.arrays, *packer.memories)
    return Packed(pieces, tuple(packer.tensors), tuple(packer.held), packer.uses)


def send(packed: Packed, folders: Sequence[str | Path], remarks: Sequence[str] = ()) -> PackedValue:
    """Make a parcel: through a file in one of the folders if it is large, else by itself.

    Folders are the best first; they exist, and only this user can enter them. There are none where
    the receiver sees no file of this machine.

    Raises:
        TransferError: If none of them has room for it; no file is left.
    """
    sizes, size_bytes = tuple(piece.nbytes for piece in packed.pieces), packed.size_bytes
    if not folders or size_bytes < LARGE_BYTES:
        return PackedValue(sizes, packed.tensors, b"".join(packed.pieces), "", tuple(remarks))
    full: list[str] = []
    for folder in map(Path, folders):
        path = folder / os.urandom(8).hex()
        try:
            free_bytes = shutil.disk_usage(folder).free
            if free_bytes >= size_bytes + SPARE_BYTES:
                _write(path, packed.pieces)
                went = [f"it was sent through a file on disk: {full[0]}"] if full else []
                return PackedValue(sizes, packed.tensors, b"", str(path), (*remarks, *went))
            room = f"{size(size_bytes)} needed, {size(free_bytes)} free"
            full.append(f"{room} in {folder.parent}")
        except OSError as error:
            full.append(f"{folder.parent} cannot be written ({error.strerror})")
    raise TransferError(
        f"There is no space to send {size(size_bytes)}: {'; '.join(full)}. Free some space, "
        "or send less at a time."
    )


def _write(path: Path, pieces: Sequence[memoryview]) -> None:
    # write(2), not a mapping: where the space ends it fails, and does not kill the process.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        for piece in pieces:
            offset = 0
            while offset < piece.nbytes:
                offset += os.write(descriptor, piece[offset : offset + STEP_BYTES])
    except BaseException:  # an interrupt too
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def memory_of(tensor: Any) -> memoryview:
    """The bytes of a contiguous tensor in host memory, for as long as the tensor lives."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return memoryview(b"")
    # Not tensor.numpy(): after it the storage cannot be resized, as FSDP does; the user's too.
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B")


def one_line(error: BaseException) -> str:
    """An error as a clause: its kind, unless it is a TransferError, and its first line."""
    text = plain_text(str(error)).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, TransferError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
