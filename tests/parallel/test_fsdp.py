"""FSDP2 and FSDP1 against one process at the same global batch; what they split and send."""

import contextlib
import io
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.dp import fsdp
from nbdist.parallel.live import registry
from nbdist.parallel.optimizers import rules
from nbdist.strategy.choose import choose
from tests.programs import parity
from tests.programs.parity import FP32, batch, close, compare, freeze, make, own_part, put
from tests.programs.rank import everyone, n, rank, refusal
from tests.support.torch_ranks import on_ranks

# Loss against fp32 of one process: what plain torch differs by, too.
HALF = {"bf16": 1.4e-3, "fp16": 1.2e-4}


def half(name: str, kind: str, **options: Any) -> None:
    """The loss in half precision is near to that in fp32."""
    parity.LENGTH = 65

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    loss, *_ = compare(name, optimizer=adamw, precision=kind, **options)
    assert loss < HALF[kind], (name, kind, options)


@on_ranks(2)
def test_it_trains_as_one_process() -> None:
    """Loss, gradients and three AdamW steps; uneven, tied and frozen parameters; no block list."""
    close(
        {
            "full": compare("fsdp"),
            "grad-op": compare("fsdp", shard="grad-op"),
            "frozen": compare("fsdp", build=lambda: freeze(make())),
            "accumulated": compare("fsdp", accumulate=2),
            "offload": compare("fsdp", offload="cpu"),
            "no blocks": compare("fsdp", build=lambda: make(depth=1)),
            "fsdp1": compare("fsdp1", accumulate=2),
        }
    )
    half("fsdp", "bf16")
    half("fsdp1", "fp16")


