"""A pipeline against one process at the same global batch: losses, gradients, outputs, errors."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.errors import OptionError
from nbdist.parallel.pp import partition
from nbdist.strategy.choice import Degrees, Options, Strategy
from nbdist.strategy.tensor_layout import TensorLayout
from tests.support.parity import build_alone
from tests.support.pipelines import PP
from tests.support.torch_ranks import run_ranks

FP32 = 2e-6

TRAINS = (
    PP
    + """
done(fp32={
    "1f1b": compare(),
    "gpipe": compare(schedule="gpipe", made={"tied": False}),
    "interleaved": compare(schedule="interleaved", made={"depth": 5}),
    "zb": compare(schedule="zb", made={"depth": 4}, how=plain),
    "accumulated": compare(accumulate=2),
    "one piece": compare(microbatches=1),
    "tied, with a bias of its own": compare(how=own_bias),
    "frozen": compare(how=freeze),
    "checkpointed": compare(checkpoint="full"),
},
fp64=compare(how=lambda model: model.double()),
half=compare(precision="bf16")[0])
"""
)


def _check(results: list[dict[str, Any]], limit: float = FP32) -> None:
    for result in results:
        for name, differences in result["fp32"].items():
            assert max(differences) < limit, (name, differences)


def test_it_trains_as_one_process(tmp_path: Path) -> None:
    """Every schedule: losses, each stage's gradients, three AdamW steps; tied and frozen ones."""
    results = run_ranks(tmp_path, 2, TRAINS)

    _check(results)
    for result in results:
        assert max(result["fp64"]) < 1e-14
        # As far off as autocast is in one process, and off.
        assert 0 < result["half"] < 5e-3


ORDERS = (
    PP
    + """
groups, open_batches = [], []

def noted(call, is_send):
    def run(group, tensors, peer, *rest):
        if not open_batches:
            groups.append([])
        groups[-1].append((is_send, peer))
        return call(group, tensors, peer, *rest)
    return run

dist.ProcessGroup.send = noted(dist.ProcessGroup.send, True)
dist.ProcessGroup.recv = noted(dist.ProcessGroup.recv, False)
together = dist.batch_isend_irecv

def batched(operations):
    groups.append([])
    open_batches.append(operations)
    try:
        return together(operations)
    finally:
        open_batches.pop()

dist.batch_isend_irecv = batched

class Open(LM):
    "Its loss is computed outside of it."
    def forward(self, tokens):
        h = self.words(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))

def order(model, count, schedule, loss_of=lambda loss: loss):
    "Sends and receives of a step and an evaluation, those that go together in a list."
    groups.clear()
    outer = put(plain(model), schedule=schedule, microbatches=count)
    loss_of(outer(batch(0))).backward()
    with torch.no_grad():
        outer.eval()(batch(1))
    return list(groups)

done(orders={
    schedule: order(make(depth=8, tied=False), 8, schedule)
    for schedule in ("1f1b", "interleaved", "zb")
} | {"outside": order(Open(depth=8, tied=False), 8, "interleaved", lambda y: y.sum())})
"""
)


def hung(orders: list[list[list[tuple[bool, int]]]]) -> list[int]:
    """Ranks that hang where each has one stream, as with NCCL's communicator made at the start.

    A rank's groups run one after another, what is in one of them together; a send is over when
    the other rank runs its receive. NCCL buffers a small message, which only helps. Collectives
    are left out: all ranks make them before, between or after steps.
    """
    queues = [[list(map(tuple, group)) for group in order] for order in orders]
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, queue in enumerate(queues):
            for is_send, peer in list(queue[0]) if queue else []:
                if is_send and queues[peer] and (False, rank) in queues[peer][0]:
                    queue[0].remove((True, peer))
                    queues[peer][0].remove((False, rank))
                    is_moving = True
        queues = [queue[1:] if queue and not queue[0] else queue for queue in queues]
    return [rank for rank, queue in enumerate(queues) if queue]


