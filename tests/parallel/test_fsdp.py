"""FSDP2 and FSDP1 against one process at the same global batch; what they split and send."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.parity import TEXT
from tests.support.torch_ranks import run_ranks

FP32 = 2e-6
# Loss against fp32 of one process: what plain torch differs by, too.
BF16, FP16 = 1.4e-3, 1.2e-4

FSDP = (
    TEXT
    + """
from nbdist.parallel import options, precision
from nbdist.parallel.dp import fsdp, fsdp1

STEPS = {
    "fsdp": (options.STEP, fsdp.STEP, precision.STEP),
    "fsdp1": (options.STEP, fsdp1.STEP, precision.STEP),
}
FULL, HYBRID = {"dp_shard": n}, {"dp_replicate": 2, "dp_shard": n // 2}

def freeze(model):
    model.words.requires_grad_(False)
    model.layers[0].qkv.requires_grad_(False)
    return model

def put(name, degrees, base, **settings):
    return put_under(job_of(base, choose(name, degrees, **settings)), *STEPS[name])

def own_names(tensors):
    return {key.replace("_fsdp_wrapped_module.", ""): tensor for key, tensor in tensors.items()}

def flat_gradients(outer, base):
    with outer.summon_full_params(outer, with_grads=True):
        return own_names(gradients_of(outer, base))

def flat_parameters(outer, base):
    with outer.summon_full_params(outer):
        return own_names(parameters_of(outer, base))

def compare(name, degrees, how=lambda model: model, accumulate=1, made=None, **settings):
    "Largest differences of losses, gradients and parameters from one process with all data."
    wanted = train(*[how(make(**(made or {})))] * 2)
    base = how(make(**(made or {})))
    outer = put(name, degrees, base, **settings)
    scale = 1024.0 if settings.get("precision") == "fp16" else 1.0
    same = {"accumulate": accumulate, "scale": scale}
    if name == "fsdp":
        trained = train(outer, base, rank, n, no_sync=fsdp.no_sync, **same)
    else:
        trained = train(outer, base, rank, n, no_sync=type(outer).no_sync,
                      optimizer=adamw(base), gradients=flat_gradients,
                      parameters=flat_parameters, **same)
    return off(trained, wanted)
"""
)

TRAINS = (
    FSDP
    + """
fp32 = {
    "full": compare("fsdp", FULL),
    "grad-op": compare("fsdp", FULL, shard="grad-op"),
    "frozen": compare("fsdp", FULL, how=freeze),
    "accumulated": compare("fsdp", FULL, accumulate=2),
    "offload": compare("fsdp", FULL, offload="cpu"),
    "no blocks": compare("fsdp", FULL, made={"depth": 1}),
    "fsdp1": compare("fsdp1", FULL, accumulate=2),
}
LENGTH, LR = 65, 1e-3
half = {name: {kind: compare(name, FULL, precision=kind)}
        for name, kind in (("fsdp", "bf16"), ("fsdp1", "fp16"))}
done(fp32=fp32, half=half)
"""
)


def _check(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name, differences in result["fp32"].items():
            assert max(differences) < FP32, (name, differences)
        for name, kinds in result["half"].items():
            for kind, differences in kinds.items():
                assert differences[0] < {"bf16": BF16, "fp16": FP16}[kind], (name, kinds)


def test_it_trains_as_one_process(tmp_path: Path) -> None:
    """Loss, gradients and three AdamW steps; uneven, tied and frozen parameters; no block list."""
    results = run_ranks(tmp_path, 2, TRAINS)

    _check(results)


MATRIX = (
    FSDP
    + """
import itertools
shard = os.environ["SHARD"]
degrees = HYBRID if shard == "hybrid" else FULL
fp32, half = {}, {}
for checkpoint, accumulate, offload in itertools.product(
    ("", "full", "selective", "2"), (1, 2), ("", "cpu")
):
    how = freeze if accumulate == 2 else (lambda model: model)
    fp32[f"{checkpoint} {accumulate} {offload}"] = compare(
        "fsdp", degrees, how, accumulate, shard=shard, checkpoint=checkpoint, offload=offload)
fp32["untied"] = compare("fsdp", degrees, made={"tied": False}, shard=shard)
for accumulate in (1, 2):
    fp32[f"fsdp1 {accumulate}"] = compare("fsdp1", degrees, accumulate=accumulate, shard=shard)
LENGTH, LR = 65, 1e-3
for name, checkpoint in itertools.product(("fsdp", "fsdp1"), ("", "selective")):
    half[f"{name} {checkpoint}"] = {
        kind: compare(name, degrees, shard=shard, checkpoint=checkpoint, precision=kind)
        for kind in ("bf16", "fp16")}
done(fp32=fp32, half=half)
"""
)


@pytest.mark.parity
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("size", "shard"), [(2, "full"), (2, "grad-op"), (4, "full"), (4, "grad-op"), (4, "hybrid")]
)
def test_every_combination_trains_as_one_process(tmp_path: Path, size: int, shard: str) -> None:
    """What is split, times checkpointing, accumulation, offload and precision; pieces of 0."""
    # 22 trainings, on up to two ranks for each core.
    results = run_ranks(tmp_path, size, MATRIX, limit_s=280.0, SHARD=shard)

    _check(results)


SENT = (
    FSDP
    + """
def sent(**settings):
    "Collectives of one step, by name, and when a gradient is there."
    accumulate = settings.pop("accumulate", 1)
    base = make()
    outer = put("fsdp", FULL, base, **settings)
    outer(batch(9, rank, n))                                     # torch sets itself up
    fsdp.settle(base)
    there = []
    with Counted() as mode:
        for number, piece in enumerate(batch(0, rank, n).chunk(accumulate)):
            is_last = number == accumulate - 1
            with contextlib.nullcontext() if is_last else fsdp.no_sync(outer):
                outer(piece).backward()
            there.append(base.head.weight.grad is not None)
    return [mode.counts.get("_allgather_base_"), mode.counts.get("_reduce_scatter_base_"), there]

def kinds(base):
    return sorted({type(p.data).__name__ for p in base.parameters()})

base = make()
before = [id(base), id(base.layers[1]), [name for name, _ in base.named_parameters()]]
job = job_of(base, choose("fsdp", FULL))
outer = put_under(job, *STEPS["fsdp"])
split = {name: list(p.to_local().shape) for name, p in base.named_parameters()}
is_same = [outer is base, before == [id(base), id(base.layers[1]), list(split)],
           base.head.weight is base.words.weight, base.scale.shape == (WIDTH,)]

lower = make()
put("fsdp", FULL, lower, precision="bf16", offload="cpu")
inside = []
lower.layers[1].mlp[1].register_forward_pre_hook(
    lambda module, args: inside.extend([str(args[0].dtype),
                                        str(lower.layers[1].mlp[0].weight.dtype)]))
loss = lower(batch(0, rank, n))
loss.backward()
dtypes = {"inside": inside, "loss": str(loss.dtype),
        "held": str(lower.head.weight.dtype), "gradient": str(lower.head.weight.grad.dtype),
        "device": str(lower.head.weight.to_local().device)}

looked = make()
put("fsdp", FULL, looked, shard="grad-op")
looked(batch(0))
unsettled = kinds(looked)
fsdp.settle(looked)

class Norms(nn.Module):
    "Batch norms keep fp32 statistics; here is no list of blocks and no attention."
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(),
                                    nn.Conv1d(6, 6, 3), nn.GroupNorm(2, 6), nn.PReLU())
        self.head = nn.Linear(6, 1)
        self.register_buffer("mean", torch.ones(6, 1))
    def forward(self, x):
        return self.head((self.layers(x) * self.mean).mean(-1)).square().mean()

