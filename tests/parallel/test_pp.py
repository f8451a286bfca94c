"""A pipeline against one process at the same global batch: losses, gradients, outputs, errors."""

import functools
import itertools
import math
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nbdist.errors import OptionError
from nbdist.hang.rank import process_groups
from nbdist.parallel.pp import partition
from nbdist.strategy.choice import Degrees, Options, Strategy
from nbdist.strategy.tensor_layout import TensorLayout
from tests.programs import parity
from tests.programs.parity import (
    FP32,
    WIDTH,
    WORDS,
    apart,
    batch,
    build_alone,
    close,
    compare,
    make,
    put,
    train,
)
from tests.programs.rank import broken_off, everyone, n, rank, refusal, say, wait_for
from tests.support.torch_ranks import on_ranks


class Plain(nn.Module):
    """Each parameter is used once, so zero bubble can run its backward in two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 23), nn.GELU(), nn.Linear(23, WIDTH))

    def forward(self, x):
        h = self.mix(self.norm(x))
        return x + self.mlp(x + h.cumsum(1) / h.shape[1])


def plain(model):
    torch.manual_seed(3)
    for position in range(len(model.layers)):
        model.layers[position] = Plain()
    return model


def own_bias(model):
    model.head.bias = nn.Parameter(torch.zeros(WORDS))
    return model


def frozen(model):
    for part in (model.words, model.layers[0]):
        part.requires_grad_(requires_grad=False)
    return model


@on_ranks(2)
def test_it_trains_as_one_process() -> None:
    """Every schedule: losses, each stage's gradients, three AdamW steps; tied and frozen ones."""
    warnings.simplefilter("ignore")
    uneven, untied = lambda: make(depth=5), lambda: make(is_tied=False)
    close(
        {
            "1f1b": compare("pp"),
            "gpipe": compare("pp", schedule="gpipe", build=untied),
            "interleaved": compare("pp", schedule="interleaved", build=uneven),
            "zb": compare("pp", schedule="zb", build=lambda: plain(make(depth=4))),
            "accumulated": compare("pp", accumulate=2),
            "one piece": compare("pp", microbatches=1),
            "tied, with a bias of its own": compare("pp", build=lambda: own_bias(make())),
            "frozen": compare("pp", build=lambda: frozen(make())),
            "checkpointed": compare("pp", checkpoint="full"),
        }
    )
    close({"fp64": compare("pp", build=lambda: make().double())[:3]}, 1e-14)
    # As far off as autocast is in one process, and off.
    assert 0 < compare("pp", precision="bf16")[0] < 5e-3


