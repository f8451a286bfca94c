"""One sequence on several ranks: attention in pieces, by ring or heads; the model called whole."""

import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbdist.errors import OptionError
from nbdist.parallel.base.transform import ModelBuild
from nbdist.parallel.cp import attention, cp, kernels, ulysses
from nbdist.parallel.sequence import split_sequence
from nbdist.strategy.choice import Degrees, Options, Strategy
from tests.programs.parity import FP32, build_alone, make
from tests.programs.rank import everyone, n, rank, refusal
from tests.programs.sequences import Model, apart, batch, loss, split
from tests.support.torch_ranks import on_ranks


def pieces_off(compute: Any, dtype: torch.dtype, n_keys: int, *, is_causal: bool) -> float:
    """How far a rank's piece of attention and of its gradients is from that of the whole."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, 32, 8), (2, n_keys, 32, 8), (2, n_keys, 32, 8), (2, 4, 32, 8)]
    q, k, v, grad = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    whole = F.scaled_dot_product_attention(*exact, is_causal=is_causal, enable_gqa=True)
    whole.backward(grad.double())
    pieces = [t.chunk(n, 2)[rank].clone().requires_grad_() for t in (q, k, v)]
    out = compute(kernels.Problem(*pieces, is_causal, 8**-0.5), dist.group.WORLD)
    out.backward(grad.chunk(n, 2)[rank])
    pairs = zip([out, *(t.grad for t in pieces)], [whole, *(t.grad for t in exact)], strict=True)
    return max((a - b.chunk(n, 2)[rank]).abs().max().item() for a, b in pairs)


def keyword(model, step):
    x, y = batch(step)
    return model(y=y, x=x)


def ignoring(model, step):
    """The first rank's targets of one row count, of the others half or none."""
    return model(*batch(step, ignored=[(0, 0, 13), (1, 2, 24), (2, 0, 24)]))


def by_hand(model, step):
    x, y = batch(step)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def near(errors: list[float]) -> None:
    assert max(errors) < FP32


def near_in_bf16(errors: list[float]) -> None:
    """A loss has steps of 0.016 at its size."""
    loss_off, gradient_off = errors
    assert loss_off < 4e-2
    assert gradient_off < 2e-3


def attends_and_trains() -> None:
    kinds = itertools.product((torch.float32, torch.bfloat16), (4, 2), (True, False))
    for dtype, n_keys, is_causal in kinds:
        for name, compute in attention.CONTEXTS.items():
            off = pieces_off(compute, dtype, n_keys, is_causal=is_causal)
            limit = FP32 if dtype == torch.float32 else 2e-2
            assert off < limit, (name, dtype, n_keys, is_causal)
    for context in ("ring", "ulysses"):
        near(apart(Model, context=context))
    near_in_bf16(apart(Model, precision="bf16"))
    near(apart(Model, ignoring))
    near(apart(Model, by_hand))


# Only from four ranks on is there one that is neither the first, the last nor a neighbour.
@on_ranks(4)
def test_a_model_trains_as_by_itself() -> None:
    """Attention, causal and full, fewer keys, fp32 and bf16; targets are ignored unevenly."""
    attends_and_trains()


@pytest.mark.parity
@on_ranks(2, 4)
def test_a_model_trains_as_by_itself_with_each_option() -> None:
    """Losses of two steps, and gradients."""
    attends_and_trains()
    for context, kind in itertools.product(("ring", "ulysses"), ("full", "selective", "2")):
        near(apart(Model, context=context, checkpoint=kind))
    near_in_bf16(apart(Model, context="ulysses", precision="bf16"))
    near(apart(Model, keyword))


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def llama(**given: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 64, **given}))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops))


def lfm2() -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["full_attention", "conv"]))


def jamba() -> Any:
    from transformers import JambaConfig, JambaForCausalLM

    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
    return JambaForCausalLM(
        JambaConfig(**SIZES, **layers, mamba_d_state=4, use_mamba_kernels=False)
    )


def inputs(step: int) -> dict[str, torch.Tensor]:
    x, _ = batch(step)
    labels = x.clone()
    labels[0, :15] = -100
    return {"input_ids": x, "labels": labels}


def loss_inside(model, step):
    return model(**inputs(step), attention_mask=torch.ones(4, 24, dtype=torch.long)).loss


