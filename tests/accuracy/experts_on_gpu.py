"""Times training steps of models with experts on one GPU, as transformers computes them.

python -m tests.accuracy.experts_on_gpu tests/accuracy/published/experts.csv

A model is cut to a few blocks; all of it is in bf16. tests/accuracy/steps.py plans the same.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAD = ("name", "batch", "step_s", "forward_backward_s", "peak_bytes", "gpu", "torch")
SEQUENCE = 4096
_WARM, _TIMED = 3, 7
_QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "max_position_embeddings": SEQUENCE,
}  # fmt: skip
_MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": SEQUENCE,
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "num_hidden_layers": 2, "hidden_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
    "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
    "max_position_embeddings": SEQUENCE, "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_QWEN2: dict[str, Any] = {
    "model_type": "qwen2_moe", "num_hidden_layers": 4, "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
    "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 60,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
    "max_position_embeddings": SEQUENCE,
}  # fmt: skip
# Name -> config, and batches of 4,096 tokens.
CASES: Mapping[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "qwen3-30b-a3b, 4 blocks": (_QWEN, (1, 2, 4)),
    "qwen3-30b-a3b, 4 blocks, 16 experts": ({**_QWEN, "num_experts": 16}, (1, 4)),
    "mixtral-8x7b, 2 blocks": (_MIXTRAL, (1, 2)),
    "qwen1.5-moe-a2.7b, 4 blocks": (_QWEN2, (1, 4)),
    "gpt-oss-20b, 2 blocks": (_GPT_OSS, (1,)),
}


def measure(name: str, batch: int) -> dict[str, object]:
    """A step of SGD with its forward and backward, on the first GPU; medians, in seconds."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**CASES[name][0])
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        ids = torch.randint(0, config.vocab_size, (batch, SEQUENCE))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    times: list[tuple[float, float]] = []
    for number in range(_WARM + _TIMED):
        if number == _WARM:
            torch.cuda.reset_peak_memory_stats()
        begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        middle.record()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        times.append((begin.elapsed_time(end), begin.elapsed_time(middle)))
    steps, passes = (sorted(column)[_TIMED // 2] for column in zip(*times[_WARM:], strict=True))
    return {
        "name": name,
        "batch": batch,
        "step_s": f"{steps / 1e3:.5f}",
        "forward_backward_s": f"{passes / 1e3:.5f}",
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "gpu": torch.cuda.get_device_name(),
        "torch": f"{torch.__version__}, transformers {transformers.__version__}",
    }


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, HEAD)
        writer.writeheader()
        for case, (_, batches) in CASES.items():
            for size in batches:
                writer.writerow(measure(case, size))
                file.flush()
