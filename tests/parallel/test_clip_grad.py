"""Norms of gradients in parts, against torch's clipping of the whole ones in one process."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from nbdist.errors import OptionError
from nbdist.parallel.accelerator.clip_grad import clip_grad_norm
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import TensorLayout
from tests.programs import sides
from tests.programs.rank import everyone, n, rank
from tests.programs.sides import flat, fsdp_side, parameter, part, placed, pp_side
from tests.support.torch_ranks import on_ranks

SHAPES = [(7, 5), (3,), (4, 8), (5, 1), (), (2, 3)]
GRADIENTS = [
    torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(SHAPES)
]


def expected(norm_type, max_norm, extra=()):
    fresh = [torch.nn.Parameter(torch.zeros_like(g)) for g in (*GRADIENTS, *extra)]
    for p, g in zip(fresh, (*GRADIENTS, *extra), strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(fresh, max_norm, norm_type)
    return norm.item(), [p.grad for p in fresh]


def laid_out(side_of, extra=()):
    layouts, parameters = {}, []
    for number, (shape, gradient) in enumerate(zip(SHAPES, GRADIENTS, strict=True)):
        side = side_of(shape, number)
        p = parameter(torch.zeros(shape), side)
        if not p.is_meta:
            p.grad = placed(part(gradient, side), side)
        layouts[id(p)] = side
        parameters.append(p)
    for gradient in extra:
        parameters.append(torch.nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient.clone()
    return layouts, parameters


def off(
    side_of: Any, norm_type: float, max_norm: float = 0.5, extra: Any = (), meetings: int = 1
) -> None:
    """Norm and clipped gradients are right, and ranks meet once at most."""
    norm, clipped = expected(norm_type, max_norm, extra)
    layouts, parameters = laid_out(side_of, extra)
    degrees = next(iter(layouts.values())).degrees
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        got = clip_grad_norm(
            parameters, max_norm, norm_type,
            lambda p: layouts[id(p)].layout if id(p) in layouts else None, degrees=degrees,
        )  # fmt: skip
    assert reduce.call_count == meetings
    assert got.item() == pytest.approx(norm, rel=1e-6)
    for p, whole in zip(parameters, clipped, strict=True):
        side = layouts.get(id(p))
        mine = part(whole, side) if side else whole
        if mine is not None and mine.numel():
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            assert (local - mine).abs().max() / whole.abs().max() < 1e-6


@on_ranks(4)
def test_parts_clip_as_the_whole_does() -> None:
    """Plain, DTensor, mixed, on some stages only: norm and gradients to 1e-6, one all_reduce."""
    flat()
    sides.square()
    for norm_type in (1.0, 2.0, 3.5, math.inf):
        for name in ("whole", "fsdp", "hsdp", "tp", "both", "pp"):
            side_of = getattr(sides, f"{name}_side")
            off(side_of, norm_type, meetings=int(name != "whole"))
    off(fsdp_side, 2.0, math.inf)
    off(fsdp_side, 2.0, 1e6)
    torch.manual_seed(1)
    off(pp_side, 2.0, 0.5, [torch.randn(6)])
    off(pp_side, math.inf, 0.5, [torch.randn(6) * 9])

    # A gradient left as partial sums: its norm is that of the sum, and it stays partial.
    whole = torch.arange(1.0, 7.0)
    p = torch.nn.Parameter(DTensor.from_local(torch.zeros(6), flat(), [Replicate()]))
    p.grad = DTensor.from_local(whole * (rank + 1) / 10, flat(), [Partial()])
    norm = clip_grad_norm([p], 1.0, 2, lambda _: TensorLayout((6,)), degrees=Degrees(tp=n))
    assert norm.item() == pytest.approx(whole.norm().item(), rel=1e-6)
    assert p.grad.full_tensor().norm().item() == pytest.approx(1.0, rel=1e-5)

    # bfloat16 gradients: torch's own norm of them has three digits.
    short = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    p = torch.nn.Parameter(torch.zeros(1000 // n, dtype=torch.bfloat16))
    p.grad = short.chunk(n)[rank].clone()
    layout = TensorLayout((1000,), tp_dim=0)
    norm = clip_grad_norm(p, 1.0, 2, lambda _: layout, degrees=Degrees(tp=n))
    assert norm.item() == pytest.approx(short.double().norm().item(), rel=1e-6)
    assert (norm.dtype, p.grad.dtype) == (torch.float32, torch.bfloat16)
    assert len({*everyone(norm.item())}) == 1


def test_every_rank_by_itself_meets_nobody() -> None:
    """Without a group, and without any gradient, there is a norm as torch's."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    none = torch.nn.Parameter(torch.zeros(2))

    assert clip_grad_norm(parameter, math.inf, 2, lambda _: None, degrees=Degrees()).item() == 5.0
    assert clip_grad_norm([none], 1.0, 2, lambda _: None, degrees=Degrees()).item() == 0.0


@pytest.mark.parametrize("norm_type", [0, -1.0, math.nan])
def test_what_is_no_norm_is_refused(norm_type: float) -> None:
    """Zero, negative and not-a-number types name what is possible."""
    with pytest.raises(OptionError, match="Use a positive number"):
        clip_grad_norm([], 1.0, norm_type, lambda _: None, degrees=Degrees())
