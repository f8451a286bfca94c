"""A strategy as configurations: Accelerate's YAML, DeepSpeed's JSON, and what has no key there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbdist.config.tree import YAML, write_value
from nbdist.strategy.choice import AXES, Options, Strategy, described, options_phrase

ACCELERATE = "accelerate"
DEEPSPEED = "deepspeed"
TORCHRUN = "torchrun"
SBATCH = "sbatch"
TRANSFORMERS = "transformers"
FORMS = (ACCELERATE, DEEPSPEED, TRANSFORMERS, TORCHRUN, SBATCH)

DEEPSPEED_FILE = "ds_config.json"
SCRIPT = "train.py"
PORT = 29500
# Stands where nobody knows the name of a host.
FIRST_HOST = "FIRST_HOST"
_ONLY_SCRIPT = "in the script, as no configuration of Accelerate has it: "


@dataclass(frozen=True, slots=True)
class Setting:
    """Strategy, hosts, device and model that a configuration is written for.

    Attributes:
        hosts: On how many hosts, with as many ranks on each.
        device: "cuda" or "cpu".
        blocks: Class names of the model's blocks; none where no model is known.
        clip: The norm that DeepSpeed clips gradients to; 0 for none.
        first_host: The name of the host of rank 0; "" where it is not known.
        is_in_script: The script chooses the strategy itself; what starts it says nothing of it.
    """

    choice: Strategy
    hosts: int = 1
    device: str = "cuda"
    blocks: tuple[str, ...] = ()
    clip: float = 0.0
    script: str = SCRIPT
    first_host: str = ""
    is_in_script: bool = False

    @property
    def ranks_of_host(self) -> int:
        """How many ranks each host has."""
        return self.choice.world_size // self.hosts


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a strategy cannot be said in a form, and what to use instead."""

    why: str


def accelerate_config(setting: Setting) -> dict[str, Any] | Refusal:
    """The strategy as the keys of an Accelerate YAML, or why it has none."""
    if why := _refusal(setting.choice):
        return Refusal(f"{why}; run it with nbdist instead: {run_line(setting.choice)}")
    choice, options = setting.choice, setting.choice.options
    is_alone = choice.name == "single" or choice.world_size == 1
    kind = "FSDP" if choice.degrees.dp_shard > 1 else "MULTI_GPU"
    kind = "NO" if is_alone else "DEEPSPEED" if choice.name == "deepspeed" else kind
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no" if options.precision == "fp32" else options.precision,
        "num_machines": 1 if is_alone else setting.hosts,
        "num_processes": 1 if is_alone else choice.world_size,
        "rdzv_backend": "static" if setting.hosts == 1 else "c10d",
        "same_network": True,
        # Accelerate looks for no DeepSpeed where it is true.
        "use_cpu": setting.device == "cpu" and choice.name != "deepspeed",
    }
    if setting.hosts > 1 and not is_alone:
        config["main_process_ip"] = setting.first_host or FIRST_HOST
        config["main_process_port"] = PORT
    if options.is_compiled:
        config["dynamo_config"] = dict(_DYNAMO)
    if kind == "FSDP":
        config["fsdp_config"] = _fsdp(setting)
    if kind == "DEEPSPEED":
        # Beside a file of DeepSpeed's Accelerate refuses to be told the precision.
        del config["mixed_precision"]
        files = {"deepspeed_config_file": DEEPSPEED_FILE, "zero3_init_flag": False}
        config["deepspeed_config"] = files
    if mesh := _mesh(choice):
        config["parallelism_config"] = mesh
    return config


def deepspeed_config(setting: Setting) -> dict[str, Any] | Refusal:
    """The strategy as DeepSpeed's settings, or why it has none; Accelerate fills "auto" in."""
    choice, options = setting.choice, setting.choice.options
    if choice.name not in ("deepspeed", "zero1"):
        stage = {"grad-op": 2}.get(options.shard, 3) if choice.name.startswith("fsdp") else 0
        near = f". deepspeed --stage {stage} splits the same" if stage else ""
        return Refusal(f"{choice.name} is not a strategy of DeepSpeed{near}")
    stage = options.stage if choice.name == "deepspeed" else 1
    zero: dict[str, Any] = {"stage": stage}
    if options.offload:
        where = {"device": options.offload, "pin_memory": setting.device != "cpu"}
        if options.offload == "nvme":
            where["nvme_path"] = "/local_nvme"
        zero["offload_optimizer"] = where
        if stage == 3:
            zero["offload_param"] = where
    settings: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": options.accumulate,
        # DeepSpeed's own default differs between versions.
        "gradient_clipping": setting.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if options.precision != "fp32":
        settings[options.precision] = {"enabled": True}
    return settings


