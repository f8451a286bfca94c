"""Steps that others measured, each as the plan that a person would ask for.

A set is fitted in part: of its models in order of size every second one, the others are held out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbdist.planner.block_time import Speeds
from nbdist.planner.devices import DEVICES, Device
from nbdist.planner.lora import with_lora
from nbdist.planner.models import CONFIGS, ModelShape, of_config
from nbdist.planner.plan import as_copies
from nbdist.planner.step_time import SPEEDS, Time, time_of
from nbdist.planner.workload import Workload
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import choose
from tests.accuracy.experts_on_gpu import CASES

FILES = Path(__file__).with_name("published")
VTRAIN, FOUNDRY = "vTrain", "llm-foundry"
MEGATRON, TITAN, SIMUMAX, QLORA = "Megatron", "torchtitan", "SimuMax", "fsdp_qlora"
AUTOMODEL, BRIDGE, ONE_GPU = "NeMo AutoModel", "Megatron Bridge", "transformers on one H200"


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step.

    Attributes:
        source: The set that it is of.
        name: Of its model.
        label: What else tells it apart.
        measured_s: Of one step of the optimizer.
        peak_bytes: Its peak of allocated memory, where that was measured.
        group: Steps of the same model, global batch, GPUs and kind of GPU.
    """

    source: str
    name: str
    label: str
    model: ModelShape
    choice: Strategy
    load: Workload
    device: Device
    measured_s: float
    group: tuple[object, ...] = ()
    peak_bytes: int = 0

    def predicted(self, speeds: Speeds = SPEEDS, sustained: Mapping[str, float] = {}) -> Time:
        """Its plan's time, by other constants where they are given."""
        part = sustained.get(self.device.name.split("-")[0], self.device.sustained)
        device = replace(self.device, sustained=part)
        time = time_of(self.model, self.choice, self.load, device, None, speeds)
        assert time is not None
        return time


def gpt(hidden: int, heads: int, layers: int, sequence: int, vocab: int) -> ModelShape:
    """A model of GPT-2's kind."""
    config = {
        "model_type": "gpt2", "n_embd": hidden, "n_head": heads, "n_layer": layers,
        "n_positions": sequence, "n_inner": 4 * hidden, "vocab_size": vocab,
    }  # fmt: skip
    return of_config(config)


# Before flash attention: scores in memory, and full checkpointing.
_OLDER = {"checkpoint": "full", "sdpa": "math"}


