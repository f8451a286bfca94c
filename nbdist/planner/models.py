"""A model as its numbers: parameters, and the shape of a transformer, by name, count or config."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.errors import OptionError, did_you_mean

_LARGEST = 1e15
# x, 0.5 x, tanh(...), 1 + tanh(...), and the product.
_WRITTEN_GELU = 5
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of a block, under its name in transformers.

    Attributes:
        inputs, outputs: Its widths.
        is_rowwise: tp splits its inputs; of any other its outputs.
    """

    name: str
    inputs: int
    outputs: int
    is_rowwise: bool = False

    @property
    def weights(self) -> int:
        """Numbers in its matrix."""
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters beside linear layers of a frozen model: B(A(x)), with A (r, inputs), B (outputs, r).

    Source: https://arxiv.org/abs/2106.09685, section 4.1; 4-bit storage is that of
    https://arxiv.org/abs/2305.14314, section 3.

    Attributes:
        rank: r.
        targets: Names of the layers that have adapters, of every block.
        quant: How the blocks' linear layers are stored: a key of lora.QUANTS, or empty.
        stored: Bytes of a number of the frozen model; 0 for what is computed in.
    """

    rank: int
    targets: tuple[str, ...]
    quant: str = ""
    stored: int = 0


@dataclass(frozen=True, slots=True)
class Transformer:
    """The shape of a dense decoder.

    Attributes:
        layers, hidden, heads, kv_heads, head_size, ffn, vocab: As their names say; `ffn` is the
            width inside the MLP.
        is_gated: The MLP has a gate: three matrices instead of two (SwiGLU).
        is_tied: The head uses the embedding's matrix.
        has_layer_norm: LayerNorm with a bias; RMSNorm without.
        has_qkv_bias, has_out_bias, has_mlp_bias: Which linear layers of a block have one: those of
            queries, keys and values; attention's last; all of the MLP.
        has_qk_norm: A norm on each head's queries, and one on its keys.
        positions: Learned ones; 0 for rotary ones.
        has_dropout: Dropout on embeddings, attention and both outputs of a block.
        kept_in_mlp: Tensors of the MLP's width that backward needs; 0 for 4 with a gate, else 2.
            More where the activation is written out in Python, as transformers' gelu_new.
        has_written_norm: So is the norm, as transformers' RMSNorm: one more tensor in fp32.
        has_one_qkv: One linear layer makes queries, keys and values.
        lora: Its adapters, beside which all is frozen; None of a model without.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    is_gated: bool = True
    is_tied: bool = False
    has_layer_norm: bool = False
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    positions: int = 0
    has_dropout: bool = False
    kept_in_mlp: int = 0
    has_written_norm: bool = False
    has_one_qkv: bool = False
    lora: Lora | None = None

    @property
    def block_parameters(self) -> int:
        """Of one block: attention, MLP, its two norms, and adapters."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        h, f = self.hidden, self.ffn
        biases = queries + 2 * keys if self.has_qkv_bias else 0
        biases += h if self.has_out_bias else 0
        biases += (2 if self.is_gated else 1) * f + h if self.has_mlp_bias else 0
        norms = 2 * self._norm + (2 * self.head_size if self.has_qk_norm else 0)
        weights = sum(layer.weights for layer in linears(self))
        return weights + biases + norms + int(self.adapters())

    @property
    def targets(self) -> tuple[Linear, ...]:
        """The linear layers of a block that have adapters."""
        names = () if self.lora is None else self.lora.targets
        return tuple(layer for layer in linears(self) if layer.name in names)

    def adapters(self, tp: int = 1) -> float:
        """Numbers in a block's adapters, on one of so many ranks that split its layers.

        Of each pair one matrix is split: B of a layer whose outputs are, else A.
        """
        rank = 0 if self.lora is None else self.lora.rank
        split = sum(at.inputs if at.is_rowwise else at.outputs for at in self.targets)
        whole = sum(at.outputs if at.is_rowwise else at.inputs for at in self.targets)
        return rank * (whole + split / tp)

    @property
    def embedding_parameters(self) -> int:
        """Of tokens and learned positions."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the last norm, and of the head where it has a matrix of its own."""
        return self._norm + (0 if self.is_tied else self.vocab * self.hidden)

    @property
    def parameters(self) -> int:
        """All parameters of the model: embeddings, blocks and head."""
        blocks = self.layers * self.block_parameters
        return blocks + self.embedding_parameters + self.head_parameters

    @property
    def _norm(self) -> int:
        return 2 * self.hidden if self.has_layer_norm else self.hidden