@pytest.mark.parity
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shard", ["full", "grad-op", "hybrid"])
@on_ranks(2, 4, limit_s=280.0)  # 22 trainings, on up to two ranks for each core
def test_every_combination_trains_as_one_process(shard: str) -> None:
    """What is split, times checkpointing, accumulation, offload and precision; pieces of 0."""
    if (n, shard) == (2, "hybrid"):
        return  # nothing to split beside the copies
    copies = 2 if shard == "hybrid" else 1
    over = {"dp_replicate": copies, "dp_shard": n // copies}
    options: dict[str, Any] = {"shard": shard}
    for checkpoint, accumulate, offload in itertools.product(
        ("", "full", "selective", "2"), (1, 2), ("", "cpu")
    ):
        build = (lambda: freeze(make())) if accumulate == 2 else make
        more = {"checkpoint": checkpoint, "accumulate": accumulate, "offload": offload}
        close({str(more): compare("fsdp", over, build=build, **options, **more)})
    close({"untied": compare("fsdp", over, build=lambda: make(is_tied=False), **options)})
    for accumulate in (1, 2):
        close({"fsdp1": compare("fsdp1", over, accumulate=accumulate, **options)})
    for name, checkpoint, kind in itertools.product(("fsdp", "fsdp1"), ("", "selective"), HALF):
        half(name, kind, checkpoint=checkpoint, degrees=over, **options)


def sent(accumulate: int = 1, **options: Any) -> list[Any]:
    """Collectives of one step, by name, and when a gradient is there."""
    base = make()
    outer = put(base, "fsdp", **options).outer
    outer(own_part(batch(9)))  # torch sets itself up
    fsdp.settle(base)
    there = []
    with parity.Counted() as mode:
        for number, piece in enumerate(own_part(batch(0)).chunk(accumulate), 1):
            with contextlib.nullcontext() if number == accumulate else fsdp.no_sync(outer):
                outer(piece).backward()
            there.append(base.head.weight.grad is not None)
    return [mode.counts.get("_allgather_base_"), mode.counts.get("_reduce_scatter_base_"), there]


@on_ranks(2)
def test_it_splits_gathers_and_reduces_by_block() -> None:
    """Pieces by torch.chunk; collectives are counted; the modules stay as they are."""
    base = make()
    before = [id(base), id(base.layers[1]), [name for name, _ in base.named_parameters()]]
    built = put(base, "fsdp")
    split = {name: list(p.to_local().shape) for name, p in base.named_parameters()}
    assert split["words.weight"] == [[19, 10], [18, 10]][rank]
    assert split["layers.2.gain"] == [[2], [1]][rank]
    assert built.outer is base
    assert before == [id(base), id(base.layers[1]), list(split)]
    assert base.head.weight is base.words.weight
    assert base.scale.shape == (10,)
    assert built.job.step_data["notes"] == []

    # Three blocks and the root, each gathered for its forward and again for its backward.
    assert sent() == [8, 4, [True]]
    assert sent(accumulate=2) == [16, 4, [False, True]]
    assert sent(shard="grad-op") == [4, 4, [True]]
    looked = make()
    put(looked, "fsdp", shard="grad-op")
    looked(batch(0))
    assert {type(p.data).__name__ for p in looked.parameters()} == {"Tensor"}
    fsdp.settle(looked)
    assert {type(p.data).__name__ for p in looked.parameters()} == {"DTensor"}


class Norms(nn.Module):
    """Batch norms keep fp32 statistics; here is no list of blocks and no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(),
            nn.Conv1d(6, 6, 3), nn.GroupNorm(2, 6), nn.PReLU(),
        )  # fmt: skip
        self.head = nn.Linear(6, 1)
        self.register_buffer("mean", torch.ones(6, 1))

    def forward(self, x):
        return self.head((self.layers(x) * self.mean).mean(-1)).square().mean()


@on_ranks(2)
def test_bf16_is_inside_and_fp32_outside() -> None:
    """Also where a model has no list of blocks, which is noted."""
    lower, inside = make(), []
    put(lower, "fsdp", precision="bf16", offload="cpu")
    mlp = lower.layers[1].mlp
    mlp[1].register_forward_pre_hook(lambda _, args: inside.extend([args[0], mlp[0].weight]))
    loss = lower(own_part(batch(0)))
    loss.backward()
    assert [tensor.dtype for tensor in inside] == [torch.bfloat16] * 2
    held = lower.head.weight
    assert loss.dtype == held.dtype == held.grad.dtype == torch.float32
    assert held.to_local().device.type == "cpu"

    norms = make(Norms)
    x = torch.randn(8, 2, 12, generator=torch.Generator().manual_seed(0))
    alone = make(Norms)(x)
    built = put(norms, "fsdp", precision="bf16")
    loss = norms(x)
    loss.backward()
    assert abs(loss - alone) < 1e-2
    assert norms.layers[1].weight.grad.to_local().numel() == 3
    assert "Norms has no list of blocks" in built.job.step_data["notes"][0]


def off_after(look: Any, shard: str) -> float:
    """Largest difference from one process, of an optimizer that is made after a look at a model."""
    alone, base = make(), make()
    outer = put(base, "fsdp", shard=shard).outer
    _kept = look(outer)
    for model in (alone, base):
        model.words.requires_grad_(requires_grad=False)
        with torch.no_grad():
            model.head.weight.mul_(2.0)
    steppers = [torch.optim.SGD(model.parameters(), 0.5) for model in (base, alone)]
    for number in range(2):
        outer(own_part(batch(number))).backward()
        alone(batch(number)).backward()
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
    whole = {name: p.full_tensor() for name, p in base.named_parameters()}
    return max((whole[name] - p).abs().max().item() for name, p in alone.named_parameters())


def evaluate(outer):
    with torch.no_grad():
        return outer(batch(0))


def drop(outer):
    outer(batch(0))


def keep(outer):
    return outer(batch(0))


def keep_on_one(outer):
    return outer(batch(0)) if rank == 0 else outer(batch(0)).item()


def fail(outer):
    hook = outer.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        outer(batch(0))
    hook.remove()


class Scaled(nn.Module):
    """Returns parameters themselves: one of the root, one of a block in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 3.0))
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"out": x, "scales": [self.scale, self.scale[1:]]}


