"""A model of six blocks, or two, that trains under every strategy; a rank can break off in it."""

# Six blocks. `breaks` says where this rank breaks off, `how` in which way: it raises, sleeps, or
# leaves the step while the others wait for it.
DEEP_MODEL = """%%distributed
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
# Where the number of blocks plays no part: what DTensors do for each parameter takes long.
TWO_BLOCKS = DEEP_MODEL.replace("range(6)", "range(2)")