@functools.lru_cache(maxsize=64)
def linears(shape: Transformer) -> tuple[Linear, ...]:
    """The linear layers of a block, in order: those of attention, then those of the MLP."""
    h, f = shape.hidden, shape.ffn
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    if shape.has_one_qkv:
        return (
            Linear("c_attn", h, queries + 2 * keys), Linear("c_proj", queries, h, is_rowwise=True),
            Linear("c_fc", h, f), Linear("c_proj", f, h, is_rowwise=True),
        )  # fmt: skip
    return (
        Linear("q_proj", h, queries), Linear("k_proj", h, keys), Linear("v_proj", h, keys),
        Linear("o_proj", queries, h, is_rowwise=True),
        *([Linear("gate_proj", h, f)] if shape.is_gated else []),
        Linear("up_proj", h, f), Linear("down_proj", f, h, is_rowwise=True),
    )  # fmt: skip


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
    """

    name: str
    parameters: int
    shape: Transformer
    is_assumed: bool = False
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    has_shape: bool = True
    frozen: int = 0

    @property
    def lora(self) -> Lora | None:
        """Its adapters, which are all that is trained; None of a model without."""
        return self.shape.lora

    @property
    def trained(self) -> int:
        """Parameters with a gradient."""
        return self.parameters - self.frozen

    @property
    def block_parameters(self) -> float:
        """Of one block; of an assumed shape, an equal part of all."""
        if self.is_assumed:
            return self.parameters / self.shape.layers
        return self.shape.block_parameters

    def block_trained(self, tp: int = 1) -> float:
        """Of one block the parameters with a gradient, on one of so many ranks that split it."""
        if self.lora is not None:
            return self.shape.adapters(tp)
        return self.block_parameters * (self.trained / self.parameters) / tp

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

    def block_bytes(self, width: float) -> float:
        """Of one block in which a number takes so many bytes, unless it is packed."""
        return (self.block_parameters - self.packed) * width + self.packed / 2

    def whole_bytes(self, width: float) -> float:
        """The same of the whole model."""
        packed = self.shape.layers * self.packed
        return (self.parameters - packed) * width + packed / 2

    @property
    def root_parameters(self) -> float:
        """Of all that is in no block; 0 for an assumed shape."""
        return self.parameters - self.shape.layers * self.block_parameters

    def stage_blocks(self, stages: int) -> float:
        """Of the pipeline stage that has most; of an assumed shape, an equal part of all."""
        each = self.shape.layers / stages
        return each if self.is_assumed else math.ceil(each)

    def stage_parameters(self, stages: int) -> float:
        """Of the pipeline stage that has most: the first with the embedding, or the last."""
        if stages == 1 or self.is_assumed:
            return self.parameters / stages
        shape = self.shape
        blocks = self.stage_blocks(stages) * shape.block_parameters
        # A tied head is on the last stage as well.
        head = shape.head_parameters + (shape.vocab * shape.hidden if shape.is_tied else 0)
        return blocks + max(shape.embedding_parameters, head)


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


# Sources: the config.json of each model on https://huggingface.co (openai-community/gpt2*,
# meta-llama/*, mistralai/Mistral-7B-v0.1, Qwen/Qwen2.5-7B); gpt-3 is table 2.1 of
# https://arxiv.org/abs/2005.14165.
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
    read = _READERS.get(kind)
    if read is None:
        raise OptionError(
            f"There is no formula for the parameters of a model of type {kind!r}, only for "
            f"{', '.join(_READERS)}. Type its number of parameters instead."
        )
    shape = read(config)
    for what in ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab"):
        if getattr(shape, what) < 1:
            raise OptionError(f"A model with {what} {getattr(shape, what)} has no parameters.")
    if shape.heads % shape.kv_heads:
        raise OptionError(
            f"{shape.heads} heads cannot share {shape.kv_heads} heads of keys and values."
        )
    title = name or str(config.get("_name_or_path") or kind)
    return ModelShape(title, shape.parameters, shape, config={**config, "model_type": kind})


def _read_gpt2(config: Mapping[str, Any]) -> Transformer:
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


def _read_llama(config: Mapping[str, Any]) -> Transformer:
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    kind = config.get("model_type", "llama")
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
        has_qkv_bias=kind == "qwen2" or bool(config.get("attention_bias")),
        has_out_bias=kind != "qwen2" and bool(config.get("attention_bias")),
        has_mlp_bias=bool(config.get("mlp_bias")),
        has_qk_norm=kind == "qwen3",
        has_written_norm=True,
    )


# model_type -> its reader. Each is compared with transformers' own model in
# tests/planner/test_models_rank.py.
_READERS: Mapping[str, Callable[[Mapping[str, Any]], Transformer]] = {
    "gpt2": _read_gpt2,
    "llama": _read_llama,
    "mistral": _read_llama,
    "qwen2": _read_llama,
    "qwen3": _read_llama,
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