def accelerate_text(setting: Setting) -> str | Refusal:
    """The YAML, with what it cannot say in comments above."""
    config = accelerate_config(setting)
    if isinstance(config, Refusal):
        return config
    lines = [f"# {described(setting.choice)}, written by nbdist"]
    lines += [f"# {note}" for note in notes(setting)]
    for key, value in sorted(config.items()):
        if isinstance(value, Mapping):
            lines += [
                f"{key}:",
                *(f"  {k}: {write_value(v, YAML)}" for k, v in sorted(value.items())),
            ]
        else:
            lines.append(f"{key}: {write_value(value, YAML)}")
    return "\n".join(lines) + "\n"


def deepspeed_text(setting: Setting) -> str | Refusal:
    """The strategy as the text of a DeepSpeed JSON; a Refusal where DeepSpeed has none."""
    config = deepspeed_config(setting)
    return config if isinstance(config, Refusal) else json.dumps(config, indent=2) + "\n"


def notes(setting: Setting) -> tuple[str, ...]:
    """Notes on what the configurations leave out or do otherwise than nbdist; a line each."""
    choice, options = setting.choice, setting.choice.options
    lines: list[str] = []
    if choice.name == "single" and choice.world_size > 1:
        lines.append("single: every rank would train the same alone, so one process is started")
    if choice.name == "deepspeed":
        lines.append(
            "the settings are in (DEEPSPEED_FILE), looked for where it is started; there is "
            "gradient_clipping, too: accelerator.clip_grad_norm_ clips nothing under DeepSpeed"
        )
    if choice.name == "zero1":
        lines.append("the JSON is DeepSpeed's stage 1: it splits the same states with its own code")
    if choice.name in ("fsdp", "fsdp1") and not setting.blocks and choice.world_size > 1:
        lines.append(
            "no model is prepared, so the class of its blocks is not known: "
            "fsdp_transformer_layer_cls_to_wrap names it; models of transformers name it themselves"
        )
    if options.accumulate > 1 and choice.name != "deepspeed":
        lines.append(
            f"start it with ACCELERATE_GRADIENT_ACCUMULATION_STEPS={options.accumulate} in the "
            "environment: the YAML has no key for it"
        )
    lines += _about_cpu(setting)
    if choice.degrees.tp > 1 and not _refusal(choice):
        loaded = "from_pretrained(..., tp_plan='auto', device_mesh=accelerator.torch_device_mesh)"
        newer = "in newer versions distributed_config=DistributedConfig(tp_plan='auto')"
        what = f"{loaded} of transformers ({newer}); Accelerate splits no other models"
        lines.append(_ONLY_SCRIPT + what)
    lines += _about_script(options, choice)
    return tuple(lines)


def _about_script(options: Options, choice: Strategy) -> list[str]:
    """Options of the strategy that only the script can have."""
    handlers = [
        (options.bucket_mb is not None, f"bucket_cap_mb={options.bucket_mb or 0:g}"),
        (options.has_static_graph, "static_graph=True"),
        (options.finds_unused, "find_unused_parameters=True"),
        (bool(options.hook), f"comm_hook=DDPCommunicationHookType.{_HOOKS.get(options.hook)}"),
    ]
    arguments = ", ".join(text for is_on, text in handlers if is_on)
    lines = []
    if arguments:
        lines.append(
            f"{_ONLY_SCRIPT}Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({arguments})])"
        )
    in_yaml = choice.degrees.dp_shard > 1 and options.checkpoint == "full"
    if options.checkpoint and not in_yaml:
        lines.append(
            f"{_ONLY_SCRIPT}--checkpoint {options.checkpoint} "
            "(model.gradient_checkpointing_enable() of transformers, or torch.utils.checkpoint)"
        )
    if options.is_fused:
        lines.append(f"{_ONLY_SCRIPT}AdamW(..., fused=True)")
    if options.sdpa:
        lines.append(f"{_ONLY_SCRIPT}with torch.nn.attention.sdpa_kernel(...): for --sdpa")
    return lines


