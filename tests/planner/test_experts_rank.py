"""What plans count of experts, counted once more in transformers' own models."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from nbdist.errors import OptionError
from nbdist.parallel.accelerator import prepare
from nbdist.parallel.base.mesh import build_mesh
from nbdist.parallel.base.transform import ModelBuild
from nbdist.parallel.ep.experts import find_experts
from nbdist.parallel.live import build, registry
from nbdist.planner.activations import block_bytes
from nbdist.planner.fake.process_group import fake_world
from nbdist.planner.live_model import by_kinds, shape_of
from nbdist.planner.memory import memory_of
from nbdist.planner.models import CONFIGS, model_of
from nbdist.planner.rank import describe_model
from nbdist.planner.workload import Widths, Workload
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import choose
from nbdist.strategy.tensor_layout import local_shape
from tests.planner.test_models_rank import BATCH, TOKENS, kept_bytes
from tests.programs.experts import Experts
from tests.programs.rank import n
from tests.support.torch_ranks import on_ranks

_SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128,
    "intermediate_size": 96, "num_experts_per_tok": 2, "num_hidden_layers": 4,
}  # fmt: skip
_INSIDE = {"moe_intermediate_size": 48}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 24, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
Make = Callable[..., PretrainedConfig]


def _mixtral(**more: Any) -> PretrainedConfig:
    return MixtralConfig(**{**_SMALL, "num_local_experts": 8, **more})


def _qwen2(**more: Any) -> PretrainedConfig:
    shared = {"shared_expert_intermediate_size": 80, "num_experts": 8}
    return Qwen2MoeConfig(**{**_SMALL, **_INSIDE, **shared, **more})


def _qwen3(**more: Any) -> PretrainedConfig:
    return Qwen3MoeConfig(**{**_SMALL, **_INSIDE, "head_dim": 32, "num_local_experts": 8, **more})


def _deepseek(**more: Any) -> PretrainedConfig:
    experts = {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
    return DeepseekV3Config(**{**_SMALL, **_INSIDE, **_LATENT, **experts, **more})


def _gpt_oss(**more: Any) -> PretrainedConfig:
    layers = more.get("num_hidden_layers", 4)
    kinds = ["full_attention"] * layers
    experts = {"num_local_experts": 8, "head_dim": 32, "rope_parameters": _ROPE}
    return GptOssConfig(**{**_SMALL, **experts, "layer_types": kinds, **more})


FORMS: dict[str, Make] = {
    "mixtral": _mixtral, "qwen2_moe": _qwen2, "qwen3_moe": _qwen3, "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}  # fmt: skip
_CLASSES = {
    "mixtral": MixtralConfig, "qwen2_moe": Qwen2MoeConfig, "qwen3_moe": Qwen3MoeConfig,
    "deepseek_v3": DeepseekV3Config, "gpt_oss": GptOssConfig,
}  # fmt: skip
_CASES: dict[str, Callable[[], PretrainedConfig]] = {
    **FORMS,
    "qwen2_moe, every other block": lambda: _qwen2(decoder_sparse_step=2),
    "qwen3_moe, named blocks": lambda: _qwen3(mlp_only_layers=[0, 2], attention_bias=True),
    "qwen2_moe, no bias": lambda: _qwen2(qkv_bias=False),
    "qwen3_moe, all dense": lambda: _qwen3(decoder_sparse_step=9),
    "deepseek_v3, queries at once": lambda: _deepseek(q_lora_rank=None),
    "deepseek_v3, with biases": lambda: _deepseek(attention_bias=True),
    "deepseek_v3, tied": lambda: _deepseek(tie_word_embeddings=True),
    "gpt_oss, no bias": lambda: _gpt_oss(attention_bias=False),
}


def _of_catalogue(name: str) -> PretrainedConfig:
    config = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    return _CLASSES[str(CONFIGS[name]["model_type"])](**config)


_CASES |= {
    name: lambda name=name: _of_catalogue(name)  # type: ignore[misc]  # mypy: a default is typed
    for name, config in CONFIGS.items()
    if config["model_type"] in _CLASSES
}


def _built(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", _CASES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    """All, those in experts, those that a token passes, and of each kind of block; to the last."""
    config = _CASES[name]()
    model, shape = _built(config), model_of(config.to_dict()).shape
    [blocks] = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    stacked = {name: p.numel() for name, p in model.named_parameters() if ".experts." in name}
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    every = sum(p.numel() for p in model.parameters())

    assert shape.parameters == every
    assert sorted(sizes) == sorted(
        size for count, kind in shape.kinds for size in [kind.block_parameters] * count
    )
    assert shape.stacked_parameters == sum(stacked.values())
    if stacked:
        experts = find_experts(model)
        assert shape.routed_blocks == len(experts)
        [count] = {layer.count for layer in experts.values()}
        unused = sum(stacked.values()) * (count - config.num_experts_per_tok) // count
        assert shape.active_parameters == every - unused


_TINY: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 640, "vocab_size": 500,
}  # fmt: skip
_BY_FORM: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"moe_intermediate_size": 384, "shared_expert_intermediate_size": 320},
    "qwen3_moe": {"moe_intermediate_size": 384},
    "deepseek_v3": {
        "moe_intermediate_size": 384,
        "num_key_value_heads": 8,
        "first_k_dense_replace": 0,
    },
}
# How it is trained -> bytes of numbers.
_WAYS = {
    "fp32": Widths(4, 4, 0, 4, 4),
    "bf16": Widths(2, 2, 0, 2, 2),
    "autocast": Widths(2, 4, 2, 4, 4),
}
_SHORT = {("mixtral", "fp32"), ("qwen2_moe", "autocast"), ("deepseek_v3", "bf16")}


@pytest.mark.parametrize(
    ("form", "way"),
    [
        pytest.param(form, way, marks=() if (form, way) in _SHORT else pytest.mark.parity)
        for form in FORMS
        for way in _WAYS
    ],
)
def test_activations_of_a_block_are_what_autograd_keeps(form: str, way: str) -> None:
    """To within 2 %: a model of three blocks against one of two, of which all have experts."""
    keys = {} if form == "deepseek_v3" else {"first_k_dense_replace": None}
    options = {
        k: v for k, v in {**_TINY, **_BY_FORM.get(form, {}), **keys}.items() if v is not None
    }
    two, three = (FORMS[form](**options, num_hidden_layers=layers) for layers in (2, 3))
    [(_, shape)] = model_of(two.to_dict()).shape.kinds
    widths = _WAYS[way]

    more = kept_bytes(three, way) - kept_bytes(two, way)

    planned = block_bytes(shape, Workload(BATCH, TOKENS), widths, choose("single", {}, 1))
    casts = widths.cast * (shape.block_parameters - shape.stacked)
    assert more == pytest.approx(planned + casts, rel=0.02)


_ROWS: list[tuple[str, dict[str, Any], int]] = [
    ("ddp", {}, 4), ("fsdp", {}, 4), ("ep", {"ep": 2}, 4), ("ep", {"ep": 4}, 4),
    ("fsdp", {"ep": 2}, 4), ("fsdp", {"ep": 4}, 4), ("fsdp", {"ep": 2, "shard": "grad-op"}, 2),
]  # fmt: skip


def _held_by_layouts(config: PretrainedConfig, choice: Strategy) -> int:
    """Bytes of parameters that rank 0 holds, by the layouts that a real build gives."""
    with fake_world(choice.world_size):
        job = ModelBuild(_built(config), choice, build_mesh(choice, "cpu"), torch.device("cpu"))
        built = build.plan(job)
        shapes = [
            local_shape(built.layouts[name], built.job.mesh.degrees, 0) or (0,)
            for name in built.parameter_names
        ]
    return 4 * sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize("form", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_rank_holds_what_the_layouts_say(form: str) -> None:
    """Where ranks split evenly, to the byte; gradients are alike, Adam's state twice as much."""
    config = FORMS[form]()
    model = model_of(config.to_dict())

    for name, given, ranks in _ROWS:
        choice = choose(name, given, ranks)
        memory = memory_of(model, choice, Workload(1, 8))
        held_bytes = _held_by_layouts(config, choice)
        assert memory.parameters == memory.gradients == held_bytes, (name, given)
        assert memory.optimizer == 2 * held_bytes


