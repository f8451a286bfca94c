"""Rules for a DeepSpeed JSON.

The rules are those of DeepSpeed's documentation (https://www.deepspeed.ai/docs/config-json/) and
of Accelerate, which reads such files too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbdist.config import keys
from nbdist.config.batch import Batch, check_batch, check_ranks
from nbdist.config.report import CheckContext, Report, check_keys, check_type, is_count
from nbdist.config.tree import ADD, REMOVE, SET, Document, Fix, join_path, walk
from nbdist.core.finding import BAD, WARN

_BATCH = Batch()
_ZERO = "zero_optimization"
_PRECISIONS = ("fp16", "bf16")
# Keys of a batch that Accelerate and transformers' Trainer fill in from the program.
_FILLED = (*_BATCH.whole, *_BATCH.micro, *_BATCH.accumulation)


def matches(document: Document) -> bool:
    """Whether a document is a DeepSpeed configuration: it has two of its keys, or a telling one."""
    names = {entry.key for entry in document.entries()} & set(keys.DEEPSPEED)
    return bool(names & {_ZERO, *_BATCH.whole, *_BATCH.micro}) or len(names) > 1


def check(notes: Report, around: CheckContext) -> None:
    """Everything that a DeepSpeed JSON can say wrong."""
    for rule in _RULES:
        rule(notes, around)


def precision_of(document: Document) -> tuple[str, ...]:
    """Which of fp16 and bf16 it turns on."""
    return tuple(name for name in _PRECISIONS if document.value(name, "enabled") is True)


def stage_of(document: Document) -> Any:
    """Return the configuration's ZeRO stage; 0 where it names none."""
    return document.value(_ZERO, "stage") or 0


def _keys(notes: Report, _around: CheckContext) -> None:
    why = "DeepSpeed has no such key, and silently ignores it"
    check_keys(notes, (), keys.DEEPSPEED, WARN, why)
    for path, key_table in keys.DEEPSPEED_PARTS.items():
        why = f"DeepSpeed refuses a key of {join_path(path)} that it does not know"
        check_keys(notes, path, key_table, BAD, why)
    for path, key_table in keys.DEEPSPEED_LOOSE.items():
        check_keys(notes, path, key_table, WARN, "DeepSpeed does not read this key there")
        for entry in notes.document.entries(*path, "params"):
            if entry.key in keys.DEEPSPEED_NUMBERS:
                check_type(notes, (*path, "params", entry.key), entry, keys.NUMBER)


def _autos(notes: Report, _around: CheckContext) -> None:
    paths = [path for path, entry in walk(notes.document.root) if entry.node.value == "auto"]
    if not paths:
        return
    names = ", ".join(map(join_path, paths))
    needs = [path for path in paths if path[0] in _FILLED]
    if needs:
        why = 'Accelerate and the Trainer put numbers for "auto"; DeepSpeed by itself stops at it'
        notes.warn(needs[0], why, "start it through them, or write the number")
    sentence = f"{len(paths)} values are filled in as training starts: {names}"
    notes.good("auto", sentence, notes.document.line(*paths[0]))


def _ranks_and_batch(notes: Report, around: CheckContext) -> None:
    dp = check_ranks(notes, around)
    document = notes.document
    check_batch(notes, _BATCH, dp)
    if not any(document.has(key) for key in (*_BATCH.whole, *_BATCH.micro)):
        notes.warn(
            _BATCH.micro,
            "DeepSpeed by itself wants train_batch_size or train_micro_batch_size_per_gpu; "
            "Accelerate takes the micro-batch from here as well, the Trainer from its arguments",
            'write the micro-batch of your loader, or "auto" for Accelerate and the Trainer',
        )
    size = document.value(*_BATCH.micro)
    for other in around.others:
        theirs = other.value("train", "batch_size")
        if is_count(theirs) and is_count(size) and theirs != size:
            line = other.line("train", "batch_size")
            why = f"{other.name} has a batch of {theirs} for a rank (line {line})"
            notes.bad(_BATCH.micro, why, f"change it to {theirs}", Fix(SET, _BATCH.micro, theirs))


def _precision(notes: Report, around: CheckContext) -> None:
    document = notes.document
    on = precision_of(document)
    # What other files say of the precision: (where, fp16, bf16 or no).
    said = (
        (f"{other.name}, line {other.line(*path)},", other.value(*path))
        for other in around.others
        for path in (("mixed_precision",), ("train", "mixed_precision"))
        if other.value(*path) in {*_PRECISIONS, "no"}
    )
    wanted = next(said, None)
    if len(on) == 2:
        keep = wanted[1] if wanted and wanted[1] in on else "bf16"
        drop = "fp16" if keep == "bf16" else "bf16"
        lines = " and ".join(str(document.line(name, "enabled")) for name in on)
        notes.bad(
            (drop, "enabled"),
            f"fp16 and bf16 are both on (lines {lines}), and DeepSpeed takes one",
            f"change {drop}.enabled to false for {keep}, or {keep}.enabled for {drop}",
            Fix(SET, (drop, "enabled"), False),
        )
        return
    if wanted is None or wanted[1] == "no" or not on or on == (wanted[1],):
        return
    where, precision = wanted
    notes.bad(
        (on[0], "enabled"),
        f"{on[0]} is on here, and {where} says mixed_precision {precision}",
        f"change {on[0]}.enabled to false and {precision}.enabled to true, or mixed_precision "
        f"there to {on[0]}",
        Fix(SET, (on[0], "enabled"), False),
        Fix(SET if document.has(precision) else ADD, (precision, "enabled"), True),
    )


