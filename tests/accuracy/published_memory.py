"""Memory that others measured, or ran out of, beside the plan's.

python -m tests.accuracy.published_memory docs/accuracy.md
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbdist
from nbdist.planner.models import CONFIGS
from nbdist.planner.plan import PlanRow
from tests.support import tables

COMMAND = "make accuracy, memory"
OUT, FITS = "out of memory", "fits"
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """A published run.

    Attributes:
        source: Key of SOURCES.
        model: A name of the catalogue, a number, or a config.
        outcome: OUT, FITS, or GiB that were measured.
        options: As nbdist.plan takes them.
    """

    source: str
    model: str | Mapping[str, Any]
    outcome: str | float
    options: Mapping[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        """Of the model."""
        if isinstance(self.model, str):
            return self.model
        return f"{self.model['name']}, {self.model['num_hidden_layers']} blocks"

    def planned(self) -> PlanRow:
        """Its plan."""
        model = self.model
        if not isinstance(model, str):
            model = {word: value for word, value in model.items() if word != "name"}
        return nbdist.plan(model, **self.options).plan.rows[0]  # type: ignore[union-attr]


_TITAN = "https://github.com/pytorch/torchtitan/blob/main"
_SIMUMAX = "https://github.com/MooreThreads/SimuMax/blob/main"
SOURCES = {
    "accelerate": "[Accelerate's FSDP post](https://huggingface.co/blog/pytorch-fsdp), 2 x 24 GB",
    "torchtitan": f"[torchtitan, 64 A100]({_TITAN}/docs/performance.md)",
    "torchtitan H100": "[torchtitan, H100 with 96 GB]"
    f"({_TITAN}/benchmarks/llama3_h100_202412_torchtitan.md)",
    "FSDP": "[FSDP's paper](https://arxiv.org/abs/2304.11277), sections 5.2, 5.4",
    "fsdp_qlora": "[fsdp_qlora, 2 x 24 GB]"
    "(https://github.com/AnswerDotAI/fsdp_qlora/blob/main/benchmarks_03_2024.md)",
    "SimuMax": f"[SimuMax, 8 B200]({_SIMUMAX}/docs/b200/b200_release_v1.2_summary.md)",
}


def _tuned(**more: Any) -> dict[str, Any]:
    """On 2 Titan RTX, with the attention of that time."""
    return {"ranks": 2, "memory": "24GB", "seq": 128, "sdpa": "math", "precision": "fp32", **more}


def _titan(ranks: int, seq: int, batch: int, **more: Any) -> dict[str, Any]:
    device = {"gpu": "a100-80gb"} if ranks == 64 else {"memory": "96GB"}
    return {"strategy": "fsdp", "ranks": ranks, "seq": seq, "batch": batch, "bf16": True, **device,
            **more}  # fmt: skip


def _cut(name: str, layers: int) -> dict[str, Any]:
    return {**CONFIGS[name], "num_hidden_layers": layers, "name": name}


_SHARED = {"strategy": "tp", "ranks": 8, "gpu": "b200", "seq": 4096, "accumulate": 4, "bf16": True,
           "recipe": "mixed", "sequence_parallel": True}  # fmt: skip
# Section 5.2 says neither batch nor tokens: they are those of section 5.4, of the same model.
_COPIES = {"strategy": "ddp", "ranks": 8, "gpu": "a100-80gb", "seq": 512, "batch": 8,
           "precision": "fp32"}  # fmt: skip
_SHARDS = {"strategy": "fsdp1", "gpu": "a100-80gb", "bf16": True, "checkpoint": "full"}
# train.py's defaults: r 64 on all linear layers, everything but 4-bit weights in bf16. Measured is
# what torch had reserved at most, which fragments are part of.
_ADAPTED = {"ranks": 2, "memory": "24GB", "bf16": True, "recipe": "bf16", "checkpoint": "full",
            "lora": 64, "targets": "all-linear"}  # fmt: skip


def _adapted(strategy: str, batch: int, **more: Any) -> dict[str, Any]:
    return {**_ADAPTED, "strategy": strategy, "batch": batch, **more}


_FEWER = _tuned(strategy="fsdp1", shard="grad-op", batch=11)
CASES = (
    MemoryCase("accelerate", "gpt2-large", FITS, _tuned(strategy="ddp", batch=7)),
    MemoryCase("accelerate", "gpt2-large", FITS, _FEWER),
    MemoryCase("accelerate", "gpt2-large", FITS, _tuned(strategy="fsdp1", batch=15)),
    MemoryCase("accelerate", "gpt2-xl", FITS, _tuned(strategy="fsdp1", batch=5)),
    MemoryCase("accelerate", "gpt2-xl", OUT, _tuned(strategy="ddp")),
    MemoryCase("accelerate", "gpt2-xl", OUT, _tuned(strategy="single", ranks=1)),
    MemoryCase("accelerate", "gpt2-xl", OUT, _tuned(strategy="single", ranks=1, precision="fp16")),
    MemoryCase("FSDP", "11B", OUT, _COPIES),
    MemoryCase("FSDP", "2.28B", FITS, _COPIES),
    MemoryCase("FSDP", "11B", FITS, {**_SHARDS, "ranks": 8, "seq": 512, "batch": 16}),
    MemoryCase("FSDP", "175B", FITS, {**_SHARDS, "ranks": 128, "seq": 2048, "batch": 2}),
    MemoryCase("torchtitan", "llama-2-70b", OUT, _titan(64, 4096, 2, checkpoint="selective")),
    MemoryCase("torchtitan", "llama-2-70b", FITS, _titan(64, 4096, 1, checkpoint="selective")),
    MemoryCase("torchtitan", "llama-2-70b", FITS, _titan(64, 4096, 2, checkpoint="full")),
    MemoryCase("torchtitan", "llama-2-13b", FITS, _titan(64, 4096, 2)),
    MemoryCase("torchtitan", "llama-3-70b", FITS, _titan(64, 8192, 1, checkpoint="full")),
    MemoryCase("torchtitan H100", "llama-3-8b", 82.4, _titan(8, 8192, 2, checkpoint="selective")),
    MemoryCase("torchtitan H100", "llama-3-8b", 67.0, _titan(128, 8192, 2, checkpoint="selective")),
    MemoryCase("SimuMax", _cut("llama-3-70b", 12), 28.29, _SHARED),
    MemoryCase("SimuMax", _cut("llama-3.1-405b", 4), 38.57, _SHARED),
    MemoryCase("fsdp_qlora", "llama-2-7b", 16.14, _adapted("fsdp", 4)),
    MemoryCase("fsdp_qlora", "llama-2-7b", 21.35, _adapted("fsdp", 6)),
    MemoryCase("fsdp_qlora", "llama-2-7b", 22.04, _adapted("ddp", 4)),
    MemoryCase("fsdp_qlora", "llama-2-7b", 4.98, _adapted("fsdp", 1, seq=512, quant="4bit")),
    MemoryCase("fsdp_qlora", "llama-2-7b", 5.21, _adapted("fsdp", 1, quant="4bit")),
    MemoryCase("fsdp_qlora", "llama-2-7b", 11.22, _adapted("fsdp", 4, quant="4bit")),
    MemoryCase("fsdp_qlora", "llama-2-7b", 20.97, _adapted("fsdp", 10, quant="4bit")),
    MemoryCase("fsdp_qlora", "llama-2-7b", 20.94, _adapted("ddp", 8, quant="4bit")),
    MemoryCase("fsdp_qlora", "llama-2-70b", 14.92,
               _adapted("fsdp", 2, quant="4bit", offload="cpu")),
)  # fmt: skip
_SHOWN = ("strategy", "shard", "checkpoint", "offload", "ranks", "batch", "seq", "precision",
          "lora", "targets", "quant")  # fmt: skip


def text() -> str:
    """A line for each case."""
    head = ("source", "model", "plan", "outcome", "predicted (GiB)", "of the device", "verdict")
    return tables.table(head, map(line, CASES))


def line(case: MemoryCase) -> tuple[str, ...]:
    """The case's cells."""
    row = case.planned()
    assert row.memory is not None
    words = (
        f"{case.options[word]}" if word == "strategy" else f"--{word} {case.options[word]}"
        for word in _SHOWN
        if word in case.options
    )
    outcome = case.outcome if isinstance(case.outcome, str) else f"{case.outcome} GiB"
    return (
        SOURCES[case.source], case.name, f"`{' '.join(words)}`", outcome,
        f"{row.memory.peak / _GIB:.1f}", f"{100 * row.share:.0f} %", row.verdict,
    )  # fmt: skip


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(tables.replaced(page.read_text(), COMMAND, text()))