def vtrain() -> Iterator[Step]:
    """Megatron-DeepSpeed: dp as copies, everything computed again, attention with its scores."""
    with (FILES / "vtrain.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            cells = {key.strip(): value for key, value in row.items()}
            gpus, batch, micro = (
                int(cells[key]) for key in ("# GPUs", "global batch", "micro batch")
            )
            hidden, heads, layers = (
                int(cells[key]) for key in ("hidden size", "attention heads", "# layers")
            )
            sequence = int(cells["sequence length"])
            tp, dp, pp = (
                int(cells[f"{word} parallelism"]) for word in ("tensor", "data", "pipeline")
            )
            name = f"{cells['Parameters (billion)']}B"
            yield Step(
                VTRAIN, name, f"tp {tp} x dp {dp} x pp {pp}, micro-batch {micro}",
                gpt(hidden, heads, layers, sequence, 51200),
                *megatron_choice(gpus, batch, micro, sequence, tp, pp, _OLDER),
                DEVICES["a100-80gb"], float(cells["iteration time (ms)"]) / 1e3,
                (name, gpus, batch),
            )  # fmt: skip


def megatron_choice(  # noqa: PLR0913, PLR0917  # what such a row has
    gpus: int, batch: int, micro: int, sequence: int, tp: int, pp: int, more: Mapping[str, Any]
) -> tuple[Strategy, Workload]:
    """tp, pp and copies, with fewer micro-batches than stages as gpipe: the idle time is equal."""
    dp = gpus // (tp * pp)
    pieces = batch // (dp * micro)
    degrees = {"tp": tp, "pp": pp, "dp": dp}
    given: dict[str, Any] = {word: n for word, n in degrees.items() if n > 1}
    given |= {"bf16": True, **more}
    if pp > 1:
        given |= {"microbatches": pieces}
        given |= {"schedule": "gpipe"} if pieces < pp else {}
    else:
        given |= {"accumulate": pieces}
    name = "pp" if pp > 1 else "tp" if tp > 1 else "ddp" if dp > 1 else "single"
    load = Workload(micro * pieces if pp > 1 else micro, sequence, recipe="mixed")
    return as_copies(choose(name, given, gpus)), load


_FOUNDRY_COLUMNS = (
    "hidden", "heads", "layers", "sequence", "gpus", "micro_batch", "accumulate",
)  # fmt: skip


def llm_foundry() -> Iterator[Step]:
    """FSDP, in part with full checkpointing and with gradients that are accumulated."""
    with (FILES / "llm_foundry.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            hidden, heads, layers, sequence, gpus, micro, again = (
                int(row[key]) for key in _FOUNDRY_COLUMNS
            )
            given: dict[str, Any] = {"bf16": True, "accumulate": again}
            given |= {"checkpoint": "full"} if row["recompute"] == "1" else {}
            given |= {"shard": "grad-op"} if row["sharding"] == "SHARD_GRAD_OP" else {}
            yield Step(
                FOUNDRY, row["model"], f"{gpus} {row['gpu']}, {sequence} tokens, batch {micro}",
                gpt(hidden, heads, layers, sequence, 50368), choose("fsdp", given, gpus),
                Workload(micro, sequence), DEVICES[row["gpu"]], float(row["step_s"]),
                (row["model"], gpus, row["global_batch"], row["gpu"]),
            )  # fmt: skip


# Parameters (10^9), heads, width, layers, tp, pp, GPUs, global batch, TFLOPS of each: table 1 of
# https://arxiv.org/abs/2104.04473, sequence 2048, vocabulary 51,200, full checkpointing.
_SCALED = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137), (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142), (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138), (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)  # fmt: skip
# Name, heads, width, layers, pp, GPUs, batch, micro-batch, seconds with full checkpointing, and
# with sequence parallelism and selective checkpointing: tables 3 and 5 of
# https://arxiv.org/abs/2205.05198; tp 8, interleaved where there is a pipeline.
_KORTHIKANTI = (
    ("22B", 64, 6144, 48, 1, 8, 4, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 64, 64, 1, 18.13, 13.75),
    ("530B", 128, 20480, 105, 35, 280, 280, 1, 49.05, 37.83),
    ("1T", 160, 25600, 128, 64, 512, 512, 1, 94.42, 71.49),
)  # fmt: skip


def megatron() -> Iterator[Step]:
    """Two papers' tables; the first does not say its micro-batches: the best planned one counts."""
    for billions, heads, hidden, layers, tp, pp, gpus, batch, tflops in _SCALED:
        # Equation 3 of that paper, with what is computed again.
        part = 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
        seconds = 96 * batch * 2048 * layers * hidden**2 * part / (gpus * tflops * 1e12)
        dp = gpus // (tp * pp)
        steps = [
            Step(
                MEGATRON, f"{billions}B", f"{gpus} A100, tp {tp} x dp {dp} x pp {pp}",
                gpt(hidden, heads, layers, 2048, 51200),
                *megatron_choice(gpus, batch, micro, 2048, tp, pp, _OLDER),
                DEVICES["a100-80gb"], seconds,
            )
            for micro in (1, 2, 4, 8)
            if batch % (dp * micro) == 0
        ]  # fmt: skip
        yield min(steps, key=lambda step: step.predicted().step_s)
    for name, heads, hidden, layers, pp, gpus, batch, micro, full_s, selective_s in _KORTHIKANTI:
        schedule = {"schedule": "interleaved"} if pp > 1 else {}
        for how, more, seconds in (
            ("full", {}, full_s),
            ("selective", {"sequence_parallel": True}, selective_s),
        ):
            given = {**_OLDER, "checkpoint": how, **schedule, **more}
            yield Step(
                MEGATRON, name, f"{gpus} A100, tp 8 x pp {pp}, {how} checkpointing",
                gpt(hidden, heads, layers, 2048, 51200),
                *megatron_choice(gpus, batch, micro, 2048, 8, pp, given),
                DEVICES["a100-80gb"], seconds,
            )  # fmt: skip


