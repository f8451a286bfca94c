"""DeepSpeed takes model and optimizer over; numbers stay those of one process."""

import contextlib
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nbdist.errors import OptionError
from nbdist.parallel.base.mesh import build_mesh
from nbdist.parallel.base.transform import ModelBuild
from nbdist.parallel.dp import deepspeed
from nbdist.strategy.choice import Degrees, Options, Strategy
from tests.programs.parity import build_alone
from tests.programs.rank import n, rank, refusal
from tests.support.torch_ranks import NEEDS_DEEPSPEED, on_ranks


class Model(nn.Module):
    """With tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.rand(1) + 1)

    def forward(self, x, y):
        h = self.tokens(x)
        logits = self.head(h + self.body(h)) * self.scale
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, 64, (2, 8, 6), generator=generator)


class Alone:
    """A model with two groups and a scheduler in one process. The seed differs by rank."""

    def __init__(self, options: Options, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.options, self.model = options, Model()
        wide, flat = ([p for p in self.model.parameters() if (p.ndim > 1) == w] for w in (1, 0))
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: 1 / (1 + s))

    def backward(self, x: torch.Tensor, y: torch.Tensor, *, is_last: bool) -> float:
        loss = self.model(x, y)["loss"]
        (loss / self.options.accumulate).backward()
        return loss.item()

    def clip(self, max_norm: float) -> Any:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def state(self) -> dict[str, torch.Tensor]:
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: tensor.detach() for name, tensor in named}


class Under(Alone):
    """The same under DeepSpeed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Options(**options), rank)
        choice = Strategy("deepspeed", Degrees(dp_replicate=n), n, self.options)
        parallel_mesh = build_mesh(choice, "cpu")
        self.engine, same = deepspeed.prepare(
            self.model, self.optimizer, choice, parallel_mesh, torch.device("cpu")
        )
        assert same is self.optimizer
        assert self.engine.module is self.model

    def backward(self, x: torch.Tensor, y: torch.Tensor, *, is_last: bool) -> float:
        with contextlib.nullcontext() if is_last else deepspeed.no_sync(self.engine):
            output = self.engine(x.chunk(n)[rank], y.chunk(n)[rank])
            assert output["loss"].dtype is output["logits"].dtype is torch.float32
            deepspeed.backward(self.engine, output["loss"] / self.options.accumulate)
        loss = output["loss"].detach().clone()
        dist.all_reduce(loss)
        return loss.item() / n

    def clip(self, max_norm: float) -> Any:
        return deepspeed.clip(self.engine, max_norm)

    def step(self) -> None:
        assert deepspeed.step(self.engine)
        self.scheduler.step()

    def state(self) -> dict[str, torch.Tensor]:
        return deepspeed.full_state(self.engine)


def train(training: Alone, max_norm: float | None = None) -> torch.Tensor:
    """Losses of four steps, and norms where gradients are clipped."""
    numbers, accumulate = [], training.options.accumulate
    for step in range(4):
        pieces = [[t.chunk(accumulate)[k] for t in batch(step)] for k in range(accumulate)]
        losses = [training.backward(*p, is_last=p is pieces[-1]) for p in pieces]
        numbers.append(sum(losses) / accumulate)
        if max_norm:
            norm = float(training.clip(max_norm))
            assert norm > 2 * max_norm
            numbers.append(norm)
        training.step()
    return torch.tensor(numbers)


def compare(max_norm: float | None = None, **options: Any) -> None:
    """Losses, norms and parameters of DeepSpeed and of one process."""
    alone, under = Alone(Options(**options)), Under(**options)
    limit = 2e-2 if "precision" in options else 1e-6
    assert (train(under, max_norm) - train(alone, max_norm)).abs().max() < limit, options
    state, expected = under.state(), alone.state()
    under.engine.destroy()
    assert state.keys() == expected.keys()
    assert max((state[k] - expected[k]).abs().max() for k in state) < limit, options


def move(old: int, new: int, precision: str) -> None:
    """What an engine has, another one of another stage is given."""
    before = Under(stage=old, precision=precision)
    train(before)
    state = before.state()
    before.engine.destroy()
    after = Under(stage=new, precision=precision)
    deepspeed.load_full(after.engine, state)
    again = after.state()
    assert all(torch.equal(again[k], state[k]) for k in state), (old, new)
    model = Model()
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        losses = [each(*batch(9))["loss"].item() for each in (after.engine, model)]
    assert abs(losses[0] - losses[1]) < (2e-2 if precision == "bf16" else 1e-6), (old, new)
    after.engine.destroy()


@NEEDS_DEEPSPEED
@pytest.mark.timeout(300)
@on_ranks(2, limit_s=280.0)
def test_stages_and_offload_train_as_one_process() -> None:
    """Losses and parameters, with two groups, a scheduler, tied weights and clipping."""
    for stage in (1, 2, 3):
        compare(stage=stage)
        compare(stage=stage, accumulate=2)
        compare(stage=stage, max_norm=0.02)
        compare(stage=stage, offload="cpu")
        compare(stage=stage, precision="bf16")
    compare(stage=2, offload="cpu", accumulate=2, max_norm=0.02)
    compare(stage=3, offload="cpu", accumulate=2, max_norm=0.02)
    for stages_and_precision in ((1, 3, "fp32"), (3, 2, "fp32"), (2, 3, "bf16")):
        move(*stages_and_precision)
    offloaded = Under(stage=2, offload="cpu")
    train(offloaded)
    engine = offloaded.engine
    assert "--accumulate 2 or more" in refusal(deepspeed.no_sync(engine).__enter__)
    assert "not the 1-norm" in refusal(lambda: deepspeed.clip(engine, 1.0, norm_type=1))


def job(**options: Any) -> ModelBuild:
    choice = Strategy("deepspeed", Degrees(dp_replicate=2), 2, Options(**options))
    return build_alone(torch.nn.Linear(2, 2), choice)


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_a_missing_package_is_named_with_the_way_to_get_it() -> None:
    """Before a model is touched; so are strategies that need none."""
    with pytest.raises(OptionError, match=r"nbdist\[deepspeed\].*Or use zero1"):
        deepspeed.STEP.plan(job(), {})


@NEEDS_DEEPSPEED
def test_options_that_do_not_go_together_are_refused() -> None:
    """NVMe is for stage 3."""
    with pytest.raises(OptionError, match=r"stage 3 only, not in 2\. Use --stage 3, or --offload"):
        deepspeed.STEP.plan(job(stage=2, offload="nvme"), {})
    with pytest.raises(OptionError, match=r"no stage 4\. Use --stage 1, 2 or 3"):
        deepspeed.STEP.plan(job(stage=4), {})


def test_settings_leave_gradients_as_they_are() -> None:
    """DeepSpeed clips by itself unless it is told otherwise."""
    settings = deepspeed.config(job(stage=3, offload="cpu", accumulate=4).choice)

    assert settings["gradient_clipping"] == 0.0
    assert settings["gradient_accumulation_steps"] == 4
    assert settings["zero_optimization"]["offload_param"]["device"] == "cpu"