@pytest.mark.parametrize("form", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("given", [{"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 4}])
def test_tp_leaves_experts_whole(form: str, given: dict[str, int]) -> None:
    """As the layouts have it; norms and routers, which tp leaves whole too, are 1 % of a rank."""
    config = FORMS[form]()
    choice = choose("fsdp" if given["tp"] == 2 else "tp", given, 4)

    planned = memory_of(model_of(config.to_dict()), choice, Workload(1, 8)).parameters

    assert planned == pytest.approx(_held_by_layouts(config, choice), rel=0.02)


@pytest.mark.parametrize("form", FORMS)
def test_what_tp_cannot_split_is_what_ranks_refuse(form: str) -> None:
    """A build refuses tp for these models, and the plan with the first of the layers it names."""
    config = FORMS[form]()
    unsplit = model_of(config.to_dict()).shape.unsplit
    choice = choose("tp", {}, 2)
    refused = contextlib.nullcontext()
    if unsplit:
        text = rf"does not know how to split model.layers.\*.{unsplit}"
        refused = pytest.raises(OptionError, match=text)
    with fake_world(2), refused:
        job = ModelBuild(_built(config), choice, build_mesh(choice, "cpu"), torch.device("cpu"))
        build.plan(job)


class Net(nn.Module):
    """A stack of experts of one's own, between two layers that ranks do not share."""

    def __init__(self) -> None:
        super().__init__()
        self.ep_plan = {"experts": "experts"}
        self.first = nn.Linear(12, 12)
        self.experts = Experts(12, 20)
        self.last = nn.Linear(12, 1)

    def forward(self, x):
        x = self.first(x)
        weights, which = x[:, :8].softmax(-1).topk(2)
        return self.last(x + self.experts(x, which, weights)).mean()


@on_ranks(2)
def test_a_prepared_model_is_described_whole_and_planned_as_ranks_hold_it() -> None:
    """Under ep its experts are known as such, all of them; a switch would hold what layouts say."""
    base = Net()
    registry.set_choice(choose("ep", {}, n))
    outer = prepare.prepare_model(base)
    live = describe_model.describe("net", outer, None, {}, wants_source=False)
    stacked = [kind for kind in live.kinds if kind.is_stacked]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in base.parameters()]
    held = sum(tensor.numel() * 4 for tensor in local)
    memory = by_kinds(live, shape_of(live), choose("ep", {}, n), Workload())

    assert (live.experts, sum(kind.count for kind in stacked)) == (8, 2 * 8 * 12 * 20)
    assert live.parameters == 2 * 8 * 12 * 20 + 12 * 13 + 13
    assert memory.parameters == memory.gradients == held
    assert memory.optimizer == 2 * held
