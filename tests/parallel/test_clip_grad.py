"""Norms of gradients in parts, against torch's clipping of the whole ones in one process."""

import math
from pathlib import Path

import pytest
import torch

from nbdist.errors import OptionError
from nbdist.parallel.accelerator.clip_grad import clip_grad_norm
from nbdist.strategy.choice import Degrees
from tests.support.sides import SIDES
from tests.support.torch_ranks import run_ranks

CLIPS = (
    SIDES
    + """
    import math
    from nbdist.parallel.accelerator.clip_grad import clip_grad_norm
    SHAPES = [(7, 5), (3,), (4, 8), (5, 1), (), (2, 3)]
    torch.manual_seed(0)
    gradients = [torch.randn(shape) for shape in SHAPES]

    def expected(norm_type, max_norm, extra=()):
        fresh = [torch.nn.Parameter(torch.zeros_like(g)) for g in (*gradients, *extra)]
        for p, g in zip(fresh, (*gradients, *extra)):
            p.grad = g.clone()
        norm = torch.nn.utils.clip_grad_norm_(fresh, max_norm, norm_type)
        return norm.item(), [p.grad for p in fresh]

    def laid_out(side_of, extra=()):
        layouts, parameters = {}, []
        for number, (shape, gradient) in enumerate(zip(SHAPES, gradients)):
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

    count = [0]
    reduce = dist.all_reduce
    def counted(*args, **kwargs):
        count[0] += 1
        return reduce(*args, **kwargs)
    dist.all_reduce = counted

    def off(side_of, norm_type, max_norm=0.5, extra=()):
        "How far norm and clipped gradients are off, relative; and how often ranks met."
        norm, clipped = expected(norm_type, max_norm, extra)
        layouts, parameters = laid_out(side_of, extra)
        count[0] = 0
        got = clip_grad_norm(parameters, max_norm, norm_type,
                             lambda p: layouts[id(p)].layout if id(p) in layouts else None,
                             degrees=next(iter(layouts.values())).degrees)
        worst = abs(got.item() - norm) / norm
        for p, whole in zip(parameters, clipped):
            side = layouts.get(id(p))
            mine = part(whole, side) if side else whole
            if mine is not None and mine.numel():
                local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                worst = max(worst, ((local - mine).abs().max() / whole.abs().max()).item())
        return worst, count[0]

    sides = {"whole": whole_side, "fsdp": fsdp_side, "hsdp": hsdp_side, "tp": tp_side,
             "both": both_side, "pp": pp_side}
    result = {f"{name} {norm_type}": off(side_of, norm_type)
              for name, side_of in sides.items() for norm_type in (1.0, 2.0, 3.5, math.inf)}
    result["measured"] = off(fsdp_side, 2.0, math.inf)
    result["small"] = off(fsdp_side, 2.0, 1e6)
    torch.manual_seed(1)
    result["beside"] = off(pp_side, 2.0, 0.5, [torch.randn(6)])
    result["beside inf"] = off(pp_side, math.inf, 0.5, [torch.randn(6) * 9])

    # A gradient left as partial sums: its norm is that of the sum, and it stays partial.
    whole = torch.arange(1.0, 7.0)
    p = torch.nn.Parameter(DTensor.from_local(torch.zeros(6), flat, [Replicate()]))
    p.grad = DTensor.from_local(whole * (rank + 1) / 10, flat, [Partial()])
    norm = clip_grad_norm([p], 1.0, 2, lambda _: TensorLayout((6,)), degrees=Degrees(tp=n))
    partial = [norm.item(), whole.norm().item(), p.grad.full_tensor().norm().item()]

    # bfloat16 gradients: torch's own norm of them has three digits.
    short = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    p = torch.nn.Parameter(torch.zeros(1000 // n, dtype=torch.bfloat16))
    p.grad = short.chunk(n)[rank].clone()
    layout = TensorLayout((1000,), tp_dim=0)
    norm = clip_grad_norm(p, 1.0, 2, lambda _: layout, degrees=Degrees(tp=n))
    half = [norm.item(), short.double().norm().item(), str(norm.dtype), str(p.grad.dtype)]
    done(result=result, partial=partial, half=half)
"""
)


def test_parts_clip_as_the_whole_does(tmp_path: Path) -> None:
    """Plain, DTensor, mixed, on some stages only: norm and gradients to 1e-6, one all_reduce."""
    results = run_ranks(tmp_path, 4, CLIPS)

    for result in results:
        for name, (worst, reductions) in result["result"].items():
            assert worst < 1e-6, name
            assert reductions == (0 if name.startswith("whole") else 1), name
        norm, expected, clipped = result["partial"]
        assert norm == pytest.approx(expected, rel=1e-6)
        assert clipped == pytest.approx(1.0, rel=1e-5)
        short, exact, *dtypes = result["half"]
        assert short == pytest.approx(exact, rel=1e-6)
        assert dtypes == ["torch.float32", "torch.bfloat16"]
    assert len({str(result["half"][0]) for result in results}) == 1


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