def test_no_schedule_hangs_where_a_rank_has_one_stream(tmp_path: Path) -> None:
    """As torch issues sends and receives, batched or not, and as a loss outside does."""
    # Two that send to each other first hang, and do not if they receive at the same time.
    sends_first = [[[(True, 1)], [(False, 1)]], [[(True, 0)], [(False, 0)]]]
    assert hung(sends_first) == [0, 1]
    assert hung([[[(True, 1), (False, 1)]], [[(True, 0), (False, 0)]]]) == []

    results = run_ranks(tmp_path, 4, ORDERS)

    for name in results[0]["orders"]:
        orders = [result["orders"][name] for result in results]
        assert sum(len(group) for order in orders for group in order) >= 2 * 2 * 3 * 8, name
        assert hung(orders) == [], name


MODELS = (
    PP
    + """
from transformers import GPT2Config, GPT2LMHeadModel

def gpt2():
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=3, n_head=4, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0))

class Encoder(nn.Module):
    "torch's own encoder with a mask, a list inside a list's module, positions of its own."
    def __init__(self):
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
    "Blocks in a Sequential; batch norm before and after; a parameter that is used everywhere."
    def __init__(self):
        super().__init__()
        self.before = nn.BatchNorm1d(16)
        self.scale = nn.Parameter(torch.ones(1) * 0.7)
        self.stack = nn.Sequential(*(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3)))
        self.after = nn.BatchNorm1d(16)
        self.unused = nn.Linear(3, 3)
    def forward(self, pair, weight=1.0):
        x, y = pair
        h = self.stack(self.before(x) * self.scale)
        return F.mse_loss(self.after(h * self.scale), y) * weight, h

class Pairs(nn.Module):
    "A block that takes and returns more than a tensor, and adds in place."
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
    def forward(self, state, extra):
        h, count, (mask, total), name = state
        h += 0.1
        h = h + torch.tanh(self.inner(h)) * mask[..., None]
        return h, count + 1, (~mask | (count > 1), total + h.mean((1, 2)) * extra), name

class Carried(nn.Module):
    "Blocks hand on tuples with integers and bools; the first number of a tuple is the loss."
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList(Pairs() for _ in range(4))
    def forward(self, x):
        count, total = torch.zeros(len(x), 1, dtype=torch.int64), 0.0 * x.float().sum(1)
        state = self.words(x) + 0.0, count, (x > 9, total), "a"
        for block in self.blocks:
            state = block(state, extra=0.5)
        h, count, (mask, total), name = state
        assert name == "a" and (count == 4).all()
        logits = F.linear(h, self.words.weight)              # tied without a module that says so
        return F.cross_entropy(logits.flatten(0, 1), x.flatten()) + total.mean(), logits, mask

def call_hf(model, step, size=8):
    x = tokens(step, size)
    return model(x, labels=x)

def call_encoder(model, step, size=8):
    x = tokens(step, size)
    return model(x, padding=torch.arange(6).expand(size, 6) >= 5, targets=x.roll(1, 1))

def call_row(model, step, size=8):
    made = torch.Generator().manual_seed(step)
    pair = [torch.randn(size, 16, generator=made), torch.randn(size, 16, generator=made)]
    return model(pair, weight=0.5)

def call_carried(model, step, size=8):
    return model(tokens(step, size))

def loss_in(output):
    if isinstance(output, dict):
        return output["loss"]
    return output[0] if isinstance(output, tuple) else output

def close(a, b):
    "The largest difference of two outputs of one form; infinite if the form differs."
    if isinstance(b, torch.Tensor):
        return (a.float() - b.float()).abs().max().item() if a.shape == b.shape else math.inf
    if isinstance(b, dict):
        keys = [key for key in b if key not in ("past_key_values", "cache")]
        return max(close(a[key], b[key]) for key in keys) if type(a) is type(b) else math.inf
    if isinstance(b, (list, tuple)):
        return max(map(close, a, b)) if len(a) == len(b) else math.inf
    return 0.0 if a == b else math.inf

def in_pieces(model, call, count):
    "The same in one process, a piece at a time: what batch norms see in a pipeline."
    class Cut:
        def __call__(self, pair, weight):
            pieces = zip(*(one.chunk(count) for one in pair))
            return sum(model(list(piece), weight)[0] for piece in pieces) / count
    return Cut()

import math, warnings
CASES = {
    "gpt2": (gpt2, call_hf), "encoder": (Encoder, call_encoder), "row": (Row, call_row),
    "carried": (Carried, call_carried),
}
fp32, outputs, forms = {}, {}, {}
for name, (kind, call) in CASES.items():
    torch.manual_seed(0)
    alone = kind()
    base = copy.deepcopy(alone)
    schedule = "interleaved" if name == "carried" else "1f1b"
    outer = put(base, schedule=schedule, microbatches=4)
    reference = in_pieces(alone, call, 4) if name == "row" else alone
    loss_of = lambda model, step: loss_in(call(model, step))
    wanted = follow(reference, alone, loss_of, gradients_of)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fp32[name] = gaps(follow(outer, base, loss_of, pp_gradients), wanted)
    told = [str(w.message) for w in caught if "once per micro-batch: 4 times" in str(w.message)]
    # Batch norms before, in and after the blocks, of three numbers each.
    forms[name + " told"] = (
        len(told) == 1 and "(after.num_batches_tracked, after.running_mean and 13 more)" in told[0]
        if name == "row" else not told)
    # Both hold the same numbers now, as far as a key's bias has any meaning.
    forms[name] = type(call(outer, 9)).__name__ == type(call(alone, 9)).__name__
    both = dict(base.named_buffers())
    fp32[name + " buffers"] = [0.0] + [
        (both[key].float() - b.float()).abs().max().item()
        for key, b in alone.named_buffers()
        if not both[key].is_meta and name != "row" and b.numel()]
    outer.eval(), alone.eval()
    if name == "row":
        alone.load_state_dict({**alone.state_dict(), **gathered(outer, base, lambda p: p)})
        everyone = [None] * n
        dist.all_gather_object(everyone, {k: b for k, b in base.named_buffers() if not b.is_meta})
        same = [torch.equal(b, everyone[1][k]) for k, b in everyone[0].items() if k in everyone[1]]
        for one in everyone:
            alone.load_state_dict({**alone.state_dict(), **one})
        forms["outer buffers"] = len(same) == 6 and all(same)
    # torch's nested tensors, in one process only, have zeros where padding is.
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        # Also a batch that no schedule could cut.
        wanted = [call(alone, 5, size) for size in (8, 3)]
        torch.backends.mha.set_fastpath_enabled(True)
        found = [call(outer, 5, size) for size in (8, 3)]
        forms["fast path " + name] = torch.backends.mha.get_fastpath_enabled()
        outputs[name] = [close(*pair) for pair in zip(found, wanted)]
done(fp32=fp32, outputs=outputs, forms=forms)
"""
)


