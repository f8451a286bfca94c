"""A small model, how it is prepared, and a step of it that is verified.

What is prepared are names of the user's: accelerator, model, optimizer, loader.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.base.tensors import digest, local_of
from nbdist.parallel.live import registry
from nbdist.verification.rank.verify import verify
from nbdist.verification.verdict import StepRequest, Verification
from tests.programs.experts import Mixture
from tests.programs.rank import rank, user
from tests.programs.training import Attention, use

WORDS = 24
STEP = StepRequest(code="typed()")


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention, self.dropout = Attention(16, 4), nn.Dropout(drop)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Net(nn.Module):
    """Others below it change what is prepared here."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, 16), nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, WORDS, bias=False)

    def forward(self, tokens, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])[None]
        x = self.embed(tokens) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MixedNet(Net):
    ep_plan = {"blocks.*.down.experts": "experts"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = nn.Identity(), Mixture(16)


class WithLoss(Net):
    def forward(self, tokens, labels=None):
        logits = super().forward(tokens)
        return logits if labels is None else loss_of(logits, labels)


class WithBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm1d(16))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


class SortedExperts(nn.Module):
    """Tokens go to one expert each, sorted as transformers sorts them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.act = nn.Linear(16, 3), nn.GELU()
        self.up = nn.Parameter(torch.randn(3, 16, 16) / 4)
        self.down = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        rows = x.flatten(0, -2)
        weight, expert = self.gate(rows).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        up = torch.einsum("ns,nst->nt", rows[order], self.up[expert[order]])
        parts = self.act(up).split(expert.bincount(minlength=3).tolist())
        out = torch.cat([down(part) for down, part in zip(self.down, parts, strict=True)])
        return (out[order.argsort()] * weight[:, None]).view_as(x)


class WithExperts(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = SortedExperts(), nn.Identity()


class Sorted(Net):
    def forward(self, tokens):
        order = tokens[:, 0].argsort(stable=True)
        return super().forward(tokens[order])[order.argsort()]


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class WithAverage(Net):
    """Beside its head the mean of it over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(16, WORDS, bias=False).requires_grad_(requires_grad=False)
        self.average.load_state_dict(self.head.state_dict())


def start(name: str, kind: Callable[[], Net] = Net, **options: Any) -> None:
    """Prepare a model under a strategy; ranks' seeds differ afterwards."""
    use(name, **options)
    torch.manual_seed(0)
    user.accelerator, user.model = Accelerator(), kind()
    user.optimizer = torch.optim.AdamW(user.model.parameters(), lr=1e-2)
    data = torch.randint(WORDS, (64, 17), generator=torch.Generator().manual_seed(1))
    user.loader = DataLoader(TensorDataset(data), 4, shuffle=True)
    user.model, user.optimizer, user.loader = user.accelerator.prepare(
        user.model, user.optimizer, user.loader
    )
    torch.manual_seed(rank)


def unwrapped() -> Any:
    return user.accelerator.unwrap_model(user.model)


def strategy() -> str:
    """Another one while the step is made by one process."""
    return registry.current().name


def samples(seed: int, length: int = 17) -> torch.Tensor:
    return torch.randint(WORDS, (4, length), generator=torch.Generator().manual_seed(seed))


def loss_of(logits, tokens):
    return F.cross_entropy(logits.reshape(-1, WORDS), tokens.reshape(-1))


def step(  # noqa: PLR0913  # what bugs change
    *, clip: bool = True, call: Any = None, after_step: Any = None, after_backward: Any = None,
    batch: Any = None, backward: Any = None, ignore: int = 0, in_no_sync: bool = False,
    loss: Any = loss_of, n_steps: int = 0,
) -> None:  # fmt: skip
    """A step as people write it, of which a bug changes a part."""
    accelerator, model, optimizer = user.accelerator, user.model, user.optimizer
    n_steps = n_steps or accelerator.gradient_accumulation_steps
    drawn = (tokens for (tokens,), _ in zip(user.loader, range(n_steps), strict=False))
    for tokens in [batch()] if batch else drawn:
        labels = tokens[:, 1:].clone()
        labels[:, :ignore] = -100
        with accelerator.no_sync(model) if in_no_sync else accelerator.accumulate(model):
            if isinstance(unwrapped(), WithLoss):
                value = model(tokens[:, :-1], labels)
            else:
                value = loss((call or model)(tokens[:, :-1]), labels)
            (backward or accelerator.backward)(value)
            if after_backward:
                after_backward()
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if after_step:
                after_step()


def verified(request: StepRequest = STEP, **changes: Any) -> Verification:
    """Of a step with changes, which is `typed()`. Collective."""
    user.typed = functools.partial(step, **changes)
    return verify(request)


def reset() -> None:
    """What is prepared is gone."""
    user.model = user.optimizer = user.loader = user.accelerator = user.typed = None
    gc.collect()


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Parameters, moments, random numbers and the strategy are afterwards as they were."""
    before = _state()
    yield
    assert _state() == before


def _state() -> list[Any]:
    prepared = registry.prepared()[0]
    tensors = [local_of(p) for p in prepared.parameters.values() if not p.is_meta]
    states = getattr(user.optimizer, "optimizer", user.optimizer).state.values()
    moments = [local_of(v) for s in states for v in s.values() if isinstance(v, torch.Tensor)]
    drawn = torch.random.get_rng_state().sum().item()
    return [digest(tensors), digest(moments), drawn, registry.current()]


def check_right(verification: Verification) -> None:
    """No alarm, and every module and parameter was compared."""
    shown = replace(verification, rows=())
    assert shown.first is None, shown
    assert not shown.findings, shown
    assert not shown.not_compared, shown
    assert shown.n_steps == 1, shown
