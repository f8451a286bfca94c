"""Options of any strategy: same numbers as without them, and each does what its name says."""

import copy
import functools
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nbdist.errors import OptionError
from nbdist.parallel.base.options import set_fused
from tests.programs.parity import FP32, Counted, batch, close, compare, make, put
from tests.programs.rank import refusal
from tests.support.torch_ranks import on_ranks, run_ranks

CHECKPOINTS = ("", "full", "selective", "2")


def runs_of(**options: Any) -> list[int]:
    """How often the norm, a product and attention run in a step of three blocks, by kernel."""
    outer = put(make(), "single", **options).outer
    outer(batch(0))
    with Counted() as mode:
        outer(batch(0)).backward()
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    return [mode.counts.get(op, 0) for op in ("native_layer_norm", "mm", flash, "_safe_softmax")]


def saved(**options: Any) -> int:
    """Numbers that a forward keeps for its backward."""
    base = make()
    outer = put(base, "single", **options).outer
    own = {p.untyped_storage().data_ptr() for p in base.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outer(batch(0))
    return sum(tensor.numel() for tensor in kept.values())


@on_ranks(2)
def test_they_work_under_each_strategy() -> None:
    """Numbers stay, under ddp and fsdp; blocks run again, kernels are the ones asked for."""

    def dropping():
        return make(drop=0.5)

    close(
        {
            "ddp full": compare("ddp", checkpoint="full"),
            "fsdp selective": compare("fsdp", checkpoint="selective"),
            "fsdp 2": compare("fsdp", checkpoint="2"),
            "dropout": compare("single", build=dropping, checkpoint="full"),
            "dropout selective": compare("single", build=dropping, checkpoint="selective"),
            "math": compare("fsdp", sdpa="math", checkpoint="full"),
            "flash": compare("ddp", sdpa="flash"),
        }
    )
    # A block has 1 norm, 1 attention and 4 products, of which 2 add a bias and are another op;
    # outside are 1 norm and 1 product. Backward takes 2 for each product.
    assert {kind: runs_of(checkpoint=kind) for kind in CHECKPOINTS} == {
        "": [4, 7 + 2 * 13, 3, 0],
        "full": [7, 7 + 2 * 13 + 3 * 2, 6, 0],
        "selective": [7, 7 + 2 * 13, 3, 0],
        "2": [5, 7 + 2 * 13 + 2, 4, 0],
    }
    assert runs_of(sdpa="flash")[2:] == [3, 0]
    assert runs_of(sdpa="math")[2:] == [0, 3]
    assert runs_of(sdpa="math", checkpoint="full")[2:] == [0, 6]
    none, full, _, second = (saved(checkpoint=kind) for kind in CHECKPOINTS)
    assert 3 * full < second < none  # what selective keeps is in no saved tensor
    for use_reentrant in (False, True):
        assert by_hand(use_reentrant=use_reentrant) == 6
    copies_are_models_of_their_own()
    transformers_blocks_see_each_key_once()
    what_cannot_be_is_refused()


def copies_are_models_of_their_own() -> None:
    base = make()
    put(base, "single", checkpoint="full", sdpa="math", precision="bf16")
    twin = copy.deepcopy(base)
    with torch.no_grad():
        for p in base.parameters():
            p.zero_()
        assert base(batch(0)) != twin(batch(0))
    assert list(inspect.signature(base.forward).parameters) == ["tokens"]


def by_hand(*, use_reentrant: bool) -> int:
    """Recomputation by the user's own hand takes the kernel that was chosen."""
    base = make()
    again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=use_reentrant)
    for block in base.layers:
        block.forward = functools.partial(again, block.forward)
    outer = put(base, "single", sdpa="math").outer
    outer(batch(0))
    with Counted() as mode:
        outer(batch(0)).backward()
    return mode.counts.get("_safe_softmax", 0)


def hugging(attention: str = "sdpa", **options: Any) -> tuple[Any, list[torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    config = GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = attention
    model = make(lambda: GPT2LMHeadModel(config))
    tokens = torch.arange(24).view(2, 12)
    out = put(model, "single", **options).outer(input_ids=tokens, labels=tokens)
    out.loss.backward()
    return out, [p.grad for p in model.parameters()]


def transformers_blocks_see_each_key_once() -> None:
    """They add to a cache of keys; computed again they would see each key twice."""
    _, plain = hugging()
    for kind in ("full", "selective"):
        _, again = hugging(checkpoint=kind)
        assert max((a - b).abs().max() for a, b in zip(again, plain, strict=True)) < FP32
    lower, _ = hugging(precision="bf16")
    assert lower.loss.dtype == lower.logits.dtype == torch.float32
    assert type(lower).__name__ == "CausalLMOutputWithCrossAttentions"


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)

    def forward(self, x):
        return self.one(x).sum()


class Drops(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1).sum()


def refused(text: str, build: Any, name: str = "single", *inputs: Any, **options: Any) -> None:
    def call():
        outer = put(build(), name, **options).outer
        return outer(*inputs) if inputs else None

    assert text in refusal(call)


def what_cannot_be_is_refused() -> None:
    refused("--checkpoint full works block by block", Plain, checkpoint="full")
    refused("--compile works block by block", Plain, is_compiled=True)
    few = "layers has 3 blocks, so none would be recomputed. Use a number from 1 to 3"
    refused(few, make, checkpoint="4")
    no_kernel = "the CPU has no such kernel here. Use flash or math"
    refused(no_kernel, make, sdpa="efficient")
    refused(no_kernel, make, "fsdp", sdpa="cudnn")
    refused("Plain never calls", Plain, "single", torch.ones(2, 3), sdpa="math")
    none = "torch has no such kernel for a call of this model's attention"
    refused(none, Drops, "single", torch.ones(1, 2, 8, 4), sdpa="flash")
    assert "'eager'" in refusal(lambda: hugging("eager", sdpa="math"))
    os.environ["CXX"], os.environ["PATH"] = "none", ""
    refused("no C++ compiler (none)", make, is_compiled=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled code lies: headers and kernels of one case serve the next."""
    return tmp_path_factory.mktemp("inductor")


def trains_compiled(name: str, checkpoint: str) -> None:
    from torch._dynamo.utils import counters

    given = {"is_compiled": True, "checkpoint": checkpoint}
    close({checkpoint: compare(name, build=lambda: make(depth=2), **given)})
    assert counters["frames"]["ok"] > 0
    assert 0 < counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["ddp", "fsdp", "ddp full", "fsdp full", "fsdp selective"])
def test_compiled_blocks_train_alike(tmp_path: Path, compiled: Path, case: str) -> None:
    """Block by block, with and without checkpointing; blocks are compiled, the rest is not."""
    name, _, checkpoint = case.partition(" ")
    env = {"TORCHINDUCTOR_CACHE_DIR": str(compiled), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    given = {"name": name, "checkpoint": checkpoint}
    # A C++ compiler runs several times.
    run_ranks(tmp_path, 2, trains_compiled, limit_s=280.0, arguments=given, **env)


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