def test_models_of_all_kinds(tmp_path: Path) -> None:
    """Tied GPT-2, torch's encoder, Sequential and tuples; eval gives all of the output."""
    results = run_ranks(tmp_path, 2, MODELS)

    _check(results)
    for result in results:
        for name, differences in result["outputs"].items():
            assert max(differences) < 2e-5, (name, differences)
        assert all(result["forms"].values()), result["forms"]


LOSSES = (
    PP
    + """
def alone(loss):
    model = make()
    loss(model).backward()
    return gradients_of(model, model)

def away(loss, other=None, **settings):
    "How far a pipeline's gradients are from those of one process."
    base = make()
    outer = put(base, **settings)
    (other or loss)(outer).backward()
    return max(gaps([(0.0, pp_gradients(outer, base))], [(0.0, alone(loss))]))

def twice(model):
    loss = model(batch(0))
    loss.backward(retain_graph=True)
    return 2 * loss

def asked(model):
    loss = model(batch(0))
    own = [p for p in model.parameters() if not p.is_meta]
    for p, g in zip(own, torch.autograd.grad(loss / 3, own)):
        p.grad = g
    return model(batch(1)) / 3

class Scaler:
    def is_enabled(self):
        return True
    def get_scale(self):
        return 1024.0

class Accelerator:
    scaler = Scaler()

seen, inside = [], []
def watched(model):
    "The largest gradient that a weight has had inside of the schedule."
    for p in model.parameters():
        if not p.is_meta:
            p.register_hook(lambda g: seen.append(g.abs().max().item()))
    loss = model(batch(0))
    inside.extend([max(seen), loss.item()])
    return loss * 1024 / 1024

def sizes(model):
    return sum(model(batch(step)[:size]) for step, size in enumerate((8, 6, 7, 8, 1)))

differences = {
    "divided": away(lambda model: model(batch(0)) / 4),
    "used twice": away(lambda model: (lambda loss: loss + 0.1 * loss.square())(model(batch(0)))),
    "two backwards": away(twice),
    "two steps": away(lambda model: model(batch(0)) + model(batch(1)) / 2),
    "autograd.grad": away(asked),
    "scaled": away(lambda model: model(batch(0)), watched, accelerator=Accelerator()),
    "sizes": away(sizes),
}
plain_seen = []
model = make()
for p in model.parameters():
    p.register_hook(lambda g: plain_seen.append(g.abs().max().item()))
loss = model(batch(0))
loss.backward()
scaled = [inside[0] / max(plain_seen), inside[1] - loss.item()]

# A second backward without retain_graph, as torch refuses it elsewhere.
again = put(make())(batch(0))
again.backward()
refused = refusal(again.backward, RuntimeError)

# Random numbers: the first step, which looks ahead, draws none that later ones do not.
base = make(drop=0.5)
outer = put(base)
drawn = []
for _ in range(3):
    torch.manual_seed(5)
    drawn.append(outer(batch(0)).item())
torch.manual_seed(6)
drawn.append(outer(batch(0)).item())
outer.eval()
evaluated = [outer(batch(0)).item() - make().eval()(batch(0)).item(), outer(batch(0)).requires_grad]

# What a rank has of the model, and what stays as it was.
base = make(tied=False)
before = [id(base.layers[1]), list(base.state_dict())]
outer = put(base, schedule="gpipe")
held = {name: not p.is_meta for name, p in base.named_parameters()}
saved = base.state_dict(keep_vars=True)
names = [before == [id(base.layers[1]), list(saved)],
         list(outer.state_dict(keep_vars=True)) == ["module." + name for name in saved],
         len(base.layers), all(isinstance(one, Block) for one in base.layers)]
done(differences=differences, scaled=scaled, refused=refused, drawn=drawn, evaluated=evaluated,
     held=held, names=names)
"""
)


