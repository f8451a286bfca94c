"""The verb that looks at the machine, the settings, and what dead runs have left."""

from __future__ import annotations

from nbdist.cluster.kernel import orphans
from nbdist.commands import cluster
from nbdist.core.option import Option
from nbdist.core.view import View, verdicts
from nbdist.diagnostics import checks
from nbdist.diagnostics import kernel as diagnostics_kernel
from nbdist.diagnostics import view as doctor_view
from nbdist.errors import OptionError
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import ANYWHERE, Verb


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


def show_topology() -> View:
    """Hosts and links as a picture, with what is to be said of them.

    Raises:
        RankGone, RankBusy: As for a cell.
    """
    if not NOTEBOOK.is_running:
        return doctor_view.topology(diagnostics_kernel.picture(None, None))
    session = NOTEBOOK.session
    return doctor_view.topology(diagnostics_kernel.picture(session, session.strategy.current()))


def examine(*, is_cleaning: bool = False, has_topology: bool = False) -> View:
    """The findings of this machine, or the picture of all hosts.

    Raises:
        OptionError: If both are asked for.
    """
    if has_topology and is_cleaning:
        raise OptionError("--topology looks at hosts and --clean removes dead runs. Type one.")
    return show_topology() if has_topology else examine_machine(is_cleaning=is_cleaning)


VERBS = (
    Verb(
        "dist_doctor",
        "Say whether ranks can work here: versions, devices, settings, leftovers, and what to do.",
        "%dist_doctor --clean",
        lambda values: examine(**vars(values)),
        (
            Option(
                ("--clean",),
                "end and remove what your dead runs left behind; live runs are not touched",
                None,
                name="is_cleaning",
            ),
            Option(
                ("--topology",),
                "hosts, GPUs and the links between them in one picture, and which network is used",
                None,
                name="has_topology",
            ),
        ),
        place=ANYWHERE,
    ),
)