_HOOKS = {"fp16": "FP16", "bf16": "BF16", "powersgd": "POWER_SGD"}
# torch.compile block by block, as nbdist does it.
_DYNAMO = {
    "dynamo_backend": "INDUCTOR",
    "dynamo_mode": "default",
    "dynamo_use_dynamic": False,
    "dynamo_use_fullgraph": False,
    "dynamo_use_regional_compilation": True,
}
SHARDING = {"full": "FULL_SHARD", "grad-op": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD"}
_NO_SEQUENCES = (
    "Accelerate splits sequences only with FSDP2 or DeepSpeed, and only where the script passes "
    "each batch to it"
)


def obstacle(setting: Setting) -> str:
    """Why Accelerate alone, in any script, does not train as this strategy does; "" if it does.

    Beyond the configurations' keys: what a script would have to do itself, and what has no effect
    on the setting's device.
    """
    choice = setting.choice
    is_alone = choice.world_size == 1
    is_cpu = setting.device == "cpu"
    reasons = (
        (choice.name == "single" and not is_alone, "Accelerate lets no rank train by itself"),
        (choice.degrees.tp > 1, "Accelerate splits the layers of models of transformers only"),
        (
            is_cpu and choice.name not in ("single", "ddp") and not is_alone,
            f"Accelerate has no {choice.name} on the CPU",
        ),
        (is_cpu and choice.options.precision == "fp16", "Accelerate ignores fp16 on the CPU"),
        (
            bool(_about_script(choice.options, choice)),
            f"no configuration of Accelerate has all of {options_phrase(choice)}",
        ),
    )
    return _refusal(choice) or next((reason for is_so, reason in reasons if is_so), "")


def _refusal(choice: Strategy) -> str:
    """Why Accelerate has no key for a strategy; "" where it has."""
    degrees, name = choice.degrees, choice.name
    reasons = (
        (name == "pp", "Accelerate does not support torch's pipelines"),
        (degrees.ep > 1, "Accelerate does not share experts between ranks"),
        (name in ("cp", "ulysses"), _NO_SEQUENCES),
        (
            name == "zero1",
            "Accelerate has ZeRO stage 1 only through DeepSpeed (deepspeed --stage 1)",
        ),
        (
            choice.options.has_sequence_parallel,
            "Accelerate's tensor parallelism has no --sequence-parallel",
        ),
        (
            degrees.tp > 1 and degrees.dp_replicate > 1,
            "Accelerate cannot combine replicas with tensor parallelism",
        ),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def run_line(choice: Strategy, script: str = SCRIPT) -> str:
    """Command line that starts a script on ranks under a strategy, with nbdist."""
    degrees = choice.degrees
    several = [f"--{word} {count}" for word, count in degrees.by_word.items()]
    meshed = several if len(several) > 1 else []
    if degrees.dp_replicate > 1 and degrees.dp_shard > 1:
        meshed.append(f"--replicas {degrees.dp_replicate}")
    # The context is what the name decides.
    typed = options_phrase(replace(choice, options=replace(choice.options, context="")))
    start = f"nbdist run {script} -n {choice.world_size} --strategy {choice.name}"
    return " ".join(filter(None, [start, *meshed, typed]))


def _fsdp(setting: Setting) -> dict[str, Any]:
    options = setting.choice.options
    is_1 = setting.choice.name == "fsdp1"
    config: dict[str, Any] = {
        "fsdp_activation_checkpointing": options.checkpoint == "full",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        # Needs transformers' from_pretrained; any model can do without.
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_offload_params": options.offload == "cpu",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 1 if is_1 else 2,
    }
    if setting.blocks:
        config["fsdp_transformer_layer_cls_to_wrap"] = ",".join(setting.blocks)
    if not is_1:
        return config | {"fsdp_reshard_after_forward": options.shard != "grad-op"}
    return config | {
        "fsdp_sharding_strategy": SHARDING[options.shard],
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": True,
    }


def _mesh(choice: Strategy) -> dict[str, int]:
    """Accelerate's degrees, where one axis alone does not say it."""
    degrees = choice.degrees
    if choice.name == "fsdp1" or (
        degrees.tp == 1 and min(degrees.dp_replicate, degrees.dp_shard) == 1
    ):
        return {}
    sizes = {axis: getattr(degrees, axis) for axis in AXES if axis not in ("pp", "cp")}
    assert math.prod(sizes.values()) == choice.world_size, choice
    return {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}


def _about_cpu(setting: Setting) -> list[str]:
    choice = setting.choice
    if setting.device != "cpu" or choice.world_size == 1 or choice.name in ("single", "deepspeed"):
        return []
    lines = []
    if choice.name == "ddp":
        lines.append(
            "ranks on the CPU: start it with ACCELERATE_USE_CPU=true in the environment (MULTI_GPU "
            "is Accelerate's word for several processes; its MULTI_CPU wants mpirun)"
        )
    elif not _refusal(choice):
        lines.append(
            f"Accelerate has no {choice.name} on the CPU: without GPUs it trains as ddp, or stops"
        )
    if choice.options.precision == "fp16":
        lines.append("Accelerate silently ignores fp16 on the CPU")
    return lines
