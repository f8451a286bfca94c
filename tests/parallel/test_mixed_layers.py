"""Models whose layers are not all attention, as transformers has them, under every strategy."""

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.test_ep import loss_of, over, steady
from tests.programs.parity import WORDS, close, compare, put
from tests.programs.rank import refusal
from tests.support.torch_ranks import on_ranks

SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "use_cache": False,
}  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 4}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "linear_conv_kernel_dim": 2,
}  # fmt: skip
CONVOLUTION = {"layer_types": ["conv", "full_attention"] * 2}
MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 2}
MAMBA2 = {
    **MAMBA,
    "mamba_n_heads": 8,
    "mamba_d_head": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
STATES = {"num_hidden_layers": 2, "state_size": 4, "conv_kernel": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**LINEAR, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 12},
    "Jamba": {
        **MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
    },
    "Lfm2": CONVOLUTION,
    "Lfm2Moe": {**CONVOLUTION, **EXPERTS, "num_dense_layers": 1},
    "FalconH1": {**MAMBA2, "mamba_d_ssm": 32, "head_dim": 4},
    "Bamba": {**MAMBA2, "attn_layer_indices": [1, 3]},
    "GraniteMoeHybrid": {
        **MAMBA2, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 12,
    },
    "MiniMax": {**LINEAR, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4},
    "OlmoHybrid": {**LINEAR, **DELTA, "pad_token_id": 0, "eos_token_id": 1},
    "RecurrentGemma": {
        "lru_width": 16, "conv1d_width": 2, "attention_window_size": 8, "head_dim": 4,
        "block_types": ["recurrent", "attention"],
    },
    "Zamba2": {
        **MAMBA, "mamba_expand": 2, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 4,
        "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid"] * 2, "adapter_rank": 4,
        "hybrid_layer_ids": [1, 3], "attention_head_dim": 8,
    },
    "Mamba": STATES,
    "Mamba2": {**STATES, "num_heads": 8, "head_dim": 4, "n_groups": 1, "chunk_size": 4},
}  # fmt: skip
# What tp says of models of which it cannot split enough to be worth while.
WHOLE = {
    "OlmoHybrid": r"layers.0.linear_attn has no attribute that says how many heads",
    "Zamba2": r"does not know how to split model.layers.\*.mamba.in_proj",
    "Mamba": r"knows none of its layer names",
    "Mamba2": r"knows none of its layer names",
}


def builder(kind: str) -> Callable[[], nn.Module]:
    """Makes a small model of a class of transformers, always with the same values."""
    import transformers

    def build() -> nn.Module:
        torch.manual_seed(0)
        sizes = {**SIZES, **MODELS[kind]}
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
        return model

    return build


def planned(kind: str, message: str) -> Callable[[], nn.Module]:
    """Makes the model with the plan that a refusal proposes, set as it says."""
    setting, text = re.findall(r"(vars\(model\)\[\"tp_plan\"\]) = (\{.*?\})", message)[0]

    def build() -> nn.Module:
        model = builder(kind)()
        exec(f"{setting} = {ast.literal_eval(text)}", {"model": model})
        return model

    return build


def _more(names: list[str], tested: set[str]) -> list[Any]:
    return [
        name if name in tested else pytest.param(name, marks=pytest.mark.parity) for name in names
    ]


@pytest.mark.parametrize("kind", _more([*MODELS], {"Jamba"}))
@on_ranks(2)
def test_they_train_as_one_process(kind: str) -> None:
    """Split by blocks, in stages, computed again, optimizer shared; with experts shared."""
    model = builder(kind)
    given = {"build": model, "loss_of": loss_of, "optimizer": steady, "steps": 2}
    off = {name: compare(name, **given) for name in ("fsdp", "fsdp1", "zero1", "pp")}
    off["fsdp, recomputed"] = compare("fsdp", checkpoint="full", **given)
    if any("experts" in name for name, _ in model().named_parameters()):
        off["ep"] = compare(*over("ep", 2), **given)
    close(off)


@pytest.mark.parametrize("kind", _more([*MODELS], {"Jamba", "MiniMax"}))
@on_ranks(2)
def test_tp_says_what_it_would_hold_whole(kind: str) -> None:
    """And with the plan that it proposes then, the model trains as one process does."""
    message = refusal(lambda: put(builder(kind)(), "tp"))
    if kind in WHOLE:
        assert re.search(WHOLE[kind], message), message
        return
    assert f"{kind}ForCausalLM: nbdist does not know how to split model.layers.*." in message
    build = planned(kind, message)
    close({kind: compare("tp", build=build, loss_of=loss_of, optimizer=steady, steps=2)})
