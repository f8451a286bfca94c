"""Verbs of the command line: a program on ranks, and the clusters of this user's notebooks."""

from __future__ import annotations

import socket
import sys
import tokenize
import traceback
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from nbdist.cells.kernel import wait
from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.cluster.kernel import orphans, runs
from nbdist.cluster.run_owner import RUNNING, STOPPED, Run
from nbdist.commands.cluster import START_OPTIONS, temporary_ranks
from nbdist.core.failures import ranks_phrase
from nbdist.core.units import is_stored
from nbdist.core.versions import VERSION
from nbdist.core.view import View
from nbdist.diagnostics import view as runs_view
from nbdist.errors import NbdistError, NotRunning, OptionError
from nbdist.notebook.verb import TERMINAL, Option, Verb
from nbdist.rpc.kernel.functions import RankFunction

TAKE_DEADLINE_S = 30.0

take_script: RankFunction[[str, str, tuple[str, ...]], None] = RankFunction(
    "nbdist.engine.script:take"
)
# The source of a cell that runs the program that `take_script` has brought.
RUN_SCRIPT = "__import__('nbdist.engine.script', fromlist=['run']).run(globals())"


def stop(values: Namespace) -> View:
    """End the ranks of one cluster, or of all; their notebooks go on."""
    lines = []
    for run in _chosen(values.named, is_all=values.is_all):
        orphans.stop(run)
        ranks = ranks_phrase(range(len(run.hosts))) if run.hosts else "its processes"
        lines.append(f"{run.name}: {ranks} stopped")
        other_hosts = sorted(set(run.hosts) - {socket.gethostname()})
        if other_hosts:
            lines.append(
                f"ranks on {', '.join(other_hosts)} end by themselves once their controller is gone"
            )
    return View("\n".join(lines))


def _living() -> list[Run]:
    """The clusters whose notebook lives, of this user on this machine."""
    return [run for run in runs.find_runs() if run.state in {RUNNING, STOPPED}]


def _chosen(named: Sequence[str], *, is_all: bool) -> list[Run]:
    if is_all and named:
        raise OptionError(f"nbdist stop: choose --all or {' '.join(named)}.")
    living = [run for run in _living() if run.state == RUNNING]
    listed = "\n" + runs_view.running(living).text
    if not living:
        raise NotRunning("No cluster of yours runs on this machine.")
    if is_all:
        return living
    if not named:
        if len(living) > 1:
            raise OptionError(
                f"nbdist stop: {len(living)} clusters run. Name one, or end all with --all.{listed}"
            )
        return living
    chosen = {
        name: run
        for name in named
        for run in living
        if name in {run.folder, run.name, run.name.removeprefix("run-")}
    }
    if missing := [name for name in named if name not in chosen]:
        raise OptionError(f"nbdist stop: there is no cluster {', '.join(missing)}.{listed}")
    return list({run.folder: run for run in chosen.values()}.values())


def run(values: Namespace) -> None:
    """Run a program on ranks, as one cell; the ranks end with it."""
    path, text = _program(values.file)
    # The ranks take over this process's sys.path: its first folder is a program's own.
    sys.path.insert(0, str(path.parent))
    with temporary_ranks(values) as session:
        rest = tuple(values.rest)
        session.call_all(take_script, str(path), text, rest, deadline_s=TAKE_DEADLINE_S)
        request = CellRequest(RUN_SCRIPT, session.ranks, is_patient=is_stored(), is_program=True)
        wait.wait(lambda: session.begin(request))


def _program(named: Sequence[str]) -> tuple[Path, str]:
    """The program's path, absolute, and its text."""
    if len(named) != 1:
        problem = "no file is named" if not named else f"{len(named)} files are named"
        raise OptionError(
            f"nbdist run: {problem}. For example: nbdist run train.py -n 2 -- --lr 0.1 (the "
            "program's own arguments come after --)."
        )
    path = Path(named[0]).absolute()
    if path.suffix == ".ipynb":
        raise OptionError(
            f"nbdist run: {named[0]} is a notebook, which has its own kernel. Run it with: jupyter "
            f"nbconvert --to notebook --execute {named[0]}; or make a program of its cells with: "
            f"jupyter nbconvert --to script {named[0]}"
        )
    try:
        with tokenize.open(path) as file:  # by the encoding that the file names
            text = file.read()
        compile(text, str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise OptionError(
            f"nbdist run: {named[0]} cannot be read ({error.strerror}). Name a Python file."
        ) from error
    except (SyntaxError, ValueError) as error:  # ValueError: it is no text, or has null bytes
        reason = "".join(traceback.format_exception_only(error)).rstrip()
        raise NbdistError(
            f"{named[0]} is not a valid Python program, so no rank was started.\n{reason}"
        ) from error
    return path, text


VERBS = (
    Verb(
        "run",
        "Run a Python program on ranks, as one cell; output is merged as in a notebook.",
        "nbdist run train.py -n 2 -- --lr 0.1",
        run,
        (
            Option(
                ("file",), "the program to run; its own arguments come after --", metavar="FILE"
            ),
            *(option for option in START_OPTIONS if option.flags != ("--auto",)),
        ),
        place=TERMINAL,
        takes_rest=True,
    ),
    Verb(
        "status",
        "List the clusters of your notebooks on this machine.",
        "nbdist status",
        lambda _values: runs_view.running(_living()),
        place=TERMINAL,
    ),
    Verb(
        "stop",
        "End the ranks of a notebook's cluster from outside; the notebook itself goes on.",
        "nbdist stop run-k3x9",
        stop,
        (
            Option(
                ("named",),
                "a cluster, as nbdist status names it (default: the only one)",
                metavar="RUN",
            ),
            Option(("--all",), "end all clusters", None, name="is_all"),
        ),
        place=TERMINAL,
    ),
    Verb(
        "version",
        "Show nbdist's version.",
        "nbdist version",
        lambda _values: View(f"nbdist {VERSION}"),
        place=TERMINAL,
    ),
)
