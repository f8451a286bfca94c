"""Options of any strategy: same numbers as without them, and each does what its name says."""

from pathlib import Path

import pytest
import torch

from nbdist.errors import OptionError
from nbdist.parallel.options import set_fused
from tests.support.parity import TEXT
from tests.support.torch_ranks import TorchRanks, run_ranks

OPTIONS = (
    TEXT
    + """
import functools, warnings
from nbdist.parallel import options, precision
from nbdist.parallel.dp import fsdp

def put(name, base, **settings):
    degrees = {"fsdp": {"dp_shard": n}}.get(name, {})
    own = (fsdp.STEP,) if name == "fsdp" else ()
    job = job_of(base, choose(name, degrees, **settings))
    outer = put_under(job, options.STEP, *own, precision.STEP)
    return nn.parallel.DistributedDataParallel(outer) if name == "ddp" else outer

def compare(name, made=None, **settings):
    "Largest differences from one process with all data and no options; alike seeds for dropout."
    made = made or {}
    alone, base = make(**made), make(**made)
    torch.manual_seed(5)
    wanted = train(alone, alone)
    outer = put(name, base, **settings)
    torch.manual_seed(5)
    parts = {} if name == "single" else {"part": rank, "parts": n}
    return off(train(outer, base, **parts), wanted)

def runs_of(**settings):
    "How often the norm, a product and attention run in a step of three blocks, by kernel."
    base = make()
    outer = put("single", base, **settings)
    outer(batch(0))
    with Counted() as mode:
        outer(batch(0)).backward()
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    return [mode.counts.get(op, 0) for op in ("native_layer_norm", "mm", flash, "_safe_softmax")]

def saved(**settings):
    "Numbers that a forward keeps for its backward."
    base = make()
    outer = put("single", base, **settings)
    own = {p.untyped_storage().data_ptr() for p in base.parameters()}
    kept = {}
    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outer(batch(0))
    return sum(tensor.numel() for tensor in kept.values())
"""
)

WORKS = (
    OPTIONS
    + """
KINDS = ("", "full", "selective", "2")
same = {f"{name} {kind}": compare(name, checkpoint=kind)
        for name, kind in (("ddp", "full"), ("fsdp", "selective"), ("fsdp", "2"))}
same["dropout"] = compare("single", made={"drop": 0.5}, checkpoint="full")
same["dropout selective"] = compare("single", made={"drop": 0.5}, checkpoint="selective")
same["math"] = compare("fsdp", sdpa="math", checkpoint="full")
same["flash"] = compare("ddp", sdpa="flash")

# Hugging Face's blocks add to a cache of keys; computed again they would see each key twice.
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16,
                    bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
def hugging(**settings):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    outer = put("single", model, **settings)
    tokens = torch.arange(24).view(2, 12)
    out = outer(input_ids=tokens, labels=tokens)
    out.loss.backward()
    return out, [p.grad for p in model.parameters()]
plain = hugging()
again = {kind: hugging(checkpoint=kind) for kind in ("full", "selective")}
lower, _ = hugging(precision="bf16")
huggings = [max((a - b).abs().max().item() for a, b in zip(gs, plain[1]))
            for _, gs in again.values()]

# A copy made by the user is a model of its own.
base = make()
put("single", base, checkpoint="full", sdpa="math", precision="bf16")
twin = copy.deepcopy(base)
with torch.no_grad():
    for p in base.parameters():
        p.zero_()
    values = [base(batch(0)).item(), twin(batch(0)).item()]
import inspect
signature = list(inspect.signature(base.forward).parameters)

# Recomputation by the user's own hand takes the kernel that was chosen.
def by_hand(use_reentrant):
    base = make()
    again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=use_reentrant)
    for block in base.layers:
        block.forward = functools.partial(again, block.forward)
    outer = put("single", base, sdpa="math")
    outer(batch(0))
    with Counted() as mode:
        outer(batch(0)).backward()
    return mode.counts.get("_safe_softmax", 0)
by_hands = [by_hand(False), by_hand(True)]

logs, refused = [], {}
class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
    def forward(self, x):
        return self.one(x).sum()
refused["no blocks"] = refusal(lambda: put("single", Plain(), checkpoint="full"))
refused["no blocks compile"] = refusal(lambda: put("single", Plain(), is_compiled=True))
refused["too few"] = refusal(lambda: put("single", make(), checkpoint="4"))
refused["efficient"] = refusal(lambda: put("single", make(), sdpa="efficient"))
refused["cudnn"] = refusal(lambda: put("fsdp", make(), sdpa="cudnn"))
refused["never"] = refusal(lambda: put("single", Plain(), sdpa="math")(torch.ones(2, 3)))
class Drops(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1).sum()
refused["no kernel"] = refusal(
    lambda: put("single", Drops(), sdpa="flash")(torch.ones(1, 2, 8, 4)))
config._attn_implementation = "eager"
refused["eager"] = refusal(lambda: hugging(sdpa="math"))
os.environ["CXX"], os.environ["PATH"] = "none", ""
refused["compiler"] = refusal(lambda: put("single", make(), is_compiled=True))

done(
    same=same, runs={kind: runs_of(checkpoint=kind) for kind in KINDS},
    kernels={kind: runs_of(sdpa=kind)[2:] for kind in ("flash", "math")},
    both=runs_of(sdpa="math", checkpoint="full")[2:],
    saved=[saved(checkpoint=kind) for kind in KINDS],
    huggings=huggings, by_hands=by_hands, dtypes=[str(lower.loss.dtype), str(lower.logits.dtype)],
    classes=[type(lower).__name__], values=values, signature=signature, refused=refused,
)
"""
)


