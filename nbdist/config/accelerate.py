"""Rules for a configuration of Accelerate, whatever its distributed_type.

config.fsdp has the rules of FSDP, meshes and Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable

from nbdist.config import deepspeed, fsdp, keys
from nbdist.config.batch import check_ranks
from nbdist.config.report import CheckContext, Report, check_keys, check_type, is_count, is_true
from nbdist.config.tree import ADD, REMOVE, RENAME, SET, Document, Fix
from nbdist.core.finding import BAD, WARN

# distributed_type -> the mapping that belongs to it.
_PART_OF = {
    "FSDP": "fsdp_config",
    "DEEPSPEED": "deepspeed_config",
    "MEGATRON_LM": "megatron_lm_config",
}
_DEEPSPEED = "deepspeed_config"


def matches(document: Document) -> bool:
    """Whether a document is a configuration of Accelerate."""
    telling = {"distributed_type", "compute_environment", *_PART_OF.values(), "parallelism_config"}
    names = {entry.key for entry in document.entries()}
    return bool(names & telling) or {"num_processes", "mixed_precision"} <= names


def check(notes: Report, around: CheckContext) -> None:
    """Everything that a configuration of Accelerate can say wrong."""
    if notes.document.value("compute_environment") == "AMAZON_SAGEMAKER":
        sentence = "AMAZON_SAGEMAKER: only the keys of this machine are checked"
        notes.good("compute_environment", sentence)
        return
    for rule in _RULES:
        rule(notes, around)


def _top(notes: Report, _around: CheckContext) -> None:
    table = {**keys.ACCELERATE, **keys.ACCELERATE_OLD}
    check_keys(notes, (), table, BAD, "Accelerate refuses a key that it does not know")
    document = notes.document
    if not document.has("distributed_type"):
        processes = document.value("num_processes")
        alone = "MULTI_GPU" if is_count(processes) and processes > 1 else "NO"
        meant = next((kind for kind, part in _PART_OF.items() if document.has(part)), alone)
        notes.bad(
            ("distributed_type",),
            "Accelerate refuses a configuration without it",
            f"write {meant}",
            Fix(ADD, ("distributed_type",), meant),
        )
    if document.value("fp16") is True and document.value("mixed_precision") == "bf16":
        why = "fp16: true is the old mixed_precision: fp16, and mixed_precision says bf16"
        what = "take fp16 out, or write mixed_precision: fp16"
        notes.bad(("fp16",), why, what, Fix(REMOVE, ("fp16",)))
    backend = document.entry("dynamo_backend")
    if backend is not None:
        choices = "=NO|EAGER|INDUCTOR|AOT_EAGER|CUDAGRAPHS|no"
        check_type(notes, ("dynamo_backend",), backend, choices)


def _parts(notes: Report, _around: CheckContext) -> None:
    document = notes.document
    for part, key_table in keys.ACCELERATE_PARTS.items():
        if isinstance(document.value(part), dict):
            _part(notes, part, key_table)
    kind = document.value("distributed_type")
    for other, part in _PART_OF.items():
        if kind in keys.DISTRIBUTED_TYPES and kind != other and document.entries(part):
            notes.warn(
                (part,),
                f"it belongs to distributed_type {other}, and this is {kind}: it is ignored",
                f"take it out, or change distributed_type to {other}",
                Fix(REMOVE, (part,)),
            )


def _part(notes: Report, part: str, key_table: keys.Keys) -> None:
    """The keys of one mapping; short names as well where Accelerate takes them."""
    document = notes.document
    short = keys.PREFIXES.get(part, "")
    strict = keys.STRICT_PREFIXES.get(part, "")
    table = dict(key_table)
    for entry in document.entries(part):
        if short and short + entry.key in key_table:
            table[entry.key] = key_table[short + entry.key]
        if strict and strict + entry.key in key_table:
            table[entry.key] = keys.ANY
            notes.bad(
                (part, entry.key),
                "Accelerate silently ignores it: its keys begin with " + strict,
                f"change the key to {strict}{entry.key}",
                Fix(RENAME, (part, entry.key), strict + entry.key),
            )
    check_keys(notes, (part,), table, WARN, "Accelerate has no such key, and silently ignores it")


def _processes(notes: Report, around: CheckContext) -> None:
    document = notes.document
    processes, machines = document.value("num_processes"), document.value("num_machines") or 1
    if not document.has("num_processes") and document.value("distributed_type") not in ("NO", None):
        fixes = () if around.ranks is None else (Fix(ADD, ("num_processes",), around.ranks),)
        why = "without it, type it: accelerate launch --num_processes N"
        what = f"write {around.ranks or 'the number of ranks'}"
        notes.warn(("num_processes",), why, what, *fixes)
    if is_count(processes) and around.ranks not in (None, processes):
        fixes = (Fix(SET, ("num_processes",), around.ranks),) if around.is_typed else ()
        why = f"there are {around.ranks} ranks ({around.source})"
        what = f"change it to {around.ranks} if it is for these"
        notes.say(BAD if fixes else WARN, ("num_processes",), why, what, *fixes)
    if not (is_count(processes) and is_count(machines)):
        return
    if processes % machines:
        near = processes // machines * machines or machines
        notes.bad(
            ("num_processes",),
            f"it counts all hosts, and {processes} is not a multiple of num_machines {machines}",
            f"change it to {near} or {near + machines}, or num_machines to a divisor",
            Fix(SET, ("num_processes",), near),
        )
    _machines(notes, machines)


def _machines(notes: Report, machines: int) -> None:
    document = notes.document
    has_launcher = document.value(_DEEPSPEED, "deepspeed_multinode_launcher") not in (
        None, "standard"
    )  # fmt: skip
    rank = document.value("machine_rank") or 0
    if isinstance(rank, int) and rank >= machines:
        notes.bad(
            ("machine_rank",),
            f"hosts are counted from 0, and num_machines is {machines}",
            f"use 0 to {machines - 1}, another one on each host",
            Fix(SET, ("machine_rank",), 0),
        )
    for key in ("main_process_ip", "main_process_port"):
        if machines > 1 and document.value(key) is None and not has_launcher:
            what = "write the address of the first host" if key.endswith("ip") else "write 29500"
            fixes = () if key.endswith("ip") else (Fix(SET, (key,), 29500),)
            why = f"{machines} hosts must find each other"
            notes.warn((key,), why, f"{what}, or type --{key}", *fixes)


def _devices(notes: Report, _around: CheckContext) -> None:
    document = notes.document
    ids, processes = document.value("gpu_ids"), document.value("num_processes")
    kind, machines = document.value("distributed_type"), document.value("num_machines") or 1
    if ids not in (None, "all") and is_count(processes) and machines == 1:
        count = len([device_id for device_id in str(ids).split(",") if device_id.strip()])
        if count < processes:
            notes.bad(
                ("gpu_ids",),
                f"they are {count} GPUs for num_processes {processes}",
                f"name {processes} GPUs, or change num_processes to {count}",
                Fix(SET, ("num_processes",), max(count, 1)),
            )
    if is_true(document.value("use_cpu")) and kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        why = f"{kind} of Accelerate wants GPUs: on the CPU it trains as ddp, or stops"
        notes.warn(("use_cpu",), why, "change it to false")
    if not is_count(processes) or processes == 1:
        return
    fix = Fix(SET, ("distributed_type",), "MULTI_GPU")
    if kind == "NO":
        why = f"NO is one process, and num_processes is {processes}"
        what = "change it to MULTI_GPU, or num_processes to 1"
        notes.bad(("distributed_type",), why, what, fix)
    elif kind == "MULTI_CPU" and not document.value("mpirun_config", "mpirun_hostfile"):
        why = f"Accelerate starts {processes} processes on CPUs through mpirun; this starts one"
        what = (
            "write MULTI_GPU and start with ACCELERATE_USE_CPU=true in the environment, or add "
            "mpirun_config"
        )
        notes.bad(("distributed_type",), why, what, fix)


def _deepspeed(notes: Report, around: CheckContext) -> None:
    document = notes.document
    if document.value("distributed_type") != "DEEPSPEED":
        return
    if document.has(_DEEPSPEED, "deepspeed_config_file"):
        paths: list[tuple[str, ...]] = [
            (_DEEPSPEED, key) for key in keys.IN_DEEPSPEED_FILE if document.has(_DEEPSPEED, key)
        ]
        if document.value("mixed_precision") is not None:
            paths.append(("mixed_precision",))
        for path in paths:
            why = "Accelerate refuses it beside deepspeed_config_file, which says it"
            notes.bad(path, why, "take it out here", Fix(REMOVE, path))
        named = (_DEEPSPEED, "deepspeed_config_file")
        if not any(deepspeed.matches(other) for other in around.others):
            why = "there is no such file next to this one or here, so it was not checked"
            notes.warn(named, why, f"make sure that {document.value(*named)} is where you start")
        return
    stage = document.value(_DEEPSPEED, "zero_stage")
    if stage is None:
        notes.good("zero_stage", "2, Accelerate's where none is named", document.line(_DEEPSPEED))
    _inline(notes, 2 if stage is None else stage)


def _inline(notes: Report, stage: object) -> None:
    """DeepSpeed's settings inside of the YAML."""
    document = notes.document
    if document.value(_DEEPSPEED, "offload_param_device") in ("cpu", "nvme") and stage != 3:
        notes.bad(
            (_DEEPSPEED, "offload_param_device"),
            f"parameters are only offloaded in stage 3, and zero_stage is {stage}",
            "change zero_stage to 3, or this to none",
            Fix(SET, (_DEEPSPEED, "zero_stage"), 3),
        )
    for key in ("zero3_init_flag", "zero3_save_16bit_model"):
        if is_true(document.value(_DEEPSPEED, key)) and stage != 3:
            notes.warn(
                (_DEEPSPEED, key),
                f"it only counts in stage 3, and zero_stage is {stage}",
                "change it to false, or zero_stage to 3",
                Fix(SET, (_DEEPSPEED, key), False),
            )
    for part in ("optimizer", "param"):
        device, path = f"offload_{part}_device", f"offload_{part}_nvme_path"
        if document.value(_DEEPSPEED, device) == "nvme" and not document.value(_DEEPSPEED, path):
            notes.bad((_DEEPSPEED, path), "nvme needs a folder on such a disk", "write its path")
    if document.value(_DEEPSPEED, "gradient_clipping") == 0:
        why = "Accelerate ignores 0, and DeepSpeed 0.19 then clips to 1.0"
        notes.warn((_DEEPSPEED, "gradient_clipping"), why, "write it into a deepspeed_config_file")


def _ranks(notes: Report, around: CheckContext) -> None:
    meshes = ("parallelism_config", "megatron_lm_config")
    if not any(notes.document.entries(part) for part in meshes):
        check_ranks(notes, around)


_RULES: tuple[Callable[[Report, CheckContext], None], ...] = (
    _top, _parts, _processes, _devices, _ranks, _deepspeed, fsdp.check_fsdp, fsdp.check_mesh,
    fsdp.check_megatron,
)  # fmt: skip