@on_ranks(2)
def test_what_is_gathered_goes_back_where_no_backward_follows() -> None:
    """What is frozen, changed or optimized after a look counts, as in one process.

    A parameter that a forward returns stays whole: its gradient is the mean over the ranks.
    """
    for look in (evaluate, fail):
        assert off_after(look, "grad-op") < FP32, look
    for look in (evaluate, drop, keep, keep_on_one, fail):
        assert off_after(look, "full") < FP32, look

    scaled = make(Scaled)
    outer = put(scaled, "fsdp").outer
    with torch.no_grad():
        assert outer(torch.ones(1, 2))["scales"][1].tolist() == [3.0] * 3
    out = outer(torch.ones(1, 2))
    (out["out"].sum() * 0 + out["scales"][0].sum() * (rank + 1)).backward()
    assert scaled.scale.grad.full_tensor().tolist() == [1.5] * 4


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([parity.Block(), parity.Block()])
        self.right = nn.ModuleList([parity.Block(), parity.Block()])


class Shared(parity.LM):
    """The same block twice, a parameter of two blocks, and one of a block and the root."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.layers.append(self.layers[0])
        self.layers[2].norm = self.layers[1].norm
        self.norm.weight = self.layers[3].norm.weight


def refused(text: str, base: nn.Module, name: str = "fsdp", **options: Any) -> None:
    """Before anything changes, and in the same words on all ranks."""
    before = dict(base.named_parameters())
    sentence = refusal(lambda: put(base, name, **options))
    assert text in sentence
    assert everyone(sentence) == [sentence] * n
    assert all(p is before[name] for name, p in base.named_parameters())


@on_ranks(2)
def test_what_cannot_be_split_is_refused_by_name() -> None:
    """Before anything changes; parameters that blocks share stay one parameter."""
    scalar, mixed = make(), make()
    scalar.temperature = nn.Parameter(torch.tensor(1.0))
    mixed.layers[1].out.to(torch.bfloat16)
    refused("cannot split temperature", scalar)
    refused("fsdp1 cannot split temperature", scalar, "fsdp1")
    refused("layers.1.gain is torch.float32", mixed)
    refused("layers.1.out.weight is torch.bfloat16", mixed)
    refused("does not offload to nvme", make(), offload="nvme")
    refused("Use fsdp.", make(), "fsdp1", offload="cpu")
    refused("layers (3 x Block)", make(), blocks="words")
    refused("left (2 x Block), right (2 x Block)", Towers())

    job = parity.job_of(make(Shared), parity.choose("fsdp"))
    assert list(fsdp.units_of(job)) == [job.base.layers[0]]
    close({"shared": compare("fsdp", build=lambda: make(Shared))})


class Lamb(torch.optim.AdamW):
    """Of which nobody knows what it looks at."""


@on_ranks(2)
def test_optimizers_of_whole_tensors_are_refused_where_parameters_are_flat() -> None:
    """Torch's by name; another one is named once, however often it is prepared; AdamW is silent."""
    registry.set_choice(choose("fsdp1", {}, n))
    accelerator = Accelerator()
    model = accelerator.prepare(make())
    muon = torch.optim.Muon([torch.ones(2, 2, requires_grad=True)])
    lines = io.StringIO()
    with contextlib.redirect_stderr(lines):
        lamb = accelerator.prepare(Lamb(model.parameters()))
        accelerator.prepare(lamb)
        accelerator.prepare(torch.optim.AdamW(model.parameters()))
    adafactor = torch.optim.Adafactor(model.parameters())
    sentence = refusal(lambda: accelerator.prepare(adafactor))

    assert sentence.startswith("Adafactor takes norms of rows, columns and whole matrices")
    assert "Muon looks at whole matrices" in refusal(
        lambda: rules.check(muon, registry.current(), ())
    )
    assert lines.getvalue().count("under fsdp1 Lamb gets this rank's pieces") == 1
    assert "AdamW" not in lines.getvalue()
