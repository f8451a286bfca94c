"""What a training configuration with `train:` in it, as InstructLab's, says of batch and precision.

Its other keys differ between versions and are not checked: that is said in the output.
"""

from __future__ import annotations

from typing import Any

from nbdist.config import deepspeed
from nbdist.config.batch import Batch, check_batch, check_ranks
from nbdist.config.keys import COUNT
from nbdist.config.report import CheckContext, Report, check_type, is_count
from nbdist.config.tree import SET, Document, Fix

_BATCH = Batch(
    ("train", "effective_batch_size"),
    ("train", "batch_size"),
    ("train", "gradient_accumulation_steps"),
)
_TELLING = {"effective_batch_size", "num_gpus", "deepspeed", "mixed_precision", "batch_size"}


def matches(document: Document) -> bool:
    """Whether it has train: with keys of a batch or of DeepSpeed in it."""
    return bool(_TELLING & {entry.key for entry in document.entries("train")})


def check(notes: Report, around: CheckContext) -> None:
    """The batch against the ranks, and what it says twice: here and in DeepSpeed's file."""
    notes.good(
        "keys", "of train: those of batch, ranks, precision and stage were checked, no others"
    )
    for path in (*_paths(), ("train", "num_gpus")):
        entry = notes.document.entry(*path)
        if entry is not None:
            check_type(notes, path, entry, COUNT)
    gpus = notes.document.value("train", "num_gpus")
    if is_count(gpus) and around.ranks not in (None, gpus):
        fixes = (
            (Fix(SET, ("train", "num_gpus"), around.ranks),) if _is_one_host(gpus, around) else ()
        )
        why = f"there are {around.ranks} ranks ({around.source})"
        notes.warn(("train", "num_gpus"), why, "it counts those of one host", *fixes)
    check_batch(notes, _BATCH, check_ranks(notes, around))
    for other in around.others:
        if deepspeed.matches(other):
            _beside(notes, other)


def _paths() -> tuple[tuple[str, ...], ...]:
    return _BATCH.whole, _BATCH.micro, _BATCH.accumulation


def _is_one_host(gpus: int, around: CheckContext) -> bool:
    """Whether the ranks are no multiple of those of a host, so that there cannot be several."""
    return around.ranks is not None and around.ranks % gpus != 0


def _beside(notes: Report, other: Document) -> None:
    """What DeepSpeed's file says otherwise."""
    on = deepspeed.precision_of(other)
    precision = notes.document.value("train", "mixed_precision")
    if len(on) == 1 and precision in ("fp16", "bf16") and precision != on[0]:
        line = other.line(on[0], "enabled")
        path: tuple[str, ...] = ("train", "mixed_precision")
        why = f"{other.name} turns {on[0]} on (line {line})"
        what = f"change it to {on[0]}, or {on[0]}.enabled there to false and {precision}'s to true"
        notes.bad(path, why, what, Fix(SET, path, on[0]))
    said: tuple[tuple[tuple[str, ...], Any, int], ...] = (
        (("train", "deepspeed", "zero_stage"), deepspeed.stage_of(other),
         other.line("zero_optimization", "stage")),
        (_BATCH.accumulation, other.value("gradient_accumulation_steps"),
         other.line("gradient_accumulation_steps")),
        (_BATCH.whole, other.value("train_batch_size"), other.line("train_batch_size")),
    )  # fmt: skip
    for path, theirs, line in said:
        current = notes.document.value(*path)
        if current is not None and is_count(theirs) and current != theirs:
            why = f"{other.name} says {theirs} (line {line})"
            notes.bad(
                path, why, f"change it to {theirs}, or that to {current}", Fix(SET, path, theirs)
            )
