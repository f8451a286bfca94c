"""What is told of a configuration, and what it is changed to."""

# ruff: noqa: E501, ISC004  # rows of tables, read side by side

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nbdist.config import distributed_config
from nbdist.config.check import check, corrected, kind_of
from nbdist.config.emit import Refusal, Setting, accelerate_config, deepspeed_config
from nbdist.config.report import CheckContext, Checked
from nbdist.config.tree import plain
from nbdist.config.yaml_reader import load, read
from nbdist.core.finding import BAD, WARN
from nbdist.strategy.choose import choose
from nbdist.strategy.table import ROWS

_DATA = Path(__file__).resolve().parents[1] / "data" / "configs"


def checked(text: str, around: CheckContext = CheckContext()) -> Checked:  # noqa: B008  # it is frozen
    return check(read("mine", text.strip()), around)


def mended(checked_config: Checked, around: CheckContext) -> Checked:
    document = checked_config.document
    return corrected(
        checked_config, around, lambda text: read(document.name, text, document.syntax)
    )[0]


def problems_of(checked_config: Checked, verdict: str) -> list[str]:
    """Name, reason and advice of the findings of a verdict, with their lines."""
    return [
        f"{f.line} {f.name}: {f.why}; {f.what}"
        for f in checked_config.findings
        if f.verdict == verdict
    ]


