"""Small models whose layers have the names and the code that people write."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

WORDS = 257  # split unevenly over 2 and over 4 ranks
WIDTH, HEADS, LAYERS, LENGTH, BATCH = 32, 4, 2, 8, 4
SIZES = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}  # fmt: skip
L = nn.Linear


class GroupedAttention(nn.Module):
    """wq, wk, wv, wo; two heads of keys and values; norms of each head; the width of a head."""

    def __init__(self, n_heads: int = HEADS, n_kv_heads: int = 2, has_bias: bool = False) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.wq = L(WIDTH, n_heads * self.head_dim, bias=has_bias)
        self.wk = L(WIDTH, n_kv_heads * self.head_dim, bias=has_bias)
        self.wv = L(WIDTH, n_kv_heads * self.head_dim, bias=has_bias)
        self.wo = L(n_heads * self.head_dim, WIDTH, bias=has_bias)
        self.q_norm = nn.RMSNorm(self.head_dim)
        self.k_norm = nn.RMSNorm(self.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q_norm(self.wq(x).view(b, t, self.n_heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.wk(x).view(b, t, self.n_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class NanoAttention(nn.Module):
    """c_attn, c_proj; all widths from the input, as in nanoGPT."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn, self.c_proj = L(WIDTH, 3 * WIDTH), L(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, dropout
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (p.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for p in parts)
        dropout = self.dropout if self.training else 0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        return self.resid_dropout(self.c_proj(y))


class Gated(nn.Module):
    """gate, up, down."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = L(WIDTH, 64, bias=False), L(WIDTH, 64, bias=False)
        self.down = L(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Plain(nn.Sequential):
    """Two layers without names, and dropout behind them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(
            L(WIDTH, 64), nn.GELU(), nn.Dropout(dropout), L(64, WIDTH), nn.Dropout(dropout)
        )


class Block(nn.Module):
    """Attention and a feed-forward part, each after its norm."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: Any = nn.RMSNorm) -> None:
        super().__init__()
        self.n1, self.attn, self.n2, self.mlp = norm(WIDTH), attn, norm(WIDTH), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Flat(nn.Module):
    """A block with all layers in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (L(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = L(WIDTH, 64), L(64, WIDTH)
        self.hd = WIDTH // HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        h = self.n1(x)
        q, k, v = (f(h).view(b, t, -1, self.hd).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(functional.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    """Words in, loss out."""

    def __init__(self, block: Any, *, is_tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.pos = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = L(WIDTH, WORDS, bias=not is_tied)
        if is_tied:
            self.head.weight = self.emb.weight

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.emb(words) + self.pos(torch.arange(words.shape[1])))
        for layer in self.layers:
            h = layer(h)
        logits = self.head(self.norm(h))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Coder(nn.Module):
    """torch's own layers: an encoder, or an encoder and a decoder."""

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        is_batch_first: bool = True,
        is_decoder: bool = False,
        norm_first: bool = True,
    ) -> None:
        super().__init__()
        self.is_batch_first = is_batch_first
        self.emb = nn.Embedding(WORDS, WIDTH)
        more = {"dropout": dropout, "batch_first": is_batch_first, "norm_first": norm_first}
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, **more)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH))
        self.decoder = None
        if is_decoder:
            layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, **more)
            self.decoder = nn.TransformerDecoder(layer, LAYERS, nn.LayerNorm(WIDTH))
        self.lm_head = L(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        n = words.shape[1]
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
        padding = words % 5 == 0
        padding[:, 0] = False  # else a row of attention is empty
        h = self.emb(words if self.is_batch_first else words.T)
        h = memory = self.encoder(h, mask=mask, src_key_padding_mask=padding)
        if self.decoder is not None:
            h = self.emb(labels if self.is_batch_first else labels.T)
            h = self.decoder(
                h, memory, tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=padding
            )
        logits = self.lm_head(h if self.is_batch_first else h.transpose(0, 1))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class HuggingFace(nn.Module):
    """A language model of Hugging Face's, with its loss alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(words, labels=labels).loss


def llama(**more: Any) -> nn.Module:
    """Llama with two heads of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return HuggingFace(LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **more})))


def qwen3(**more: Any) -> nn.Module:
    """Qwen 3: norms of each head's query and key; tied."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    return HuggingFace(Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **heads, **more})))


def gpt2(dropout: float = 0.0, **more: Any) -> nn.Module:
    """GPT-2: query, key and value fused in a Conv1D; tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 16, **more}
    return HuggingFace(GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **drops)))


def bert() -> nn.Module:
    """BERT: query, key and value apart from the layer behind them."""
    from transformers import BertConfig, BertForMaskedLM

    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return HuggingFace(BertForMaskedLM(BertConfig(**SIZES, **drops)))


MODELS = {
    "grouped": lambda: Model(lambda: Block(GroupedAttention(), Gated())),
    "biases": lambda: Model(
        lambda: Block(GroupedAttention(n_kv_heads=4, has_bias=True), Plain(), nn.LayerNorm)
    ),
    "nano": lambda: Model(lambda: Block(NanoAttention(), Plain(), nn.LayerNorm), is_tied=True),
    "flat": lambda: Model(Flat),
    "encoder": Coder,
    "length first": lambda: Coder(is_batch_first=False, norm_first=False),
    "decoder": lambda: Coder(is_decoder=True),
    "llama": llama,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "bert": bert,
}


def batch(step: int = 0, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and labels, (BATCH, length) each, equal on all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(0, WORDS, (2, BATCH, length), generator=generator)
    words[0, 0, 0] = 3  # the padding, whose row has no gradient
    return words[0], words[1]
