"""Rules for batch and precision in a training configuration with `train:`, as InstructLab's.

Its other keys differ between versions and are not checked: that is said in the output.
"""

from __future__ import annotations

from collections.abc import Mapping

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
# A key here -> the same in DeepSpeed's file.
_SAID_TWICE: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("train", "deepspeed", "zero_stage"): ("zero_optimization", "stage"),
    _BATCH.accumulation: ("gradient_accumulation_steps",),
    _BATCH.whole: ("train_batch_size",),
}
_TELLING = {"effective_batch_size", "num_gpus", "deepspeed", "mixed_precision", "batch_size"}


def matches(document: Document) -> bool:
    """Whether it has train: with keys of a batch or of DeepSpeed in it."""
    return bool(_TELLING & {entry.key for entry in document.entries("train")})


def check(notes: Report, around: CheckContext) -> None:
    """The batch against the ranks, and what it says twice: here and in DeepSpeed's file."""
    sentence = "of train: those of batch, ranks, precision and stage were checked, no others"
    notes.good("keys", sentence)
    for path in (_BATCH.whole, _BATCH.micro, _BATCH.accumulation, ("train", "num_gpus")):
        entry = notes.document.entry(*path)
        if entry is not None:
            check_type(notes, path, entry, COUNT)
    gpus = notes.document.value("train", "num_gpus")
    if is_count(gpus) and around.ranks not in (None, gpus):
        # Ranks that are no multiple of those of a host cannot be on several.
        is_one_host = around.ranks % gpus != 0
        fixes = (Fix(SET, ("train", "num_gpus"), around.ranks),) if is_one_host else ()
        why = f"there are {around.ranks} ranks ({around.source})"
        notes.warn(("train", "num_gpus"), why, "it counts those of one host", *fixes)
    check_batch(notes, _BATCH, check_ranks(notes, around))
    for other in around.others:
        if deepspeed.matches(other):
            _beside(notes, other)


def _beside(notes: Report, other: Document) -> None:
    """Report the values that DeepSpeed's file sets otherwise."""
    on = deepspeed.precision_of(other)
    precision = notes.document.value("train", "mixed_precision")
    if len(on) == 1 and precision in ("fp16", "bf16") and precision != on[0]:
        line = other.line(on[0], "enabled")
        why = f"{other.name} turns {on[0]} on (line {line})"
        what = f"change it to {on[0]}, or {on[0]}.enabled there to false and {precision}'s to true"
        place = ("train", "mixed_precision")
        notes.bad(place, why, what, Fix(SET, place, on[0]))
    for path, same in _SAID_TWICE.items():
        current, theirs = notes.document.value(*path), other.value(*same)
        if current is not None and is_count(theirs) and current != theirs:
            why = f"{other.name} says {theirs} (line {other.line(*same)})"
            what = f"change it to {theirs}, or that to {current}"
            notes.bad(path, why, what, Fix(SET, path, theirs))