def counted(model, step):
    return model(**inputs(step), num_items_in_batch=81).loss


@on_ranks(2, 4)
def test_models_of_transformers_need_no_change() -> None:
    """Labels are shifted over the borders of pieces, positions go on; outputs are whole."""
    every = [*itertools.product((llama, gpt2), ("ring", "ulysses"))]
    for build, context in every[1 : 3 if n == 2 else 4]:
        near(apart(build, loss_inside, context=context))
    near(apart(llama, counted))
    # Its values are float32 in a cache and bf16 without one.
    assert max(apart(llama, loss_inside, precision="bf16")) < 2e-2

    alone, model = make(llama).eval(), split(make(llama)).eval()
    with torch.no_grad():
        output, expected = model(**inputs(0)), alone(**inputs(0))
        last, last_expected = (
            m(inputs(0)["input_ids"], logits_to_keep=1).logits for m in (model, alone)
        )
    assert abs(output.loss - expected.loss) < FP32
    assert (output.logits - expected.logits).abs().max() < FP32
    assert (last - last_expected).abs().max() < FP32
    training = model.train()(**inputs(0))
    for each in (training, output, expected):
        assert type(each).__name__ == "CausalLMOutputWithPast"
    assert training.logits is None, "a part of the logits must not pass for all of them"
    what_transformers_cannot_split(model)


def what_transformers_cannot_split(model: Any) -> None:
    # Their weights at the start are too small for a difference of the outputs.
    sentence = refusal(lambda: loss_inside(split(make(lfm2)), 0))
    assert "outside of attention in model.layers.1.conv (Lfm2ShortConv)" in sentence
    if n == 4:
        sentence = refusal(lambda: loss_inside(split(make(jamba)), 0))
        assert "outside of attention in model.layers.0.mamba (JambaMamba" in sentence
    mask = torch.ones(4, 24, dtype=torch.long)
    mask[1, :3] = 0
    padded = refusal(lambda: model(**inputs(0), attention_mask=mask))
    assert "Leave it out where padding is at the end" in padded
    narrow, eager = make(llama), make(llama)
    narrow.config.sliding_window = 16
    eager.config._attn_implementation = "eager"
    sentence = refusal(lambda: split(narrow)(**inputs(0)))
    assert "sliding_window is 16, less than the sequence of 24" in sentence
    assert "attn_implementation='sdpa'" in refusal(lambda: split(eager)(**inputs(0)))


class Counts(Model):
    "Positions cannot be given."

    def forward(self, x, y=None):
        return super().forward(x, y)


class Mixes(Model):
    "A token also sees the one before, outside of attention."

    def forward(self, x, y=None, position_ids=None):
        return super().forward(x + F.pad(x, (1, 0))[:, :-1] % 7 % 2, y, position_ids)


class Shifts(Model):
    "Shifts labels itself."

    def forward(self, x, labels, position_ids=None):
        logits = super().forward(x, None, position_ids)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class Masked(Model):
    def forward(self, x, y=None, position_ids=None):
        h = self.tokens(x)[:, None]
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        return F.scaled_dot_product_attention(h, h, h, attn_mask=mask).mean()


class Pair(Model):
    "Logits and loss, as many write it."

    def forward(self, x, y=None, position_ids=None):
        logits = super().forward(x, None, position_ids)
        loss = None if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return {"logits": logits, "more": [(logits * 2, 7)], "loss": loss}


class Torch(nn.Module):
    "torch's own layers."

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 64)
        self.is_causal = True

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.tokens(x)
        h = self.body(h, mask, is_causal=True) if self.is_causal else self.body(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Regression(nn.Module):
    "Full attention, squared errors, given as a sum."

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x, y):
        h, _ = self.attention(x, x, x, need_weights=False)
        return F.mse_loss(h, y, reduction="sum") / 999 + F.l1_loss(h, y)


def full():
    model = Torch()
    model.is_causal = False
    return model


def vectors(model, step):
    x = torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(step))
    return model(x, x.flip(1))


def again(*, use_reentrant: bool) -> Model:
    """As users write it: what is computed again calls attention itself, outside of forward."""
    model = Model()
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    return model


