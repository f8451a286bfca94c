"""Each lint on real ranks: a program that is wrong, the same made right, and %dist_check."""

import re
from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel

_SETUP = """%%distributed
import gc
import warnings
import torch.distributed.fsdp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset, get_worker_info
)

warnings.simplefilter("ignore")  # torch's own, of workers
inputs = torch.arange(64.0).reshape(32, 2)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
x = torch.randn(16, 2, generator=torch.Generator().manual_seed(rank))


def linear(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 1)


def train(model, optimizer, loader):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.left = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x).square().mean()


def fresh(model=None):
    "A prepared model and its optimizer."
    model = accelerator.prepare(linear() if model is None else model)
    return model, torch.optim.SGD(model.parameters(), 1e-6)
"""

_APART = """apart, optimizer = fresh()
apart(x).square().mean().backward()
"""
_SCALED = """model, optimizer = fresh()
for dtype, is_on in cases:
    scaler = torch.amp.GradScaler('cpu', enabled=is_on)
    with torch.autocast('cpu', dtype=dtype):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
_SHARD = """from torch.distributed.fsdp import fully_shard
shards = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
for one in (*shards, shards):
    fully_shard(one)
"""
# Lint -> (a program that is wrong, what it tells, the same made right).
_LINTS = {
    "same-data": (
        (
            "model, optimizer = fresh()\n"
            "loader = DataLoader(data, batch_size=4)\n"
            "train(model, optimizer, loader)"
        ),
        "loader gave ranks 0-1 the same batches (the first 4 were compared)",
        (
            "model, optimizer = fresh()\n"
            "shared = accelerator.prepare(DataLoader(data, batch_size=4))\n"
            "sampled = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))\n"
            "ones = DataLoader(TensorDataset(torch.ones(32, 2), torch.ones(32, 1)), batch_size=4)\n"
            "for one in shared, sampled, ones:\n"
            "    train(model, optimizer, one)\n"
            "every = DataLoader(data, batch_size=4)\n"
            "with torch.no_grad():\n"
            "    total = sum(model(x).sum() for x, y in every)  # all of it on each rank: fine"
        ),
    ),
    "set-epoch": (
        (
            "model, optimizer = fresh()\n"
            "sampled = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))\n"
            "for epoch in range(2):\n"
            "    train(model, optimizer, sampled)"
        ),
        "sampled was iterated again with its DistributedSampler still at epoch 0",
        (
            "model, optimizer = fresh()\n"
            "right = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))\n"
            "peek = next(iter(right))\n"
            "for epoch in range(2):\n"
            "    right.sampler.set_epoch(epoch)\n"
            "    train(model, optimizer, right)\n"
            "plain = DistributedSampler(data, shuffle=False)\n"
            "plain = DataLoader(data, batch_size=4, sampler=plain)\n"
            "for epoch in range(2):\n"
            "    train(model, optimizer, plain)"
        ),
    ),
    "loss-not-divided": (
        (
            "model, optimizer = fresh()\n"
            "for step in range(3):\n"
            "    optimizer.zero_grad()\n"
            "    for part in x.chunk(4):\n"
            "        model(part).square().mean().backward()\n"
            "    optimizer.step()"
        ),
        "model(part).square().mean().backward() called backward 4 times per step",
        (
            "model, optimizer = fresh()\n"
            "for step in range(3):\n"
            "    optimizer.zero_grad()\n"
            "    for part in x.chunk(4):\n"
            "        (model(part).square().mean() / 4).backward()\n"
            "    optimizer.step()\n"
            "    for part in x.chunk(4):  # a sum needs no division\n"
            "        optimizer.zero_grad()\n"
            "        F.mse_loss(model(part), part[:, :1], reduction='sum').backward()\n"
            "    optimizer.step()\n"
            "for step in range(3):\n"
            "    optimizer.zero_grad()\n"
            "    model(x).square().mean().backward()  # two losses, as of a GAN\n"
            "    model(-x).square().mean().backward()\n"
            "    optimizer.step()\n"
            "for step in range(3):\n"
            "    for part in x.chunk(2):  # looked for the largest, not added up\n"
            "        optimizer.zero_grad()\n"
            "        model(part).square().mean().backward()\n"
            "    optimizer.step()"
        ),
    ),
    "unused-parameters": (
        (
            "two = DDP(Two())\n"
            "optimizer = torch.optim.SGD(two.parameters(), 1e-6)\n"
            "two(x).backward()\n"
            "optimizer.step()"
        ),
        "left.weight, left.bias of two got no gradient in the first step (2 of 4 parameters)",
        (
            "base = Two()\n"
            "base.left.requires_grad_(False)\n"
            "frozen = DDP(base)\n"
            "searched = DDP(Two(), find_unused_parameters=True)\n"
            "for one in frozen, searched:\n"
            "    optimizer = torch.optim.SGD(one.parameters(), 1e-6)\n"
            "    for _ in range(2):\n"
            "        one(x).backward()\n"
            "        optimizer.step()"
        ),
    ),
    "beside-wrapper": (
        (
            "inner = linear()\n"
            "wrapped = DDP(inner)\n"
            "optimizer = torch.optim.SGD(wrapped.parameters(), 1e-6)\n"
            "inner(x[:4] * 0 + 1).square().mean().backward()\n"
            "optimizer.step()"
        ),
        "the optimizer of wrapped stepped with gradients that did not come through wrapped",
        (
            "right = DDP(linear())\n"
            "halves = [torch.optim.SGD([p], 1e-6) for p in right.parameters()]\n"
            "for _ in range(3):\n"
            "    right.module(x).sum().item()  # looked at, not trained\n"
            "    right(x).square().mean().backward()\n"
            "    [one.step() for one in halves]\n"
            "    [one.zero_grad() for one in halves]\n"
            "with right.no_sync():\n"
            "    right(x).square().mean().backward()\n"
            "right(x).square().mean().backward()\n"
            "halves[0].step()\n"
            "halves[1].step()"
        ),
    ),
    "gradients-apart": (
        (
            "model, optimizer = fresh()\n"
            "first, second = model(x), model(-x)\n"
            "first.square().mean().backward()\n"
            "second.square().mean().backward()\n"
            "optimizer.step()"
        ),
        "that differed between rank 0 and rank 1: two forwards or more ran before their backwards",
        (
            "model, optimizer = fresh()\n"
            "losses = [model(part).square().mean() for part in (x, -x)]\n"
            "torch.autograd.backward(losses)  # one backward\n"
            "optimizer.step()\n"
            "leaf = x.clone().requires_grad_()\n"
            "[slope] = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)\n"
            "(slope.square().sum() + model(leaf).square().mean()).backward()\n"
            "optimizer.step()\n"
            "optimizer.zero_grad()\n"
            "with model.no_sync():\n"
            "    model(x).square().mean().backward()\n"
            "for parameter in model.parameters():  # reduced by hand\n"
            "    torch.distributed.all_reduce(parameter.grad)\n"
            "optimizer.step()\n"
            "optimizer.zero_grad()\n"
            "with model.no_sync():\n"
            "    model(x).square().mean().backward()\n"
            "model(-x).square().mean().backward()  # reduces the sum\n"
            "optimizer.step()"
        ),
    ),
    "initial-values": (
        (
            "class Odd(torch.nn.Linear): pass\n"
            "torch.manual_seed(rank)\n"
            "odd = accelerator.prepare(Odd(3, 3))"
        ),
        "the initial values of Odd differed between rank 0 and rank 1; prepare replaced them",
        "torch.manual_seed(1)\nsame = accelerator.prepare(torch.nn.Linear(3, 3))",
    ),
    "shard-seeds": (
        f"torch.manual_seed(rank)\n{_SHARD}",
        "fully_shard got different values of Sequential on rank 0 and rank 1",
        f"torch.manual_seed(5)\n{_SHARD}",
    ),
    "parameters-apart": (
        f"{_APART}if rank == 0:\n    optimizer.step()",
        "the parameters of apart differ between rank 0 and rank 1 after this cell",
        f"{_APART}optimizer.step()",
    ),
    "bf16-scaler": (
        f"cases = [(torch.bfloat16, True)]\n{_SCALED}",
        "a GradScaler scaled a loss computed under bf16 autocast",
        f"cases = [(torch.float16, True), (torch.bfloat16, False)]\n{_SCALED}",
    ),
    "workers": (
        (
            "import os\n"
            "many = 1 + len(os.sched_getaffinity(0)) // 2\n"
            "loader = DataLoader(data, batch_size=16, num_workers=many)\n"
            "n = len(list(loader))"
        ),
        "2 ranks of one host started",
        "n = len(list(DataLoader(data, batch_size=4)))",
    ),
}
# These are about one model: the next one is told too, also one of the same name.
_OF_A_MODEL = ("parameters-apart", "gradients-apart")


@pytest.fixture(scope="module")
def _linted(_shared_kernel: Kernel) -> Kernel:
    cell = _shared_kernel.run(_SETUP)
    assert cell.status == "ok", cell.visible
    return _shared_kernel


@pytest.fixture
def linted(_linted: Kernel) -> Iterator[Kernel]:
    """Two ranks that have told nothing yet, and whose models of before are gone."""
    _linted.run("%dist_check --tell all")
    yield _linted
    _linted.run(
        "%%distributed\nfor name in ('model', 'optimizer', 'apart', 'two', 'wrapped', 'inner',"
        " 'right', 'halves', 'odd', 'same', 'shards', 'one', 'stream'):\n"
        "    globals().pop(name, None)\n"
        "n = gc.collect()"
    )


_EXPERTS = """
class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 8, 8))
    def forward(self, x, which, weights):
        out = torch.zeros_like(x)
        for number in range(len(self.weight)):
            token, k = torch.where(which == number)
            out = out.index_add(0, token, x[token] @ self.weight[number] * weights[token, k, None])
        return out