REFUSED = {
    "no blocks": "--checkpoint full works block by block",
    "no blocks compile": "--compile works block by block",
    "too few": "layers has 3 blocks, so none would be recomputed. Use a number from 1 to 3",
    "efficient": "the CPU has no such kernel here. Use flash or math",
    "cudnn": "the CPU has no such kernel here. Use flash or math",
    "never": "Plain never calls",
    "no kernel": "torch has no such kernel for a call of this model's attention",
    "eager": "'eager'",
    "compiler": "no C++ compiler (none)",
}


def test_they_work_under_each_strategy(tmp_path: Path) -> None:
    """Numbers stay, under ddp and fsdp; blocks run again, kernels are the ones asked for."""
    first, other = run_ranks(tmp_path, 2, WORKS)

    assert first == other
    for name, differences in first["same"].items():
        assert max(differences) < 2e-6, (name, differences)
    assert max(first["huggings"]) < 2e-6
    # A block has 1 norm, 1 attention and 4 products, of which 2 add a bias and are another op;
    # outside are 1 norm and 1 product. Backward takes 2 for each product.
    assert first["runs"] == {
        "": [4, 7 + 2 * 13, 3, 0],
        "full": [7, 7 + 2 * 13 + 3 * 2, 6, 0],
        "selective": [7, 7 + 2 * 13, 3, 0],
        "2": [5, 7 + 2 * 13 + 2, 4, 0],
    }
    assert first["kernels"] == {"flash": [3, 0], "math": [0, 3]}
    assert first["both"] == [0, 6]
    assert first["by_hands"] == [6, 6]
    none, full, _, second = first["saved"]  # what selective keeps is in no saved tensor
    assert 3 * full < second < none
    assert first["dtypes"] == ["torch.float32", "torch.float32"]
    assert first["classes"] == ["CausalLMOutputWithCrossAttentions"]
    assert first["values"][0] != first["values"][1]
    assert first["signature"] == ["tokens"]

    for what, message in REFUSED.items():
        assert message in first["refused"][what], what


COMPILED = (
    OPTIONS
    + """
from torch._dynamo.utils import counters
faulthandler.dump_traceback_later(280, exit=True)
name, _, kind = os.environ["CASE"].partition(" ")
differences = compare(name, made={"depth": 2}, is_compiled=True, checkpoint=kind)
done(differences=differences, frames=counters["frames"]["ok"],
     graphs=counters["stats"]["unique_graphs"])
"""
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled code lies: headers and kernels of one case serve the next."""
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["ddp", "fsdp", "ddp full", "fsdp full", "fsdp selective"])
def test_compiled_blocks_train_alike(tmp_path: Path, compiled: Path, case: str) -> None:
    """Block by block, with and without checkpointing; blocks are compiled, the rest is not."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(compiled), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # A C++ compiler runs several times.
    with TorchRanks(tmp_path, 2, COMPILED, limit_s=280.0, CASE=case, **env) as ranks:
        results = ranks.results()

    for result in results:
        assert max(result["differences"]) < 2e-6, result
        assert result["frames"] > 0
        assert 0 < result["graphs"] <= 2


def _step(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 0.5 + number)
    optimizer.step()


KINDS = [
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize(("kind", "arguments"), KINDS)
def test_a_fused_step_gives_the_same_numbers(
    kind: type[torch.optim.Optimizer], arguments: dict[str, object]
) -> None:
    """On and off between steps of one optimizer: its groups go back to what the user gave."""
    parameter_lists = [
        [torch.nn.Parameter(torch.linspace(0, 1, 7)), torch.nn.Parameter(torch.ones(3))]
        for _ in "12"
    ]
    mine, other = (
        kind([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "lr": 0.2}], **arguments)
        for p in parameter_lists
    )
    dicts = [id(group) for group in mine.param_groups]
    before = [(group["fused"], group["foreach"]) for group in mine.param_groups]

    for is_on in (False, True, True, False):
        set_fused(mine, is_on=is_on)
        with torch.profiler.profile() as profile:
            _step(mine, parameter_lists[0])
        ran = {event.key for event in profile.key_averages()}
        assert any("_fused_" in name for name in ran) == is_on
        _step(other, parameter_lists[1])

    for a, b in zip(*parameter_lists, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert dicts == [id(group) for group in mine.param_groups]
    assert before == [(group["fused"], group["foreach"]) for group in mine.param_groups]


def test_a_group_added_later_is_fused_too() -> None:
    """And goes back to its own setting; an optimizer that the user made fused stays so."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    set_fused(optimizer, is_on=True)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "fused": None})

    set_fused(optimizer, is_on=True)
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    set_fused(optimizer, is_on=False)
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]

    fused = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
    set_fused(fused, is_on=False)
    assert fused.param_groups[0]["fused"] is True


def test_an_optimizer_without_a_fused_step_is_refused() -> None:
    """Nothing has changed then; the message lists those that have one."""
    parameters = [torch.nn.Parameter(torch.ones(2))]
    rms = torch.optim.RMSprop(parameters)
    optimizer = torch.optim.Adam(parameters, differentiable=True)

    with pytest.raises(
        OptionError, match=r"RMSprop has no fused step\. Use one of Adam, AdamW, SGD"
    ):
        set_fused(rms, is_on=True)
    with pytest.raises(OptionError, match="differentiable=True"):
        set_fused(optimizer, is_on=True)

    assert "fused" not in rms.param_groups[0]
    assert optimizer.param_groups[0]["fused"] is None
