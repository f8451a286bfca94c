"""A model as its numbers: parameters, and the shape of a transformer, by name, count or config."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.errors import OptionError, did_you_mean
from nbdist.planner.shape.read_config import READERS, read_config
from nbdist.planner.shape.transformer import Lora, Transformer, largest_stage, linears
from nbdist.strategy.choice import Degrees

_LARGEST = 1e15
WHOLE = Degrees()
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model to plan for.

    Attributes:
        parameters: All of them, one or more, adapters too.
        shape: Its transformer. Where only the number was typed it is one of about that size.
        is_assumed: The shape was not given but derived from the number.
        config: As in its config.json, for an engine that makes the model; derived as well.
        has_shape: False of a live model of another kind: its number of parameters is known, and
            `shape` says nothing of it.
        frozen: So many of the parameters have no gradient.
        experts: The number in a layer; 0 without.
    """

    name: str
    parameters: int
    shape: Transformer
    is_assumed: bool = False
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    has_shape: bool = True
    frozen: int = 0
    experts: int = 0

    @property
    def lora(self) -> Lora | None:
        """The model's adapters, which are all that is trained; None without any."""
        return self.shape.lora

    @property
    def trained(self) -> int:
        """Parameters with a gradient."""
        return self.parameters - self.frozen

    @property
    def block_parameters(self) -> float:
        """Parameters of one block, experts included; for an assumed shape, a part of all."""
        if self.is_assumed:
            return self.parameters / self.shape.layers
        return self.shape.block_parameters

    def block_trained(self, on: Degrees = WHOLE) -> float:
        """Parameters of one block with a gradient, as tp and ep split the block on a rank."""
        if self.lora is not None:
            return self.shape.adapters(on.tp)
        stacked = self.shape.stacked
        local = (self.block_parameters - stacked) / on.tp + stacked / on.ep
        return local * (self.trained / self.parameters)

    @property
    def packed(self) -> float:
        """Numbers of a block that are stored in 4 bits: the matrices of its linear layers.

        bitsandbytes leaves biases, norms, the embedding and the head as they are. Of an assumed
        shape all that is frozen is counted so.
        """
        if self.lora is None or not self.lora.quant:
            return 0
        if self.is_assumed:
            return self.frozen / self.shape.layers
        return sum(layer.weights for layer in linears(self.shape))

    def block_bytes(self, width: float, on: Degrees = WHOLE) -> float:
        """Bytes of one block in which a number takes `width` bytes, unless it is packed.

        On a rank, as tp and ep split it: tp leaves experts whole.
        """
        stacked = self.shape.stacked
        rest = (self.block_parameters - self.packed - stacked) * width + self.packed / 2
        return rest / on.tp + stacked * width / on.ep

    def whole_bytes(self, width: float, on: Degrees = WHOLE) -> float:
        """The same of the whole model; pp splits it evenly."""
        packed, stacked = self.shape.layers * self.packed, self.shape.stacked_parameters
        rest = (self.parameters - packed - stacked) * width + packed / 2
        return (rest / on.tp + stacked * width / on.ep) / on.pp

    @property
    def root_parameters(self) -> float:
        """Parameters outside of all blocks; 0 for an assumed shape."""
        if self.is_assumed:
            return 0
        return self.parameters - sum(n * kind.block_parameters for n, kind in self.shape.kinds)

    def stage_blocks(self, stages: int) -> float:
        """Blocks of the pipeline stage with most; for an assumed shape, an equal part of all."""
        each = self.shape.layers / stages
        return each if self.is_assumed else math.ceil(each)

    def largest_stage(self, count: int) -> tuple[float, float]:
        """Parameters of the pipeline stage that has most, and those of them that are in experts."""
        if count == 1 or self.is_assumed:
            return self.parameters / count, self.shape.stacked_parameters / count
        return largest_stage(self.shape, count)

    def stage_parameters(self, stages: int) -> float:
        """Parameters of the pipeline stage that has most."""
        return self.largest_stage(stages)[0]


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
        "vocab_size": vocab, **more,
    }  # fmt: skip


def _gpt2(layers: int, hidden: int, heads: int, positions: int = 1024) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads,
        "n_positions": positions, "vocab_size": 50257,
    }  # fmt: skip


def _experts(
    kind: str, config: dict[str, Any], count: int, chosen: int, **more: Any
) -> dict[str, Any]:
    key = "n_routed_experts" if kind == "deepseek_v3" else "num_local_experts"
    return {**config, "model_type": kind, key: count, "num_experts_per_tok": chosen, **more}