class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = torch.nn.Linear(8, 4), Experts()
        self.ep_plan = {"experts": "experts"}
    def forward(self, x, skew):
        weights, which = (self.router(x) + skew).softmax(-1).topk(1)
        return self.experts(x, which, weights)
torch.manual_seed(0)
mixture = accelerator.prepare(Mixture())
tokens = torch.arange(400.0).sin()[:, None] * torch.eye(8)[torch.arange(400) % 8] * 8
def route(skew):
    mixture(tokens, 1e4 * torch.eye(4)[skew]).sum().backward()
route(torch.arange(400) % 4)
"""


def test_uneven_experts_are_told(linted: Kernel) -> None:
    """The rank that computes most and the expert that gets most; not where they are even.

    The picture beside the strategy has the same cell's tokens.
    """
    linted.run("%dist_strategy ep")
    even = linted.run(f"%%distributed\n{_EXPERTS}")
    uneven = linted.run("%%distributed\nroute(torch.full((400,), 2))")
    strategy = linted.run("%dist_strategy")
    linted.run("%%distributed\ndel mixture, route\nn = gc.collect()")
    linted.run("%dist_strategy ddp")

    assert (even.status, even.stderr) == ("ok", "")
    assert (
        "lint uneven-experts [0-1]: rank 1 computed 2.0 times as many tokens in the experts of "
        "mixture as a rank does on average (800 of 800)"
    ) in uneven.stderr
    assert "expert 2 of experts in mixture got 100% of its layer's tokens" in uneven.stderr
    assert (
        "experts of Mixture in the last cell: 800 tokens; rank 1 computed 2.0 times the mean, and "
        "expert 2 of experts got 100% (evenly 25%)"
    ) in strategy.visible


_ROUTED = """
class Routed(torch.nn.Module):
    def __init__(self, weigh):
        super().__init__()
        torch.manual_seed(0)
        self.weigh, self.router = weigh, torch.nn.Linear(8, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        torch.nn.init.zeros_(self.experts[0].weight)
    def forward(self, x):
        scores, which = self.router(x).topk(2)
        weights = self.weigh(scores)
        made = torch.stack([expert(x) for expert in self.experts], 1)
        picked = made.gather(1, which[..., None].expand(-1, -1, 8))
        return (picked * weights[..., None]).sum(1).square().mean()
def step(weigh):
    global mixture, optimizer
    mixture = Routed(weigh)
    optimizer = torch.optim.SGD(mixture.parameters(), 0.1)
    mixture, optimizer = accelerator.prepare(mixture, optimizer)
    for _ in range(3):
        mixture(torch.randn(64, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_router_that_learns_nothing_is_told(linted: Kernel) -> None:
    """No gradient of detached weights, zeros of a softmax over one; not where it learns."""
    linted.run("%dist_strategy fsdp")
    right = linted.run(f"%%distributed\n{_ROUTED}\nstep(lambda scores: scores.softmax(-1))")
    detached = linted.run("%%distributed\nstep(lambda scores: scores.detach().softmax(-1))")
    linted.run("%dist_check --tell all")
    always_1 = linted.run(
        "%%distributed\nstep(lambda scores: scores[..., None].softmax(-1)[..., 0])"
    )
    linted.run("%%distributed\ndel mixture, optimizer, step\nn = gc.collect()")
    linted.run("%dist_strategy ddp")

    assert (right.status, right.stderr) == ("ok", "")
    for cell in (detached, always_1):
        assert (
            "lint untrained-router [0-1]: router.weight of mixture got no gradient in a step in "
            "which the experts got one"
        ) in cell.stderr, cell.visible


@pytest.mark.parametrize("name", _LINTS)
def test_what_is_wrong_is_told_once_and_what_is_right_never(linted: Kernel, name: str) -> None:
    """In the output of the cell, with what to do; the same cell again is silent.

    Unless the lint is about a model that the cell makes anew.
    """
    wrong, sentence, right = _LINTS[name]
    silent = linted.run(f"%%distributed\n{right}")
    first = linted.run(f"%%distributed\n{wrong}")
    again = linted.run(f"%%distributed\n{wrong}")

    assert (silent.status, silent.stderr) == ("ok", ""), silent.visible
    assert f"lint {name} [0-1]: " in first.stderr, first.visible
    assert sentence in first.stderr
    assert f"(silence: %dist_check --silence {name})" in first.stderr
    assert (f"lint {name}" in again.stderr) == (name in _OF_A_MODEL)


def test_data_that_each_rank_has_cut_are_told_however_a_loader_reads_them(linted: Kernel) -> None:
    """Streams with workers, by rank 0 for all or by each rank; lists; samplers of one rank."""
    cell = linted.run(
        "%%distributed\n"
        "from accelerate.utils import DataLoaderConfiguration\n"
        "class Stream(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        info = get_worker_info()\n"
        "        worker, workers = (info.id, info.num_workers) if info else (0, 1)\n"
        "        yield from range(rank * workers + worker, 24, world_size * workers)\n"
        "def prepare(loader, **settings):\n"
        "    accelerator.dataloader_config = DataLoaderConfiguration(**settings)\n"
        "    return accelerator.prepare(loader)\n"
        "worked = prepare(DataLoader(Stream(), batch_size=2, num_workers=1))\n"
        "dispatched = prepare(DataLoader(Stream(), batch_size=2), dispatch_batches=True)\n"
        "read = prepare(DataLoader(Stream(), batch_size=2), dispatch_batches=False)\n"
        "halved = prepare(DataLoader(Stream(), batch_size=2), split_batches=True)\n"
        "class Headed(Stream):\n"
        "    def __iter__(self):\n"
        "        yield from (0, 0, 0, 0)\n"
        "        yield from super().__iter__()\n"
        "class Sample:\n"
        "    def __init__(self, number):\n        self.number = number\n"
        "class Objects(Stream):\n"
        "    def __iter__(self):\n        return map(Sample, super().__iter__())\n"
        "class Once(IterableDataset):\n"
        "    def __init__(self):\n        self.numbers = iter(range(rank, 24, 2))\n"
        "    def __iter__(self):\n        return self.numbers\n"
        "def numbers(samples):\n    return torch.tensor([sample.number for sample in samples])\n"
        "headed = prepare(DataLoader(Headed(), batch_size=2))\n"
        "objects = prepare(DataLoader(Objects(), batch_size=2, collate_fn=numbers))\n"
        "once = prepare(DataLoader(Once(), batch_size=2))\n"
        "part = prepare(DataLoader(Subset(range(16), range(rank, 16, 2)), batch_size=2))\n"
        "own = DistributedSampler(range(16), shuffle=False)\n"
        "drawn = prepare(DataLoader(range(16), batch_size=2, sampler=own))\n"
        "whole = prepare(DataLoader(range(16), batch_size=2, shuffle=True))\n"
        "n = [len(list(each)) for each in (worked, dispatched, read, halved, part, drawn, whole)]\n"
        "n += [len(list(each)) for each in (headed, objects, once)]"
    )
    linted.run(
        "%%distributed\ndel worked, dispatched, read, halved, part, drawn, whole, own\n"
        "del headed, objects, once"
    )

    assert cell.status == "ok", cell.visible
    found = re.findall(r"lint sharded-twice \[0-1\]: (\w+) is prepared, and its (\w+)", cell.stderr)
    streams = [(name, "dataset") for name in (
        "worked", "dispatched", "read", "halved", "part", "headed", "objects", "once",
    )]  # fmt: skip
    assert sorted(found) == sorted([*streams, ("drawn", "sampler")])


def test_odd_objects_in_the_notebook_turn_nothing_off(linted: Kernel) -> None:
    """A lazy mapping and a class whose attributes raise: nothing of them runs, and lints go on."""
    cell = linted.run(
        "%%distributed\n"
        "class Lazy(dict):\n"
        "    def items(self):\n        raise ValueError('not yet')\n"
        "    values = __iter__ = __getitem__ = items\n"
        "class Raises:\n"
        "    def __getattr__(self, name):\n        raise ValueError('not yet ' + name)\n"
        "class Outer(torch.nn.Module):\n"
        "    def named_modules(self, *args, **kwargs):\n        raise ValueError('not yet')\n"
        "    modules = parameters = named_modules\n"
        "odd, lazy, early = Raises(), Lazy(a=1), Outer()\n"
        "model, optimizer = fresh(linear(rank))\n"
        "loader = DataLoader(data, batch_size=8)\n"
        "train(model, optimizer, loader)"
    )
    checked = linted.run("%dist_check")
    linted.run("%%distributed\ndel odd, lazy, early, loader")

    assert checked.status == "ok", checked.visible
    assert "lint initial-values [0-1]: " in cell.stderr, cell.visible
    assert "lint same-data [0-1]: loader gave" in cell.stderr
    assert "not yet" not in cell.stderr


def test_an_accelerators_backward_is_the_line_that_calls_it(linted: Kernel) -> None:
    """It divides by the backwards that it was told of: by one, where it was told of none."""
    wrong = _LINTS["loss-not-divided"][0]
    last = "model(part).square().mean()"
    named = linted.run(
        "%%distributed\n" + wrong.replace(f"{last}.backward()", f"accelerator.backward({last})")
    )

    assert f"accelerator.backward({last}) called backward 4 times per step" in named.stderr


_UNREDUCED = """%%distributed
(a, a_steps), (b, b_steps), (c, _), (d, d_steps) = [fresh() for _ in range(4)]
a_steps, b_steps, d_steps = accelerator.prepare(a_steps, b_steps, d_steps)
outputs = [a(part).square().mean() for part in (x, -x)]
loss = b(x).square().mean()
for each in (*outputs, loss):
    each.backward(retain_graph=True)
a_steps.step()
loss.backward()
b_steps.step()


def hook(parameter):
    torch.optim.SGD([parameter], 1e-6).step()
    parameter.grad = None


for parameter in c.parameters():
    parameter.register_post_accumulate_grad_hook(hook)
c(x).square().mean().backward()
with accelerator.no_sync(d):
    d(x).square().mean().backward()
d_steps.step()
e, e_steps = fresh()
e_steps = accelerator.prepare(e_steps)
found = torch.autograd.grad(e(x).square().mean(), list(e.parameters()))
for parameter, gradient in zip(e.parameters(), found):
    parameter.grad = gradient
e_steps.step()
for optimizer in a_steps, b_steps, d_steps, e_steps:
    optimizer.zero_grad()
"""
_REDUCED = """%%distributed
penalty = torch.autograd.grad(a(x).mean(), a.module.weight, create_graph=True)[0].square().sum()
a(x).square().mean().backward()
a_steps.step()
found = torch.autograd.grad(a(x).square().mean(), list(a.parameters()))
for parameter, gradient in zip(a.parameters(), found):
    parameter.grad = accelerator.reduce(gradient, "mean")
a_steps.step()
del b, b_steps, c, d, d_steps, e, e_steps, outputs, loss, parameter, gradient, found
del penalty, optimizer, hook
n = gc.collect()
"""


def test_what_ddp_has_not_reduced_is_told_of_each_model(linted: Kernel) -> None:
    """Under zero1, whose steps make ranks equal again; %dist_check says it until it is mended."""
    linted.run("%dist_strategy zero1")
    told = linted.run(_UNREDUCED)
    linted.run("%%distributed\npass")
    checked = linted.run("%dist_check").plain[-1]
    mended = linted.run(_REDUCED)
    healthy = linted.run("%dist_check").plain[-1]
    linted.run("%dist_strategy ddp")
    linted.run("%%distributed\ndel a, a_steps\nn = gc.collect()")

    assert told.status == mended.status == "ok", (told.visible, mended.visible)
    assert checked.startswith("NOT healthy on 2 ranks: ")
    for model, line, idiom in (
        ("a", 8, "two forwards or more ran"),
        ("b", 10, "a second backward ran through one forward"),
        ("c", 14, "the step ran in a hook"),
        ("d", 23, "ran under no_sync"),
        ("e", 29, "torch.autograd.grad or torch.func has computed them"),
    ):
        sentence = (
            rf"the optimizer of {model} stepped at line {line} of cell \[\d+\] with .*{idiom}"
        )
        assert re.search(sentence, told.stderr), told.visible
        assert re.search(sentence, checked), checked
    assert "lint" not in mended.stderr
    assert healthy.startswith("healthy"), healthy


_DEAD = """%%distributed
base = linear()
kept = base.weight
before = torch.optim.SGD(base.parameters(), 1e-6)
model = accelerator.prepare(base)
loss = model(x).square().mean()
held = list(model.parameters())  # gathered, until the backward
loss.backward()
{step}
"""


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("before.step()", "an optimizer of base stepped weight, bias"),
        ("torch.optim.SGD(held, 1e-6).step()", "an optimizer of base stepped weight, bias"),
        ("accelerator.prepare(before).step()", ""),
        ("torch.optim.SGD([model.weight], 1e-6).step()", ""),
        ("(model(x).mean() + kept.square().sum()).backward()", "a loss used weight of base"),
        ("(model(x).mean() + held[0].square().sum() * 0).backward()", ""),
    ],
)
def test_an_optimizer_of_dead_parameters_is_told(linted: Kernel, step: str, says: str) -> None:
    """Of those from before prepare, and of those that fsdp gathers; not one that has a part."""
    linted.run("%dist_strategy fsdp --shard grad-op")
    cell = linted.run(_DEAD.format(step=step))
    linted.run(
        "%%distributed\ndel base, before, kept, model, loss, held\noptimizer = None\n"
        "n = gc.collect()"
    )
    linted.run("%dist_strategy ddp")

    assert cell.status == "ok", cell.visible
    assert says in cell.stderr
    assert ("dead-parameters" in cell.stderr) == bool(says), cell.visible


def test_a_new_model_with_the_fault_is_a_new_cause(linted: Kernel) -> None:
    """Another name is told as well; a silenced lint is not; --lints says both."""
    wrong, _, _ = _LINTS["parameters-apart"]
    first = linted.run(f"%%distributed\n{wrong}")
    other = linted.run(f"%%distributed\n{wrong.replace('apart', 'other')}")
    linted.run("%dist_check --silence parameters-apart")
    third = linted.run(f"%%distributed\n{wrong.replace('apart', 'third')}")
    listed = linted.run("%dist_check --lints")
    linted.run("%%distributed\ndel other, third")

    assert "parameters of apart differ" in first.stderr
    assert "parameters of other differ" in other.stderr
    assert third.stderr == ""
    assert "parameters-apart   silenced" in listed.plain[-1]


def test_a_switch_tells_the_effective_batch(linted: Kernel) -> None:
    """Where a loader is prepared whose batches each rank has whole; back again is another cause."""
    linted.run(
        "%%distributed\nmodel, optimizer = fresh()\noptimizer = accelerator.prepare(optimizer)\n"
        "loader = accelerator.prepare(DataLoader(data, batch_size=4))"
    )
    tp = linted.run("%dist_strategy single")
    back = linted.run("%dist_strategy ddp")
    quiet = linted.run("%dist_strategy single")
    linted.run("%dist_strategy ddp")

    assert "was 8 samples and is now 4, but the learning rate stays 1e-06" in tp.plain[-1]
    assert "was 4 samples and is now 8" in back.plain[-1]
    assert "lint" not in quiet.plain[-1]


_LARGE = """%%distributed
{name} = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000, bias=False) for _ in range(16)])
{name}_steps = torch.optim.AdamW({name}.parameters())
import psutil, resource
limits = resource.getrlimit(resource.RLIMIT_AS)
most = psutil.Process().memory_info().vms + 200_000_000
resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
"""
_PREPARED = """{name}, {name}_steps = accelerator.prepare({name}, {name}_steps)
"""
_RESTORED = """%%distributed
resource.setrlimit(resource.RLIMIT_AS, limits)
large = large_steps = other = other_steps = quiet = quiet_steps = None
gc.collect()
"""


def test_a_model_that_will_not_fit_is_told_before_it_is_built(linted: Kernel) -> None:
    """64 MB of parameters, and 200 free: with gradients, Adam and buckets ddp takes 320."""
    linted.run("%dist_strategy fsdp")
    fits = linted.run((_LARGE + _PREPARED).format(name="large"))
    switched = linted.run("%dist_strategy ddp")
    linted.run("%dist_strategy fsdp")
    again = linted.run("%dist_strategy ddp")
    linted.run(_RESTORED)
    broken = linted.run((_LARGE + _PREPARED + "raise ValueError").format(name="other"))
    linted.run(_RESTORED)
    linted.run("%dist_check --silence memory-shortage")
    quiet = linted.run((_LARGE + _PREPARED).format(name="quiet"))
    linted.run(_RESTORED)
    linted.run("%dist_check --tell memory-shortage")

    assert fits.status == quiet.status == "ok", (fits.visible, quiet.visible)
    assert "memory-shortage" not in fits.stderr + again.stderr + quiet.stderr
    for result, name in ((switched, "large"), (broken, "other")):
        match = re.search(
            rf"lint memory-shortage \[0-1\]: {name} under ddp, dp 2 needs 320\.0 MB on each rank "
            r"\(parameters, gradients, AdamW\), and rank [01] has (\d+)\.\d MB free for it\. "
            r"Instead, fsdp[ a-z-]* needs \d+\.\d MB",
            result.stderr,
        )
        assert match is not None, result.visible
        assert 150 < int(match[1]) < 320


def test_check_finds_what_differs_and_nan(linted: Kernel) -> None:
    """By name, with the ranks and the largest difference; after a repair all is well."""
    linted.run(
        "%%distributed\nmodel, optimizer = fresh()\nmodel(x).square().mean().backward()\n"
        "optimizer.step()"
    )
    clean = linted.run("%dist_check")
    linted.run("%%rank[1]\nwith torch.no_grad():\n    model.module.weight[0, 0] += 0.25")
    apart = linted.run("%dist_check")
    linted.run("%dist_sync_model --from 0")
    linted.run("%%rank[0]\nwith torch.no_grad():\n    model.module.bias.fill_(float('inf'))")
    odd = linted.run("import nbdist\nfound = nbdist.session().check()\nfound.is_healthy")
    names = linted.run("[(one.kind, one.ranks, one.first, one.n_inf) for one in found.not_finite]")

    assert clean.plain[-1].startswith("healthy: on 2 ranks")
    assert apart.plain[-1].startswith("NOT healthy on 2 ranks: ranks differ")
    assert "parameter weight differs between rank 0 and rank 1, by up to 0.25" in apart.plain[-1]
    assert odd.plain[-1] == "False"
    assert names.plain[-1] == "[('parameter', (0,), 'bias', 1)]"


def test_looks_while_training_name_the_step_and_the_parameter(linted: Kernel) -> None:
    """NaN is told while the cell runs; the first module with --trace-nan, for one cell."""
    linted.run("%%distributed\nmodel, optimizer = fresh()")
    set_to = linted.run("%dist_check --every 2")
    body = (
        "%%distributed\nfor n in range(6):\n    optimizer.zero_grad()\n"
        "    z = x * float('nan') if n == 3 else x\n"
        "    model(z).square().mean().backward()\n    optimizer.step()"
    )
    looked = linted.run(body)
    linted.run("%dist_check --every 0")
    linted.run("%%distributed\nmodel, optimizer = fresh()")
    linted.run("%dist_check --trace-nan")
    traced = linted.run(body)
    linted.run("%%distributed\nmodel, optimizer = fresh()")
    after = linted.run(body)

    assert set_to.plain[-1].startswith(
        "before every 2 steps of an optimizer, gradients are checked"
    )
    assert "[0-1] step 4: gradients are not finite in 2 of 2 parameters" in looked.stderr
    assert "model.bias (checked every 2 steps" in looked.stderr
    assert "[0-1] step 4 of this cell: model (Linear) is the first module" in traced.stderr
    assert "its input was not finite either" in traced.stderr
    assert after.stderr == ""


def test_a_lint_is_told_of_a_cell_that_fails(linted: Kernel) -> None:
    """The names of unused parameters stand above torch's error, which has numbers."""
    wrong = _LINTS["unused-parameters"][0]
    cell = linted.run(f"%%distributed\n{wrong}\ntwo(x).backward()")

    assert cell.status == "error"
    assert "left.weight, left.bias of two got no gradient" in cell.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%dist_check --silence nope", "There is no lint 'nope'. Choose one of same-data"),
        ("%dist_check --every -1", "not a valid number of steps"),
        ("%dist_check --every 2 --lints", "choose one of --every, --lints"),
    ],
)
def test_mistakes_list_the_choices(linted: Kernel, line: str, says: str) -> None:
    """As ordinary errors."""
    linted.run(line).check_failure("OptionError", re.escape(says))
