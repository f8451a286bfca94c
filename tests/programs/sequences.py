"""A model whose sequence several ranks split, its batches, and the same by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.programs import parity


class Attention(nn.Module):
    """Four heads of queries, two of keys and values."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 32)
        self.out, self.dropout = nn.Linear(32, 32), dropout

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 4, 8).transpose(1, 2).chunk(2, 1)
        given = {"is_causal": True, "enable_gqa": True, "dropout_p": self.dropout}
        y = F.scaled_dot_product_attention(q, k, v, **given)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), Attention(dropout)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    """Returns the loss; logits without targets. Learned positions, given or counted."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.positions = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(2)])
        self.head = nn.Linear(32, 64)

    def forward(self, x, y=None, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(x.shape[1]).unsqueeze(0)
        h = self.tokens(x) + self.positions(position_ids)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch(step: int, ignored: Iterable[tuple[int, int, int]] = ()) -> tuple[Any, Any]:
    """Tokens and targets; of those some are ignored, each a row with its first and last place."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randint(0, 64, (4, 25), generator=generator)
    y = x[:, 1:].clone()
    for row, start, stop in ignored:
        y[row, start:stop] = -100
    return x[:, :-1].contiguous(), y


def loss(model: Any, step: int) -> torch.Tensor:
    return model(*batch(step))


def split(base: nn.Module, context: str = "ring", **options: Any) -> Any:
    """What is called of a model under ring attention or Ulysses."""
    return parity.put(base, "cp" if context == "ring" else context, **options).outer


def apart(
    build: Callable[[], nn.Module], loss_of: Any = loss, context: str = "ring", **options: Any
) -> list[float]:
    """Greatest difference of losses, and of gradients, to the model by itself."""
    options |= {"half": options.get("precision") == "bf16", "steps": 2}
    return parity.compare(
        "cp" if context == "ring" else context,
        build=lambda: parity.make(build),
        loss_of=lambda model, step, _cut: loss_of(model, step),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
        **options,
    )[:2]
