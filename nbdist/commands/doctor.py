"""The verb that looks at the machine, the settings, and what dead runs have left."""

from __future__ import annotations

from argparse import Namespace

from nbdist.client import facts, leftovers
from nbdist.commands import running
from nbdist.core import doctor as checks
from nbdist.core.doctor_facts import Facts
from nbdist.notebook import NOTEBOOK
from nbdist.verbs import ANYWHERE, Option, Verb
from nbdist.view import doctor as doctor_view
from nbdist.view.finding import verdicts
from nbdist.view.mime import View


def dist_doctor(values: Namespace) -> View:
    """Look whether ranks can work here; with --clean, remove what dead runs have left first."""
    return examined(is_cleaning=values.is_cleaning)


def examined(*, is_cleaning: bool) -> View:
    """The findings, and below them the ranks that run in this notebook."""
    done: tuple[str, ...] = ()
    if is_cleaning:
        done = leftovers.clean() or ("nothing to clean: dead runs have left nothing",)
    is_running = NOTEBOOK.is_running
    collected = _of_running_ranks() if is_running else facts.collect(None)
    view = verdicts(checks.examine(collected), before=done)
    return doctor_view.below(view, running.status_view()) if is_running else view


def _of_running_ranks() -> Facts:
    options = NOTEBOOK.options
    return facts.collect(NOTEBOOK.session.topology.world_size, options.debug, options.gpus)


VERBS = (
    Verb(
        "dist_doctor",
        "Say whether ranks can work here: versions, devices, settings, leftovers, and what to do.",
        "%dist_doctor --clean",
        dist_doctor,
        (
            Option(
                ("--clean",),
                "end and remove what dead runs of yours have left; living ones are left alone",
                None,
                name="is_cleaning",
            ),
        ),
        place=ANYWHERE,
    ),
)
