"""By which names tensor parallelism knows a model's layers: tables, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

# The words of a plan. colwise and rowwise come in pairs: between them activations are split.
STYLES = {
    "colwise": "a linear layer split by its outputs; its input is whole, its output split",
    "colwise:N": "the same where N parts of equal length are one weight (query, key, value: 3)",
    "rowwise": "a linear layer split by its inputs; its input is split, its output whole",
    "embedding": "an embedding split by its rows",
    "head": "a linear layer split by its outputs, which are put together again (logits)",
    "shared": "a whole layer between colwise and rowwise: its gradients are summed",
    "attention": "a torch.nn.MultiheadAttention, split by its heads",
    "divide:A,B": "a module whose attributes A and B are divided (how many heads there are)",
}


@dataclass(frozen=True, slots=True)
class Family:
    """Names of layers in one module between which activations can be split.

    Attributes:
        columns: Split by outputs; query first in attention.
        rows: Names of which one is there, split by inputs.
        parts: How many parts are one weight in a column.
        fused: How many times the width of the row the column has; above `parts` where query, key
            and value of one head lie side by side.
        is_attention: There are heads, which stay whole.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    parts: int = 1
    fused: int = 1
    is_attention: bool = False


def _attention(columns: str, rows: str, parts: int = 1, fused: int = 1) -> Family:
    return Family(tuple(columns.split()), tuple(rows.split()), parts, fused, is_attention=True)


def _feed_forward(columns: str, rows: str, parts: int = 1) -> Family:
    return Family(tuple(columns.split()), tuple(rows.split()), parts, parts)


# More specific ones first.
FAMILIES = (
    _attention("q_proj k_proj v_proj", "o_proj out_proj dense proj c_proj"),
    _attention("wq wk wv", "wo"),
    _attention("w_q w_k w_v", "w_o"),
    _attention("W_q W_k W_v", "W_o"),
    _attention("q k v", "o out proj c_proj o_proj out_proj"),
    _attention("c_q c_k c_v", "c_proj"),
    _attention("to_q to_k to_v", "to_out to_out.0"),
    _attention("q_lin k_lin v_lin", "out_lin"),
    _attention("q_linear k_linear v_linear", "out out_linear"),
    _attention("query key value", "out proj out_proj dense output c_proj"),
    _attention("self.query self.key self.value", "output.dense"),
    _attention("c_attn", "c_proj", parts=3, fused=3),
    _attention("qkv", "proj o out out_proj o_proj", parts=3, fused=3),
    _attention("qkv_proj", "o_proj out_proj proj", parts=3, fused=3),
    _attention("Wqkv", "out_proj Wo", parts=3, fused=3),
    _attention("to_qkv", "to_out to_out.0", parts=3, fused=3),
    _attention("query_key_value", "dense", fused=3),
    _feed_forward("gate_proj up_proj", "down_proj"),
    _feed_forward("gate_up_proj", "down_proj", parts=2),
    _feed_forward("up_proj", "down_proj"),
    _feed_forward("gate up", "down"),
    _feed_forward("up", "down"),
    _feed_forward("w1 w3", "w2"),
    _feed_forward("w1", "w2"),
    _feed_forward("fc1", "fc2"),
    _feed_forward("fc_1", "fc_2"),
    _feed_forward("linear1", "linear2"),
    _feed_forward("lin1", "lin2"),
    _feed_forward("fc_in", "fc_out"),
    _feed_forward("c_fc", "c_proj"),
    _feed_forward("fc", "proj"),
    _feed_forward("dense_h_to_4h", "dense_4h_to_h"),
    _feed_forward("intermediate.dense", "output.dense"),
    _feed_forward("wi", "wo"),
    _feed_forward("wi_0 wi_1", "wo"),
)
# Norms of each head's query and key. Others, over all heads, cannot be computed on a part.
HEAD_NORMS = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm")
# Last part of a name. Positions are no vocabulary.
EMBEDDINGS = (
    "emb", "embed", "embedding", "embeddings", "embed_tokens", "embed_in", "shared", "token_emb",
    "token_embed", "token_embedding", "token_embedding_table", "token_embeddings", "tok_emb",
    "tok_embed", "tok_embedding", "tok_embeddings", "word_embeddings", "wte",
)  # fmt: skip
HEADS = (
    "classifier", "decoder", "embed_out", "head", "lm_head", "logits", "out", "out_head", "output",
    "proj", "to_logits", "unembed", "unembedding", "vocab_proj",
)  # fmt: skip
# Attributes of attention modules: how many heads, how many of keys and values, how wide one is.
HEAD_COUNTS = (
    "num_heads", "n_heads", "n_head", "nheads", "nhead", "num_head", "num_attention_heads",
    "heads", "nh", "h", "H", "n_local_heads",
)  # fmt: skip
KV_COUNTS = (
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "nkv",
    "n_local_kv_heads",
)  # fmt: skip
HEAD_SIZES = (
    "head_dim", "head_size", "d_head", "dim_head", "dim_per_head", "hd", "d_k", "hs",
    "attention_head_size", "key_value_proj_dim",
)  # fmt: skip
# Divided where their value is the width of all heads together.
WIDTHS = (
    "C", "D", "all_head_size", "attn_dim", "d", "d_inner", "d_model", "d_out", "dim", "emb_dim",
    "emb_size", "embed_dim", "embed_size", "embedding_dim", "hidden_dim", "hidden_size",
    "inner_dim", "kv_dim", "model_dim", "n_embd", "n_embed", "n_state", "q_dim", "split_size",
    "width",
)  # fmt: skip
