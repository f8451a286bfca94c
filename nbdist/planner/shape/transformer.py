"""The shape of a decoder: its numbers, its linear layers, its experts, and how many parameters."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import dataclass, replace


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
class Experts:
    """Experts of a block in place of an MLP: many MLPs with a gate, of which a router chooses some.

    Attributes:
        count: Of a block.
        chosen: For each token.
        ffn: Width inside of each.
        kept: Tensors of that width that backward needs; more where the gate is written in Python.
        shared: Width inside of an MLP that all tokens pass besides; 0 without.
        has_shared_gate: A linear layer of one output scales what that one makes.
        has_bias: The router has one, and each expert one for gate and up and one for down.
        dense_blocks: Blocks with an MLP of the model's `ffn` instead.
    """

    count: int
    chosen: int
    ffn: int
    kept: int = 4
    shared: int = 0
    has_shared_gate: bool = False
    has_bias: bool = False
    dense_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention by way of narrow queries, keys and values, each with a norm (MLA).

    Source: https://arxiv.org/abs/2405.04434, section 2.1.

    Attributes:
        queries: Width of narrow queries; 0 where they are made at once.
        keys: Of narrow keys and values.
        rotary: Of each head's queries and keys, the numbers with positions: all heads share these
            of keys.
        values: Width of a head's values.
    """

    queries: int
    keys: int
    rotary: int
    values: int


@dataclass(frozen=True, slots=True)
class Transformer:
    """The shape of a decoder, dense or with experts.

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
        has_sinks: A number for each head takes part in its softmax. transformers computes such
            attention with its scores in memory, under any --sdpa.
        experts: None of a dense model.
        latent: None of attention that makes keys and values at once.
        unsplit: Modules that tp knows no way to split; empty where it knows all.
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
    has_sinks: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    unsplit: str = ""
    lora: Lora | None = None

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: attention, two norms, adapters, and an MLP or experts."""
        norms = 2 * self._norm + (2 * self.head_size if self.has_qk_norm else 0)
        norms += self.heads if self.has_sinks else 0
        if self.latent is not None:
            norms += self.latent.queries + self.latent.keys
        weights = sum(layer.weights for layer in linears(self))
        routed = 0
        if self.experts is not None:
            routed = self.stacked + self.experts.count * (self.hidden + self.experts.has_bias)
        return weights + self._biases + norms + routed + int(self.adapters())

    @property
    def stacked(self) -> int:
        """Numbers in the experts of a block that has some."""
        if self.experts is None:
            return 0
        h, f = self.hidden, self.experts.ffn
        return self.experts.count * (3 * h * f + (2 * f + h if self.experts.has_bias else 0))

    @property
    def kinds(self) -> tuple[tuple[int, Transformer], ...]:
        """So many blocks of each kind, each as a model of such blocks alone; dense ones first."""
        return _kinds(self)

    @property
    def stacked_parameters(self) -> int:
        """Numbers in all experts of the model."""
        return sum(count * kind.stacked for count, kind in self.kinds)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes: all but the experts that it does not choose."""
        if self.experts is None:
            return self.parameters
        return (
            self.parameters
            - self.stacked_parameters
            + (self.stacked_parameters // self.experts.count * self.experts.chosen)
        )

    @property
    def routed_blocks(self) -> int:
        """Blocks with experts."""
        return sum(count for count, kind in self.kinds if kind.experts is not None)

    @property
    def mlp_width(self) -> int:
        """Inside of the MLP that all tokens pass; 0 where there are experts alone."""
        return self.ffn if self.experts is None else self.experts.shared

    @property
    def value_size(self) -> int:
        """Width of a head's values."""
        return self.head_size if self.latent is None else self.latent.values

    @property
    def _biases(self) -> int:
        """Biases of a block's linear layers."""
        count = 0
        if self.has_qkv_bias and self.latent is None:
            count += (self.heads + 2 * self.kv_heads) * self.head_size
        elif self.has_qkv_bias and self.latent is not None:
            count += self.latent.queries + self.latent.keys + self.latent.rotary
        count += self.hidden if self.has_out_bias else 0
        if self.has_mlp_bias and self.experts is None:
            count += (2 if self.is_gated else 1) * self.ffn + self.hidden
        return count

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
        """Parameters of token and learned position embeddings."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the last norm, and of the head where it has a matrix of its own."""
        return self._norm + (0 if self.is_tied else self.vocab * self.hidden)

    @property
    def parameters(self) -> int:
        """All parameters of the model: embeddings, blocks and head."""
        blocks = sum(count * kind.block_parameters for count, kind in self.kinds)
        return blocks + self.embedding_parameters + self.head_parameters

    @property
    def _norm(self) -> int:
        return 2 * self.hidden if self.has_layer_norm else self.hidden


