"""Tensor parallelism: loss and every gradient as in one process, random numbers, errors."""

import copy
import functools
import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbdist.parallel.base import module_patches
from nbdist.parallel.base.transform import ModelBuild
from nbdist.parallel.live import build
from tests.programs import parity
from tests.programs.parity import CPU, apart, make, put
from tests.programs.rank import everyone, n, rank, refusal
from tests.support.torch_ranks import on_ranks
from tests.support.tp_models import MODELS, Block, Coder, Model, NanoAttention, Plain, batch

TOLERANCE = 2e-6
STILL = functools.partial(torch.optim.SGD, lr=0.0, foreach=False)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
SEQUENCE = {"has_sequence_parallel": True}


def loss_of(model: Any, step: int, cut: parity.Cut) -> torch.Tensor:
    return model(*map(cut, batch(step)))


def check(kind: str, *args: Any, optimizer: Any = STILL, steps: int = 1, **options: Any) -> None:
    """A model beside the same one in this process, in training and in evaluation."""
    alone, built = make(MODELS[kind]), put(make(MODELS[kind]), "tp", *args, **options)
    stepped = lambda model: optimizer(model.parameters())  # noqa: E731
    loss, gradient, _, relative = parity.train(built, alone, loss_of, stepped, steps)
    assert max(loss, gradient) <= TOLERANCE, (kind, options)
    assert relative <= 1e-4, (kind, options)
    alone.eval(), built.outer.eval()
    with torch.no_grad():
        (cut,) = parity.cuts(built, 1)
        value = loss_of(built.outer, 9, cut) / n
        dist.all_reduce(value)
        assert abs(loss_of(alone, 9, lambda tensor: tensor) - value) <= TOLERANCE, (kind, options)


LATER = ("biases", "length first", "qwen3", "bert")
SOON = tuple(name for name in MODELS if name not in LATER)


@pytest.mark.parametrize(
    ("names", "split"),
    [
        (SOON, ("decoder", "llama")),
        pytest.param(LATER, ("grouped", "nano", "length first", "gpt2"), marks=pytest.mark.parity),
    ],
    ids=["some", "others"],
)
@on_ranks(2)
def test_models_train_as_in_one_process(names: list[str], split: list[str]) -> None:
    """All shipped plans, some with sequence parallelism, in training and evaluation."""
    for name in names:
        check(name)
    for name in split:
        check(name, **SEQUENCE)


