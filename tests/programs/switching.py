"""A model, the same trained by one process, and the ranks' loop: no line of it names a strategy.

What a switch rebinds (model, optimizer, scheduler) are names of the user's.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nbdist.parallel.accelerator import prepare as live
from nbdist.parallel.live import registry
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import choose
from tests.programs.rank import n, rank, user

CLOSE = 2e-6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc1, self.fc2 = nn.Linear(8, 20), nn.Linear(20, 8)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((2,), 1.5))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)) * self.scale[0]
        return F.cross_entropy(logits[:, :-1].reshape(-1, 13), tokens[:, 1:].reshape(-1))


def tokens(step: int) -> torch.Tensor:
    return torch.randint(13, (16, 6), generator=torch.Generator().manual_seed(step))


def optimizer_for(model: nn.Module) -> tuple[Any, Any]:
    """With its scheduler."""
    large = [p for p in model.parameters() if p.dim() > 1]
    small = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)


def pick(name: str, **given: Any) -> Strategy:
    return choose(name, given, n, device_type="cpu", backend="gloo")


def fresh() -> None:
    """The user's model on this rank, not yet prepared, and the one process's."""
    gc.collect()
    gc.freeze()  # what torch brings is not looked at again and again
    torch.manual_seed(0)
    user.reference = Net()
    user.first = copy.deepcopy(user.reference.state_dict())
    user.alone, user.alone_scheduler = optimizer_for(user.reference)
    user.expected, user.losses = [], []
    torch.manual_seed(rank)  # rank 0's values are to win
    user.model = Net()  # before `base`: the first name counts
    user.base = user.model
    if rank == 0:
        user.model.load_state_dict(user.first)


def begin(name: str, **given: Any) -> None:
    registry.set_choice(pick(name, **given))
    user.model = live.prepare_model(user.model)
    user.optimizer, user.scheduler = optimizer_for(user.model)
    live.bind(user.optimizer)


def expect(count: int) -> None:
    """Train the one process so far."""
    while len(user.expected) < count:
        value = user.reference(tokens(len(user.expected)))
        value.backward()
        user.alone.step()
        user.alone_scheduler.step()
        user.alone.zero_grad()
        user.expected.append(value.item())


def own_part(batch: torch.Tensor) -> torch.Tensor:
    """This rank's, under the current strategy."""
    degrees = registry.current().degrees
    place = degrees.coordinate(rank)
    return batch.chunk(degrees.dp)[place.dp_replicate * degrees.dp_shard + place.dp_shard]


def train(steps: int) -> None:
    for _ in range(steps):
        value = user.model(own_part(tokens(len(user.losses))))
        value.backward()
        user.optimizer.step()
        user.scheduler.step()
        user.optimizer.zero_grad()
        mean = value.detach().clone()
        dist.all_reduce(mean)
        user.losses.append(mean.item() / n)


def worst() -> float:
    """The largest difference of a loss from that of one process."""
    expect(len(user.losses))
    return max(abs(a - b) for a, b in zip(user.losses, user.expected, strict=False))


def identities() -> list[int]:
    groups = user.optimizer.param_groups
    objects = [user.optimizer, user.scheduler, user.optimizer.state]
    return [*map(id, objects), *map(id, groups), *(id(g["params"]) for g in groups)]
