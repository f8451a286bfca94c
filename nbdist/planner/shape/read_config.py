"""The shape of a model by its config.json: a reader for each type that a formula knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbdist.errors import OptionError
from nbdist.planner.shape.transformer import Experts, Latent, Transformer

Config = Mapping[str, Any]
# x, 0.5 x, tanh(...), 1 + tanh(...), and the product.
_WRITTEN_GELU = 5
# Gate and up in one, both between their limits, the sigmoid's input, its result, and the product.
_WRITTEN_GATE = 7


def read_config(kind: str, config: Config) -> Transformer:
    """The shape of a model of a type, a key of READERS.

    Raises:
        OptionError: A number is missing or none, or heads do not divide what they have to.
    """
    shape = READERS[kind](config)
    for what in ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab"):
        if getattr(shape, what) < 1:
            raise OptionError(f"A model with {what} {getattr(shape, what)} has no parameters.")
    if shape.heads % shape.kv_heads:
        raise OptionError(
            f"{shape.heads} heads cannot share {shape.kv_heads} heads of keys and values."
        )
    experts = shape.experts
    if experts is not None and not 1 <= experts.chosen <= experts.count:
        raise OptionError(
            f"A router cannot choose {experts.chosen} of {experts.count} experts for each token."
        )
    return shape


def _read_gpt2(config: Config) -> Transformer:
    hidden, heads = _number(config, "n_embd"), _number(config, "n_head")
    _check_heads(hidden, heads)
    return Transformer(
        layers=_number(config, "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        ffn=_number(config, "n_inner", 4 * hidden),
        vocab=_number(config, "vocab_size"),
        is_gated=False,
        is_tied=bool(config.get("tie_word_embeddings", True)),
        has_layer_norm=True,
        has_qkv_bias=True,
        has_out_bias=True,
        has_mlp_bias=True,
        positions=_number(config, "n_positions", 1024),
        has_dropout=bool(config.get("resid_pdrop", 0.1)),
        kept_in_mlp=_WRITTEN_GELU * (config.get("activation_function", "gelu_new") == "gelu_new"),
        has_one_qkv=True,
    )


def _has_bias(kind: str, config: Config) -> bool:
    """Whether queries, keys and values have one; where the config is silent, as transformers."""
    if kind == "qwen2":
        return True
    key = "qkv_bias" if kind == "qwen2_moe" else "attention_bias"
    return bool(config.get(key, kind in {"qwen2_moe", "gpt_oss"}))


def _read_llama(config: Config) -> Transformer:
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    kind = str(config.get("model_type", "llama"))
    head_size = _number(config, "head_dim", 0)
    if head_size == 0:
        _check_heads(hidden, heads)
        head_size = hidden // heads
    return Transformer(
        layers=_number(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads", heads),
        head_size=head_size,
        ffn=_number(config, "intermediate_size"),
        vocab=_number(config, "vocab_size"),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=_has_bias(kind, config),
        has_out_bias=not kind.startswith("qwen2") and _has_bias(kind, config),
        has_mlp_bias=bool(config.get("mlp_bias")),
        has_qk_norm=kind.startswith("qwen3"),
        has_written_norm=True,
    )


@dataclass(frozen=True, slots=True)
class _ExpertKeys:
    """The keys of a model type's expert numbers; `shared` may be "a*b", a product."""

    ffn: str
    shared: str = ""


_EXPERTS: Mapping[str, _ExpertKeys] = {
    "mixtral": _ExpertKeys("intermediate_size"),
    "qwen2_moe": _ExpertKeys("moe_intermediate_size", "shared_expert_intermediate_size"),
    "qwen3_moe": _ExpertKeys("moe_intermediate_size"),
    "deepseek_v3": _ExpertKeys("moe_intermediate_size", "moe_intermediate_size*n_shared_experts"),
    "gpt_oss": _ExpertKeys("intermediate_size"),
}
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
# Type -> what nbdist's plans for tp do not cover in transformers' model of it.
_UNSPLIT = {
    "qwen2_moe": "mlp.shared_expert_gate",
    "deepseek_v3": "self_attn",
    "gpt_oss": "self_attn",
}


def _read_experts(config: Config) -> Transformer:
    """A model like Llama with experts in place of the MLP, in all blocks or in most."""
    kind = str(config.get("model_type"))
    keys, dense = _EXPERTS[kind], _dense_blocks(config)
    count = next((key for key in _COUNTS if config.get(key) is not None), _COUNTS[0])
    shared = 1
    for key in keys.shared.split("*") if keys.shared else ():
        shared *= _number(config, key)
    shape = _read_llama({**config, "intermediate_size": config.get("intermediate_size") or 1})
    experts = Experts(
        count=_number(config, count),
        chosen=_number(config, "num_experts_per_tok"),
        ffn=_number(config, keys.ffn),
        kept=_WRITTEN_GATE if kind == "gpt_oss" else 4,
        shared=shared if keys.shared else 0,
        has_shared_gate=kind == "qwen2_moe",
        has_bias=kind == "gpt_oss",
        dense_blocks=min(dense, shape.layers),
    )
    shape = replace(
        shape,
        experts=None if experts.dense_blocks == shape.layers else experts,
        unsplit=_UNSPLIT.get(kind, ""),
        has_sinks=kind == "gpt_oss",
    )
    return _with_latent(shape, config) if kind == "deepseek_v3" else shape


def _dense_blocks(config: Config) -> int:
    """Blocks without experts: DeepSeek's first, of Qwen's those that are named or left out."""
    if "first_k_dense_replace" in config:
        return _number(config, "first_k_dense_replace", 0)
    step, named = _number(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = range(_number(config, "num_hidden_layers"))
    return sum(layer in named or (layer + 1) % max(1, step) > 0 for layer in layers)


def _with_latent(shape: Transformer, config: Config) -> Transformer:
    rotary = _number(config, "qk_rope_head_dim")
    latent = Latent(
        queries=_number(config, "q_lora_rank", 0),
        keys=_number(config, "kv_lora_rank"),
        rotary=rotary,
        values=_number(config, "v_head_dim"),
    )
    head_size = _number(config, "qk_nope_head_dim") + rotary
    return replace(shape, latent=latent, head_size=head_size, kv_heads=shape.heads)


# model_type -> its reader. Each is compared with transformers' own model in
# tests/planner/test_models_rank.py.
READERS: Mapping[str, Callable[[Config], Transformer]] = {
    "gpt2": _read_gpt2,
    "llama": _read_llama,
    "mistral": _read_llama,
    "qwen2": _read_llama,
    "qwen3": _read_llama,
    **dict.fromkeys(_EXPERTS, _read_experts),
}


def _number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 10**9:
        raise OptionError(f"The model's config has {key} = {value!r}; a number is needed there.")
    return value


def _check_heads(hidden: int, heads: int) -> None:
    if heads < 1 or hidden % heads:
        raise OptionError(f"A width of {hidden} cannot be divided into {heads} heads.")
