"""A model under a strategy whose memory is predicted and measured, and what came of it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LOG = "NBDIST_ACCURACY_LOG"
"""Names the JSON lines file that every case is added to."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        model: A key of MODELS.
        name: The strategy.
        given: Its degrees and options.
        batch, sequence: What a rank computes at once.
        n: Ranks.
    """

    model: str
    name: str
    given: dict[str, Any] = field(default_factory=dict)
    batch: int = 4
    sequence: int = 128
    n: int = 2

    @property
    def typed(self) -> str:
        """As behind %dist_strategy."""
        words = [
            f"--{word}" if value is True else f"--{word} {value}"
            for word, value in self.given.items()
        ]
        return " ".join([self.name, *words])


@dataclass(frozen=True, slots=True)
class Result:
    """A line of the table in docs/accuracy.md; sizes in bytes.

    Attributes:
        typed, model, n, batch, sequence: Of the case.
        measured: The peak.
        run: The peak by a run with fake tensors; None where there is none.
        formulas: By formulas; None of a model without a shape.
        states: Whether parameters, gradients and the optimizer's state were exact.
        note: Why there was no run.
    """

    typed: str
    model: str
    n: int
    batch: int
    sequence: int
    measured: float
    run: float | None
    formulas: float | None
    states: bool
    note: str = ""


def record(result: Result) -> None:
    """Add a result to the file that NBDIST_ACCURACY_LOG names, if it names one."""
    path = os.environ.get(LOG)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


_LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 640, "vocab_size": 500, "num_hidden_layers": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
_GPT = {
    "model_type": "gpt2", "n_embd": 256, "n_head": 8, "n_layer": 4, "n_positions": 512,
    "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
# Name -> config of transformers; None of models that tests/accuracy/ranks.py builds.
MODELS: dict[str, dict[str, Any] | None] = {
    "llama": _LLAMA,
    "llama, tied": {**_LLAMA, "tie_word_embeddings": True},
    "llama, 4000 words": {**_LLAMA, "vocab_size": 4000},
    "gpt2": _GPT,
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 32},
    "mixtral": {**_LLAMA, "model_type": "mixtral", **_EXPERTS},
    "qwen2-moe": {
        **_LLAMA,
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe": {
        **_LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "moe_intermediate_size": 384,
        **_EXPERTS,
    },
    "deepseek": {
        **_LLAMA,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
        "n_group": 2,
        "topk_group": 1,
    },
    "gpt-oss": {
        **_LLAMA,
        "model_type": "gpt_oss",
        "head_dim": 32,
        **_EXPERTS,
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mlp": None,
    "cnn": None,
    "vit": None,
}

_EP = {"ep": 2}
_FULL, _SEL, _BF16 = {"checkpoint": "full"}, {"checkpoint": "selective"}, {"bf16": True}
# `make test` takes these, one group of ranks.
SHORT = [
    Case("llama", "fsdp"),
    Case("mlp", "ddp"),
]
LONG = [
    Case("llama", "single"),
    Case("llama", "zero1"),
    Case("cnn", "fsdp"),
    Case("llama", "ddp"),
    Case("llama", "tp"),
    Case("llama", "tp", {"sequence_parallel": True}),
    Case("llama", "fsdp", {"shard": "grad-op"}),
    Case("llama", "fsdp1"),
    Case("llama", "fsdp", _FULL),
    Case("llama", "fsdp", _SEL),
    Case("llama", "single", _FULL),
    Case("llama", "ddp", _BF16),
    Case("llama", "fsdp", _BF16),
    Case("llama", "zero1", _BF16),
    Case("llama", "single", batch=1, sequence=512),
    Case("llama", "fsdp", batch=16),
    Case("llama, tied", "single"),
    Case("llama, 4000 words", "single"),
    Case("llama, 4000 words", "fsdp", _BF16),
    Case("qwen3", "fsdp"),
    Case("gpt2", "single"),
    Case("gpt2", "ddp", _BF16),
    Case("gpt2", "fsdp"),
    Case("gpt2", "tp"),
    Case("gpt2", "pp", batch=4),
    Case("llama", "cp"),
    Case("llama", "ulysses"),
    Case("mlp", "single"),
    Case("mlp", "fsdp"),
    Case("cnn", "ddp"),
    Case("vit", "single"),
    Case("vit", "fsdp", _BF16),
    Case("vit", "zero1"),
    Case("mixtral", "single"),
    Case("mixtral", "ddp"),
    Case("mixtral", "fsdp"),
    Case("mixtral", "fsdp", _BF16),
    Case("mixtral", "tp"),
    Case("mixtral", "pp"),
    Case("mixtral", "ep"),
    Case("mixtral", "ep", _BF16),
    Case("mixtral", "ep", _FULL),
    Case("mixtral", "ep", _SEL),
    Case("mixtral", "fsdp", _EP),
    Case("mixtral", "fsdp", {**_EP, **_BF16}),
    Case("mixtral", "fsdp", {**_EP, "shard": "grad-op"}),
    Case("qwen2-moe", "ep"),
    Case("qwen3-moe", "fsdp", _EP),
    Case("deepseek", "ddp"),
    Case("deepseek", "ep"),
    Case("gpt-oss", "fsdp", _EP),
    Case("mixtral", "ep", _EP, n=4),
    Case("mixtral", "fsdp", _EP, n=4),
    Case("mixtral", "fsdp", {**_EP, **_BF16}, n=4),
    Case("mixtral", "fsdp", {"tp": 2, **_EP}, n=4),
    Case("deepseek", "fsdp", _EP, n=4),
    Case("llama", "fsdp", n=4),
    Case("llama", "fsdp", {"shard": "hybrid"}, n=4),
    Case("llama", "fsdp", {"tp": 2}, n=4),
    Case("gpt2", "zero1", n=4),
]
