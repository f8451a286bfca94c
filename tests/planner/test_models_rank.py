"""What plans count, counted once more: real models' parameters, kept activations, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from nbdist.planner.activations import block_bytes
from nbdist.planner.models import CONFIGS, model_of
from nbdist.planner.workload import OPTIMIZERS, Widths, Workload
from nbdist.strategy.choose import choose

_SMALL: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "vocab_size": 101,
}  # fmt: skip
_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": GPT2Config,
    "gpt2, wide and short": lambda: GPT2Config(
        n_layer=2, n_embd=40, n_head=4, n_inner=64, n_positions=32, vocab_size=101
    ),
    "gpt2, head of its own": lambda: GPT2Config(n_layer=2, tie_word_embeddings=False),
    "llama-2-7b": LlamaConfig,
    "llama-3-8b": lambda: LlamaConfig(**_given("llama-3-8b")),
    "llama-3-70b": lambda: LlamaConfig(**_given("llama-3-70b")),
    "llama-3.2-1b": lambda: LlamaConfig(**_given("llama-3.2-1b")),
    "small llama": lambda: LlamaConfig(**_SMALL),
    "llama with biases": lambda: LlamaConfig(**_SMALL, attention_bias=True, mlp_bias=True),
    "llama with a bias in attention": lambda: LlamaConfig(**_SMALL, attention_bias=True),
    "llama with narrow heads": lambda: LlamaConfig(**_SMALL, head_dim=4),
    "mistral": lambda: MistralConfig(**_SMALL),
    "qwen2": lambda: Qwen2Config(**_SMALL),
    "qwen2, tied": lambda: Qwen2Config(**_SMALL, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SMALL, head_dim=8),
    "qwen3 with biases": lambda: Qwen3Config(**_SMALL, head_dim=8, attention_bias=True),
}


def _given(name: str) -> dict[str, Any]:
    return {key: value for key, value in CONFIGS[name].items() if key != "model_type"}


@pytest.mark.parametrize("name", _CONFIGS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    """All of them and those of a block, to the last one; nothing is allocated."""
    config = _CONFIGS[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    [blocks] = [m for m in model.modules() if isinstance(m, nn.ModuleList)]

    planned = model_of(config.to_dict())

    assert planned.parameters == sum(p.numel() for p in model.parameters())
    assert planned.shape.block_parameters == sum(p.numel() for p in blocks[0].parameters())
    assert planned.shape.layers == len(blocks)


_TINY: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 640, "vocab_size": 500,
}  # fmt: skip
_TINY_GPT: dict[str, Any] = {
    "n_embd": 256, "n_head": 8, "n_positions": 256, "vocab_size": 500, "bos_token_id": 0,
    "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_HEADS: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": 256}
FORMS: dict[str, Callable[[int], PretrainedConfig]] = {
    "llama": lambda layers: LlamaConfig(**_TINY, num_hidden_layers=layers),
    "qwen3": lambda layers: Qwen3Config(**_TINY, **_HEADS, num_hidden_layers=layers),
    "gpt2": lambda layers: GPT2Config(**_TINY_GPT, n_layer=layers),
    "gpt2 with torch's gelu": lambda layers: GPT2Config(
        **_TINY_GPT, n_layer=layers, activation_function="gelu"
    ),
}
BATCH, TOKENS = 2, 64
# How it is trained -> type of the weights, and bytes of numbers.
_WAYS = {
    "fp32": (torch.float32, Widths(4, 4, 0, 4, 4)),
    "bf16": (torch.bfloat16, Widths(2, 2, 0, 2, 2)),
    "autocast": (torch.float32, Widths(2, 4, 2, 4, 4)),
}


def kept_bytes(config: PretrainedConfig, way: str) -> int:
    """Bytes that autograd keeps for the backward of a step, without what the model holds."""
    model = AutoModelForCausalLM.from_config(config, dtype=_WAYS[way][0])
    return kept_by(model, is_autocast=way == "autocast")


def kept_by(model: nn.Module, *, is_autocast: bool) -> int:
    """The same of a model that is there."""
    own_pointers = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}  # holding them: addresses are not used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own_pointers:
            storages[memory.data_ptr()] = memory
        return tensor

    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_autocast),
    ):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    return sum(memory.nbytes() for memory in storages.values())


_SHORT = {
    *(("llama", way) for way in _WAYS),
    ("qwen3", "fp32"),
    ("gpt2", "autocast"),
    ("gpt2 with torch's gelu", "fp32"),
}


@pytest.mark.parametrize(
    ("form", "way"),
    [
        pytest.param(form, way, marks=() if (form, way) in _SHORT else pytest.mark.parity)
        for form in FORMS
        for way in _WAYS
    ],
)
def test_activations_of_a_block_are_what_autograd_keeps(form: str, way: str) -> None:
    """To within 2 %: a model of three blocks against one of two; statistics come on top."""
    shape = model_of(FORMS[form](2).to_dict()).shape
    widths = _WAYS[way][1]

    more = kept_bytes(FORMS[form](3), way) - kept_bytes(FORMS[form](2), way)

    planned = block_bytes(shape, Workload(BATCH, TOKENS), widths, choose("single", {}, 1))
    assert more == pytest.approx(planned + widths.cast * shape.block_parameters, rel=0.02)


def test_an_optimizer_in_8_bits() -> None:
    """Two moments of a byte, with a scale in fp32 for each 256 numbers: bitsandbytes' blocks."""
    assert pytest.approx(2 * (1 + 4 / 256), rel=0.02) == OPTIMIZERS["adamw8bit"].state_bytes