# Model, GPU, GPUs, tokens, batch, options, tokens per second and GPU. A100: docs/performance.md of
# https://github.com/pytorch/torchtitan at 0413364; H100 (96 GB, 500 W):
# benchmarks/llama3_h100_202412_torchtitan.md. Rows in float8 are left out: nbdist has none.
_TITAN = (
    ("llama-3-8b", "a100-80gb", 64, 8192, 1, {"checkpoint": "2"}, 2904),
    ("llama-3-8b", "a100-80gb", 64, 8192, 1, {"checkpoint": "selective"}, 2973),
    ("llama-3-70b", "a100-80gb", 64, 8192, 1, {"checkpoint": "full"}, 331),
    ("llama-2-13b", "a100-80gb", 64, 4096, 2, {}, 2162),
    ("llama-2-13b", "a100-80gb", 64, 4096, 2, {"checkpoint": "2"}, 1914),
    ("llama-2-13b", "a100-80gb", 64, 4096, 2, {"checkpoint": "selective"}, 1904),
    ("llama-2-70b", "a100-80gb", 64, 4096, 1, {"checkpoint": "selective"}, 355),
    ("llama-2-70b", "a100-80gb", 64, 4096, 2, {"checkpoint": "full"}, 353),
    ("llama-3-8b", "h100", 8, 8192, 2, {"checkpoint": "selective"}, 5762),
    ("llama-3-8b", "h100", 8, 8192, 2, {"checkpoint": "selective", "compile": True}, 6667),
    ("llama-3-8b", "h100", 128, 8192, 2, {"checkpoint": "selective"}, 5605),
    ("llama-3-8b", "h100", 128, 8192, 2, {"checkpoint": "selective", "compile": True}, 6514),
)  # fmt: skip


def torchtitan() -> Iterator[Step]:
    """Its published runs with FSDP2 in bf16."""
    for name, gpu, gpus, sequence, batch, more, rate in _TITAN:
        words = " ".join(f"{k} {v}" if v is not True else k for k, v in more.items())
        yield Step(
            TITAN, name, f"{gpus} {gpu}, {sequence} tokens, batch {batch} {words}".strip(),
            of_config(CONFIGS[name], name), choose("fsdp", {"bf16": True, **more}, gpus),
            Workload(batch, sequence), DEVICES[gpu], batch * sequence / rate,
        )  # fmt: skip


# Of Llama 3 cut to so many layers, tp, pp, dp, micro-batches, milliseconds measured on 8 B200 with
# Megatron: docs/b200/b200_release_v1.2_summary.md of https://github.com/MooreThreads/SimuMax at
# 1b8ca90, micro-batch 1 and 4,096 tokens (simu_tools/megatron_scripts), without checkpointing.
_B200 = (
    ("llama-3-70b", 12, 1, 2, 4, 843.0), ("llama-3-70b", 12, 2, 1, 4, 725.5),
    ("llama-3-70b", 12, 4, 1, 4, 409.8), ("llama-3-70b", 12, 8, 1, 4, 280.9),
    ("llama-3-70b", 12, 1, 2, 8, 1476.8), ("llama-3-70b", 12, 2, 1, 8, 1387.0),
    ("llama-3-70b", 12, 4, 1, 8, 765.6), ("llama-3-70b", 12, 8, 1, 8, 556.7),
    ("llama-3-70b", 12, 1, 2, 32, 5436.5), ("llama-3-70b", 12, 2, 1, 32, 5376.5),
    ("llama-3-70b", 12, 4, 1, 32, 2964.6), ("llama-3-70b", 12, 8, 1, 32, 2073.7),
    ("llama-3.1-405b", 4, 1, 2, 4, 1074.6), ("llama-3.1-405b", 4, 2, 1, 4, 907.3),
    ("llama-3.1-405b", 4, 4, 1, 4, 476.0), ("llama-3.1-405b", 4, 8, 1, 4, 258.8),
    ("llama-3.1-405b", 4, 1, 2, 32, 7046.4), ("llama-3.1-405b", 4, 2, 1, 32, 6604.1),
    ("llama-3.1-405b", 4, 4, 1, 32, 3455.4), ("llama-3.1-405b", 4, 8, 1, 32, 1901.8),
)  # fmt: skip


def simumax() -> Iterator[Step]:
    """Its measured dense cases; dp fills the 8 GPUs."""
    for name, layers, tp, pp, pieces, ms in _B200:
        dp = 8 // (tp * pp)
        model = of_config(
            {**CONFIGS[name], "num_hidden_layers": layers}, f"{name}, {layers} blocks"
        )
        yield Step(
            SIMUMAX, model.name, f"tp {tp} x dp {dp} x pp {pp}, {pieces} micro-batches", model,
            *megatron_choice(8, pieces * dp, 1, 4096, tp, pp, {}),
            DEVICES["b200"], ms / 1e3,
        )  # fmt: skip


