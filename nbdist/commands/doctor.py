"""The verb that looks at the machine, the settings, and what dead runs have left."""

from __future__ import annotations

from nbdist.cluster.kernel import orphans
from nbdist.commands import cluster
from nbdist.core.view import View, verdicts
from nbdist.diagnostics import checks
from nbdist.diagnostics import kernel as diagnostics_kernel
from nbdist.diagnostics import view as doctor_view
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import ANYWHERE, Option, Verb


def examine_machine(*, is_cleaning: bool) -> View:
    """The findings, and below them the ranks that run in this notebook."""
    done: tuple[str, ...] = ()
    if is_cleaning:
        done = orphans.clean() or ("nothing to clean: dead runs left nothing behind",)
    if not NOTEBOOK.is_running:
        return verdicts(checks.examine(diagnostics_kernel.collect(None)), before=done)
    options, places = NOTEBOOK.options, NOTEBOOK.session.topology.ranks
    hosts = [place.host for place in places]
    facts = diagnostics_kernel.collect(hosts, options.debug, options.gpus)
    view = verdicts(checks.examine(facts), before=done)
    return doctor_view.below(view, cluster.status_view())


VERBS = (
    Verb(
        "dist_doctor",
        "Say whether ranks can work here: versions, devices, settings, leftovers, and what to do.",
        "%dist_doctor --clean",
        lambda values: examine_machine(is_cleaning=values.is_cleaning),
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
