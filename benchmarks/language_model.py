"""The model that benchmarks train: a decoder with attention, returning its loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model is."""

    width: int
    n_blocks: int
    n_words: int
    n_heads: int = 8


class Block(nn.Module):
    """Attention and a feed-forward part, each with its norm and its residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.head_dim = width // size.n_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        x = self.norm1(h)
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return h + self.down_proj(functional.gelu(self.up_proj(self.norm2(h))))


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.n_words, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.n_blocks))
        self.head = nn.Linear(size.width, size.n_words)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch."""
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return mean_loss(self.head(h), labels)


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of what the head returns."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make(size: Size) -> Net:
    """The same on every rank and every side."""
    torch.manual_seed(0)
    return Net(size)


def batch(size: Size, rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(size.n_words, (rows, length), generator=draw)
    return tokens, (tokens * 5 + 1) % size.n_words
