"""Verbs that bring ranks up, say how they are, bring them back and end them."""

from __future__ import annotations

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from nbdist.cells.kernel import kept_runs, wait
from nbdist.cells.view.live_cell import publish
from nbdist.cluster import view as ranks_view
from nbdist.cluster.agent.guardian import LOG
from nbdist.cluster.kernel import keep, run_dir, runs
from nbdist.cluster.kernel.start import DEFAULT_DEADLINE_S, StartOptions
from nbdist.cluster.run_owner import KEPT, Run
from nbdist.cluster.slurm import FLAGS, SlurmOptions
from nbdist.core.failures import ranks_are, ranks_phrase
from nbdist.core.option import Option, duration, options_of, positive_number
from nbdist.core.units import is_stored, shown, span
from nbdist.core.view import View
from nbdist.diagnostics import view as runs_view
from nbdist.errors import AlreadyRunning, OptionError
from nbdist.notebook.notebook import LOCAL, NOTEBOOK, SHOWN
from nbdist.notebook.session import Session, StartedSession
from nbdist.notebook.verb import Verb, strategy_given, strategy_options
from nbdist.strategy.choose import StrategySpec
from nbdist.strategy.table import ROWS


def start_and_show(options: StartOptions, title: str = "starting") -> StartedSession:
    """Bring ranks up with a progress line that becomes their table."""
    progress = SHOWN.line(title)
    started = NOTEBOOK.start(options, progress)
    progress.finish(
        ranks_view.start_view(started.session.topology, started.elapsed_s, started.notes)
    )
    return started


@contextlib.contextmanager
def temporary_ranks(values: Namespace) -> Iterator[Session]:
    """Ranks for one command of a terminal: their table goes to stderr, stdout is the command's."""
    try:
        started = NOTEBOOK.start(start_options(values), lambda _text: None)
        view = ranks_view.start_view(started.session.topology, started.elapsed_s, started.notes)
        sys.stderr.write(f"{view.text}\n")
        yield started.session
    finally:
        if NOTEBOOK.is_running:
            NOTEBOOK.stop()


def start_options(values: Namespace) -> StartOptions:
    """Collect the START_OPTIONS that were given, or those of them that the verb has."""
    typed, job = _values(StartOptions, values), _values(SlurmOptions, values)
    if typed.get("hosts") and typed.get("profile") == "local":
        raise OptionError(
            "The profile local starts ranks on this machine alone, and --hosts names others. Leave "
            "out --profile local (ssh then starts the ranks) or --hosts."
        )
    spec = StrategySpec.parse(typed.pop("strategy", None), strategy_given(values))
    return StartOptions(**typed, strategy=spec, slurm=SlurmOptions(**job))


def _values(record: type[Any], values: Namespace) -> dict[str, Any]:
    """Collect the given options that are fields of a record, by name."""
    names = [field.name for field in fields(record)]
    typed = {name: getattr(values, name, None) for name in names}
    return {name: value for name, value in typed.items() if value is not None}


def dist_init(values: Namespace) -> View | None:
    """Start ranks, or say which ones run already."""
    options = start_options(values)
    if NOTEBOOK.is_running:
        view = _already_running(options)
    else:
        start_and_show(options)
        view = None
    if values.auto:
        NOTEBOOK.set_mode("all")
    return view


def _already_running(options: StartOptions) -> View:
    session = NOTEBOOK.session
    running = f"{ranks_are(session.ranks)} already running in this notebook"
    differing = NOTEBOOK.differs(options)
    if differing:
        flags = {"strategy": "--strategy", "slurm": "/".join(FLAGS)}
        typed = ", ".join(flags.get(name) or _OF_RECORDS[name].flags[0] for name in differing)
        raise AlreadyRunning(
            f"{running}, with a different {typed}. %dist_reset with the options you want starts "
            "afresh; %dist_shutdown only stops; %dist_strategy switches the strategy alone."
        )
    view = status_view()
    note = f"{running}; %dist_reset starts afresh."
    return View(f"{note}\n{view.text}", f"<div>{note}</div>{view.html}")


def dist_reset(values: Namespace) -> None:
    """End the ranks and start new ones, with the same options unless others are given."""
    options, mode = start_options(values), NOTEBOOK.mode
    ranks: tuple[int, ...] = ()
    if NOTEBOOK.is_running:
        options = _same_options(options)
        lines = NOTEBOOK.session.checkpoints.end()
        ranks = NOTEBOOK.stop().ranks
        if lines:
            publish(View("\n".join(lines))._repr_mimebundle_())
    started = start_and_show(options, "starting afresh")
    if values.auto or mode != LOCAL:
        # The mode is numbers: of other ranks than before it would mean something else.
        is_same = not values.auto and ranks == started.session.ranks
        NOTEBOOK.set_mode(mode if is_same else "all")