class Sent:
    """Groups of sends and receives, those that go together in a list."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[bool, int]]] = []
        self._is_open = False
        self._together = dist.batch_isend_irecv
        dist.batch_isend_irecv = self._batched
        for name, is_send in (("send", True), ("recv", False)):
            setattr(dist.ProcessGroup, name, self._noted(getattr(dist.ProcessGroup, name), is_send))

    def _noted(self, call: Callable[..., Any], is_send: bool) -> Callable[..., Any]:
        def run(group, tensors, peer, *rest):
            if not self._is_open:
                self.groups.append([])
            self.groups[-1].append((is_send, peer))
            return call(group, tensors, peer, *rest)

        return run

    def _batched(self, operations):
        self.groups.append([])
        self._is_open = True
        try:
            return self._together(operations)
        finally:
            self._is_open = False


def hung(orders: list[list[list[tuple[bool, int]]]]) -> list[int]:
    """Ranks that hang where each has one stream, as with NCCL's communicator made at the start.

    A rank's groups run one after another, what is in one of them together; a send is over when
    the other rank runs its receive. NCCL buffers a small message, which only helps. Collectives
    are left out: all ranks make them before, between or after steps.
    """
    queues = [[list(group) for group in order] for order in orders]
    is_moving = True
    while is_moving:
        is_moving = False
        for of_rank, queue in enumerate(queues):
            for is_send, peer in list(queue[0]) if queue else []:
                if is_send and queues[peer] and (False, of_rank) in queues[peer][0]:
                    queue[0].remove((True, peer))
                    queues[peer][0].remove((False, of_rank))
                    is_moving = True
        queues = [queue[1:] if queue and not queue[0] else queue for queue in queues]
    return [of_rank for of_rank, queue in enumerate(queues) if queue]


class Open(parity.LM):
    """Its loss is computed outside of it."""

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


def test_two_that_send_first_hang() -> None:
    """And do not if they receive at the same time."""
    assert hung([[[(True, 1)], [(False, 1)]], [[(True, 0)], [(False, 0)]]]) == [0, 1]
    assert hung([[[(True, 1), (False, 1)]], [[(True, 0), (False, 0)]]]) == []


@on_ranks(4)
def test_no_schedule_hangs_where_a_rank_has_one_stream() -> None:
    """As torch issues sends and receives, batched or not, and as a loss outside does."""
    sent, kinds = Sent(), dict.fromkeys(("1f1b", "interleaved", "zb"), parity.LM)
    for schedule, kind in [*kinds.items(), ("interleaved", Open)]:
        sent.groups.clear()
        model = plain(make(kind, depth=8, is_tied=False))
        outer = put(model, "pp", schedule=schedule, microbatches=8).outer
        outer(batch(0)).sum().backward()
        with torch.no_grad():
            outer.eval()(batch(1))
        orders = everyone(sent.groups)
        assert sum(len(group) for order in orders for group in order) >= 2 * 2 * 3 * 8
        assert hung(orders) == [], (schedule, kind)


class Encoder(nn.Module):
    """torch's own encoder with a mask, a list inside a list's module, positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.places = nn.Parameter(torch.randn(6, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x, *, padding, targets):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.encoder(self.words(x) + self.places, mask=later, src_key_padding_mask=padding)
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class Row(nn.Module):
    """Blocks in a Sequential; batch norm before and after; a parameter that is used everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
        self.scale = nn.Parameter(torch.ones(1) * 0.7)
        self.stack = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3))
        )
        self.unused = nn.Linear(3, 3)

    def forward(self, pair, weight=1.0):
        x, y = pair
        h = self.stack(self.before(x) * self.scale)
        return F.mse_loss(self.after(h * self.scale), y) * weight, h


class Pairs(nn.Module):
    """A block that takes and returns more than a tensor, and adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, state, extra):
        h, count, (mask, total), name = state
        h += 0.1
        h = h + torch.tanh(self.inner(h)) * mask[..., None]
        return h, count + 1, (~mask | (count > 1), total + h.mean((1, 2)) * extra), name


class Carried(nn.Module):
    """Blocks hand on tuples with integers and bools; the first number of a tuple is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList(Pairs() for _ in range(4))

    def forward(self, x):
        count, total = torch.zeros(len(x), 1, dtype=torch.int64), 0.0 * x.float().sum(1)
        state = self.words(x) + 0.0, count, (x > 9, total), "a"
        for block in self.blocks:
            state = block(state, extra=0.5)
        h, count, (mask, total), name = state
        assert name == "a"
        assert (count == 4).all()
        logits = F.linear(h, self.words.weight)  # tied without a module that says so
        return F.cross_entropy(logits.flatten(0, 1), x.flatten()) + total.mean(), logits, mask


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 16}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops))


def call_hf(model, step, size=8):
    x = batch(step, size)
    return model(x, labels=x)


def call_encoder(model, step, size=8):
    x = batch(step, size)
    return model(x, padding=torch.arange(6).expand(size, 6) >= 5, targets=x.roll(1, 1))


def call_row(model, step, size=8):
    made = torch.Generator().manual_seed(step)
    pair = [torch.randn(size, 16, generator=made), torch.randn(size, 16, generator=made)]
    if isinstance(model, Row) and model.training and size == 8:
        # A piece at a time, as batch norms see it in a pipeline.
        pieces = zip(*(tensor.chunk(4) for tensor in pair), strict=True)
        return (sum(model(piece, weight=0.5)[0] for piece in pieces) / 4,)
    return model(pair, weight=0.5)


def call_carried(model, step, size=8):
    return model(batch(step, size))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "gpt2": (gpt2, call_hf),
    "encoder": (Encoder, call_encoder),
    "row": (Row, call_row),
    "carried": (Carried, call_carried),
}


def loss_in(call, model, step, _cut):
    output = call(model, step)
    if isinstance(output, dict):
        return output["loss"]
    return output[0] if isinstance(output, tuple) else output


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def gap(a, b) -> float:
    """The largest difference of two outputs of one form; infinite if the form differs."""
    if isinstance(b, torch.Tensor):
        return (a.float() - b.float()).abs().max().item() if a.shape == b.shape else math.inf
    if isinstance(b, dict):
        keys = [key for key in b if key not in ("past_key_values", "cache")]
        return max(gap(a[key], b[key]) for key in keys) if type(a) is type(b) else math.inf
    if isinstance(b, (list, tuple)):
        return max(map(gap, a, b)) if len(a) == len(b) else math.inf
    return 0.0 if a == b else math.inf


def buffers_are_alike(name: str, base: nn.Module, alone: nn.Module) -> None:
    """Those that all stages hold are everywhere the same; the whole model has each stage's."""
    held = everyone({k: b for k, b in base.named_buffers() if not b.is_meta})
    if name != "row":
        own = dict(alone.named_buffers())
        assert all((b.float() - own[k].float()).abs().lt(FP32).all() for k, b in held[rank].items())
        return
    same = [torch.equal(b, held[1][k]) for k, b in held[0].items() if k in held[1]]
    assert same == [True] * 6
    own = everyone({k: p for k, p in base.named_parameters() if not p.is_meta})
    alone.load_state_dict({**alone.state_dict(), **own[0], **own[1], **held[0], **held[1]})