@on_ranks(2, 4)
def test_models_of_other_kinds_are_right_or_refused() -> None:
    """Torch's own layers, full attention, recomputation; what cannot be split says why."""
    near(apart(Torch))
    near(apart(full))
    near(apart(Torch, context="ulysses"))
    near(apart(Regression, vectors))
    near(apart(Pair, lambda model, step: model(*batch(step))["loss"]))
    near(apart(functools.partial(again, use_reentrant=False)))
    near(apart(functools.partial(again, use_reentrant=True), context="ulysses"))
    what_comes_whole()
    what_is_refused()


def what_comes_whole() -> None:
    """What is computed without gradients, as often as not by each rank alone."""
    x, y = batch(9)
    for kind, at in itertools.product((Pair, Counts, Mixes, Masked), (slice(None), slice(23))):
        alone, model = make(kind), split(make(kind))
        with torch.no_grad():
            outputs = [split_sequence.tensors(m(x[:, at], y[:, at])) for m in (model, alone)]
        for a, b in zip(*outputs, strict=True):
            assert (a - b).abs().max() < FP32, kind
    model = split(make(Pair))
    model.eval()
    output = model(x, y)
    assert (output["logits"] - make(Pair)(x, y)["logits"]).abs().max() < FP32
    assert output["more"][0][1] == 7
    training = split(make(Pair))(x, y)
    assert training["logits"] is training["more"][0][0] is None


def what_is_refused() -> None:
    x, y = batch(9)
    below = 23 - 23 % n
    length = f"23 % {n} = {23 % n}). Cut or pad it to {below} or 24"
    for text, call in {
        "Let forward take `position_ids`": lambda: loss(split(make(Counts)), 0),
        "more than 1e-03": lambda: loss(split(make(Mixes)), 0),
        "Shift labels before the call": lambda: loss(split(make(Shifts)), 0),
        "is_causal=True is the causal one": lambda: loss(split(make(Masked)), 0),
        "asks for 0.1. Set its attention dropout to 0": lambda: loss(
            split(make(Model, dropout=0.1)), 0
        ),
        length: lambda: split(make(Model))(x[:, :23], y[:, :23]),
        "no sequence to split": lambda: split(make(Model))(x[0]),
        "Leave --compile out": lambda: split(make(Model), is_compiled=True),
    }.items():
        assert text in refusal(call)


class Small(Model):
    "A branch behind the attention of each block, times gamma."

    def __init__(self, branch, gamma):
        super().__init__()
        self.branches = nn.ModuleList([branch() for _ in self.blocks])
        self.gamma = nn.Parameter(torch.full((32,), gamma))
        for block, own in zip(self.blocks, self.branches, strict=True):
            block.register_forward_hook(lambda m, args, h, own=own: h + self.gamma * own(h))


class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.conv = width, nn.Conv1d(32, 32, width, groups=32)

    def forward(self, x):
        return self.conv(F.pad(x.transpose(1, 2), (self.width - 1, 0))).transpose(1, 2)


class Far(nn.Module):
    "Sees the position that is 16 before."

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 2, groups=32, dilation=16)

    def forward(self, x):
        return self.conv(F.pad(x.transpose(1, 2), (16, 0))).transpose(1, 2)


class Training(Conv):
    "Is there in training alone."

    def forward(self, x):
        return super().forward(x) if self.training else torch.zeros_like(x)


class Statistics(nn.BatchNorm1d):
    "Of all positions, in training."

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Ahead(nn.Module):
    "A gate that is closed by its bias: sigmoid(-40) of the next position."

    def forward(self, x):
        return (F.pad(x, (0, 0, 0, 1))[:, 1:] - 40).sigmoid() * x


class Experts(nn.Module):
    "Tokens are sorted by expert and put back: they do not see each other."

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 2)
        self.experts = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, expert = self.router(flat).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        parts = flat[order].split(torch.bincount(expert, minlength=2).tolist())
        out = torch.cat([run(part) for run, part in zip(self.experts, parts, strict=True)])
        return (torch.zeros_like(flat).index_copy(0, order, out) * weight[:, None]).view_as(x)


class Positions(Model):
    "Counts positions itself; their embedding begins at zero."

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.positions.weight)

    def forward(self, x, y=None):
        return super().forward(x, y)


class Last(nn.GRU):
    def forward(self, x):
        return super().forward(x.transpose(0, 1))[0].transpose(0, 1)