# Model, experts, width, MLP's width, that of each expert, shared ones, chosen ones, vocabulary,
# micro-batches and milliseconds: the same page's cases of DeepSeek cut to 4 blocks, the first of
# them dense, on 8 B200 with ep 8, each expert padded to its mean load
# (--moe-pad-expert-input-to-capacity). Cases with pp are left out: nbdist has no ep there.
_DEEPSEEK_V2 = ("deepseek-v2", 160, 5120, 12288, 1536, 2, 6, 102400)
_DEEPSEEK_V3 = ("deepseek-v3", 256, 7168, 18432, 2048, 1, 8, 129280)
_EXPERTS = (
    (_DEEPSEEK_V2, 4, 366.6), (_DEEPSEEK_V2, 8, 676.2), (_DEEPSEEK_V2, 32, 2721.3),
    (_DEEPSEEK_V3, 4, 603.2), (_DEEPSEEK_V3, 8, 1101.7), (_DEEPSEEK_V3, 32, 4141.2),
)  # fmt: skip


def simumax_experts() -> Iterator[Step]:
    """Its measured cases with experts."""
    for (name, count, hidden, ffn, each, shared, chosen, vocab), pieces, ms in _EXPERTS:
        config = {
            **CONFIGS["deepseek-v3"], "num_hidden_layers": 4, "first_k_dense_replace": 1,
            "hidden_size": hidden, "intermediate_size": ffn, "moe_intermediate_size": each,
            "n_routed_experts": count, "n_shared_experts": shared, "num_experts_per_tok": chosen,
            "vocab_size": vocab,
        }  # fmt: skip
        model = of_config(config, f"{name}, 4 blocks")
        yield Step(
            SIMUMAX, model.name, f"ep 8, {pieces} micro-batches", model,
            choose("ep", {"ep": 8, "bf16": True, "accumulate": pieces}, 8),
            Workload(1, 4096, recipe="mixed"), DEVICES["b200"], ms / 1e3,
        )  # fmt: skip


# Model, GPUs, batch, backwards, options, seconds of a step: docs/performance-summary.mdx of
# https://github.com/NVIDIA-NeMo/Automodel at 36044ad, FSDP2 with ep, 4,096 tokens, H100, tokens
# spread evenly (fake_balanced_gate); ep and recomputation by examples/llm_benchmark. Its other rows
# have pp beside ep, or are hybrid models.
_AUTOMODEL = (
    ("qwen3-30b-a3b", 8, 4, 16, {"ep": 8, "checkpoint": "full"}, 21.773),
    ("gpt-oss-20b", 8, 2, 16, {"ep": 8}, 10.04),
    ("gpt-oss-120b", 64, 2, 4, {"ep": 64}, 4.30),
)


def automodel() -> Iterator[Step]:
    """NVIDIA's training of transformers' models with FSDP2 and expert parallelism."""
    for name, gpus, batch, times, more, seconds in _AUTOMODEL:
        words = " ".join(f"{word} {value}" for word, value in more.items())
        yield Step(
            AUTOMODEL, name, f"{gpus} h100, fsdp, {words}, batch {batch}, accumulate {times}",
            _with_flash(of_config(CONFIGS[name], name)),
            choose("fsdp", {"bf16": True, "accumulate": times, **more}, gpus),
            Workload(batch, 4096), DEVICES["h100"], seconds,
        )  # fmt: skip


def _with_flash(model: ModelShape) -> ModelShape:
    """Whose attention with sinks is a kernel that keeps no scores, as in neither transformers."""
    return replace(model, shape=replace(model.shape, has_sinks=False))


# Name, batch, milliseconds of a step, and bytes at its peak: experts_on_gpu on one H200, torch
# 2.11.0 with CUDA 13.0, transformers 5.17.
_H200 = (
    ("qwen3-30b-a3b, 4 blocks", 1, 49.72, 11110306304),
    ("qwen3-30b-a3b, 4 blocks", 2, 84.45, 14975386112),
    ("qwen3-30b-a3b, 4 blocks", 4, 154.25, 24632345088),
    ("qwen3-30b-a3b, 4 blocks, 16 experts", 1, 43.48, 5909873152),
    ("qwen3-30b-a3b, 4 blocks, 16 experts", 4, 147.73, 20373291520),
    ("mixtral-8x7b, 2 blocks", 1, 60.54, 13372783104),
    ("mixtral-8x7b, 2 blocks", 2, 110.39, 15521265152),
    ("qwen1.5-moe-a2.7b, 4 blocks", 1, 44.26, 10157094912),
    ("qwen1.5-moe-a2.7b, 4 blocks", 4, 134.31, 23032607232),
    ("gpt-oss-20b, 2 blocks", 1, 115.38, 17740600832),
)