@on_ranks(2)
def test_models_of_all_kinds() -> None:
    """Tied GPT-2, torch's encoder, Sequential and tuples; eval gives all of the output."""
    for name, (kind, call) in MODELS.items():
        alone, base = make(kind), make(kind)
        schedule = "interleaved" if name == "carried" else "1f1b"
        built = put(base, "pp", schedule=schedule, microbatches=4)
        outer = built.outer
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            differences = train(built, alone, functools.partial(loss_in, call), adamw)
        assert max(differences[:2]) < FP32, (name, differences)
        told = [str(w.message) for w in caught if "once per micro-batch: 4 times" in str(w.message)]
        # Batch norms before, in and after the blocks, of three numbers each.
        assert len(told) == (name == "row")
        assert all("(after.num_batches_tracked, after.running_mean and 13 more)" in t for t in told)
        assert type(call(outer, 9)).__name__ == type(call(alone, 9)).__name__
        outer.eval(), alone.eval()
        buffers_are_alike(name, base, alone)
        # torch's nested tensors, in one process only, have zeros where padding is.
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            # Also a batch that no schedule could cut.
            wanted = [call(alone, 5, size) for size in (8, 3)]
            torch.backends.mha.set_fastpath_enabled(True)
            assert gap([call(outer, 5, size) for size in (8, 3)], wanted) < 2e-5, name
            assert torch.backends.mha.get_fastpath_enabled()


def away(loss: Callable[[Any], Any], other: Any = None, **settings: Any) -> None:
    """A pipeline's gradients are those of one process."""
    alone, built = make(), put(make(), "pp", **settings)
    loss(alone).backward()
    (other or loss)(built.outer).backward()
    assert apart(built, alone)[0] < FP32, loss


def twice(model):
    loss = model(batch(0))
    loss.backward(retain_graph=True)
    return 2 * loss


def asked(model):
    loss = model(batch(0))
    own = [p for p in model.parameters() if not p.is_meta]
    for p, g in zip(own, torch.autograd.grad(loss / 3, own), strict=True):
        p.grad = g
    return model(batch(1)) / 3


class Scaler:
    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return 1024.0


class Accelerator:
    scaler = Scaler()


def watched(model) -> tuple[list[float], Any]:
    """Gradients that weights get, and the loss of a forward."""
    seen: list[float] = []
    for p in model.parameters():
        if not p.is_meta:
            p.register_hook(lambda g: seen.append(g.abs().max().item()))
    return seen, model(batch(0))


