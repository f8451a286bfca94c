"""The batch equation: samples of a step = micro-batch x accumulation x data-parallel ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nbdist.config.report import CheckContext, Report, is_count
from nbdist.config.tree import SET, Fix
from nbdist.core.finding import BAD

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The three numbers of the equation as a file names them.

    Attributes:
        whole, micro, accumulation: Paths of the samples of a step, of a rank at once, of backwards.
    """

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
    ranks = around.ranks
    if ranks % split:
        fitting = [n for n in (ranks // split * split, -(-ranks // split) * split) if n]
        notes.bad(
            ("ranks",),
            f"{ranks} ranks ({around.source}) cannot form {axes_text}: {ranks} / {split} = "
            f"{ranks / split:g}",
            f"use {' or '.join(map(str, fitting))} ranks, or other degrees",
            value=f"{ranks}, {around.source}",
        )
        return None
    dp = ranks // split
    if around.dp is not None and around.dp != dp:
        notes.bad(
            ("ranks",),
            f"{axes_text or 'tp 1'} x dp {around.dp} are {split * around.dp} ranks, and there are "
            f"{ranks} ({around.source})",
            f"use dp {dp}, or {split * around.dp} ranks",
            value=f"{ranks}, {around.source}",
        )
        return None
    alike = f": {dp} see different data ({axes_text} the same)" if split > 1 else ""
    notes.good("ranks", f"{ranks}, {around.source}{alike}")
    return dp


def check_batch(notes: Report, names: Batch, dp: int | None) -> None:
    """Note where the equation does not come out whole, and which number to change to what.

    Args:
        notes: Of the document.
        names: Where it has the three numbers.
        dp: Data-parallel ranks; None where they are not known.
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
        quotient = whole // step
        micro, accumulation = _filled(micro, accumulation, quotient)
        notes.good(
            "batch", _equation(whole, micro, accumulation, dp), notes.document.line(*names.whole)
        )
        return
    _mismatch(notes, names, (whole, micro, accumulation), dp)


def _filled(micro: int | None, accumulation: int | None, quotient: int) -> tuple[int, int]:
    """What DeepSpeed takes for what is not there."""
    if micro is None:
        return quotient, accumulation or 1
    return micro, accumulation or quotient


def _equation(whole: int, micro: int, accumulation: int, dp: int) -> str:
    return f"{whole} = micro-batch {micro} x accumulation {accumulation} x {dp} data-parallel ranks"


def _mismatch(
    notes: Report, names: Batch, read: tuple[int, int | None, int | None], dp: int
) -> None:
    """The samples of a step stay as they are where a whole accumulation can be found."""
    whole, micro, accumulation = read
    step = (micro or 1) * (accumulation or 1) * dp
    parts = [
        f"micro-batch {micro}" if micro else "micro-batch",
        f"accumulation {accumulation}" if accumulation else "accumulation",
        f"{dp} data-parallel ranks",
    ]
    equation = " x ".join(parts)
    whole_name = names.whole[-1]
    if micro and accumulation:
        why = f"{whole} is not {equation} = {step}"
        if whole % (micro * dp) == 0:
            other = whole // (micro * dp)
            notes.bad(
                names.whole, why,
                f"change {names.accumulation[-1]} from {accumulation} to {other} (then the step "
                f"stays {whole} samples), or {whole_name} to {step}",
                Fix(SET, names.accumulation, other),
            )  # fmt: skip
            return
        notes.bad(names.whole, why, f"change {whole_name} to {step}", Fix(SET, names.whole, step))
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
    """What the numbers say by themselves: for how many ranks they are."""
    if whole is None:
        return
    step = (micro or 1) * (accumulation or 1)
    if whole % step:
        notes.say(
            BAD, names.whole,
            f"{whole} is not a multiple of {step}, the samples of one rank in a step: no number of "
            "ranks fits",
            f"change {names.whole[-1]} to {max(whole // step, 1) * step}",
            Fix(SET, names.whole, max(whole // step, 1) * step),
        )  # fmt: skip
        return
    most = whole // step
    if micro and accumulation:
        fits = f"{most} data-parallel rank{'s' if most > 1 else ''} alone"
    else:
        fits = f"as many data-parallel ranks as divide {most}"
    notes.good("batch", f"{names.whole[-1]} {whole} fits {fits}", notes.document.line(*names.whole))
