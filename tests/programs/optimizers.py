"""Optimizers as people write them: some take a rank's part for the whole."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor


class PlainSGD(torch.optim.Optimizer):
    """Each element by itself. Others below it change `step_one`, which steps a parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.step_one(p, p.grad, self.state[p], group["lr"])

    def step_one(self, p, gradient, state, rate):
        p.sub_(gradient, alpha=rate)


def moments(gradient, state):
    """Adam's change, of moments that it keeps in the state."""
    if not state:
        state |= {"step": 0, "first": torch.zeros_like(gradient)}
        state["second"] = torch.zeros_like(gradient)
    state["step"] += 1
    state["first"].lerp_(gradient, 0.1)
    state["second"].lerp_(gradient**2, 0.01)
    first, second = (
        state[k] / (1 - b ** state["step"]) for k, b in (("first", 0.9), ("second", 0.99))
    )
    return first / (second.sqrt() + 1e-4)


class Lamb(PlainSGD):
    """The ratio of two norms, which of a DTensor are those of all of it."""

    def step_one(self, p, gradient, state, rate):
        change = moments(gradient, state)
        p.sub_(change * self.ratio(p, change), alpha=rate)

    def ratio(self, p, change):
        return p.norm() / (change.norm() + 1e-6)


class LambOfNumbers(Lamb):
    """Wrong where `.item()` gives the norm of a part."""

    def ratio(self, p, change):
        return p.norm().item() / (change.norm().item() + 1e-6)


class LambOfParts(Lamb):
    """Wrong where a rank has a part."""

    def step_one(self, p, gradient, state, rate):
        local = [t.to_local() if isinstance(t, DTensor) else t for t in (p, gradient)]
        super().step_one(*local, state, rate)


class Muon(PlainSGD):
    """Newton-Schulz on matrices and on each of a stack of experts, and Adam on all else."""

    dtype = torch.float32

    def step_one(self, p, gradient, state, rate):
        if p.ndim < 2:
            p.sub_(moments(gradient, state), alpha=rate)
            return
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 0.05)
        p.sub_(self.orthogonal(gradient.lerp(state["momentum"], 0.95)).to(p.dtype), alpha=rate)

    def orthogonal(self, matrix):
        return newton_schulz(matrix.to(self.dtype), (3.4445, -4.7750, 2.0315), 5, 1e-7)


def newton_schulz(matrix, coefficients, steps, eps):
    """A matrix's directions without their sizes, or those of each of a stack; in its own dtype."""
    a, b, c = coefficients
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.pow(2).sum((-2, -1), keepdim=True).sqrt() + eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class TorchMuon(torch.optim.Muon):
    """torch's own on the matrices alone; not rounded to bf16."""

    def __init__(self, params: Any) -> None:
        super().__init__([p for p in params if p.ndim == 2], 1e-2)

    def step(self, closure=None):
        with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz):
            super().step(closure)


class HalfMuon(Muon):
    """In bf16, as it is mostly run: rounded, but not wrong."""

    dtype = torch.bfloat16


class ByTotal(PlainSGD):
    """Divides by the norm of all gradients, as it finds them."""

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.sub_(p.grad / total, alpha=0.1)


class AroundAnother(PlainSGD):
    """Keeps an optimizer of its own, which has the parameters too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups, 1e-2)

    def step(self, closure=None):
        self.inner.step()