@on_ranks(2)
def test_a_loss_is_as_any_other() -> None:
    """Divided, added up, scaled, used twice; batches of other sizes."""
    away(lambda model: model(batch(0)) / 4)
    away(lambda model: (loss := model(batch(0))) + 0.1 * loss.square())
    away(twice)
    away(lambda model: model(batch(0)) + model(batch(1)) / 2)
    away(asked)
    away(lambda model: sum(model(batch(i)[:size]) for i, size in enumerate((8, 6, 7, 8, 1))))

    plain_seen, plain_loss = watched(make())
    plain_loss.backward()
    scaled = put(make(), "pp", accelerator=Accelerator())
    seen, loss = watched(scaled.outer)
    # Of each of four micro-batches: a fourth of about the same, times 1024.
    assert 128 < max(seen) / max(plain_seen) < 1024
    assert abs(loss - plain_loss) < FP32
    (loss * 1024 / 1024).backward()
    alone = make()
    alone(batch(0)).backward()
    assert apart(scaled, alone)[0] < FP32

    again = put(make(), "pp").outer(batch(0))
    again.backward()
    assert "second time" in refusal(again.backward, RuntimeError)
    draws_and_names()


def draws_and_names() -> None:
    """The first step, which looks ahead, draws none that later ones do not; what a rank holds."""
    outer = put(make(drop=0.5), "pp").outer
    drawn = []
    for seed in (5, 5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(outer(batch(0)).item())
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3]
    assert everyone(drawn) == [drawn] * n
    outer.eval()
    assert abs(outer(batch(0)) - make().eval()(batch(0))) < FP32
    assert not outer(batch(0)).requires_grad

    base = make(is_tied=False)
    before = [*base.layers], list(base.state_dict())
    outer = put(base, "pp", schedule="gpipe").outer
    assert before == ([*base.layers], list(base.state_dict(keep_vars=True)))
    assert list(outer.state_dict(keep_vars=True)) == [f"module.{name}" for name in before[1]]
    foreign = [("layers.2.", "head."), ("words.", "layers.0.", "layers.1.")][rank]
    for name, p in base.named_parameters():
        assert p.is_meta == name.startswith(foreign), name


class Biased(nn.Module):
    """Each block gets the result of an embedding that stands outside."""

    def __init__(self, block: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.mixes = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def blocks(self, h):
        bias = self.bias(torch.arange(6))
        for mix in self.mixes:
            h = mix(h + bias)
        return h

    def forward(self, x):
        logits = self.head(self.blocks(self.words(x))[:, :6])
        return F.cross_entropy(logits.flatten(0, 1), x.flatten())


class Around(Biased):
    """Adds to what blocks return, outside of them."""

    def blocks(self, h):
        for mix in self.mixes:
            h = h + mix(h)
        return h


class Straight(Biased):
    def blocks(self, h):
        for mix in self.mixes:
            h = mix(h)
        return h


class Summed(Biased):
    """Carries a sum past the blocks."""

    def forward(self, x):
        h, extra = self.words(x), 0.0
        for mix in self.mixes:
            h = mix(h)
            extra = extra + h.square().mean()
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten()) + extra


class Logits(Biased):
    def forward(self, x, is_short=False):
        h = self.words(x)
        for mix in self.mixes[:1] if is_short else self.mixes:
            h = mix(h)
        return self.head(h)


class Moody(nn.Module):
    """A block that raises in forward or in backward when it is told to."""

    mood = ""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        if self.mood == "forward":
            raise ValueError("no more of this")
        if self.mood == "backward":
            h.register_hook(lambda g: 1 / 0)
        if self.mood == "other shape":
            h = torch.cat([h, h], 1)
        return torch.tanh(self.mix(h))


def moods():
    return Straight(Moody)


def says(call: Callable[[], Any], *expected: str) -> None:
    """What each rank is told: the class of the error, and what is said in it."""
    text = ""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {error}"
    assert re.match(expected[rank % len(expected)], text, re.DOTALL), text


NO_MORE, NO_MORE_THERE = r"ValueError: no more of this$", r"NbdistError: .*on rank 0.*no more"
ON_1, USES = r"NbdistError: .*on rank 1", r"NbdistError: .*uses what blocks before mixes.2 return"


