"""Values as a skeleton and what lies in it, so that ranks can send and cut them.

A model takes and returns tensors inside tuples, dicts and objects of any class. The skeleton is
the pickled value with numbers in place of the tensors.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbdist.errors import NbdistError

# What stays itself when arguments are cut: it cannot be pickled, or would be copied.
_KEPT = (
    torch.Tensor,
    torch.nn.Module,
    torch.Generator,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
)


@dataclass(frozen=True, slots=True)
class FlatValue:
    """A value taken apart: its structure as bytes, and its tensors.

    Attributes:
        skeleton: Equal bytes for values that differ in their tensors' numbers alone.
        leaves: The tensors, each once; also functions and modules.
    """

    skeleton: bytes
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The leaves, of a value that can be sent.

        Raises:
            NbdistError: A leaf is a function or module, or a tensor that is split over a mesh.
        """
        for leaf in self.leaves:
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor):
                raise NbdistError(
                    f"a pipeline stage cannot send a {type(leaf).__name__}: what a block or "
                    "the model returns must be plain tensors, and containers of them"
                )
        return self.leaves


class _Pickler(pickle.Pickler):
    """Takes leaves out and numbers them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # Without a memo the bytes depend on values, not on which strings are one object.
        self.fast = True
        self.numbers: dict[int, int] = {}
        self.leaves: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, _KEPT):
            return None
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.leaves)
            self.leaves.append(value)
        return self.numbers[id(value)]


class _Unpickler(pickle.Unpickler):
    """Puts leaves in the places that `_Pickler` has numbered."""

    def __init__(self, file: io.BytesIO, leaves: Sequence[Any]) -> None:
        super().__init__(file)
        self.leaves = leaves

    def persistent_load(self, number: int) -> Any:
        return self.leaves[number]


# Of a tensor by itself, which is what most blocks return: some 10 us less at each border.
_TENSOR = b"tensor"


def pack(value: Any) -> FlatValue:
    """The value with its tensors, functions and modules taken out as leaves.

    Raises:
        NbdistError: Something in it cannot be pickled.
    """
    if type(value) is torch.Tensor:
        return FlatValue(_TENSOR, (value,))
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise NbdistError(
            f"a pipeline cannot pass on a {type(value).__name__}: {error}. Pass tensors, "
            "numbers, strings, and lists, tuples and dicts of them"
        ) from error
    return FlatValue(file.getvalue(), tuple(pickler.leaves))


def unpack(skeleton: bytes, leaves: Sequence[Any]) -> Any:
    """A value with these leaves."""
    if skeleton == _TENSOR:
        return leaves[0]
    # The bytes come from `pack` on a rank of this run, which could do here what it wants anyway.
    return _Unpickler(io.BytesIO(skeleton), leaves).load()


def batch_size(packed: FlatValue) -> int:
    """Size of the first dim of the first tensor that has dims.

    Raises:
        NbdistError: There is no such tensor.
    """
    for leaf in packed.leaves:
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise NbdistError(
        "a pipeline cuts batches along their first dim, and none of forward's arguments "
        "is a tensor with one. Pass the batch to forward"
    )


def split_batch(packed: FlatValue, count: int) -> list[FlatValue]:
    """A value in pieces: tensors whose first dim is the batch are cut, others are in each."""
    size = batch_size(packed)

    def pieces(leaf: Any) -> Iterable[Any]:
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == size:
            return torch.split(leaf, size // count)
        return [leaf] * count

    rows = zip(*(pieces(leaf) for leaf in packed.leaves), strict=True)
    return [FlatValue(packed.skeleton, row) for row in rows]


def send(value: Any, to: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Send a value to a rank of the group, which calls `receive`. Tensors lose their gradient."""
    packed = pack(value)
    tensors = packed.tensors
    dist.send_object_list([_header(packed)], group=group, group_dst=to, device=device)
    send_tensors(tensors, to, group)


def receive(source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Receive a value that a rank of the group has sent with `send`."""
    box: list[Any] = [None]
    dist.recv_object_list(box, group=group, group_src=source, device=device)
    skeleton, kinds = box[0]
    alike = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]
    return unpack(skeleton, receive_tensors(alike, source, group, device))


def send_tensors(tensors: Iterable[torch.Tensor], to: int, group: dist.ProcessGroup) -> None:
    """Send tensors to a rank of the group, which calls `receive_tensors` with their like."""
    for tensor in tensors:
        dist.send(_bytes(tensor), group=group, group_dst=to)


def receive_tensors(
    alike: Iterable[torch.Tensor], source: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Tensors of these shapes and dtypes that a rank of the group has sent; contiguous leaves."""
    tensors = tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in alike)
    for tensor in tensors:
        dist.recv(_bytes(tensor), group=group, group_src=source)
    return tensors


def broadcast(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """One rank's value, on every rank of the group. Collective; others pass None."""
    packed = pack(value)
    is_source = dist.get_rank(group) == source
    box = [_header(packed) if is_source else None]
    dist.broadcast_object_list(box, group=group, group_src=source, device=device)
    assert box[0] is not None
    skeleton, kinds = box[0]
    if is_source:
        tensors = [tensor.detach() for tensor in packed.tensors]
    else:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]
    for tensor in tensors:
        dist.broadcast(_bytes(tensor), group=group, group_src=source)
    return unpack(skeleton, tensors)


def _header(packed: FlatValue) -> tuple[bytes, list[tuple[torch.Size, torch.dtype]]]:
    return packed.skeleton, [(tensor.shape, tensor.dtype) for tensor in packed.tensors]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as bytes: Gloo does not send every dtype. The same memory if it is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
