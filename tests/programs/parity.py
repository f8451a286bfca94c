"""A model under any strategy beside the same model in one process, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nbdist.parallel.base import mesh
from nbdist.parallel.base.tensors import local_of
from nbdist.parallel.base.transform import ModelBuild
from nbdist.parallel.dp import fsdp
from nbdist.parallel.live import build
from nbdist.strategy.choice import Degrees, Options, Strategy
from tests.programs.rank import n, rank

CPU = torch.device("cpu")
WIDTH, WORDS, LENGTH, GLOBAL = 10, 37, 6, 8
FP32 = 2e-6
"""How far numbers of a few steps in fp32 may be from those of one process."""

Cut = Callable[[torch.Tensor], torch.Tensor]
LossOf = Callable[[Any, int, Cut], torch.Tensor]
# What a strategy spans by itself, beside single, whose ranks do the same.
AXES = {"ddp": "dp_replicate", "zero1": "dp_replicate", "pp": "pp", "tp": "tp", "single": ""}
AXES |= {"ep": "dp_replicate", "fsdp": "dp_shard", "fsdp1": "dp_shard", "cp": "cp", "ulysses": "cp"}


class Block(nn.Module):
    """Sizes that 2 and 4 ranks divide with a rest, or not at all (gain: three numbers)."""

    def __init__(self, drop: float = 0.0) -> None:
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
    """A language model that returns its loss."""

    def __init__(self, depth: int = 3, *, is_tied: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        # As language models begin: torch's own 1.0 makes large logits, and rounding errors of them.
        nn.init.normal_(self.words.weight, std=0.1)
        self.layers = nn.ModuleList(Block(drop) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))
        if is_tied:
            self.head.weight = self.words.weight

    def hidden(self, tokens):
        h = self.words(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h * self.scale)

    def forward(self, tokens):
        logits = self.head(self.hidden(tokens[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make(kind: Callable[..., nn.Module] = LM, *, seed: int = 0, **given: Any) -> Any:
    """A model with the same values on all ranks."""
    torch.manual_seed(seed)
    return kind(**given)


def freeze(model: LM) -> LM:
    model.words.requires_grad_(requires_grad=False)
    model.layers[0].qkv.requires_grad_(requires_grad=False)
    return model


def batch(step: int, size: int = GLOBAL) -> torch.Tensor:
    """Tokens, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (size, LENGTH), generator=generator)


def loss_of(model: Any, step: int, cut: Cut) -> torch.Tensor:
    """The loss of the part of a step's batch that `cut` leaves."""
    return model(cut(batch(step)))


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Of a batch, under data parallelism."""
    return tensor.chunk(n)[rank]


def choose(name: str, degrees: Mapping[str, int] | None = None, **options: Any) -> Strategy:
    """A strategy on all ranks; nothing is asked that only a notebook's user is asked."""
    axis = AXES[name]
    spans = degrees or ({axis: n} if axis else {})
    context = {"cp": "ring", "ulysses": "ulysses"}.get(name, "")
    return Strategy(name, Degrees(**spans), n, Options(**{"context": context, **options}))


_meshes: dict[object, mesh.ParallelMesh] = {}


def job_of(base: nn.Module, choice: Strategy, accelerator: Any = None) -> ModelBuild:
    key = (choice.name == "single", choice.degrees)
    parallel_mesh = _meshes[key] if key in _meshes else mesh.build_mesh(choice, "cpu")
    _meshes[key] = parallel_mesh
    job = ModelBuild(base, choice, parallel_mesh, CPU)
    job.accelerator = accelerator
    return job


def build_alone(base: nn.Module, choice: Strategy) -> ModelBuild:
    """A model that is planned in this process, as on rank 0, without other ranks."""
    place = choice.degrees.coordinate(0)
    return ModelBuild(base, choice, mesh.ParallelMesh(choice.degrees, 0, place, None), CPU)


def put(base: nn.Module, name: str, *args: Any, accelerator: Any = None, **options: Any) -> Any:
    """A model under a strategy, with values that are equal on all ranks: `.outer` is called."""
    built = build.plan(job_of(base, choose(name, *args, **options), accelerator))
    build.commit(built, {k: p for k, p in parts_of(built, build.tensors_of(base)) if p is not None})
    return built


