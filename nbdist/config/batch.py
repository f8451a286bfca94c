"""The batch equation: samples of a step = micro-batch x accumulation x data-parallel ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nbdist.config.report import CheckContext, Report, is_count
from nbdist.config.tree import SET, Fix

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Paths of keys: the samples of a step, those of a rank at once, and the backwards."""

    whole: Path = ("train_batch_size",)
    micro: Path = ("train_micro_batch_size_per_gpu",)
    accumulation: Path = ("gradient_accumulation_steps",)


def check_ranks(notes: Report, around: CheckContext) -> int | None:
    """How many ranks see different data; None where it is not known.

    Notes where tp x pp x cp (x dp) and the ranks do not go together.
    """
    axes = {"tp": around.tp or 1, "pp": around.pp or 1, "cp": around.cp or 1}
    split = math.prod(axes.values())
    axes_text = " x ".join(f"{name} {count}" for name, count in axes.items() if count > 1)
    if around.ranks is None:
        if around.dp is not None:
            return around.dp
        notes.good("ranks", "not known: what depends on them was not checked (--ranks N)")
        return None
    ranks, source = around.ranks, around.source
    dp = ranks // split
    if ranks % split:
        why = f"{ranks} ranks ({source}) cannot form {axes_text}: {ranks} / {split} = "
        fitting = " or ".join(str(n) for n in (dp * split, -(-ranks // split) * split) if n)
        what = f"use {fitting} ranks, or other degrees"
        notes.bad(("ranks",), f"{why}{ranks / split:g}", what, value=f"{ranks}, {source}")
        return None
    if around.dp is not None and around.dp != dp:
        asked = split * around.dp
        why = f"{axes_text or 'tp 1'} x dp {around.dp} are {asked} ranks, and there are {ranks}"
        what = f"use dp {dp}, or {asked} ranks"
        notes.bad(("ranks",), f"{why} ({source})", what, value=f"{ranks}, {source}")
        return None
    alike = f": {dp} see different data ({axes_text} the same)" if split > 1 else ""
    notes.good("ranks", f"{ranks}, {source}{alike}")
    return dp


def check_batch(notes: Report, names: Batch, dp: int | None) -> None:
    """Note where the equation does not come out whole, and which number to change to what.

    `dp` counts data-parallel ranks; None where they are not known.
    """
    read = [notes.document.value(*path) for path in (names.whole, names.micro, names.accumulation)]
    if any(value is not None and not is_count(value) for value in read):
        return  # told as a wrong type, or filled in by somebody
    whole, micro, accumulation = read
    if whole is None and micro is None:
        return
    if dp is None:
        _without_ranks(notes, names, whole, micro, accumulation)
        return
    if whole is None:
        product = micro * (accumulation or 1) * dp
        notes.good("batch", _equation(product, micro, accumulation or 1, dp))
        return
    step = (micro or 1) * (accumulation or 1) * dp
    is_open = micro is None or accumulation is None
    if whole == step or (is_open and whole % step == 0):
        # What DeepSpeed takes for what is not there.
        if micro is None:
            micro, accumulation = whole // step, accumulation or 1
        equation = _equation(whole, micro, accumulation or whole // step, dp)
        notes.good("batch", equation, notes.document.line(*names.whole))
        return
    _mismatch(notes, names, (whole, micro, accumulation), dp)


def _equation(whole: int, micro: int, accumulation: int, dp: int) -> str:
    return f"{whole} = micro-batch {micro} x accumulation {accumulation} x {dp} data-parallel ranks"


def _mismatch(
    notes: Report, names: Batch, read: tuple[int, int | None, int | None], dp: int
) -> None:
    """The samples of a step stay as they are where a whole accumulation can be found."""
    whole, micro, accumulation = read
    step = (micro or 1) * (accumulation or 1) * dp
    factors = {"micro-batch": micro, "accumulation": accumulation}
    parts = [f"{word} {count}" if count else word for word, count in factors.items()]
    equation = " x ".join([*parts, f"{dp} data-parallel ranks"])
    whole_name = names.whole[-1]
    if micro and accumulation:
        why = f"{whole} is not {equation} = {step}"
        what, fix = f"change {whole_name} to {step}", Fix(SET, names.whole, step)
        if whole % (micro * dp) == 0:
            other = whole // (micro * dp)
            what = (
                f"change {names.accumulation[-1]} from {accumulation} to {other} (then the step "
                f"stays {whole} samples), or {whole_name} to {step}"
            )
            fix = Fix(SET, names.accumulation, other)
        notes.bad(names.whole, why, what, fix)
        return
    why = f"{whole} = {equation} has no whole solution: {whole} / {step} = {whole / step:.6g}"
    near = [n for n in (whole // step * step, -(-whole // step) * step) if n]
    best = min(near, key=lambda n: (abs(n - whole), n))
    open_word = "accumulation" if micro else "micro-batch"
    counts = " or ".join(f"{n} ({open_word} {n // step})" for n in dict.fromkeys(near))
    notes.bad(names.whole, why, f"change {whole_name} to {counts}", Fix(SET, names.whole, best))


def _without_ranks(
    notes: Report, names: Batch, whole: int | None, micro: int | None, accumulation: int | None
) -> None:
    """Check the numbers without a count of ranks, and say how many ranks fit them."""
    if whole is None:
        return
    step = (micro or 1) * (accumulation or 1)
    if whole % step:
        near = max(whole // step, 1) * step
        notes.bad(
            names.whole,
            f"{whole} is not a multiple of {step}, the samples of one rank in a step: no number of "
            "ranks fits",
            f"change {names.whole[-1]} to {near}",
            Fix(SET, names.whole, near),
        )
        return
    most = whole // step
    if micro and accumulation:
        fits = f"{most} data-parallel rank{'s' if most > 1 else ''} alone"
    else:
        fits = f"as many data-parallel ranks as divide {most}"
    notes.good("batch", f"{names.whole[-1]} {whole} fits {fits}", notes.document.line(*names.whole))