# The documents' own configurations: file, ranks and degrees, what is bad, what the corrected has.
_OWN: dict[str, tuple[str, CheckContext, list[str], list[str]]] = {
    "ddp": ("accelerate_ddp.yaml", CheckContext(), [], []),
    "deepspeed": ("accelerate_deepspeed.yaml", CheckContext(), [], []),
    "fsdp": ("accelerate_fsdp.yaml", CheckContext(), [], []),
    "stage 1": ("zero1_part.json", CheckContext(), [], []),
    "stage 2": ("zero2_part.json", CheckContext(), [], []),
    "stage 3": ("zero3_part.json", CheckContext(8, "--ranks"), [], []),
    "stage 2, all": ("zero2_adamw.json", CheckContext(8, "--ranks"), [], []),
    "stage 3, all": ("zero3_adamw.json", CheckContext(4, "--ranks"), [], []),
    "training": ("instructlab.yaml", CheckContext(), [], []),
    # The four that cannot run.
    "three axes": (
        "three_axes.json",
        CheckContext(800, "--ranks", tp=8, pp=4),
        ["2 train_batch_size: 2048 = micro-batch 4 x accumulation x 25 data-parallel ranks has no "
         "whole solution: 2048 / 100 = 20.48; change train_batch_size to 2000 (accumulation 20) or 2100",
         "6 comment: JSON has no comments"],
        ['"train_batch_size": 2000,', '"stage": 1,\n'],
    ),
    "offload": (
        "zero3_offload.json",
        CheckContext(8, "--ranks"),
        ["6 comment", "19 train_batch_size: 16 is not micro-batch 1 x accumulation 16 x 8 "
         "data-parallel ranks = 128; change gradient_accumulation_steps from 16 to 2"],
        ['"gradient_accumulation_steps": 2,', '"pin_memory": true\n'],
    ),
    "two hosts": (
        "instructlab.yaml",
        CheckContext(8, "--ranks"),
        ["14 train.effective_batch_size: 128 is not micro-batch 8 x accumulation 4 x 8 "
         "data-parallel ranks = 256; change gradient_accumulation_steps from 4 to 2"],
        ["gradient_accumulation_steps: 2\n", "effective_batch_size: 128 # 8 * 4 * 4 GPUs"],
    ),
    "two precisions": (
        "zero3_adamw.json",
        CheckContext(4, "--ranks", others=(load(_DATA / "instructlab.yaml"),)),
        ["5 fp16.enabled: fp16 is on here, and "],
        ['"enabled": false', '"bf16": {"enabled": true}'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _OWN)
def test_configurations_of_the_guides(name: str) -> None:
    """Nine can run as they are; four cannot, and their corrected text can."""
    file, around, bad, right = _OWN[name]
    checked_config = check(load(_DATA / file), around)
    after = mended(checked_config, around)
    problems = problems_of(checked_config, BAD)

    assert f"{checked_config.kind}, in {checked_config.document.syntax}" in [
        finding.found for finding in checked_config.findings
    ]
    assert len(problems) == len(bad)
    assert [any(part in line for line in problems) for part in bad] == [True] * len(bad)
    assert not after.is_bad
    assert [part for part in right if part not in after.document.text] == []
    if not bad:
        assert bool(checked_config)


def test_every_file_of_the_guides_is_a_case() -> None:
    """No file lies in the folder that no test reads."""
    assert {file for file, *_ in _OWN.values()} == {path.name for path in _DATA.iterdir()}


_LAUNCH = "distributed_type: MULTI_GPU\nnum_processes: 4\n"
_FSDP = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n"
_FSDP2 = _FSDP + "  fsdp_version: 2\n"
_DS = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n"
_MESH = _FSDP2 + "parallelism_config:\n"
_MEGATRON = "distributed_type: MEGATRON_LM\nnum_processes: 8\nmegatron_lm_config:\n"
_BATCH = '{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, '
_ZERO = _BATCH + '"zero_optimization": {"stage": %s}}'

# Text -> (verdict, what is told, what the corrected text has; "" where nothing can be known).
_CASES: dict[str, tuple[str, str, str]] = {
    # Accelerate, whatever its type
    "num_processes: 4\nmixed_precision: bf16": (BAD, "refuses a configuration without it; write MULTI_GPU", "distributed_type: MULTI_GPU"),
    "fsdp_config: {fsdp_version: 2}\nnum_processes: 4": (BAD, "write FSDP", "distributed_type: FSDP"),
    _LAUNCH + "mixed_precison: bf16": (BAD, "3 mixed_precison: Accelerate refuses a key that it does not know; change the key to mixed_precision", "mixed_precision: bf16"),
    _LAUNCH + "favourite: 3": (BAD, "take it out", "num_processes: 4\n"),
    _LAUNCH + "mixed_precision: no": (BAD, "YAML reads no without quotation marks as false; write 'no'", "mixed_precision: 'no'"),
    "distributed_type: NO\nnum_processes: 1": (WARN, "write 'NO'", "distributed_type: 'NO'"),
    _LAUNCH + "mixed_precision: bfloat16": (BAD, "bfloat16 is not one of no, fp16, bf16, fp8; write bf16", "mixed_precision: bf16"),
    "distributed_type: multi_gpu\nnum_processes: 4": (BAD, "write MULTI_GPU", "distributed_type: MULTI_GPU"),
    "distributed_type: DDP\nnum_processes: 4": (BAD, "DDP is not one of NO, MULTI_CPU", ""),
    "distributed_type: MULTI_GPU\nnum_processes: '4'": (BAD, "it must be a whole number above 0, and '4' is a string; write 4", "num_processes: 4"),
    "distributed_type: MULTI_GPU\nnum_processes: four": (BAD, "write a whole number above 0", ""),
    _LAUNCH + "use_cpu: 'false'": (BAD, "write false", "use_cpu: false"),
    _LAUNCH + "fp16: true\nmixed_precision: bf16": (BAD, "fp16: true is the old mixed_precision: fp16", "num_processes: 4\nmixed_precision"),
    _LAUNCH + "num_machines: 3": (BAD, "4 is not a multiple of num_machines 3; change it to 3 or 6", "num_processes: 3"),
    _LAUNCH + "num_machines: 2\nmain_process_ip: a\nmain_process_port: 1\nmachine_rank: 2": (BAD, "counted from 0, and num_machines is 2; use 0 to 1", "machine_rank: 0"),
    _LAUNCH + "num_machines: 2": (WARN, "2 hosts must find each other; write 29500, or type --main_process_port", "main_process_port: 29500"),
    "distributed_type: MULTI_GPU\nnum_processes: 1\ngpu_ids: 0": (BAD, "it must be a string, and 0 is a number; write '0'", "gpu_ids: '0'"),
    _LAUNCH + "gpu_ids: 0,1": (BAD, "they are 2 GPUs for num_processes 4", "num_processes: 2"),
    "distributed_type: 'NO'\nnum_processes: 2": (BAD, "NO is one process", "MULTI_GPU"),
    "distributed_type: MULTI_CPU\nnum_processes: 2": (BAD, "through mpirun; this starts one", "MULTI_GPU"),
    "distributed_type: MULTI_GPU": (WARN, "accelerate launch --num_processes N", ""),
    _LAUNCH + "fsdp_config:\n  fsdp_version: 2": (WARN, "it belongs to distributed_type FSDP, and this is MULTI_GPU", "num_processes: 4\n"),
    _LAUNCH + "dynamo_backend: NO": (BAD, "dynamo_backend", "dynamo_backend: 'NO'"),
    # FSDP
    _FSDP + "  fsdp_offload_params: false": (WARN, "without it this is FSDP1", ""),
    _FSDP2 + "  fsdp_sharding_strategy: FULL_SHARD": (WARN, "FSDP2 has no fsdp_sharding_strategy: fsdp_reshard_after_forward: true is FULL_SHARD", "fsdp_version: 2"),
    _FSDP2 + "  fsdp_reshard_after_forward: SHARD_GRAD_OP": (BAD, "FSDP2 wants true or false", "fsdp_reshard_after_forward: false"),
    _FSDP2 + "  reshard_after_forward: FULL_SHARD": (BAD, "write true", "  reshard_after_forward: true"),
    _FSDP2 + "  fsdp_state_dict_type: LOCAL_STATE_DICT": (BAD, "write SHARDED_STATE_DICT", "SHARDED_STATE_DICT"),
    _FSDP2 + "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP": (WARN, "only a model of transformers says", ""),
    _FSDP2 + "  fsdp_ofload_params: true": (WARN, "change the key to fsdp_offload_params", "fsdp_offload_params: true"),
    _FSDP2 + "  fsdp_activation_checkpointing_offload: true": (BAD, "it needs fsdp_activation_checkpointing", "fsdp_activation_checkpointing: true"),
    _FSDP2 + "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_sync_module_states: false": (BAD, "has to be true", ""),
    _FSDP + "  fsdp_version: 3": (BAD, "3 is not one of 1, 2", ""),
    # transformers' DistributedConfig
    '{"fsdp_size": 8, "fdsp_cpu_offload": true}': (WARN, "transformers silently ignores it; change the key to fsdp_cpu_offload", '"fsdp_cpu_offload": true'),
    '{"fsdp_size": "8"}': (BAD, "write 8", '"fsdp_size": 8'),
    '{"pp_size": 2, "fsdp_size": 4}': (BAD, "cannot combine a pipeline (pp 2) with FSDP or replicas", ""),
    '{"fsdp_size": 4, "tp_size": 2, "ep_size": 3}': (BAD, "it must be a multiple of tp_size, 2", ""),
    '{"fsdp_size": 4, "tp_size": 2, "ep_size": 6}': (BAD, "it must divide fsdp_size x tp_size = 4 x 2 = 8", ""),
    "tp_size: 8\nenable_expert_parallel: true": (WARN, "transformers has replaced it by ep_size", "tp_size: 8\n"),
    # Meshes
    _MESH + "  parallelism_config_tp_size: 2\n  parallelism_config_dp_shard_size: 2": (BAD, "dp_shard 2 x tp 2 are 4 ranks, and there are 8 (as num_processes says); change dp_shard_size to 4", "dp_shard_size: 4"),
    _MESH + "  parallelism_config_tp_size: 3": (BAD, "tp 3 are 3 ranks, and there are 8", ""),
    _MESH + "  tp_size: 2\n  dp_shard_size: 4": (BAD, "its keys begin with parallelism_config_", "parallelism_config_tp_size: 2\n  parallelism_config_dp_shard_size: 4"),
    _MESH + "  parallelism_config_tp_size: 8": (BAD, "FSDP has nothing to split over", ""),
    _MESH + "  parallelism_config_tp_size: 2\n  parallelism_config_dp_replicate_size: 4": (BAD, "swap them: dp_replicate 1, dp_shard 4", "parallelism_config_dp_replicate_size: 1"),
    _FSDP + "  fsdp_version: 1\nparallelism_config:\n  parallelism_config_dp_shard_size: 8": (BAD, "only with FSDP2, and this is FSDP1", "fsdp_version: 2"),
    # Megatron-LM
    _MEGATRON + "  megatron_lm_tp_degree: 4\n  megatron_lm_pp_degree: 3": (BAD, "tp 4 x pp 3 = 12 does not divide 8 ranks", "num_processes: 12"),
    _MEGATRON + "  megatron_lm_pp_degree: 2": (WARN, "a pipeline of 2 stages idles", "megatron_lm_num_micro_batches: 4"),
    _MEGATRON + "  megatron_lm_sequence_parallelism: true": (BAD, "it splits across tp, and tp is 1", "sequence_parallelism: false"),
    # DeepSpeed in Accelerate's YAML
    _DS + "  deepspeed_config_file: ds.json\n  zero_stage: 2": (BAD, "refuses it beside deepspeed_config_file", "deepspeed_config_file: ds.json"),
    "mixed_precision: bf16\n" + _DS + "  deepspeed_config_file: ds.json": (BAD, "1 mixed_precision: Accelerate refuses it beside", "distributed_type"),
    _DS + "  zero_stage: 2\n  offload_param_device: cpu": (BAD, "only offloaded in stage 3, and zero_stage is 2", "zero_stage: 3"),
    _DS + "  zero_stage: 2\n  zero3_init_flag: true": (WARN, "it only counts in stage 3", "zero3_init_flag: false"),
    _DS + "  zero_stage: 3\n  offload_param_device: nvme": (BAD, "nvme needs a folder", ""),
    _DS + "  zero_stage: 4": (BAD, "4 is not one of 0, 1, 2, 3", ""),
    _DS + "  gradient_clipping: 1e0": (BAD, "it must be a number, and 1e0 is a string; write 1.0", "gradient_clipping: 1.0"),
    _DS + "  gradient_clipping: 0.0": (WARN, "Accelerate ignores 0", ""),
    # DeepSpeed
    _ZERO % '2, "stage3_prefetch_bucket_size": 5e7': (WARN, "it only counts in stage 3, and this is stage 2", '{"stage": 2}'),
    _ZERO % '1, "offload_param": {"device": "cpu"}': (BAD, "parameters are only offloaded in stage 3, and this is stage 1", '"stage": 3'),
    _ZERO % '2, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}': (BAD, "offloads to NVMe in stage 3", '"device": "cpu"'),
    _ZERO % '3, "offload_param": {"device": "nvme"}': (BAD, "nvme needs a folder", ""),
    _ZERO % '0, "offload_optimizer": {"device": "cpu"}': (BAD, "offloaded in stages 1, 2 and 3", '"stage": 2'),
    _ZERO % '2, "overlap_com": true': (BAD, "DeepSpeed refuses a key of zero_optimization that it does not know; change the key to overlap_comm", '"overlap_comm": true'),
    _ZERO % '2, "overlap_comm": "true"': (BAD, "is a string; write true", '"overlap_comm": true'),
    _ZERO % '"2"': ("", "", ""),
    _ZERO % "2.5": (BAD, "2.5 is not one of", ""),
    _ZERO % '2, "cpu_offload": true': (WARN, "the old way to say offload_optimizer", ""),
    _BATCH + '"fp16": {"enabled": true}, "bf16": {"enabled": true}}': (BAD, "fp16 and bf16 are both on", '"fp16": {"enabled": false}, "bf16": {"enabled": true}'),
    _BATCH + '"fp_16": {"enabled": true}}': (WARN, "silently ignores it; change the key to fp16", '"fp16": {"enabled": true}'),
    _BATCH + '"optimizer": {"type": "AdamW", "params": {"lr": "1e-5"}}}': (BAD, 'it must be a number, and "1e-5" is a string; write 1e-05', '"lr": 1e-05'),
    _BATCH + '"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}': ("", "", ""),
    _BATCH + '"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}': (WARN, "clips by gradient_clipping", '"params": {}'),
    _BATCH + '"scheduler": {"type": "WarmupDecayLR", "params": {}}}': (BAD, "WarmupDecayLR needs the number of all steps", ""),
    _BATCH + '"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 9}}}': (BAD, "does not end within 9", ""),
    _BATCH + '"scheduler": {"type": "Cosine"}}': (WARN, "others are not known here", ""),
    '{"train_batch_size": "auto", "gradient_clipping": 1.0}': (WARN, 'put numbers for "auto"; DeepSpeed by itself stops', ""),
    '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}': (BAD, "no number of ranks fits; change train_batch_size to 8", '"train_batch_size": 8'),
    '{"zero_optimization": {"stage": 2}}': (WARN, "DeepSpeed by itself wants train_batch_size", ""),
    '{"zero_optimization": {}, "train_batch_size": 8, "gradient_clipping": 1.0}': (WARN, "the stage is 0", ""),
    # Of no kind
    "model:\n  name: llama": (BAD, "match no known format; only the syntax was checked. Known formats: Accelerate", ""),
}  # fmt: skip


@pytest.mark.parametrize("text", _CASES)
def test_what_is_wrong_is_told_and_mended(text: str) -> None:
    """Each mistake alone: the verdict, the words with the numbers, and the corrected value."""
    verdict, part, right = _CASES[text]
    checked_config = checked(text)
    after = mended(checked_config, CheckContext())

    assert not verdict or [line for line in problems_of(checked_config, verdict) if part in line], (
        checked_config.findings
    )
    assert verdict == BAD or not checked_config.is_bad, problems_of(checked_config, BAD)
    if right:
        assert right in after.document.text
        assert not after.is_bad, problems_of(after, BAD)
        assert not [line for line in problems_of(after, verdict) if part in line]


_EQUATIONS = {
    # whole, micro, accumulation; ranks -> found or what to do
    ("64", "-", "4", 8): "64 = micro-batch 2 x accumulation 4 x 8 data-parallel ranks",
    ("64", "2", "-", 8): "64 = micro-batch 2 x accumulation 4 x 8 data-parallel ranks",
    ("64", "-", "-", 8): "64 = micro-batch 8 x accumulation 1 x 8 data-parallel ranks",
    ("-", "2", "4", 8): "64 = micro-batch 2 x accumulation 4 x 8 data-parallel ranks",
    ("64", "2", "4", 8): "64 = micro-batch 2 x accumulation 4 x 8 data-parallel ranks",
    ("64", "2", "4", 4): "change gradient_accumulation_steps from 4 to 8",
    ("64", "3", "4", 4): "64 is not micro-batch 3 x accumulation 4 x 4 data-parallel ranks = 48; change train_batch_size to 48",
    ("64", "3", "-", 4): "64 / 12 = 5.33333; change train_batch_size to 60 (accumulation 5) or 72 (accumulation 6)",
    ("64", "-", "3", 4): "change train_batch_size to 60 (micro-batch 5) or 72 (micro-batch 6)",
    ("4", "-", "-", 8): "4 / 8 = 0.5; change train_batch_size to 8",
    ("16", "1", "16", None): "train_batch_size 16 fits 1 data-parallel rank alone",
    ("128", "-", "4", None): "fits as many data-parallel ranks as divide 32",
}  # fmt: skip


@pytest.mark.parametrize("numbers", _EQUATIONS)
def test_the_batch_equation(numbers: tuple[str, str, str, int | None]) -> None:
    """Whatever of the three numbers is there, the equation is told, or which number to change."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    pairs = zip(names, numbers[:3], strict=True)
    entries = ", ".join(f'"{name}": {number}' for name, number in pairs if number != "-")
    around = CheckContext(numbers[3], "--ranks")
    checked_config = checked(f'{{{entries}, "gradient_clipping": 1.0}}', around)
    lines = [f"{f.found} {f.why}; {f.what}" for f in checked_config.findings]

    assert [line for line in lines if _EQUATIONS[numbers] in line], lines
    assert not mended(checked_config, around).is_bad


def test_degrees_that_do_not_form_the_ranks() -> None:
    """TP x PP x DP against the ranks, with the numbers that work."""
    text = '{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}'
    odd = problems_of(checked(text, CheckContext(12, "--ranks", tp=8)), BAD)
    three = problems_of(checked(text, CheckContext(800, "--ranks", tp=8, pp=4, dp=20)), BAD)

    assert "12 ranks (--ranks) cannot form tp 8: 12 / 8 = 1.5; use 8 or 16 ranks" in odd[0]
    assert "tp 8 x pp 4 x dp 20 are 640 ranks, and there are 800" in three[0]
    assert "use dp 25, or 640 ranks" in three[0]


def test_ranks_that_are_typed_count_and_those_that_run_are_only_told() -> None:
    """num_processes is changed for --ranks, and left for the ranks that happen to run."""
    typed, here = CheckContext(2, "--ranks"), CheckContext(2, "as run here")

    assert "num_processes: 2" in mended(checked(_LAUNCH, typed), typed).document.text
    assert "num_processes: 4" in mended(checked(_LAUNCH, here), here).document.text
    assert checked(_LAUNCH, typed).is_bad
    assert not checked(_LAUNCH, here).is_bad


def test_files_that_count_together() -> None:
    """A YAML with its DeepSpeed file: both are checked, and what they say differently is told."""
    text = '{"train_batch_size": 9, "zero_optimization": {"stge": 2}, "fp16": {"enabled": true}}'
    ds = read("ds.json", text)
    checked_config = checked(_DS + "  deepspeed_config_file: ds.json", CheckContext(others=(ds,)))
    lab = check(load(_DATA / "instructlab.yaml"), CheckContext(others=(ds,)))

    ours = "\n".join(problems_of(checked_config, BAD))
    assert "ds.json, line 1: zero_optimization.stge" in ours
    assert "9 / 8 = 1.125" in ours
    assert "ds.json turns fp16 on (line 1)" in "\n".join(problems_of(lab, BAD))


def test_two_rules_that_disagree_end() -> None:
    """A value that two rules want different is changed once, and what is left is told."""
    text = '{"train_batch_size": 128, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}'
    ds = read("ds.json", text)
    around = CheckContext(8, "--ranks", others=(ds,))
    after, changes = corrected(
        check(load(_DATA / "instructlab.yaml"), around), around, lambda text: read("mine", text)
    )

    assert len(changes) == 2
    assert after.is_bad


def test_an_anchor_is_left_alone() -> None:
    """A change that would take away what other lines refer to is told and not made."""
    text = "distributed_type: MULTI_GPU\nnum_processes: &n '4'\nnum_machines: *n\n"
    document = read("a.yaml", text)
    after, changes = corrected(
        check(document, CheckContext()), CheckContext(), lambda new: read("a.yaml", new)
    )

    assert after.is_bad
    assert "not changed, since other lines refer to it" in changes[0]


def test_kinds_are_known_by_their_content() -> None:
    """Names of files say nothing; a Slurm script or a recipe of others is of no kind."""
    kinds = {path.name: kind_of(load(path)) for path in _DATA.iterdir()}

    assert {kind for name, kind in kinds.items() if name.startswith("accelerate")} == {"Accelerate"}
    assert {kind for name, kind in kinds.items() if name.endswith(".json")} == {"DeepSpeed"}
    assert kinds["instructlab.yaml"] == "InstructLab"
    assert kind_of(read("a", "output_dir: x\nmodel: {_component_: torchtune}\n")) == ""


@pytest.mark.parametrize(
    ("text", "told", "right"),
    [
        ('{"tp_size": 2, "fsdp_size": 2}', "fsdp 2 x tp 2 are 4 ranks, and there are 8 (--ranks); "
         "change fsdp_size to 4", '"fsdp_size": 4'),
        ('{"tp_size": 3}', "change the ranks to 3, or a degree to a divisor of 8", ""),
        ('{"tp_plan": "auto", "fsdp_size": 2}', "", ""),  # then tp gets the rest
    ],
)  # fmt: skip
def test_the_sizes_of_transformers_are_the_ranks(text: str, told: str, right: str) -> None:
    """Their product, of which a size that is not written can be the rest."""
    around = CheckContext(8, "--ranks")
    result = check(read("its.json", text), around)

    assert [told in line for line in problems_of(result, BAD)] == [True] * bool(told)
    assert right in mended(result, around).document.text


def test_the_page_says_what_each_strategy_is() -> None:
    """docs/configs.md has a row for every strategy, with the type and stage that are written."""
    page = (_DATA.parents[2] / "docs" / "configs.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))

    assert set(ROWS) <= set(rows)
    for name in ROWS:
        strategy_setting = Setting(choose(name, {}, 4))
        yaml, ds, distributed = rows[name].split(" | ")
        its = distributed_config.text(strategy_setting)
        assert distributed.startswith("none") == isinstance(its, Refusal)
        config = accelerate_config(strategy_setting)
        kind = "none" if isinstance(config, Refusal) else f"`{config['distributed_type']}`"
        assert yaml.startswith(kind)
        assert ds.startswith("none") == isinstance(deepspeed_config(strategy_setting), Refusal)


_ODD: list[Any] = [
    None, True, False, 0, -1, 2.5, float("inf"), float("nan"), "auto", "x", "", "no", "2", "1e-5",
    [], [1], {}, {"a": 1}, {"enabled": "auto"}, [{"a": [{}]}], 10**30,
]  # fmt: skip


def _odd(value: Any, chance: random.Random) -> Any:
    """A configuration in which some keys and values are something else."""
    if isinstance(value, dict):
        names = {key: key if chance.random() > 0.04 else f"{key}s" for key in value}
        return {names[k]: _odd(v, chance) for k, v in value.items()}
    if isinstance(value, list) or chance.random() > 0.12:
        return value
    return chance.choice(_ODD)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_stands_in_a_file_is_checked(seed: int) -> None:
    """No value breaks the check, and what is written corrected is in the file's format."""
    chance = random.Random(seed)  # not for secrets
    texts = [*(path.read_text() for path in sorted(_DATA.iterdir())), *_CASES]
    arounds = [
        CheckContext(),
        CheckContext(8, "--ranks"),
        CheckContext(6, "--ranks", tp=4),
        CheckContext(7, "as run here"),
    ]
    for text in texts:
        document = read("mine", text)
        odd = _odd(plain(document.root), chance)
        is_json = document.syntax == "JSON"
        new = json.dumps(odd) if is_json else yaml.safe_dump(odd)
        around = chance.choice(arounds)
        after = mended(check(read("mine", new, document.syntax), around), around)
        (json.loads if is_json else yaml.safe_load)(after.document.text)