class Keeps(Model):
    "Keeps what the loop adds to the loss; its router begins at zero."

    def __init__(self, kind):
        super().__init__()
        self.kind, self.router, self.losses = kind, nn.Linear(32, 4), []
        nn.init.zeros_(self.router.weight)
        self.blocks[1].register_forward_hook(self.keep)
        self.register_buffer("calls", torch.zeros(()))

    def keep(self, block, args, h):
        self.calls += 1
        scores = self.router(h)
        balance = (scores.softmax(-1).mean((0, 1)) ** 2).sum()
        if self.kind == "list":
            self.losses.append(balance)
        elif self.kind != "training" or self.training:
            self.aux = scores.logsumexp(-1).pow(2).mean() if self.kind == "mean" else balance


def with_aux(model, step):
    loss, inner = model(*batch(step)), getattr(model, "base", model)
    side = sum(inner.losses) if inner.kind == "list" else inner.aux
    inner.losses.clear()
    return loss + 0.1 * side


def warned(kind: str) -> list[str]:
    """What two steps say; the trial leaves no trace in what the model counts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = split(make(functools.partial(Keeps, kind)))
        for step in range(2):
            with_aux(model, step).backward()
    assert model.base.calls == 2
    return [str(warning.message) for warning in caught]


BRANCHES: dict[Any, str] = {
    Ahead: "branches.0 (Ahead)",
    functools.partial(Last, 32, 32): "branches.0 (Last)",
    Far: "branches.0.conv (Conv1d)",
    functools.partial(Training, 3): "branches.0.conv (Conv1d)",
    functools.partial(Statistics, 32): "branches.0 (Statistics)",
    functools.partial(Conv, 3): "branches.0.conv (Conv1d)",
}


@on_ranks(2)
def test_what_is_small_at_the_start_is_refused_too() -> None:
    """Branches times zero, closed gates, positions of zeros, side losses of a router of zeros."""
    *_, conv = BRANCHES
    cases = [*((branch, 0.0) for branch in BRANCHES), (conv, 1e-3), (conv, 1.0)]
    for branch, gamma in cases:
        sentence = refusal(lambda: loss(split(make(Small, branch=branch, gamma=gamma)), 0))  # noqa: B023
        assert f"outside of attention in {BRANCHES[branch]}" in sentence, (branch, gamma)
    model = split(make(Small, branch=functools.partial(Statistics, 32), gamma=1.0))
    model.eval()
    loss(model, 0)  # the model is tried again when it trains
    model.train()
    assert "branches.0 (Statistics)" in refusal(lambda: loss(model, 0))
    assert "Let forward take `position_ids`" in refusal(lambda: loss(split(make(Positions)), 0))
    for branch, gamma in itertools.product((functools.partial(Conv, 1), Experts), (0.0, 1.0)):
        near(apart(functools.partial(Small, branch, gamma)))


@on_ranks(2)
def test_losses_beside_the_models_are_refused_or_right() -> None:
    """Those of a router whose weights are zero; a mean over the sequence is right."""
    for kind, name in (("balance", "aux"), ("list", "losses")):
        model = split(make(functools.partial(Keeps, kind)))
        sentence = refusal(lambda: with_aux(model, 0).backward())  # noqa: B023
        assert f"the loss uses {name}, which each rank computes" in sentence
        model(*batch(1)).backward()  # without it the model goes on
    near(apart(functools.partial(Keeps, "mean"), with_aux))
    (warning,) = warned("training")
    assert "The loss uses aux" in warning
    assert "was not compared" in warning
    assert warned("mean") == []


def job(base: torch.nn.Module, degree: int, context: str) -> ModelBuild:
    choice = Strategy(context, Degrees(cp=degree), degree, Options(context=context))
    return build_alone(base, choice)


def torchs_own() -> torch.nn.Module:
    return torch.nn.TransformerEncoderLayer(48, 6, 64)


def configured() -> torch.nn.Module:
    """As transformers' models say it."""
    model: Any = torch.nn.Linear(2, 2)
    model.config = type("Config", (), {"num_attention_heads": 6})()
    return model