def _same_options(typed: StartOptions) -> StartOptions:
    """The options of the running ranks, unless others than these two are asked for."""
    options = NOTEBOOK.options
    if typed.deadline_s != DEFAULT_DEADLINE_S:
        options = replace(options, deadline_s=typed.deadline_s)
    if typed.strategy is not None:
        options = replace(options, strategy=typed.strategy)
    others = replace(typed, deadline_s=DEFAULT_DEADLINE_S, strategy=None)
    return options if others == StartOptions() else typed


def dist_shutdown(_values: Namespace) -> View:
    """End the ranks, after saves that are being written."""
    lines = NOTEBOOK.session.checkpoints.end()
    session = NOTEBOOK.stop()
    return View("\n".join([*lines, f"{ranks_phrase(session.ranks)} stopped"]))


def dist_detach(values: Namespace) -> View:
    """Let go of the ranks, after saves that are being written: they go on for a while."""
    session = NOTEBOOK.session
    lines = session.checkpoints.end()
    busy = session.busy_ranks
    if len(values.keep_s) > 1:
        raise OptionError(f"%dist_detach: give one time, not {' '.join(map(span, values.keep_s))}.")
    keep_s = NOTEBOOK.detach(values.keep_s[0] if values.keep_s else None, values.save)
    written = run_dir.read_keep(session.cluster.run_dir)
    saved = ""
    if written is not None and written.save:
        saved = f", then saved to {shown(written.save)} ({LOG} beside it says how)"
    lines.append(
        f"{ranks_are(session.ranks)} kept for {span(keep_s)}{saved}. %dist_attach in any notebook "
        f"of this machine brings them back (run {shown(session.cluster.run_dir.name)}); `nbdist "
        "stop` ends them."
    )
    if busy:
        lines.append(f"{ranks_are(busy)} still running a cell")
    return View("\n".join(lines))


def kept_run(named: str) -> Run:
    """The kept run that is meant; an error shows all of them as `nbdist status` does.

    Raises:
        NotRunning, OptionError: See cluster.kernel.keep.find.
    """
    try:
        return keep.find(named)
    except OptionError as error:
        listed = kept_runs.find()
        if not listed:
            raise
        raise OptionError(f"{error}\n{runs_view.kept(listed, time.time()).text}") from error


def tell_kept() -> None:
    """Say which ranks are kept that no notebook holds; nothing where outputs are stored."""
    waiting = [] if is_stored() else [run for run in runs.kept() if run.state == KEPT]
    for run in waiting:
        left_s = run.detachment.until_s - time.time() if run.detachment else 0.0
        left = f" for {span(left_s)} more" if left_s > 0 else ""
        count = ranks_are(range(len(run.hosts))) if run.hosts else "ranks are"
        named = f" {run.name}" if len(waiting) > 1 else ""
        line = f"{run.name}: {count} kept{left}. %dist_attach{named} brings them back here."
        publish(View(line)._repr_mimebundle_())


def dist_attach(values: Namespace) -> None:
    """Hold kept ranks in this notebook, and go on with the cell that they run."""
    if len(values.named) > 1:
        raise OptionError(f"%dist_attach: name one run, not {' '.join(values.named)}.")
    attach_and_show("".join(values.named), takes=values.takes)


def attach_and_show(named: str, *, takes: bool) -> Session:
    """Hold kept ranks, with a progress line that becomes their table, and their cell below."""
    progress = SHOWN.line("attaching")
    attached = NOTEBOOK.attach(lambda: kept_run(named), takes=takes)
    cell = attached.session.resume()  # its ranks count as busy from here on
    status = attached.session.status()
    progress.finish(
        ranks_view.attach_view(
            attached.session.topology, status, attached.elapsed_s, attached.notes
        )
    )
    if cell is not None:
        wait.wait(lambda: cell)
    return attached.session


def status_view(*, wants_stacks: bool = False) -> View:
    """The ranks of this notebook as %dist_status shows them."""
    session = NOTEBOOK.session
    status = session.status(wants_stacks=wants_stacks)
    up_s = time.time() - session.started_s
    return ranks_view.status(session.topology, status, up_s, NOTEBOOK.mode_phrase)


def dist_restart(values: Namespace) -> None:
    """Bring ranks back under their numbers; the others keep everything."""
    session = NOTEBOOK.session
    chosen = session.chosen(" ".join(values.where)) if values.where else None
    progress = SHOWN.line("restarting")
    restarted = session.maintenance.restart(chosen, values.timeout_s, progress)
    progress.finish(ranks_view.restart_view(restarted.ranks, restarted.elapsed_s, restarted.notes))


