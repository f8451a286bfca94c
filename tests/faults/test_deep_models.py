"""A deep model under every strategy trains on as if ten broken steps in a row had not been."""

from collections.abc import Callable

import pytest

from tests.support.faults import Ranks

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.faults]

_BREAKS = 10
# Six blocks. `breaks` says where this rank breaks off, `how` in which way: it raises, sleeps, or
# leaves the step while the others wait for it.
_MODEL = """%%distributed
from torch import nn
from torch.nn import functional as F

class Left(Exception):
    pass

class Block(nn.Module):
    breaks = None

    def __init__(self, index):
        super().__init__()
        self.index, self.head_dim = index, 4
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))
        self.up_proj, self.down_proj = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        inner = torch.tanh(self.up_proj(self.norm2(x)))
        if Block.breaks == (self.index, 'forward'):
            self.fail()
        if Block.breaks == (self.index, 'backward'):
            inner.register_hook(self.fail)
        return x + self.down_proj(inner)

    def fail(self, *_):
        Block.breaks = None
        how()

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(Block(index) for index in range(6))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 24)

    def forward(self, tokens, labels):
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

def fresh():
    torch.manual_seed(0)
    net = Deep()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return accelerator.prepare(net, optimizer)

tokens = torch.randint(24, (4, 16), generator=torch.Generator().manual_seed(1))

def forward_backward():
    loss = model(tokens, labels=tokens)
    accelerator.backward(loss)
    return loss

def train_step():
    loss = forward_backward()
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.reduce(loss.detach(), 'mean').item()
"""
_BROKEN = """%%distributed
import time
def how():
    if {how!r} == 'stop':
        print('go', time.monotonic(), flush=True)
        time.sleep(3600)
    raise (Left if {how!r} == 'hang' else ValueError)('broken off')
if rank == {rank}:
    Block.breaks = ({block}, {phase!r})
try:
    forward_backward()
except Left:
    pass
"""


@pytest.mark.parametrize(
    "typed", ["ddp", "zero1", "fsdp", "fsdp --shard grad-op", "tp", "pp", "cp"]
)
def test_ten_broken_steps_under_every_strategy(
    typed: str, ranks_of: Callable[[int], Ranks]
) -> None:
    """Forward and backward, at each block, on either rank; by exception, by stop and by hang."""
    ranks = ranks_of(2)
    ranks.set_kept()
    ranks.ok(f"%dist_strategy {typed}")
    ranks.ok(_MODEL)
    ranks.ok("%%distributed\nmodel, optimizer = fresh()")
    expected = [ranks.values("train_step()") for _ in range(_BREAKS + 1)]
    ranks.ok("%%distributed\nmodel, optimizer = fresh()")
    losses = [ranks.values("train_step()")]
    for number in range(_BREAKS):
        how = ("exception", "hang", "stop")[number % 3]
        block = number % 6
        # Of a pipeline's two stages the rank that has the block breaks off.
        rank = block // 3 if typed == "pp" else number // 3 % 2
        phase = ("forward", "backward")[number % 2]
        handle = ranks.kernel.start(_BROKEN.format(how=how, rank=rank, block=block, phase=phase))
        if how == "stop":
            ranks.begin_s(handle)
            ranks.kernel.interrupt()
        cell = ranks.finish(handle)
        assert cell.error is not None, (number, how, cell.visible)
        losses.append(ranks.values("train_step()"))

    assert len({losses[0] for losses in expected}) == _BREAKS + 1  # it does train
    for now, then in zip(losses, expected, strict=True):
        assert now == pytest.approx(then, rel=1e-6)
    ranks.ok("%dist_strategy ddp")
    ranks.conclude(f"ten broken steps of a deep model, {typed}", "repeat", None, None)