torch.manual_seed(0)
norms = Norms()
torch.manual_seed(0)
x = torch.randn(8, 2, 12)
alone = copy.deepcopy(norms)(x).item()
job_of_norms = job_of(norms, choose("fsdp", FULL, precision="bf16"))
put_under(job_of_norms, *STEPS["fsdp"])
loss = norms(x)
loss.backward()
done(
    sent={"one": sent(), "two": sent(accumulate=2), "grad-op": sent(shard="grad-op")},
    split=split, is_same=is_same, seen=dtypes,
    no_notes=job.step_data["notes"],
    looked=[unsettled, kinds(looked)],
    norms=[loss.item() - alone, norms.layers[1].weight.grad.to_local().numel()],
    notes=job_of_norms.step_data["notes"],
)
"""
)


def test_it_splits_gathers_and_reduces_by_block(tmp_path: Path) -> None:
    """Pieces by torch.chunk; collectives are counted; bf16 inside, fp32 held and returned."""
    results = run_ranks(tmp_path, 2, SENT)

    halves = [result["split"] for result in results]
    assert [half["words.weight"] for half in halves] == [[19, 10], [18, 10]]
    assert [half["layers.2.gain"] for half in halves] == [[2], [1]]
    for result in results:
        assert result["is_same"] == [True] * 4
        # Three blocks and the root, each gathered for its forward and again for its backward.
        assert result["sent"]["one"] == [8, 4, [True]]
        assert result["sent"]["two"] == [16, 4, [False, True]]
        assert result["sent"]["grad-op"] == [4, 4, [True]]
        assert result["seen"] == {
            "inside": ["torch.bfloat16", "torch.bfloat16"],
            "loss": "torch.float32",
            "held": "torch.float32",
            "gradient": "torch.float32",
            "device": "cpu",
        }
        assert result["looked"] == [["Tensor"], ["DTensor"]]
        assert abs(result["norms"][0]) < 1e-2
        assert result["norms"][1] == 3
        assert "Norms has no list of blocks" in result["notes"][0]
        assert result["no_notes"] == []


LOOKS = (
    FSDP
    + """
