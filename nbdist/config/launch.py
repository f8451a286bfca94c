"""Writes files that start a script under a strategy: a torchrun line, a Slurm batch script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nbdist.config import distributed_config
from nbdist.config.emit import (
    ACCELERATE,
    DEEPSPEED,
    FIRST_HOST,
    PORT,
    SBATCH,
    TORCHRUN,
    TRANSFORMERS,
    Refusal,
    Setting,
    accelerate_config,
    accelerate_text,
    deepspeed_text,
    notes,
    run_line,
)
from nbdist.strategy.choice import described
from nbdist.strategy.hosts import ranks_of_host


@dataclass(frozen=True, slots=True)
class Configured:
    """A strategy as configurations.

    Attributes:
        texts: Form (of emit.FORMS) -> the file's text.
        refused: Form -> why the strategy has none.
        notes: What they do not say, or do otherwise; a line each.
    """

    setting: Setting
    texts: Mapping[str, str]
    refused: Mapping[str, str]
    notes: tuple[str, ...]


def configured(setting: Setting) -> Configured:
    """A strategy in every form that it has.

    Raises:
        OptionError: The ranks cannot be shared out over so many hosts; with the numbers that can.
    """
    ranks_of_host(setting.choice.world_size, setting.hosts)
    by_form = {form: write(setting) for form, write in _WRITERS.items()}
    return Configured(
        setting,
        {form: text for form, text in by_form.items() if isinstance(text, str)},
        {form: text.why for form, text in by_form.items() if isinstance(text, Refusal)},
        notes(setting) if isinstance(by_form[ACCELERATE], str) else (),
    )


# Keys whose variable is not named after them.
_NAMED = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}


def environment(setting: Setting) -> dict[str, str] | Refusal:
    """Variables of the environment for Accelerate, so that torchrun is enough to start it.

    `accelerate launch` sets the same of the YAML (a test compares them).
    """
    if setting.is_in_script:
        return {"ACCELERATE_USE_CPU": "true"} if setting.device == "cpu" else {}
    config = accelerate_config(setting)
    if isinstance(config, Refusal):
        return config
    if deepspeed := config.get("deepspeed_config"):
        return {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_CONFIG_DS_FIELDS": ",".join(deepspeed),
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(deepspeed["deepspeed_config_file"]),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": _word(deepspeed["zero3_init_flag"]),
        }
    options = setting.choice.options
    variables = {
        "ACCELERATE_USE_CPU": "true" if setting.device == "cpu" else "",
        "ACCELERATE_MIXED_PRECISION": "" if options.precision == "fp32" else options.precision,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
            str(options.accumulate) if options.accumulate > 1 else ""
        ),
    }
    for key, value in config.get("dynamo_config", {}).items():
        variables[f"ACCELERATE_{key.upper()}"] = str(value)
    if fsdp := config.get("fsdp_config"):
        variables["ACCELERATE_USE_FSDP"] = "true"
        variables |= {_NAMED.get(key, key.upper()): _word(value) for key, value in fsdp.items()}
    if mesh := config.get("parallelism_config"):
        variables["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        variables |= {key.upper(): _word(value) for key, value in mesh.items()}
    return {name: value for name, value in variables.items() if value}


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def torchrun_text(setting: Setting) -> str | Refusal:
    """One command, the same on every host; with what Accelerate reads from the environment."""
    setting = _of_one(setting)
    variables = environment(setting)
    if isinstance(variables, Refusal):
        return variables
    assignments = [f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
    count = f"--nproc-per-node {setting.ranks_of_host}"
    where = f"--standalone {count}"
    if setting.hosts > 1:
        endpoint = f"{setting.first_host or FIRST_HOST}:{PORT}"
        where = f"--nnodes {setting.hosts} {count} --rdzv-backend c10d --rdzv-endpoint {endpoint}"
        where += " --rdzv-id nbdist"
    return " ".join([*assignments, "torchrun", where, shlex.quote(setting.script)]) + "\n"


def _of_one(setting: Setting) -> Setting:
    """Without parallelism one process is started, whatever the number of ranks."""
    if setting.choice.name != "single" or setting.is_in_script:
        return setting
    return replace(setting, hosts=1, choice=replace(setting.choice, world_size=1))


def sbatch_text(setting: Setting) -> str | Refusal:
    """A batch script for Slurm: one task a host, which starts the ranks there."""
    setting = _of_one(setting)
    variables = environment(setting)
    if isinstance(variables, Refusal) and setting.hosts > 1:
        return Refusal(f"{variables.why} (on one host, or with --profile on a cluster of yours)")
    head = [
        "#!/bin/bash",
        f"# {described(setting.choice)}, written by nbdist",
        "# Account, partition and time are the cluster's own: add them.",
        "#SBATCH --job-name=train",
        f"#SBATCH --nodes={setting.hosts}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={setting.ranks_of_host}"] if setting.device != "cpu" else []),
        "#SBATCH --output=%x-%j.out",
        "",
        "set -euo pipefail",
    ]
    if isinstance(variables, Refusal):
        line = run_line(setting.choice, shlex.quote(setting.script))
        return "\n".join([*head, f'srun --kill-on-bad-exit=1 {line} -- "$@"', ""])
    body = [
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())),
        "",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 20000))  # another one for each job",
        "srun --kill-on-bad-exit=1 torchrun \\",
        f'  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node {setting.ranks_of_host} \\',
        '  --rdzv-backend c10d --rdzv-endpoint "$first:$port" --rdzv-id "$SLURM_JOB_ID" \\',
        f'  {shlex.quote(setting.script)} "$@"',
        "",
    ]
    return "\n".join([*head, *body])


_WRITERS = {
    ACCELERATE: accelerate_text,
    DEEPSPEED: deepspeed_text,
    TRANSFORMERS: distributed_config.text,
    TORCHRUN: torchrun_text,
    SBATCH: sbatch_text,
}