@functools.lru_cache(maxsize=64)
def _kinds(shape: Transformer) -> tuple[tuple[int, Transformer], ...]:
    experts = shape.experts
    if experts is None:
        return ((shape.layers, shape),)
    dense = experts.dense_blocks
    routed = replace(shape, experts=replace(experts, dense_blocks=0))
    both = ((dense, replace(shape, experts=None)), (shape.layers - dense, routed))
    return tuple((count, kind) for count, kind in both if count)


@functools.lru_cache(maxsize=256)
def stages_of(shape: Transformer, count: int) -> tuple[tuple[tuple[int, Transformer], ...], ...]:
    """The blocks of each of so many pipeline stages by kind; the first ones have one more."""
    kinds = [kind for n, kind in shape.kinds for _ in range(n)]
    each, more = divmod(len(kinds), count)
    ends = [stage * each + min(stage, more) for stage in range(count + 1)]
    parts = (kinds[start:end] for start, end in itertools.pairwise(ends))
    return tuple(tuple((n, kind) for kind, n in Counter(part).items()) for part in parts)


@functools.lru_cache(maxsize=256)
def largest_stage(shape: Transformer, count: int) -> tuple[int, int]:
    """Parameters of the pipeline stage that has most, and those of them that are in experts.

    It is the first with the embedding, or the last; a tied head is on both.
    """
    head = shape.head_parameters + (shape.vocab * shape.hidden if shape.is_tied else 0)
    ends = {0: shape.embedding_parameters, count - 1: head}
    return max(
        (
            sum(n * kind.block_parameters for n, kind in blocks) + ends.get(stage, 0),
            sum(n * kind.stacked for n, kind in blocks),
        )
        for stage, blocks in enumerate(stages_of(shape, count))
    )


@functools.lru_cache(maxsize=64)
def linears(shape: Transformer) -> tuple[Linear, ...]:
    """The linear layers of a block, in order: those of attention, then those of the MLP.

    Of a block with experts the MLP is the shared one. Routers and experts are no linear layers.
    """
    h, f = shape.hidden, shape.mlp_width
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    if shape.has_one_qkv:
        return (
            Linear("c_attn", h, queries + 2 * keys), Linear("c_proj", queries, h, is_rowwise=True),
            Linear("c_fc", h, f), Linear("c_proj", f, h, is_rowwise=True),
        )  # fmt: skip
    attention: tuple[Linear, ...] = (
        Linear("q_proj", h, queries), Linear("k_proj", h, keys), Linear("v_proj", h, keys),
    )  # fmt: skip
    if shape.latent is not None:
        attention = _latent_linears(shape, shape.latent)
    out = Linear("o_proj", shape.heads * shape.value_size, h, is_rowwise=True)
    mlp = (
        *([Linear("gate_proj", h, f)] if shape.is_gated else []),
        Linear("up_proj", h, f), Linear("down_proj", f, h, is_rowwise=True),
    )  # fmt: skip
    gate = shape.experts is not None and shape.experts.has_shared_gate
    return (*attention, out, *(mlp if f else ()), *([Linear("shared_expert_gate", h, 1)] * gate))


def _latent_linears(shape: Transformer, latent: Latent) -> tuple[Linear, ...]:
    h, heads, queries = shape.hidden, shape.heads, shape.heads * shape.head_size
    keys = heads * (shape.head_size - latent.rotary + latent.values)
    narrow = (Linear("q_a_proj", h, latent.queries), Linear("q_b_proj", latent.queries, queries))
    return (
        *(narrow if latent.queries else (Linear("q_proj", h, queries),)),
        Linear("kv_a_proj_with_mqa", h, latent.keys + latent.rotary),
        Linear("kv_b_proj", latent.keys, keys),
    )