def what_no_pipeline_can_run() -> None:
    says(
        lambda: put(make(Biased), "pp").outer(batch(0)),
        r"NbdistError: .*stage 1, on rank 1, failed",
        r"NbdistError: .*uses bias.weight on stage 1 .*model.pp_everywhere = \['bias'\]",
    )
    says(lambda: put(make(Summed), "pp").outer(batch(0)), ON_1, USES)
    says(lambda: put(make(Around), "pp").outer(batch(0)), ON_1, USES)
    says(
        lambda: put(make(Logits), "pp").outer.eval()(batch(0), is_short=True),
        r"NbdistError: .*returned before mixes.1: .* every block",
        r"NbdistError: .*stage 0, on rank 0",
    )
    says(
        lambda: put(make(moods), "pp").outer(batch(rank)),
        r"NbdistError: Ranks 0-1 .*different inputs",
    )
    says(
        lambda: put(make(moods), "pp", microbatches=4).outer(batch(0, 6)),
        r"OptionError: .*of 6 .* 4 micro-batches.*--microbatches 1 or 2 or 3 or 6",
    )
    logits = put(make(Logits), "pp").outer
    says(lambda: logits(3), r"NbdistError: .*none of forward's arguments is a tensor")
    grown = torch.ones(4, requires_grad=True)
    says(lambda: logits(grown), r"NbdistError: .*requires a gradient")
    odd = [lambda: 1, sys.stdout]
    says(lambda: logits.eval()(odd), r"NbdistError: .*cannot pass on a tuple")


def step(built: Any, alone: nn.Module, number: int) -> None:
    """A loss and the gradients that have added up are those of one process."""
    loss, wanted = built.outer(batch(number)), alone(batch(number))
    loss.backward()
    wanted.backward()
    assert abs(loss - wanted) < 2 * FP32
    assert apart(built, alone)[0] < 2 * FP32  # of up to seven steps without zero_grad in between


@on_ranks(2)
def test_what_goes_wrong_is_said_and_leaves_no_trace() -> None:
    """The user's error where it happened, its place on the others; the next step is right."""
    what_no_pipeline_can_run()
    biased = make(Biased)
    biased.pp_everywhere = ["bias"]
    step(put(biased, "pp"), make(Biased), 0)

    # Errors of the model's own, in steps whose shape is known by then.
    base, alone = make(moods), make(moods)
    for model in (base, alone):
        model.mixes[0].mix.requires_grad_(requires_grad=False)
    built = put(base, "pp")
    step(built, alone, 0)
    there = r"NbdistError: .*on rank 1.*ValueError: no more"
    other = r"NbdistError: mixes.1 returned torch.float32 \(2, 12, 10\), but .*\(2, 6, 10\) before"
    for mood, place, *expected in (
        ("forward", 0, NO_MORE, NO_MORE_THERE),
        ("forward", 1, NO_MORE, NO_MORE_THERE),
        ("forward", 3, there, NO_MORE),
        ("other shape", 0, ""),
        ("other shape", 1, other, r"NbdistError: .*on rank 0, failed"),
        ("other shape", 3, ""),
    ):
        base.mixes[place].mood = mood
        says(lambda: built.outer(batch(1)), *expected)
        base.mixes[place].mood = ""
        step(built, alone, 2)  # gradients add up to what was there before
    base.mixes[1].mood = "forward"
    with torch.no_grad():
        says(lambda: built.outer(batch(1)), NO_MORE, NO_MORE_THERE)
    base.mixes[1].mood = ""
    fails_in_backward(built, alone)


def fails_in_backward(built: Any, alone: nn.Module) -> None:
    """The others cannot know: they wait, are broken off and go on."""
    base = built.job.base
    base.mixes[2].mood = "backward"
    if rank == 1:
        says(lambda: built.outer(batch(1)), r"ZeroDivisionError: division by zero")
        say("failed")
    else:
        assert broken_off(lambda: built.outer(batch(1)))[0] == "RuntimeError"
    wait_for("failed", [1])
    base.mixes[2].mood = ""
    process_groups.recover(1)
    for p in (*base.parameters(), *alone.parameters()):
        p.grad = None
    step(built, alone, 3)