def _stage(notes: Report, _around: CheckContext) -> None:
    document = notes.document
    if isinstance(document.value(_ZERO), dict) and not document.has(_ZERO, "stage"):
        why = "without it the stage is 0: nothing is split"
        notes.warn((_ZERO, "stage"), why, "write 1, 2 or 3")
    if document.value(_ZERO, "stage") not in (0, 1, 2, None):
        return
    stage_text = f"stage {stage_of(document)}"
    for entry in document.entries(_ZERO):
        if entry.key.startswith("stage3_"):
            notes.warn(
                (_ZERO, entry.key),
                f"it only counts in stage 3, and this is {stage_text}",
                "take it out, or change stage to 3",
                Fix(REMOVE, (_ZERO, entry.key)),
            )
    if document.value(_ZERO, "offload_param", "device") in ("cpu", "nvme"):
        notes.bad(
            (_ZERO, "offload_param"),
            f"parameters are only offloaded in stage 3, and this is {stage_text}",
            "change stage to 3, or take offload_param out",
            Fix(SET, (_ZERO, "stage"), 3),
        )


def _offload(notes: Report, _around: CheckContext) -> None:
    document = notes.document
    stage = stage_of(document)
    for part in ("offload_optimizer", "offload_param"):
        device = document.value(_ZERO, part, "device")
        if device == "nvme" and not document.value(_ZERO, part, "nvme_path"):
            what = 'write its path, or change device to "cpu"'
            notes.bad((_ZERO, part, "nvme_path"), "nvme needs a folder on such a disk", what)
        if device == "nvme" and part == "offload_optimizer" and stage != 3:
            notes.bad(
                (_ZERO, part, "device"),
                f"DeepSpeed only offloads to NVMe in stage 3, and this is stage {stage}",
                'change it to "cpu", or stage to 3',
                Fix(SET, (_ZERO, part, "device"), "cpu"),
            )
    if stage == 0 and document.value(_ZERO, "offload_optimizer", "device") in ("cpu", "nvme"):
        notes.bad(
            (_ZERO, "offload_optimizer"),
            "an optimizer is offloaded in stages 1, 2 and 3, and this is stage 0",
            "change stage to 2, or take offload_optimizer out",
            Fix(SET, (_ZERO, "stage"), 2),
        )
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if document.has(_ZERO, old):
            what = f'write "{new}": {{"device": "cpu"}}'
            notes.warn((_ZERO, old), f"it is the old way to say {new}", what)


def _optimizer(notes: Report, _around: CheckContext) -> None:
    document, norm = notes.document, ("optimizer", "params", "max_grad_norm")
    if document.has(*norm):
        why = "DeepSpeed clips by gradient_clipping, and not by the optimizer's parameters"
        notes.warn(norm, why, "take it out, and write gradient_clipping", Fix(REMOVE, norm))
    kind = document.value("scheduler", "type")
    if isinstance(kind, str) and kind not in keys.SCHEDULERS:
        why = f"DeepSpeed has {', '.join(keys.SCHEDULERS)}; others are not known here"
        notes.warn(("scheduler", "type"), why, "check that your version has it")
    total = document.value("scheduler", "params", "total_num_steps")
    warmup = document.value("scheduler", "params", "warmup_num_steps")
    if kind in ("WarmupDecayLR", "WarmupCosineLR"):
        if total is None:
            why = f"{kind} needs the number of all steps"
            what = "write how many steps of the optimizer there will be"
            notes.bad(("scheduler", "params", "total_num_steps"), why, what)
        elif is_count(total) and isinstance(warmup, int | float) and warmup >= total:
            why = f"the warm-up of {warmup} steps does not end within {total}"
            notes.bad(("scheduler", "params", "warmup_num_steps"), why, f"use less than {total}")
    has_batch = any(document.has(key) for key in _FILLED)
    if has_batch and not document.has("gradient_clipping"):
        why = "without it versions of DeepSpeed differ: 0.19 clips to 1.0, older ones not at all"
        notes.warn(("gradient_clipping",), why, "write 1.0, or 0.0 for none")


_RULES: tuple[Callable[[Report, CheckContext], None], ...] = (
    _keys, _autos, _ranks_and_batch, _precision, _stage, _offload, _optimizer,
)  # fmt: skip