def one_gpu() -> Iterator[Step]:
    """Experts of transformers without parallelism, all in bf16, with SGD."""
    for name, batch, ms, peak_bytes in _H200:
        yield Step(
            ONE_GPU, name, f"1 h200, batch {batch}", of_config(CASES[name][0], name),
            choose("single", {"bf16": True}, 1),
            Workload(batch, 4096, optimizer="sgd", recipe="bf16"), DEVICES["h200"], ms / 1e3,
            peak_bytes=peak_bytes,
        )  # fmt: skip


# Container, ep, backwards, tokens per second and GPU: gpt-oss-120b on 64 B200 in bf16, batch 4 of
# 4,096 tokens; docs/performance-summary-archive.md of https://github.com/NVIDIA-NeMo/Megatron-Bridge
# at 067f987. Other rows are in 8 bits, on other GPUs, or have pp beside ep.
_BRIDGE = (
    ("25.11", 8, 2, 8213), ("26.02", 64, 5, 8047), ("26.02.01", 8, 5, 13722),
    ("26.04", 8, 5, 13045), ("26.04.01", 8, 5, 13568),
)  # fmt: skip


def bridge() -> Iterator[Step]:
    """Megatron with copies and expert parallelism, by releases of its container."""
    for release, ep, times, rate in _BRIDGE:
        yield Step(
            BRIDGE, "gpt-oss-120b", f"64 b200, ep {ep}, batch 4, accumulate {times}, {release}",
            _with_flash(of_config(CONFIGS["gpt-oss-120b"], "gpt-oss-120b")),
            choose("ep", {"ep": ep, "bf16": True, "accumulate": times}, 64),
            Workload(4, 4096, recipe="mixed"), DEVICES["b200"], 4 * times * 4096 / rate,
        )  # fmt: skip


# Model, GPU, GPUs, batch of each, 4 bits, strategy, and seconds of 1,024 samples of 2,048 tokens:
# benchmarks_03_2024.md of https://github.com/AnswerDotAI/fsdp_qlora, r 64 on all linear layers and
# full checkpointing. Left out: what is offloaded, GPUs that no data sheet here has, and two 3090 at
# 280 W on slow PCIe lanes.
_QLORA = (
    ("llama-2-7b", "rtx-4090", 2, 4, None, "ddp", 437),
    ("llama-2-7b", "rtx-4090", 2, 6, None, "fsdp", 481),
    ("llama-2-7b", "rtx-4090", 2, 8, "4bit", "ddp", 450),
    ("llama-2-7b", "rtx-4090", 2, 10, "4bit", "fsdp", 466),
    ("llama-2-70b", "a100-40gb", 2, 1, "4bit", "fsdp", 3277),
    ("llama-2-70b", "a100-40gb", 4, 4, "4bit", "fsdp", 1266),
    ("llama-2-70b", "a100-40gb", 8, 4, "4bit", "fsdp", 672),
    ("llama-2-70b", "h100", 4, 8, "4bit", "fsdp", 667),
)


def qlora() -> Iterator[Step]:
    """LoRA and QLoRA, as Answer.AI measured them."""
    for name, gpu, gpus, batch, quant, strategy, run_s in _QLORA:
        model = with_lora(of_config(CONFIGS[name], name), 64, "all-linear", quant)
        words = {"bf16": True, "checkpoint": "full"}
        yield Step(
            QLORA, name, f"{gpus} {gpu}, {strategy}, batch {batch}, {quant or 'bf16'}", model,
            choose(strategy, words, gpus), Workload(batch, 2048, recipe="bf16"), DEVICES[gpu],
            run_s / 1024 * batch * gpus,
        )  # fmt: skip


def fitted_names(steps: list[Step]) -> frozenset[str]:
    """Of a set's models in order of size the second, the fourth and so on: at most half of them."""
    sizes = {step.name: step.model.parameters for step in steps}
    return frozenset(sorted(sizes, key=lambda name: sizes[name])[1::2])