class _Net(nn.Module):
    def __init__(self, depth: int = 6, width: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(11, width)
        self.places = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("table", torch.ones(3))
        self.head = nn.Linear(width, 11)


def _layouts(model: nn.Module, ranks: int, **options: Any) -> dict[str, frozenset[int] | None]:
    choice = Strategy("pp", Degrees(pp=ranks), ranks, Options(**options))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    layouts = {name: TensorLayout(tuple(tensor.shape)) for name, tensor in tensors}
    planned = partition.STEP.plan(build_alone(model, choice), layouts)
    return {name: layout.stages for name, layout in planned.items()}


def test_what_each_stage_holds() -> None:
    """Blocks in turn; embeddings first, the head last; the rest, and what is named, everywhere."""
    model = _Net()
    holders = _layouts(model, 3)

    assert holders["words.weight"] == {0}
    assert holders["places.weight"] == {0, 2}  # no head has its rows: it might be one
    assert holders["head.weight"] == holders["head.bias"] == {2}
    assert holders["norm.weight"] is holders["table"] is None
    assert [holders[f"blocks.{n}.weight"] for n in range(6)] == [{0}, {0}, {1}, {1}, {2}, {2}]
    looped = _layouts(model, 3, schedule="zb")
    assert [looped[f"blocks.{n}.bias"] for n in range(6)] == [{0}, {1}, {2}] * 2
    few = _layouts(_Net(5), 3, schedule="interleaved")
    assert [few[f"blocks.{n}.bias"] for n in range(5)] == [{0}, {0}, {1}, {1}, {2}]
    model.head.weight = model.words.weight
    assert _layouts(model, 3)["words.weight"] == _layouts(model, 3)["head.bias"] == {0, 2}
    model.pp_everywhere = ["words"]  # type: ignore[assignment]
    assert _layouts(model, 3)["words.weight"] is None


@pytest.mark.parametrize(
    ("ranks", "options", "text"),
    [
        (8, {}, r"6 blocks \(blocks\) cannot form 8 .* Use --pp 2 or 4"),
        (7, {}, r"6 blocks \(blocks\) cannot form 7 .* Use another strategy"),
        (2, {"schedule": "1f1b2"}, r"no pipeline schedule 1f1b2. Use one of gpipe, 1f1b, inter"),
        (4, {"schedule": "zb", "microbatches": 9}, r"deal 9 .* 4 ranks .* --microbatches 8 or 12"),
        (2, {"schedule": "zb", "checkpoint": "full"}, r"--checkpoint full does not allow"),
        (2, {"schedule": "zb", "is_compiled": True}, r"--compile does not allow"),
        (2, {"microbatches": 0}, r"--microbatches 0"),
        (2, {"blocks": "words"}, r"--blocks words"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    ranks: int, options: dict[str, Any], text: str
) -> None:
    """Before anything changes, without other ranks."""
    with pytest.raises(OptionError, match=text):
        _layouts(_Net(), ranks, **options)


@pytest.mark.parity
@on_ranks(2, 4)
def test_every_schedule_trains_as_one_process() -> None:
    """Schedules, depths that stages divide or not, accumulation, micro-batches, checkpointing."""
    warnings.simplefilter("ignore")
    results = {}
    for schedule, depth, accumulate, microbatches in itertools.product(
        ("gpipe", "1f1b", "interleaved", "zb"), (4, 9), (1, 2), (None, 4)
    ):
        pieces = 2 if accumulate == 2 and microbatches and n == 4 else microbatches
        how = plain if depth == 9 else frozen
        given = {"schedule": schedule, "accumulate": accumulate, "microbatches": pieces}
        build = functools.partial(lambda how, depth: how(make(depth=depth)), how, depth)
        results[f"{depth} {given}"] = compare("pp", build=build, **given)
    for checkpoint in ("full", "selective", "2"):
        given = {"checkpoint": checkpoint, "schedule": "interleaved"}
        results[f"checkpoint {checkpoint}"] = compare("pp", build=lambda: make(depth=5), **given)
    if n == 4:
        results["pieces"] = compare("pp", {"pp": 2, "dp_shard": 2}, shard="grad-op")
    else:
        untied, first = lambda: make(is_tied=False), lambda: frozen(make(depth=2, is_tied=False))
        results["zb, twice used"] = compare("pp", schedule="zb", build=untied)
        given = {"schedule": "interleaved", "microbatches": 8}
        results["more pieces"] = compare("pp", build=lambda: make(depth=4), **given)
        results["first stage frozen"] = compare("pp", build=first)
    # Of three AdamW steps; by how much rounding differs depends on the processor's kernels.
    close(results, 2 * FP32)