def dropped(kind: Any, **options: Any) -> tuple[list[str], list[str], list[float], int]:
    """Dropouts that drop alike on the ranks, and otherwise; losses; own masks. Seeds differ."""
    model = make(kind)
    torch.manual_seed(100 + rank)
    outer = put(model, "tp", **options).outer.train()
    masks = []

    def see(_module, _args, out, name):
        masks.append((name, zlib.crc32(out.detach().ne(0).numpy().tobytes())))

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(functools.partial(see, name=name))
    optimizer = torch.optim.SGD(outer.parameters(), 0.1)
    losses = []
    before = torch.get_rng_state()
    for step in range(2):
        loss = outer(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    streams = everyone((not torch.equal(before, torch.get_rng_state()), torch.rand(()).item()))
    assert streams[0] != streams[1]
    assert everyone(losses) == [losses] * n
    pairs = [*zip(*everyone(masks), strict=True)]
    alike = sorted({x[0] for x, y in pairs if x == y})
    return alike, sorted({x[0] for x, y in pairs if x != y}), losses, len({m for _, m in masks})


def dropping() -> Model:
    return Model(lambda: Block(NanoAttention(0.2), Plain(0.2), nn.LayerNorm), dropout=0.2)


def dropouts_are_alike_where_activations_are() -> None:
    layers = [f"layers.{n}.{name}" for n in (0, 1) for name in ("attn.resid_dropout", "mlp.4")]
    between = ["layers.0.mlp.2", "layers.1.mlp.2"]
    alike, own, losses, n_masks = dropped(dropping)
    assert (alike, own) == (["drop", *layers], between)
    assert n_masks == 2 * 7  # a mask of its own for each call
    # Activations that are computed again drop what they dropped: the same losses, step by step.
    assert dropped(dropping, checkpoint="full")[:3] == (["drop", *layers], between, losses)
    assert dropped(dropping, **SEQUENCE)[:2] == (["drop"], sorted([*layers, *between]))
    own = dropped(lambda: Coder(0.2))[1]
    assert own == [f"encoder.layers.{n}.dropout" for n in (0, 1)]


@on_ranks(2)
def test_optimizers_random_numbers_and_errors() -> None:
    """What a loop needs beside gradients, in one start of two ranks."""
    fused = functools.partial(ADAMW, fused=True)
    check("nano", optimizer=functools.partial(ADAMW, foreach=True), steps=2)
    check("nano", optimizer=fused, steps=2, **SEQUENCE)
    check("nano", checkpoint="full")
    dropouts_are_alike_where_activations_are()
    what_is_split_is_copied_planned_again_and_taken_off()
    surprises_are_refused()


def what_is_split_is_copied_planned_again_and_taken_off() -> None:
    plain = make(MODELS["nano"])
    built = put(plain, "tp")
    assert plain.layers[0].attn.n_head == 2
    words, labels = batch()
    assert copy.deepcopy(built.outer)(words, labels) == built.outer(words, labels)
    assert all(p.requires_grad for p in plain.parameters())
    assert plain.head.weight is plain.emb.weight
    # Planned again from what the model is without it.
    with build.bare(built):
        again = build.plan(ModelBuild(plain, built.job.choice, built.job.mesh, CPU))
    assert again.layouts == built.layouts
    outside = refusal(lambda: built.outer(words + 257, labels), IndexError)
    assert "out of range" in outside
    module_patches.revert(built.changes)
    assert plain.layers[0].attn.n_head == 4
    long = put(make(MODELS["nano"]), "tp", **SEQUENCE).outer
    uneven = refusal(lambda: long(*batch(0, 7)))
    assert "a sequence of 7 cannot be split over tp=2" in uneven
    long(*batch(0, 6))


class Noisy(Plain):
    is_noisy = False

    def forward(self, x):
        x = super().forward(x)
        return x + torch.randn_like(x) if Noisy.is_noisy else x


def surprises_are_refused() -> None:
    """Random numbers that were not drawn before; a call again is alike on all ranks."""
    torch.manual_seed(rank)
    noisy = put(Model(lambda: Block(NanoAttention(), Noisy())), "tp").outer
    noisy(*batch())
    Noisy.is_noisy = True
    assert "Run it again" in refusal(lambda: noisy(*batch()))
    assert len({*everyone(noisy(*batch()).item())}) == 1


W, H = 32, 4


class Only(nn.Module):
    def __init__(self, call: Any, **more: Any) -> None:
        super().__init__()
        self.mha, self.call = nn.MultiheadAttention(W, H, **more), call

    def forward(self, *arguments):
        return self.call(self.mha, *arguments)


def attends_alike(
    inputs: list[torch.Tensor], call: Any, *, first: bool = True, **more: Any
) -> None:
    """Results, weights and gradients, in training and in evaluation."""
    build_ = functools.partial(Only, call, batch_first=first, **more)
    whole, split = make(build_), put(make(build_), "tp")
    for is_training in (True, False):
        whole.train(is_training), split.outer.train(is_training)
        outcomes = []
        for model in (whole, split.outer):
            leaves = [x.clone().requires_grad_(is_training) for x in inputs]
            with torch.set_grad_enabled(is_training):
                result, weights = model(*leaves)
            if is_training:
                weights_sum = 0 if weights is None else weights[..., 0].sum()
                (result.pow(2).sum() + weights_sum).backward()
            tensors = [result, weights, *(x.grad for x in leaves)]
            outcomes.append([x.detach() for x in tensors if x is not None])
        for a, b in zip(*outcomes, strict=True):
            assert (a - b).abs().max() <= TOLERANCE
    gradient, relative = apart(split, whole)
    assert gradient <= 5e-6  # of sums, not of means: larger numbers
    assert relative <= 1e-4


@on_ranks(2)
def test_torchs_attention_is_the_same_on_own_heads() -> None:
    """Weights told, masks of each kind, other widths of keys, without batch; no fast path."""
    torch.manual_seed(1)
    x, y = torch.randn(3, 5, W), torch.randn(3, 7, W)
    narrow = torch.randn(3, 7, 12)
    masked = {"attn_mask": torch.triu(torch.ones(5, 5, dtype=torch.bool), 1), "is_causal": True}
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    padded, each = {"key_padding_mask": padding}, torch.randn(3 * H, 5, 7)
    bare = {"need_weights": False}
    attends_alike([x], lambda m, x: m(x, x, x))
    attends_alike([x], lambda m, x: m(x, x, x, average_attn_weights=False))
    attends_alike([x], lambda m, x: m(x, x, x, **masked, **bare))
    attends_alike([x, y], lambda m, x, y: m(x, y, y, **padded, **bare))
    attends_alike([x, y], lambda m, x, y: m(x, y, y, attn_mask=each))
    attends_alike([x, narrow], lambda m, x, y: m(x, y, y), kdim=12, vdim=12, bias=False)
    attends_alike([x], lambda m, x: m(x, x, x), first=False)
    attends_alike([x[0]], lambda m, x: m(x, x, x), first=False)
    # The encoder's own fast path in C++ would take the ranks' parts for the whole.
    layer = make(lambda: nn.TransformerEncoderLayer(W, H, 64, batch_first=True, dropout=0.0))
    whole = nn.TransformerEncoder(layer, 2).eval()
    split = put(copy.deepcopy(whole), "tp").outer.eval()
    with torch.no_grad():
        a, b = (m(y, src_key_padding_mask=padding)[~padding] for m in (whole, split))
    assert (a - b).abs().max() <= TOLERANCE


TP, SHARDED, STAGED = {"tp": 4}, {"dp_shard": 2, "tp": 2}, {"pp": 2, "tp": 2}
PIECES = {"microbatches": 2}


@pytest.mark.parity
@pytest.mark.parametrize(
    ("names", "degrees", "options"),
    [
        ("biases, nano, flat, encoder, length first, decoder, gpt2", TP, {}),
        ("biases, nano, encoder, length first, decoder, gpt2", TP, SEQUENCE),
        ("grouped, nano, encoder, llama", SHARDED, {}),
        ("grouped, nano, encoder, length first, qwen3", SHARDED, SEQUENCE),
        ("nano, encoder", STAGED, PIECES),
        ("grouped, encoder", STAGED, {**PIECES, **SEQUENCE}),
    ],
)
@on_ranks(4)
def test_four_ranks(names: str, degrees: dict[str, int], options: dict[str, Any]) -> None:
    """tp at four, with FSDP and in a pipeline, sequence parallelism in each; uneven vocabulary."""
    for name in names.split(", "):
        check(name, degrees, **options)
    for more in ("foreach", "fused") if degrees == SHARDED and not options else ():
        check("nano", degrees, optimizer=functools.partial(ADAMW, **{more: True}), steps=3)