def test_a_loss_is_as_any_other(tmp_path: Path) -> None:
    """Divided, added up, scaled, used twice; dropout draws as often; batches of other sizes."""
    results = run_ranks(tmp_path, 2, LOSSES)

    for rank, result in enumerate(results):
        for name, difference in result["differences"].items():
            assert difference < FP32, (name, difference)
        # Of each of four micro-batches: a fourth of about the same, times 1024.
        assert 128 < result["scaled"][0] < 1024
        assert abs(result["scaled"][1]) < FP32
        assert "second time" in result["refused"]
        assert result["drawn"][0] == result["drawn"][1] == result["drawn"][2] != result["drawn"][3]
        assert result["drawn"] == results[0]["drawn"]
        assert abs(result["evaluated"][0]) < FP32
        assert result["evaluated"][1] is False
        assert result["names"] == [True, True, 3, True]
        foreign = {"words", "layers.0", "layers.1"} if rank else {"layers.2", "head"}
        for name, is_held in result["held"].items():
            assert is_held != any(name.startswith(f"{other}.") for other in foreign), name


FAILS = (
    PP
    + """
def said(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]

class Biased(nn.Module):
    "Each block gets the result of an embedding that stands outside."
    def __init__(self):
        super().__init__()
        self.words, self.bias = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
    def forward(self, x):
        h, bias = self.words(x), self.bias(torch.arange(6))
        for mix in self.mixes:
            h = mix(h + bias)
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten())

class Summed(Biased):
    "Carries a sum past the blocks."
    def forward(self, x):
        h, extra = self.words(x), 0.0
        for mix in self.mixes:
            h = mix(h)
            extra = extra + h.square().mean()
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten()) + extra

class Around(Biased):
    "Adds to what blocks return, outside of them."
    def forward(self, x):
        h = self.words(x)
        for mix in self.mixes:
            h = h + mix(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten())

class Logits(Biased):
    def forward(self, x, is_short=False):
        h = self.words(x)
        for mix in (self.mixes[:1] if is_short else self.mixes):
            h = mix(h)
        return self.head(h)

class Moody(nn.Module):
    "A block that raises in forward or in backward when it is told to."
    mood = ""
    def __init__(self):
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

class Moods(Biased):
    def __init__(self):
        super().__init__()
        self.mixes = nn.ModuleList(Moody() for _ in range(4))
    def forward(self, x):
        h = self.words(x)
        for mix in self.mixes:
            h = mix(h)
        return F.cross_entropy(self.head(h[:, :6]).flatten(0, 1), x.flatten())

def seeded(kind):
    torch.manual_seed(0)
    return kind()

messages = {}
messages["embedding"] = said(lambda: put(seeded(Biased))(tokens(0)))
messages["sum"] = said(lambda: put(seeded(Summed))(tokens(0)))
messages["around"] = said(lambda: put(seeded(Around))(tokens(0)))
messages["ends early"] = said(lambda: put(seeded(Logits)).eval()(tokens(0), is_short=True))
messages["batches"] = said(lambda: put(seeded(Moods))(tokens(rank)))
messages["pieces"] = said(lambda: put(seeded(Moods), microbatches=4)(tokens(0, 6)))
messages["no batch"] = said(lambda: put(seeded(Logits))(3))
messages["gradient"] = said(lambda: put(seeded(Logits))(torch.ones(4, requires_grad=True)))
messages["lambda"] = said(lambda: put(seeded(Logits)).eval()([lambda: 1, open(os.devnull)]))

def step(outer, base, alone, number):
    "How far a loss and the gradients that have added up are from those of one process."
    loss, wanted = outer(tokens(number)), alone(tokens(number))
    loss.backward()
    wanted.backward()
    return max(gaps([(loss.item(), pp_gradients(outer, base))],
                    [(wanted.item(), gradients_of(alone, alone))]))

biased = seeded(Biased)
biased.pp_everywhere = ["bias"]
everywhere = step(put(biased), biased, seeded(Biased), 0)

# Errors of the model's own, in steps whose shape is known by then.
base, alone = seeded(Moods), seeded(Moods)
alone.mixes[0].mix.requires_grad_(False)
base.mixes[0].mix.requires_grad_(False)
outer = put(base)
models = outer, base, alone
right = [step(*models, 0)]
for mood in ("forward", "other shape"):
    for place in (0, 1, 3):
        base.mixes[place].mood = mood
        messages[f"{mood} {place}"] = said(lambda: outer(tokens(1)))
        base.mixes[place].mood = ""
        right.append(step(*models, 2))  # gradients add up to what was there before
with torch.no_grad():
    base.mixes[1].mood = "forward"
    messages["eval"] = said(lambda: outer(tokens(1)))
    base.mixes[1].mood = ""

# In backward the others cannot know: they wait, are broken off and go on.
base.mixes[2].mood = "backward"
if rank == 1:
    messages["backward"] = said(lambda: outer(tokens(1)))
    say("failed")
else:
    messages["backward"] = [broken_off(lambda: outer(tokens(1)))[0], ""]
wait_for("failed", [1])
base.mixes[2].mood = ""
process_groups.recover(1)
for p in (*base.parameters(), *alone.parameters()):
    p.grad = None
right.append(step(*models, 3))
done(told=messages, everywhere=everywhere, right=right)
"""
)