def parts_of(built: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """This rank's part of each of a model's whole tensors, by name; None where it has none."""
    for name, layout in built.layouts.items():
        if name in tensors:
            part = build.part_of(tensors[name].detach(), layout, built.job.mesh.degrees, rank)
            yield name, None if part is None else part.clone()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of those that have one; each lies as its parameter does."""
    held = {name: p for name, p in model.named_parameters() if p.grad is not None}
    for name, p in held.items():
        assert getattr(p.grad, "placements", None) == getattr(p, "placements", None), name
    return {name: p.grad for name, p in held.items() if p.grad is not None}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def apart(built: Any, alone: nn.Module, what: Callable[[Any], Any] = gradients) -> list[float]:
    """The largest difference of this rank's parts to a whole model's; and by its largest number.

    Some are nothing but rounding: a bias of keys moves all of a query's scores alike.
    """
    whole, base = what(alone), built.job.base
    flat = getattr(type(built.outer), "summon_full_params", None)
    with flat(built.outer, with_grads=True) if flat else contextlib.nullcontext():
        own = {build.own_name(name): tensor for name, tensor in what(base).items()}
        wanted = whole.items() if flat else parts_of(built, whole)
        wanted = {name: part for name, part in wanted if part is not None}
        empty = {name for name, part in wanted.items() if not part.numel()}
        present = {name for name, tensor in own.items() if not tensor.is_meta}
        assert present - empty == wanted.keys() - empty, present ^ wanted.keys()
        off = {k: (local_of(own[k]) - wanted[k]).abs().max().item() for k in present - empty}
    sizes = {name: max(whole[name].abs().max().item(), 1e-3) for name in off}
    return [max(off.values()), max(off[name] / sizes[name] for name in off)]


def no_sync(built: Any) -> Any:
    """The block in which gradients only add up."""
    if built.job.choice.name == "fsdp":
        return fsdp.no_sync(built.outer)
    return getattr(built.outer, "no_sync", contextlib.nullcontext)()


def cuts(built: Any, accumulate: int) -> list[Cut]:
    """How a batch becomes this rank's pieces."""
    degrees, place = built.job.mesh.degrees, built.job.mesh.coordinate
    at = place.dp_replicate * degrees.dp_shard + place.dp_shard
    return [
        lambda t, number=number: t.chunk(degrees.dp)[at].chunk(accumulate)[number]
        for number in range(accumulate)
    ]


def train_step(built: Any, step: int, loss_of: LossOf, accumulate: int, scale: float) -> float:
    """Forwards and backwards of a step; the mean of the ranks' losses."""
    mean = torch.zeros((), dtype=torch.float64)
    for number, cut in enumerate(cuts(built, accumulate), 1):
        with contextlib.nullcontext() if number == accumulate else no_sync(built):
            loss = loss_of(built.outer, step, cut) / accumulate
            (loss * scale).backward()
        mean += loss.detach() / n
    dist.all_reduce(mean)
    for p in built.job.base.parameters() if scale != 1.0 else ():
        if p.grad is not None:
            p.grad.div_(scale)
    return mean.item()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(
    built: Any,
    alone: nn.Module,
    loss_of: LossOf = loss_of,
    optimizer: Any = adamw,
    steps: int = 3,
    half: bool = False,
) -> list[float]:
    """How far losses, gradients, what is trained, and gradients by size are from one process.

    Args:
        built: The model under its strategy.
        alone: The same by itself.
        loss_of: Of a model, a step's number and what cuts a rank's piece out of a batch.
        optimizer: Of the model that is given.
        steps: Of training.
        half: The one process computes in bf16 as well.
    """
    options = built.job.choice.options
    scale = 1024.0 if options.precision == "fp16" else 1.0
    steppers = optimizer(alone), optimizer(built.job.base)
    losses, off = [], []
    for step in range(steps):
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            wanted = loss_of(alone, step, lambda tensor: tensor)
        wanted.backward()
        torch.manual_seed(step)
        loss = train_step(built, step, loss_of, options.accumulate, scale)
        losses.append(abs(loss - wanted.item()))
        off.append(apart(built, alone))
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
    gradients, by_size = map(max, zip(*off, strict=True))
    return [max(losses), gradients, apart(built, alone, values)[0], by_size]


def compare(
    name: str, *args: Any, build: Callable[[], Any] = make, loss_of: LossOf = loss_of,
    optimizer: Any = adamw, steps: int = 3, half: bool = False, **options: Any,
) -> list[float]:  # fmt: skip
    """What `train` says of a model under a strategy (a name, degrees if need be, options)."""
    built = put(build(), name, *args, **options)
    return train(built, build(), loss_of, optimizer, steps, half)


def close(differences: Mapping[str, list[float]], limit: float = FP32) -> None:
    """Every comparison: losses, gradients, parameters."""
    far = {name: each for name, each in differences.items() if not max(each[:3]) < limit}
    assert not far, far


class Counted(TorchDispatchMode):
    """How often each op of torch runs, by its name; in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))
