"""A small language model with a list of blocks, its data, and how it is made and prepared."""

import os
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import TensorDataset

from nbdist.parallel.live import registry
from nbdist.strategy.choose import choose

N_BLOCKS = int(os.environ.get("BLOCKS", "4"))


class Attention(nn.Module):
    def __init__(self, width, n_heads):
        super().__init__()
        self.head_dim = width // n_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        return self.down_proj(torch.tanh(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, width, n_heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, n_heads), Perceptron(width)

    def forward(self, h):
        h = h + self.attention(self.norm1(h))
        return h + self.mlp(self.norm2(h))


class Net(nn.Module):
    def __init__(self, width=16, n_blocks=N_BLOCKS, n_heads=4):
        super().__init__()
        self.embed = nn.Embedding(24, width)
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_blocks))
        self.norm = nn.Identity()
        self.head = nn.Linear(width, 24)

    def forward(self, tokens, labels=None):
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


STEPS, BATCH = 6, 8
draw = torch.Generator().manual_seed(3)
tokens = torch.randint(24, (STEPS * BATCH, 8), generator=draw)
labels = (tokens * 5 + 1) % 24
data = TensorDataset(tokens, labels)


def use(name, **options):
    registry.set_choice(choose(name, options, dist.get_world_size()))


def groups(net):
    flat = [p for p in net.parameters() if p.ndim < 2]
    wide = [p for p in net.parameters() if p.ndim > 1]
    return [{"params": wide}, {"params": flat, "lr": 3e-3}]


def make(seed, kind=Net):
    torch.manual_seed(seed)
    net = kind()
    optimizer = torch.optim.AdamW(groups(net), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return net, optimizer, scheduler


def tried(function, *args):
    """What it returns, or the traceback."""
    try:
        return function(*args)
    except BaseException:  # noqa: BLE001
        return traceback.format_exc()