# What each rank is told: the class of the error, and what is said in it.
_NO_MORE, _NO_MORE_THERE = r"ValueError: no more of this$", r"NbdistError: .*on rank 0.*no more"
_USES = r"NbdistError: .*uses what blocks before mixes.2 return"
TOLD = {
    "embedding": (
        r"NbdistError: .*stage 1, on rank 1, failed",
        r"NbdistError: .*uses bias.weight on stage 1 .*model.pp_everywhere = \['bias'\]",
    ),
    "sum": (r"NbdistError: .*on rank 1", _USES),
    "around": (r"NbdistError: .*on rank 1", _USES),
    "ends early": (
        r"NbdistError: .*returned before mixes.1: .* every block",
        r"NbdistError: .*stage 0, on rank 0",
    ),
    "batches": (r"NbdistError: Ranks 0-1 .*different inputs",) * 2,
    "pieces": (r"OptionError: .*of 6 .* 4 micro-batches.*--microbatches 1 or 2 or 3 or 6",) * 2,
    "no batch": (r"NbdistError: .*none of forward's arguments is a tensor",) * 2,
    "gradient": (r"NbdistError: .*requires a gradient",) * 2,
    "lambda": (r"NbdistError: .*cannot pass on a tuple",) * 2,
    "forward 0": (_NO_MORE, _NO_MORE_THERE),
    "forward 1": (_NO_MORE, _NO_MORE_THERE),
    "forward 3": (r"NbdistError: .*on rank 1.*ValueError: no more", _NO_MORE),
    "other shape 1": (
        r"NbdistError: mixes.1 returned torch.float32 \(2, 12, 10\), but .*\(2, 6, 10\) before",
        r"NbdistError: .*on rank 0, failed",
    ),
    "eval": (_NO_MORE, _NO_MORE_THERE),
    "backward": (r"RuntimeError: ", r"ZeroDivisionError: division by zero"),
}