@pytest.mark.parametrize("build", [torchs_own, configured])
def test_a_model_that_tells_its_heads_is_refused_before_anything_changes(build: Any) -> None:
    """With the degrees that divide them; ring attention has no such need."""
    base = build()
    with pytest.raises(OptionError, match=r"cp=4 .*6 heads .*\(6 % 4 = 2\)\. Use cp=1, 2, 3 or 6"):
        cp.STEP.plan(job(base, 4, "ulysses"), {})

    assert cp.STEP.plan(job(base, 3, "ulysses"), {}) == {}
    assert cp.STEP.plan(job(base, 4, "ring"), {}) == {}


def test_one_head_leaves_ring_attention() -> None:
    """There is no other degree to name."""
    with pytest.raises(OptionError, match=r"1 head is .* Use cp=1, or the strategy cp \(ring"):
        ulysses.check_heads(1, 2)


class Heads(nn.Module):
    def __init__(self, heads, dropout=0.0):
        super().__init__()
        self.mix, self.parts, self.dropout = nn.Linear(24, 72), heads, dropout

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.mix(x).view(b, t, 3, self.parts, -1).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2)


@on_ranks(2)
def test_what_only_forward_shows() -> None:
    """Heads that no attribute tells are found at the first call; dropout is each rank's own."""
    torch.manual_seed(0)
    uneven, even, x = Heads(3), Heads(4, 0.5), torch.randn(1, 64, 24)
    sentence = refusal(lambda: split(uneven, context="ulysses")(x))
    assert "3 heads are not divisible by 2 (3 % 2 = 1). Use cp=1 or 3" in sentence
    with torch.no_grad():
        alone = split(uneven, context="ulysses")(x)
        assert torch.equal(alone, uneven(x)), "without gradients each rank computes the whole"
        torch.manual_seed(rank)
        expected, model = even.eval()(x), split(even, context="ulysses")
        assert (model.eval()(x) - expected).abs().max() < FP32
        model.base.train()
        drawn = torch.stack([model(x) for _ in range(100)])
    # Weights are dropped, and the rest is scaled up: far from the whole, near it on average.
    assert (drawn.mean(0) - expected).abs().mean() < 0.2 * (drawn[0] - expected).abs().mean()
    assert len({*everyone(drawn.sum().item())}) == 1, "outputs are whole, and so the same"


def problem(device: str, dtype: torch.dtype, size: int, *, is_causal: bool) -> kernels.Problem:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 40, size, generator=generator) for _ in range(3))
    parts = (t.to(device, dtype) for t in (query, key, value))
    return kernels.Problem(*parts, is_causal, 0.3)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu(1), pytest.mark.parity])]
)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-6), (torch.bfloat16, 4e-2)])
def test_every_kernel_gives_what_the_plain_one_does(
    device: str, dtype: torch.dtype, limit: float, is_causal: bool
) -> None:
    """Output, log-sum-exp and, from those of more keys, gradients."""
    tried = problem(device, dtype, 16, is_causal=is_causal)
    grad = torch.randn(tried.query.shape, generator=torch.Generator().manual_seed(1))
    grad = grad.to(device, dtype)
    exact = kernels.PLAIN.forward(tried)
    # As if there were as many further keys, whose values are 0.
    joined = kernels.Attended((exact.out / 2).to(dtype), exact.lse + torch.tensor(2.0).log())
    expected = kernels.PLAIN.backward(tried, grad, joined)
    able = [k for k in kernels.KERNELS if k.device in ("", device) and k.fits(tried)]
    assert len(able) > 1

    for kernel in able:
        attended = kernel.forward(tried)
        grads = kernel.backward(tried, grad, joined)
        parts, wholes = (attended.out, attended.lse, *grads), (exact.out, exact.lse, *expected)
        for actual, wanted in zip(parts, wholes, strict=True):
            assert actual.shape == wanted.shape
            assert (actual.float() - wanted.float()).abs().max() < limit, kernel


def test_heads_that_a_kernel_does_not_take_get_the_plain_one() -> None:
    """Values of another size than queries have no flash kernel on the CPU."""
    usual = problem("cpu", torch.float32, 16, is_causal=True)
    other = kernels.Problem(usual.query, usual.key, usual.value[..., :5], is_causal=True, scale=1.0)

    assert kernels.choose(usual) is kernels.KERNELS[0]
    assert kernels.choose(other) is kernels.PLAIN
