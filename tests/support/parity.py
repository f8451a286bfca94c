"""What texts of ranks share that compare a strategy with one process: models, batches, steps."""

import torch

from nbdist.parallel.mesh import ParallelMesh
from nbdist.parallel.transform import ModelBuild
from nbdist.strategy.choice import Strategy

CPU = torch.device("cpu")

# Behind torch_ranks.PRELUDE. A case trains `steps` times on the same global batches as `alone`.
TEXT = """
import contextlib, copy, dataclasses
import torch.nn.functional as F
from torch import nn
from nbdist.strategy.choice import Strategy, Degrees, Options
from unittest import mock
from nbdist.parallel import build as building
from nbdist.parallel.mesh import build_mesh
from nbdist.parallel.transform import ModelBuild

WIDTH, WORDS, LENGTH, GLOBAL = 10, 37, 6, 8
LR = 1e-2

class Block(nn.Module):
    # Sizes that 2 and 4 ranks divide with a rest, or not at all (gain: three numbers).
    def __init__(self, drop=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # No bias: a key's has no gradient but rounding, which Adam would make whole steps of.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 23), nn.GELU(), nn.Linear(23, WIDTH))
        self.gain = nn.Parameter(torch.tensor([1.0, 0.5, 0.5]))
        self.drop = nn.Dropout(drop)
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (6, 5)).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.gain[0] * self.out(y)
        return x + self.drop(self.mlp(x)) * self.gain[1:].sum()

class LM(nn.Module):
    def __init__(self, depth=3, tied=True, drop=0.0):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        # As language models begin: torch's own 1.0 makes large logits, and rounding errors of them.
        nn.init.normal_(self.words.weight, std=0.1)
        self.layers = nn.ModuleList(Block(drop) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))
        if tied:
            self.head.weight = self.words.weight
    def forward(self, tokens):
        h = self.words(tokens[:, :-1])
        for layer in self.layers:
            h = layer(h)
        logits = self.head(self.norm(h * self.scale))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

def make(seed=0, **kwargs):
    torch.manual_seed(seed)
    return LM(**kwargs)

def batch(step, part=0, parts=1):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (GLOBAL, LENGTH), generator=generator).chunk(parts)[part]

def adamw(model, **kwargs):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, **kwargs)

def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()

def gradients_of(outer, base):
    return {n: whole(p.grad) for n, p in base.named_parameters() if p.grad is not None}

def parameters_of(outer, base):
    return {n: whole(p) for n, p in base.named_parameters()}

def train(outer, base, part=0, parts=1, steps=3, accumulate=1, scale=1.0, no_sync=None,
          optimizer=None, gradients=gradients_of, parameters=parameters_of):
    "Losses (means over parts), gradients of the first step, parameters at the end."
    optimizer = optimizer or adamw(base)
    losses, first = [], {}
    for step in range(steps):
        total = 0.0
        pieces = batch(step, part, parts).chunk(accumulate)
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            with no_sync(outer) if no_sync and not is_last else contextlib.nullcontext():
                loss = outer(piece) / accumulate
                (loss * scale).backward()
            total += loss.item()
        if step == 0:
            first = {n: g / scale for n, g in gradients(outer, base).items()}
        for p in base.parameters():
            if p.grad is not None and scale != 1.0:
                p.grad.div_(scale)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor(total, dtype=torch.float64)
        if parts > 1:
            dist.all_reduce(mean)
            mean /= parts
        losses.append(mean.item())
    return losses, first, parameters(outer, base)

def off(actual, wanted):
    "Largest differences of losses, gradients and parameters; names must be the same."
    def tensors(a, b):
        assert a.keys() == b.keys(), (a.keys(), b.keys())
        return max((a[n].float() - b[n].float()).abs().max().item() for n in b)
    return [
        max(abs(a - b) for a, b in zip(actual[0], wanted[0])),
        tensors(actual[1], wanted[1]),
        tensors(actual[2], wanted[2]),
    ]

def choose(name, degrees, **options):
    return Strategy(name, Degrees(**degrees), n, Options(**options))

grids = {}
def job_of(base, choice):
    key = (choice.name == "single", choice.degrees)
    if key not in grids:
        grids[key] = build_mesh(choice, "cpu")
    return ModelBuild(base, choice, grids[key], torch.device("cpu"))

def put_under(job, *steps):
    "Steps on a model with values that are equal on all ranks."
    with mock.patch.object(building, "load", lambda names: steps):
        built = building.plan(job)
    tensors, local = building.tensors_of(job.base), {}
    for name, layout in built.layouts.items():
        part = building.part_of(tensors[name].detach(), layout, job.grid.degrees, job.grid.rank)
        if part is not None:
            local[name] = part.clone()
    return building.commit(built, local)

from torch.utils._python_dispatch import TorchDispatchMode

class Counted(TorchDispatchMode):
    "How often each op of torch runs, by its name; in backward too."
    def __init__(self):
        super().__init__()
        self.counts = {}
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))
"""


def build_alone(base: torch.nn.Module, choice: Strategy) -> ModelBuild:
    """A model that is planned in this process, as on rank 0, without other ranks."""
    place = choice.degrees.coordinate(0)
    return ModelBuild(base, choice, ParallelMesh(choice.degrees, 0, place, None), CPU)
