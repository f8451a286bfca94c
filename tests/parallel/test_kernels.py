"""Attention over a piece of keys: every kernel gives what ordinary tensor operations give."""

import pytest
import torch

from nbdist.parallel.cp import kernels

pytestmark = pytest.mark.engine


def problem(device: str, dtype: torch.dtype, size: int, *, is_causal: bool) -> kernels.Problem:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 40, size, generator=generator) for _ in range(3))
    parts = (t.to(device, dtype) for t in (query, key, value))
    return kernels.Problem(*parts, is_causal, 0.3)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu(1), pytest.mark.parity])]
)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-6), (torch.bfloat16, 4e-2)])
def test_every_kernel_gives_what_the_plain_one_does(
    device: str, dtype: torch.dtype, limit: float, is_causal: bool
) -> None:
    """Output, log-sum-exp and, from those of more keys, gradients."""
    tried = problem(device, dtype, 16, is_causal=is_causal)
    grad = torch.randn(tried.query.shape, generator=torch.Generator().manual_seed(1))
    grad = grad.to(device, dtype)
    exact = kernels.PLAIN.forward(tried)
    # As if there were as many further keys, whose values are 0.
    joined = kernels.Attended((exact.out / 2).to(dtype), exact.lse + torch.tensor(2.0).log())
    expected = kernels.PLAIN.backward(tried, grad, joined)
    able = [k for k in kernels.KERNELS if k.device in ("", device) and k.fits(tried)]
    assert len(able) > 1

    for kernel in able:
        attended = kernel.forward(tried)
        grads = kernel.backward(tried, grad, joined)
        found, wholes = (attended.out, attended.lse, *grads), (exact.out, exact.lse, *expected)
        for actual, wanted in zip(found, wholes, strict=True):
            assert actual.shape == wanted.shape
            assert (actual.float() - wanted.float()).abs().max() < limit, kernel.name


def test_heads_that_a_kernel_does_not_take_get_the_plain_one() -> None:
    """Values of another size than queries have no flash kernel on the CPU."""
    usual = problem("cpu", torch.float32, 16, is_causal=True)
    other = kernels.Problem(usual.query, usual.key, usual.value[..., :5], is_causal=True, scale=1.0)

    assert kernels.choose(usual).name == "flash"
    assert kernels.choose(other) is kernels.PLAIN