def off_after(look, shard):
    "Largest difference from one process, of an optimizer that is made after a look at a model."
    alone, base = make(), make()
    outer = put("fsdp", FULL, base, shard=shard)
    kept = look(outer)
    base.words.requires_grad_(False)
    alone.words.requires_grad_(False)
    with torch.no_grad():
        base.head.weight.mul_(2.0)
        alone.head.weight.mul_(2.0)
    own, other = (torch.optim.SGD(m.parameters(), 0.5) for m in (base, alone))
    for number in range(2):
        outer(batch(number).chunk(n)[rank]).backward()
        alone(batch(number)).backward()
        own.step(), own.zero_grad()
        other.step(), other.zero_grad()
    values = {k: p.full_tensor() for k, p in base.named_parameters()}
    return max((values[k] - p).abs().max().item() for k, p in alone.named_parameters())

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
    def raise_(module, args):
        raise ValueError("in the middle")
    hook = getattr(outer, "module", outer).head.register_forward_pre_hook(raise_)
    try:
        outer(batch(0))
    except ValueError:
        hook.remove()

looks = {f"grad-op {look.__name__}": off_after(look, "grad-op") for look in (evaluate, fail)}
looks["fail"] = off_after(fail, "full")
looks |= {look.__name__: off_after(look, "full") for look in (evaluate, drop, keep, keep_on_one)}

class Scaled(nn.Module):
    "Returns parameters themselves: one of the root, one of a block in a dict."
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 3.0))
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"out": x, "scales": [self.scale, self.scale[1:]]}

scaled = Scaled()
outer = put("fsdp", FULL, scaled)
with torch.no_grad():
    evaluated = outer(torch.ones(1, 2))["scales"][1].tolist()
out = outer(torch.ones(1, 2))
(out["out"].sum() * 0 + out["scales"][0].sum() * (rank + 1)).backward()
done(looks=looks, scales=[evaluated, scaled.scale.grad.full_tensor().tolist()])
"""
)


def test_what_is_gathered_goes_back_where_no_backward_follows(tmp_path: Path) -> None:
    """What is frozen, changed or optimized after a look counts, as in one process.

    A parameter that a forward returns stays whole: its gradient is the mean over the ranks.
    """
    for result in run_ranks(tmp_path, 2, LOOKS):
        assert max(result["looks"].values()) < FP32, result["looks"]
        assert result["scales"] == [[3.0] * 3, [1.5] * 4]


REFUSED = (
    FSDP
    + """
def trial(base, degrees=FULL, name="fsdp", **settings):
    before = {key: value for key, value in base.named_parameters()}
    text = refusal(lambda: put(name, degrees, base, **settings))
    after = dict(base.named_parameters())
    assert all(after[key] is value for key, value in before.items())
    return text

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList([Block(), Block()])
        self.right = nn.ModuleList([Block(), Block()])

scalar, mixed = make(), make()
scalar.temperature = nn.Parameter(torch.tensor(1.0))
mixed.layers[1].out.to(torch.bfloat16)

class Shared(LM):
    "The same block twice, a parameter of two blocks, and one of a block and the root."
    def __init__(self):
        super().__init__(depth=4)
        self.layers.append(self.layers[0])
        self.layers[2].norm = self.layers[1].norm
        self.norm.weight = self.layers[3].norm.weight

def shared(*_):
    torch.manual_seed(0)
    return Shared()
job = job_of(shared(), choose("fsdp", FULL))
units = fsdp.units_of(job)
done(
    scalar=trial(scalar), scalar1=trial(scalar, name="fsdp1"), mixed=trial(mixed),
    nvme=trial(make(), offload="nvme"), offload1=trial(make(), name="fsdp1", offload="cpu"),
    blocks=trial(make(), blocks="words"), towers=trial(Towers()),
    units=[job.base.layers[0] is unit for unit in units],
    shared=compare("fsdp", FULL, how=shared),
)
"""
)


def test_what_cannot_be_split_is_refused_by_name(tmp_path: Path) -> None:
    """Before anything changes; parameters that blocks share stay one parameter."""
    first, other = run_ranks(tmp_path, 2, REFUSED)

    assert first == other
    assert "cannot split temperature" in first["scalar"]
    assert "fsdp1 cannot split temperature" in first["scalar1"]
    assert "layers.1.gain is torch.float32" in first["mixed"]
    assert "layers.1.out.weight is torch.bfloat16" in first["mixed"]
    assert "does not offload to nvme" in first["nvme"]
    assert "Use fsdp." in first["offload1"]
    assert "layers (3 x Block)" in first["blocks"]
    assert "left (2 x Block), right (2 x Block)" in first["towers"]
    assert first["units"] == [True]
    assert max(first["shared"]) < FP32
