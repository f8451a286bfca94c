"""The verb that looks at the machine, the settings, and what dead runs have left."""

from __future__ import annotations

from argparse import Namespace

from nbdist.cluster.kernel import orphans
from nbdist.commands import cluster
from nbdist.core.view import View, verdicts
from nbdist.diagnostics import checks
from nbdist.diagnostics import kernel as diagnostics_kernel
from nbdist.diagnostics import view as doctor_view
from nbdist.diagnostics.facts import Facts
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import ANYWHERE, Option, Verb


def dist_doctor(values: Namespace) -> View:
    """Look whether ranks can work here; with --clean, remove what dead runs have left first."""
    return examined(is_cleaning=values.is_cleaning)


def examined(*, is_cleaning: bool) -> View:
    """The findings, and below them the ranks that run in this notebook."""
    done: tuple[str, ...] = ()
    if is_cleaning:
        done = orphans.clean() or ("nothing to clean: dead runs left nothing behind",)
    is_running = NOTEBOOK.is_running
    collected = _of_running_ranks() if is_running else diagnostics_kernel.collect(None)
    view = verdicts(checks.examine(collected), before=done)
    return doctor_view.below(view, cluster.status_view()) if is_running else view


def _of_running_ranks() -> Facts:
    options = NOTEBOOK.options
    return diagnostics_kernel.collect(
        NOTEBOOK.session.topology.world_size, options.debug, options.gpus
    )


VERBS = (
    Verb(
        "dist_doctor",
        "Say whether ranks can work here: versions, devices, settings, leftovers, and what to do.",
        "%dist_doctor --clean",
        dist_doctor,
        (
            Option(
                ("--clean",),
                "end and remove what your dead runs left behind; live runs are not touched",
                None,
                name="is_cleaning",
            ),
        ),
        place=ANYWHERE,
    ),
)
