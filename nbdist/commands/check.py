"""The verb that checks models on all ranks, and says what lints tell."""

from __future__ import annotations

import argparse
from argparse import Namespace

from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.lints import rules
from nbdist.lints import view as checkup_view
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import Option, Verb


def dist_check(values: Namespace) -> View:
    """Check once; or set what is looked at from now on."""
    session = NOTEBOOK.session
    given = {
        "--every": values.every is not None,
        "--trace-nan": values.is_tracing,
        "--silence": values.silenced is not None,
        "--tell": values.told is not None,
        "--lints": values.wants_lints,
    }
    chosen = [flag for flag, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise OptionError(f"%dist_check: choose one of {', '.join(chosen)}.")
    if values.every is not None:
        session.check_every(values.every)
        return View(_every(values.every))
    if values.is_tracing:
        session.trace_nan()
        return View("the next cell tells the first module whose output is not finite")
    if chosen:
        return _lints(values)
    return checkup_view.checkup(session.check())


def _every(every: int) -> str:
    if not every:
        return "parameters and gradients are no longer looked at while training"
    which = "every step" if every == 1 else f"every {every} steps"
    return (
        f"{which} of an optimizer gradients are looked at for NaN and inf before it steps, and "
        "the ranks' parameters of these moments are compared at the end of the cell; --every 0 "
        "ends it"
    )


def _lints(values: Namespace) -> View:
    session = NOTEBOOK.session
    if values.wants_lints:
        return checkup_view.lints(session.lints.states())
    text = values.silenced if values.silenced is not None else values.told
    names = [name.strip() for name in text.split(",") if name.strip()]
    session.silence(*names, is_on=values.silenced is not None)
    done = "not told any more" if values.silenced is not None else "told again"
    return View(f"{done}: {', '.join(rules.checked(names))}")


def step_count(text: str) -> int:
    """A number of steps; 0 for never."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps (1 or more; 0: never)")
    return int(text)


VERBS = (
    Verb(
        "dist_check",
        "Check that models are equal on all ranks and finite; list and silence lints.",
        "%dist_check --every 10",
        dist_check,
        (
            Option(
                ("--every",),
                "check before every Nth optimizer step from now on (0 stops)",
                step_count,
                metavar="N",
            ),
            Option(
                ("--trace-nan",),
                "report the first module of the next cell whose output is not finite",
                None,
                name="is_tracing",
            ),
            Option(
                ("--lints",), "list all lints, and when each is reported", None, name="wants_lints"
            ),
            Option(
                ("--silence",), "silence these lints, or all", metavar="NAME,NAME",
                name="silenced",
            ),
            Option(
                ("--tell",), "report these lints again, or all", metavar="NAME,NAME",
                name="told",
            ),
        ),
    ),
)  # fmt: skip
