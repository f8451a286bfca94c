"""A stack of experts of one's own, as `model.ep_plan` names one, and their router."""

from __future__ import annotations

import torch
from torch import nn


class Experts(nn.Module):
    """Each a small perceptron; what a token gets is their sum by its weights."""

    def __init__(self, width: int, hidden: int, count: int = 8) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(count, hidden, width) * 0.2)

    def forward(self, x, which, weights):
        out = torch.zeros_like(x)
        for number in range(len(self.up)):
            token, k = torch.where(which == number)
            y = torch.tanh(x[token] @ self.up[number]) @ self.down[number]
            out = out.index_add(0, token, (y * weights[token, k, None]).to(out.dtype))
        return out


class Mixture(nn.Module):
    """Of two experts for each token."""

    def __init__(self, width: int, count: int = 8) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, count), Experts(width, 2 * width, count)

    def forward(self, h):
        x = h.flatten(0, 1)
        weights, which = self.router(x).float().softmax(-1).topk(2)
        return self.experts(x, which, weights).view_as(h)