def test_what_goes_wrong_is_said_and_leaves_no_trace(tmp_path: Path) -> None:
    """The user's error where it happened, its place on the others; the next step is right."""
    results = run_ranks(tmp_path, 2, FAILS)

    for rank, result in enumerate(results):
        for name, expected in TOLD.items():
            text = ": ".join(result["told"][name])
            assert re.match(expected[rank], text, re.DOTALL), (rank, name, text)
        assert result["everywhere"] < FP32
        # Seven steps without zero_grad in between.
        assert max(result["right"]) < 2 * FP32, result["right"]


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


MATRIX = (
    PP
    + """
import itertools
fp32 = {}
for schedule, depth, accumulate, microbatches in itertools.product(
    ("gpipe", "1f1b", "interleaved", "zb"), (4, 9), (1, 2), (None, 4)
):
    if accumulate == 2 and microbatches and n == 4:
        microbatches = 2
    name = f"{schedule} {depth} {accumulate} {microbatches}"
    fp32[name] = compare(made={"depth": depth}, accumulate=accumulate, schedule=schedule,
                         microbatches=microbatches, how=plain if depth == 9 else freeze)
for checkpoint in ("full", "selective", "2"):
    fp32["checkpoint " + checkpoint] = compare(made={"depth": 5}, checkpoint=checkpoint,
                                               schedule="interleaved")
if n == 4:
    fp32["pieces"] = compare({"pp": 2, "dp_shard": 2}, shard="grad-op")
else:
    fp32["zb, twice used"] = compare(schedule="zb", made={"tied": False})
    fp32["more pieces"] = compare(microbatches=8, schedule="interleaved", made={"depth": 4})
    fp32["first stage frozen"] = compare(how=freeze, made={"depth": 2, "tied": False})
done(fp32=fp32)
"""
)


@pytest.mark.parity
@pytest.mark.parametrize("size", [2, 4])
def test_every_schedule_trains_as_one_process(tmp_path: Path, size: int) -> None:
    """Schedules, depths that stages divide or not, accumulation, micro-batches, checkpointing."""
    results = run_ranks(tmp_path, size, MATRIX)

    # Of three AdamW steps; by how much rounding differs depends on the processor's kernels.
    _check(results, 2 * FP32)
