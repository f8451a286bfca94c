"""The verb that checks models on all ranks, and lists and silences lints."""

from __future__ import annotations

from argparse import Namespace

from nbdist.core.option import Option, whole_number
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.lints import rules
from nbdist.lints import view as checkup_view
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import Verb


def dist_check(values: Namespace) -> View:
    """Check once; or set what is checked from now on."""
    session = NOTEBOOK.session
    flags = {
        "--every": values.every is not None,
        "--trace-nan": values.is_tracing,
        "--silence": values.silenced is not None,
        "--tell": values.restored is not None,
        "--lints": values.wants_lints,
    }
    chosen = [flag for flag, is_set in flags.items() if is_set]
    if len(chosen) > 1:
        raise OptionError(f"%dist_check: choose one of {', '.join(chosen)}.")
    if values.every is not None:
        session.check_every(values.every)
        return View(_every(values.every))
    if values.is_tracing:
        session.trace_nan()
        return View("the next cell reports the first module whose output is not finite")
    if chosen:
        return _lints(values)
    return checkup_view.checkup(session.check())


def _every(every: int) -> str:
    if not every:
        return "parameters and gradients are no longer checked during training"
    which = "every step" if every == 1 else f"every {every} steps"
    return (
        f"before {which} of an optimizer, gradients are checked for NaN and inf; when the cell "
        "ends, the ranks' parameters at these steps are compared; --every 0 ends it"
    )


def _lints(values: Namespace) -> View:
    session = NOTEBOOK.session
    if values.wants_lints:
        return checkup_view.lints(session.lints.states())
    text = values.silenced if values.silenced is not None else values.restored
    names = [name.strip() for name in text.split(",") if name.strip()]
    session.silence(*names, is_on=values.silenced is not None)
    done = "silenced" if values.silenced is not None else "no longer silenced"
    return View(f"{done}: {', '.join(rules.resolve_names(names))}")


VERBS = (
    Verb(
        "dist_check",
        "Check that models are equal on all ranks and finite; list and silence lints.",
        "%dist_check --every 10",
        dist_check,
        (
            Option(
                ("--every",),
                "check before every Nth step of an optimizer from now on (0: never)",
                whole_number("a valid number of steps (1 or more; 0: never)", 0),
                metavar="N",
            ),
            Option(
                ("--trace-nan",),
                "report the first module of the next cell whose output is not finite",
                None,
                name="is_tracing",
            ),
            Option(("--lints",), "list lints and when they are reported", None, name="wants_lints"),
            Option(
                ("--silence",), "silence lints: their names, or all", metavar="NAME,NAME",
                name="silenced", choices=("all", *rules.LINTS),
            ),
            Option(
                ("--tell",), "report lints again: their names, or all", metavar="NAME,NAME",
                name="restored", choices=("all", *rules.LINTS),
            ),
        ),
    ),
)  # fmt: skip
