"""Tensors that pass from one stage of a pipeline to the next: with gradients, fixed shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.parallel.pp.pytree import pack, unpack


@dataclass(frozen=True, slots=True)
class StageBoundary:
    """The values between two stages: the skeleton of a value, and its tensors' kinds.

    torch's schedules need its shapes before a step, and want a gradient for each tensor. So
    what has none (integers, bools) travels as its bytes, in fp32: numbers up to 255 are the
    same in every dtype that a step in between casts to.
    """

    skeleton: bytes
    kinds: tuple[tuple[torch.Size, torch.dtype], ...]

    @staticmethod
    def of(value: Any) -> StageBoundary:
        """The border that this value crosses."""
        packed = pack(value)
        return StageBoundary(packed.skeleton, tuple((t.shape, t.dtype) for t in packed.tensors))

    def examples(self) -> tuple[torch.Tensor, ...]:
        """Examples of these tensors on meta: without memory, and they need a gradient."""
        return tuple(
            _wire(torch.empty(shape, dtype=dtype, device="meta")).requires_grad_()
            for shape, dtype in self.kinds
        )

    @property
    def form(self) -> tuple[bytes, list[torch.Size]]:
        """Structure and shapes. Dtypes change on the way."""
        return self.skeleton, [shape for shape, _ in self.kinds]

    def __str__(self) -> str:
        return ", ".join(f"{dtype} {tuple(shape)}" for shape, dtype in self.kinds) or "no tensor"


def pack_activations(value: Any) -> tuple[torch.Tensor, ...]:
    """The wires of a value. Copies: what is sent is contiguous and no view, as torch wants it."""
    return _copies([_wire(tensor) for tensor in pack(value).tensors])


def unpack_activations(wires: Sequence[torch.Tensor], border: StageBoundary) -> Any:
    """The value that has crossed. Copies: blocks may change their arguments in place."""
    copies = _copies(wires)
    tensors = [_unwire(wire, *kind) for wire, kind in zip(copies, border.kinds, strict=True)]
    return unpack(border.skeleton, tensors)


def nan_like(
    examples: Sequence[torch.Tensor], wires: Sequence[torch.Tensor], device: torch.device
) -> Any:
    """NaN in the shape of examples, in place of what a stage would have made of its wires."""
    return _Broken.apply(tuple(examples), device, *wires)  # type: ignore[no-untyped-call]


def _copies(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    # A single one has no others whose gradients could come without its own.
    if len(tensors) == 1:
        return (tensors[0].clone(memory_format=torch.contiguous_format),)
    copies: tuple[torch.Tensor, ...] = _Copies.apply(*tensors)  # type: ignore[no-untyped-call]
    return copies


class _Copies(torch.autograd.Function):
    """Copies. A tensor that nothing depends on has a gradient too: zeros."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


class _Broken(torch.autograd.Function):
    """Gives NaN in the shape of examples; passes gradients of zero to the wires."""

    @staticmethod
    def forward(
        ctx: Any, examples: tuple[torch.Tensor, ...], device: torch.device, *wires: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*wires)
        return tuple(
            torch.full(example.shape, float("nan"), dtype=example.dtype, device=device)
            for example in examples
        )

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *(torch.zeros_like(wire) for wire in ctx.saved_tensors)


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        return tensor
    return tensor.contiguous().flatten().view(torch.uint8).to(torch.float32)


def _unwire(wire: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(wire)
    if dtype.is_floating_point:
        return wire
    return wire.detach().to(torch.uint8).view(dtype).reshape(shape)