# Sources: the config.json of each model on https://huggingface.co (openai-community/gpt2*,
# meta-llama/*, mistralai/M*-v0.1, Qwen/*, deepseek-ai/DeepSeek-V3, openai/gpt-oss-*); gpt-3 is
# table 2.1 of https://arxiv.org/abs/2005.14165.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt-3": _gpt2(96, 12288, 96, 2048),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama-3.1-405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "llama-3.2-1b": _llama(
        16, 2048, 32, 8, 8192, 128256, tie_word_embeddings=True, head_dim=64
    ),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, model_type="mistral"),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064, model_type="qwen2"),
    "mixtral-8x7b": _experts("mixtral", _llama(32, 4096, 32, 8, 14336, 32000), 8, 2),
    "mixtral-8x22b": _experts("mixtral", _llama(56, 6144, 48, 8, 16384, 32000), 8, 2),
    "qwen1.5-moe-a2.7b": _experts(
        "qwen2_moe", _llama(24, 2048, 16, 16, 5632, 151936), 60, 4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    ),
    "qwen3-30b-a3b": _experts(
        "qwen3_moe", _llama(48, 2048, 32, 4, 6144, 151936, head_dim=128), 128, 8,
        moe_intermediate_size=768,
    ),
    "qwen3-235b-a22b": _experts(
        "qwen3_moe", _llama(94, 4096, 64, 4, 12288, 151936, head_dim=128), 128, 8,
        moe_intermediate_size=1536,
    ),
    "deepseek-v3": _experts(
        "deepseek_v3", _llama(61, 7168, 128, 128, 18432, 129280), 256, 8,
        moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=3, q_lora_rank=1536,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
    ),
    "gpt-oss-20b": _experts(
        "gpt_oss", _llama(24, 2880, 64, 8, 2880, 201088, head_dim=64), 32, 4
    ),
    "gpt-oss-120b": _experts(
        "gpt_oss", _llama(36, 2880, 64, 8, 2880, 201088, head_dim=64), 128, 4
    ),
}  # fmt: skip


def model_of(model: str | float | Mapping[str, Any]) -> ModelShape:
    """A model by its number of parameters, its name, or the contents of its config.json.

    Args:
        model: `7e9`, `7B`, `350M`, a name of CONFIGS, or a mapping of Hugging Face's names.

    Raises:
        OptionError: If it is none of these, has no parameters, or is no dense decoder.
    """
    if isinstance(model, Mapping):
        return of_config(model)
    text = str(model).strip()
    number = re.fullmatch(
        r"(\d[\d_]*\.?\d*(?:e[+]?\d{1,2})?) ?([KMBT]?)", text, re.IGNORECASE | re.ASCII
    )
    if number is not None:
        return of_count(float(number[1].replace("_", "")) * _UNITS[number[2].upper()], text)
    name = text.lower().replace("_", "-").rpartition("/")[2]
    name = name.replace("meta-llama-", "llama-").removesuffix("-hf").removesuffix("-v0.1")
    if name not in CONFIGS:
        hint = did_you_mean(name, CONFIGS, 3)
        raise OptionError(
            f"There is no model {text!r} to plan for.{hint} Type its number of parameters (7e9, "
            f"7B, 350M), the path of a config.json, or one of {', '.join(CONFIGS)}. "
            "Where ranks run, a variable there that is a model will do."
        )
    return of_config(CONFIGS[name], name)


def of_count(count: float, name: str) -> ModelShape:
    """A model of so many parameters, with the shape that such models have.

    Width and depth are those of a transformer of 12 h^2 parameters in each of L blocks with
    h = 128 L, as in GPT-3 and Llama: 7e9 gives 33 blocks of width 4224.

    Raises:
        OptionError: If it is below 1, or more than 1e15.
    """
    if count < 1:
        raise OptionError(
            f"A model of {name} parameters has nothing to plan for. Type 1 or more, such as 7e9."
        )
    if count > _LARGEST:
        raise OptionError(
            f"{name} parameters are more than {_LARGEST:.0e}. Type fewer, such as 7e9."
        )
    layers = max(1, round((count / (12 * 128**2)) ** (1 / 3)))
    hidden = 128 * max(1, round(math.sqrt(count / (12 * layers)) / 128))
    shape = Transformer(
        layers=layers, hidden=hidden, heads=hidden // 128, kv_heads=hidden // 128, head_size=128,
        ffn=round(hidden * 8 / 3), vocab=32000, has_written_norm=True,
    )  # fmt: skip
    config = _llama(layers, hidden, shape.heads, shape.kv_heads, shape.ffn, shape.vocab)
    return ModelShape(name, round(count), shape, is_assumed=True, config=config)


def of_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """A model by the contents of its config.json.

    Raises:
        OptionError: If its type is not one of those with an exact count, or a number is missing.
    """
    kind = str(config.get("model_type", "gpt2" if "n_embd" in config else "llama"))
    if kind not in READERS:
        raise OptionError(
            f"There is no formula for the parameters of a model of type {kind!r}, only for "
            f"{', '.join(READERS)}. Type its number of parameters instead."
        )
    shape = read_config(kind, config)
    title = name or str(config.get("_name_or_path") or kind)
    return ModelShape(
        title,
        shape.parameters,
        shape,
        config={**config, "model_type": kind},
        experts=0 if shape.experts is None else shape.experts.count,
    )