def dist_mode(values: Namespace) -> View:
    """Set or show where plain cells run."""
    words = list(values.where)
    if values.is_on:
        words.append("all")
    if values.is_off:
        words.append(LOCAL)
    if len(words) > 1 and (values.is_on or values.is_off):
        raise OptionError(f"%dist_mode: choose one of {', '.join(words)}.")
    if words:
        NOTEBOOK.set_mode(" ".join(words))
    return View(f"plain cells run {NOTEBOOK.mode_phrase}")


def sync(values: Namespace) -> View:
    """Wait until every rank has come to this point."""
    waited_s = NOTEBOOK.session.sync(values.timeout_s)
    latest = max(range(len(waited_s)), key=lambda rank: -waited_s[rank])
    phrase = ranks_phrase(NOTEBOOK.session.ranks)
    if max(waited_s) < 1 or is_stored():
        return View(f"{phrase} in step")
    return View(f"{phrase} in step; rank {latest} came last, after {max(waited_s):.1f} s")


def _timeout(what: str, default_s: float, name: str = "timeout_s") -> Option:
    help_text = f"{what}, in seconds (default: {default_s:.0f})"
    return Option(("--timeout",), help_text, positive_number, default_s, "S", name)


_OF_RECORDS = {
    row.name: row for record in (StartOptions, SlurmOptions) for row in options_of(record)
}
START_OPTIONS = (
    # The records have the defaults; None stands for an option that was not given.
    *(replace(row, default=None) for row in _OF_RECORDS.values()),
    Option(("--auto",), "run plain cells on all ranks from now on", None),
    Option(
        ("--strategy",),
        "how models are trained in parallel (default: ddp)",
        metavar="NAME",
        choices=tuple(ROWS),
    ),
    *strategy_options(),
)
_MASTER_ADDRESS = dict.fromkeys(
    ("-a", "--master-addr"),
    "not needed: ranks on this machine meet in a file, and others find rank 0 by themselves",
)

_SYNC_OPTIONS = (_timeout("longest wait", 30.0),)

VERBS = (
    Verb(
        "dist_init",
        "Start ranks: one process per GPU, or several on the CPU.",
        "%dist_init -n 2",
        dist_init,
        START_OPTIONS,
        replaced=_MASTER_ADDRESS,
    ),
    Verb(
        "dist_reset",
        "End the ranks and start new ones, with the same options or the ones given.",
        "%dist_reset",
        dist_reset,
        START_OPTIONS,
        replaced={
            **_MASTER_ADDRESS,
            "--nuclear": "%dist_reset always ends everything it started, and nothing else",
        },
    ),
    Verb("dist_shutdown", "End the ranks.", "%dist_shutdown", dist_shutdown),
    Verb(
        "dist_detach",
        "Let go of the ranks: they go on without this notebook.",
        "%dist_detach 8h",
        dist_detach,
        (
            Option(
                ("keep_s",),
                "for how long (default: as --keep said at the start, or 8h)",
                duration,
                metavar="TIME",
            ),
            _OF_RECORDS["save"],
        ),
    ),
    Verb(
        "dist_attach",
        "Hold ranks that were kept, with the cell that they run.",
        "%dist_attach",
        dist_attach,
        (
            Option(
                ("named",),
                "the run, or its folder (default: the only one that is kept)",
                metavar="RUN",
            ),
            Option(
                ("--take",), "take the ranks from the notebook that holds them", None, name="takes"
            ),
        ),
    ),
    Verb(
        "dist_status",
        "Show what runs where, and who waits for whom.",
        "%dist_status --stacks",
        lambda values: status_view(wants_stacks=values.wants_stacks),
        (Option(("--stacks",), "also show every rank's Python stacks", None, name="wants_stacks"),),
    ),
    Verb(
        "dist_restart",
        "Bring ranks back under their numbers; the others keep everything.",
        "%dist_restart 1",
        dist_restart,
        (
            Option(
                ("where",), "ranks such as 0,2-3 (default: those that have ended)", metavar="RANKS"
            ),
            _timeout("longest time it may take", DEFAULT_DEADLINE_S),
        ),
    ),
    Verb(
        "dist_mode",
        "Set where plain cells run: all, local, or ranks.",
        "%dist_mode all",
        dist_mode,
        (
            Option(
                ("where",),
                "all, local, or ranks such as 0,1",
                metavar="WHERE",
                choices=("all", LOCAL),
            ),
            Option(("-e", "--enable"), "the same as all", None, name="is_on"),
            Option(("-d", "--disable"), "the same as local", None, name="is_off"),
        ),
    ),
    Verb(
        "dist_sync",
        "Wait until all ranks have come to this point.",
        "%dist_sync",
        sync,
        _SYNC_OPTIONS,
    ),
    Verb("sync", "The same as %dist_sync.", "%sync", sync, _SYNC_OPTIONS),
)
