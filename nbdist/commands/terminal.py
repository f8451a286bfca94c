"""Verbs of the command line: a program on ranks, and the clusters of this user's notebooks."""

from __future__ import annotations

import os
import socket
import sys
import time
import tokenize
import traceback
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nbdist.cells.journal import CellHead
from nbdist.cells.kept_run import first_line
from nbdist.cells.kernel import kept_runs, onlooker, wait
from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.cells.outputs import CellResult, Event
from nbdist.cells.view.live_cell import LiveCell
from nbdist.checkpoint import view as checkpoint_view
from nbdist.cluster.kernel import orphans, runs
from nbdist.cluster.run_owner import ELSEWHERE, KEPT, RUNNING, STOPPED, Run
from nbdist.commands.cluster import START_OPTIONS, kept_run, temporary_ranks
from nbdist.core.failures import plain, ranks_phrase, summary, traceback_text
from nbdist.core.option import Option
from nbdist.core.units import is_stored
from nbdist.core.versions import VERSION
from nbdist.core.view import View
from nbdist.diagnostics import view as runs_view
from nbdist.errors import NbdistError, NotRunning, OptionError
from nbdist.notebook.session import Session, attach
from nbdist.notebook.verb import TERMINAL, Verb
from nbdist.rpc.kernel.functions import RankFunction

TAKE_DEADLINE_S = 30.0
# Ranks whose time was over go on so long without the process that saves them.
LAST_S = 1.0
# How often somebody who looks on looks for the next cell.
IDLE_POLL_S = 0.2

take_script: RankFunction[[str, str, tuple[str, ...]], None] = RankFunction(
    "nbdist.engine.script:take"
)
# The source of a cell that runs the program that `take_script` has brought.
RUN_SCRIPT = "__import__('nbdist.engine.script', fromlist=['run']).run(globals())"


class _Unshown:
    """A sink for the output of a cell that is interrupted so that its ranks can be saved."""

    def draw(self, _events: Sequence[Event]) -> None:
        """Show nothing."""

    def close(self, _result: CellResult) -> None:
        """Show nothing."""


def status() -> View:
    """The clusters whose notebook lives, and those that outlive it."""
    all_runs = runs.find_runs()
    living = [run for run in all_runs if run.state in {RUNNING, STOPPED}]
    waiting = [
        entry for entry in kept_runs.look(all_runs) if entry.run.state in {RUNNING, KEPT, ELSEWHERE}
    ]
    views = [runs_view.running(living)] if living or not waiting else []
    if waiting:
        views.append(runs_view.kept(waiting, time.time()))
    return runs_view.below(*views)


def stop(values: Namespace) -> View:
    """End the ranks of one cluster, or of all; their notebooks go on."""
    chosen = _chosen(values.named, is_all=values.is_all)
    if values.save and len(chosen) > 1:
        raise OptionError(f"nbdist stop --save: choose one of {len(chosen)} clusters.")
    lines = []
    for run in chosen:
        ends = _end_kept if values.save or run.state == KEPT else _end_held
        lines += ends(run, values.save)
    return View("\n".join(lines))


def _end_held(run: Run, _save: str) -> list[str]:
    """End the ranks of a notebook that lives, which is told."""
    orphans.stop(run)
    ranks = ranks_phrase(range(len(run.hosts))) if run.hosts else "its processes"
    lines = [f"{run.name}: {ranks} stopped"]
    other_hosts = sorted(set(run.hosts) - {socket.gethostname()})
    if other_hosts:
        lines.append(
            f"ranks on {', '.join(other_hosts)} end by themselves once their controller is gone"
        )
    return lines


def _end_kept(run: Run, path: str) -> list[str]:
    """End ranks that no notebook holds, on all hosts; before that save what they have, if asked.

    Raises:
        NbdistError: If they could not be saved: they are kept until the same moment as before.
    """
    try:
        if run.keep is None:
            raise NotRunning(
                f"{run.name} is not kept, so only its notebook can save it, with %dist_save."
            )
        left_s = run.keep.keep_s
        if run.detachment is not None:
            left_s = max(run.detachment.until_s - time.time(), 0.0)
        # Whatever becomes of this process: not longer than before, and saved at most once.
        keep = replace(run.keep, keep_s=left_s or LAST_S)
        if not left_s:
            keep = replace(keep, save="", at_end=())
        attached, _ = attach(run, lambda _request: _Unshown(), keep=keep)
    except NbdistError as error:
        if path:
            raise NbdistError(f"{run.name} was not saved. {error}") from error
        return [f"{run.name}: {error}", *orphans.remove(run)]
    session = attached.session
    lines = _save_first(session, path) if path else []
    session.stop()
    return [*lines, f"{run.name}: {ranks_phrase(session.ranks)} stopped"]


def _save_first(session: Session, path: str) -> list[str]:
    try:
        if interrupted := session.interrupt_left():
            sys.stderr.write(f"{interrupted}\n")  # it is so, whatever becomes of the save
        saved = checkpoint_view.saved_view(session.save(path))
    except BaseException:
        session.leave()
        raise
    return [saved.text]


def _chosen(named: Sequence[str], *, is_all: bool) -> list[Run]:
    if is_all and named:
        raise OptionError(f"nbdist stop: choose --all or {' '.join(named)}.")
    living = [run for run in runs.find_runs() if run.state in {RUNNING, KEPT}]
    if len(named) == 1 and os.sep in named[0]:
        return [run for run in living if run.folder == named[0]] or [kept_run(named[0])]
    if not living:
        raise NotRunning("No cluster of yours runs on this machine.")
    if is_all or (not named and len(living) == 1):
        return living
    listed = f"\n{status().text}"
    if not named:
        raise OptionError(
            f"nbdist stop: {len(living)} clusters run. Name one, or end all with --all.{listed}"
        )
    chosen = {
        name: run
        for name in named
        for run in living
        if name in {run.name, run.name.removeprefix("run-")}
    }
    if missing := [name for name in named if name not in chosen]:
        raise OptionError(f"nbdist stop: there is no cluster {', '.join(missing)}.{listed}")
    return list({run.folder: run for run in chosen.values()}.values())


def attach_here(values: Namespace) -> View | None:
    """Show the cell that kept ranks run, and the following ones, until Ctrl-C."""
    return _look_on(_chosen_kept(values.named, "attach"), shows_all=False, follows=True)


def logs(values: Namespace) -> View | None:
    """Show the newest cell of kept ranks, all of it."""
    return _look_on(_chosen_kept(values.named, "logs"), shows_all=True, follows=values.follows)


def _chosen_kept(named: Sequence[str], word: str) -> Run:
    """The kept run that is meant."""
    if len(named) > 1:
        raise OptionError(f"nbdist {word}: name one run, not {' '.join(named)}.")
    return kept_run("".join(named))


def _look_on(run: Run, *, shows_all: bool, follows: bool) -> View | None:
    newest = 0
    try:
        while True:
            head = onlooker.newest(run)
            if head is not None and head.run > newest:
                # Of the cells that follow, all is shown.
                _show_cell(run, head, shows_all=shows_all or newest > 0, follows=follows)
                newest = head.run
            elif not follows:
                return None if newest else View(f"{run.name} has run no cell that it has kept")
            elif not onlooker.is_living(run):
                return View(f"{run.name} has ended")
            else:
                time.sleep(IDLE_POLL_S)
    except KeyboardInterrupt:
        return View(f"\n{run.name} goes on")


def _show_cell(run: Run, head: CellHead, *, shows_all: bool, follows: bool) -> None:
    """The cell's output on stdout; what it is, and how it failed, on stderr."""
    sys.stderr.write(
        f"{run.name}, {head.label} on {ranks_phrase(head.ranks)}: {first_line(head.code)}\n"
    )
    sink = LiveCell(lambda: Path(os.devnull), is_clipped=False)
    failures = onlooker.show(run, head, sink, shows_all=shows_all, follows=follows)
    if failures:
        text = f"{traceback_text(failures)}\n\n{summary(failures)}\n"
        sys.stderr.write(text if sys.stderr.isatty() else plain(text))


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


_KEPT_RUN = Option(
    ("named",), "a kept run, as nbdist status names it (default: the only one)", metavar="RUN"
)

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
        "List the clusters of your notebooks on this machine, and those that are kept.",
        "nbdist status",
        lambda _values: status(),
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
            Option(
                ("--save",),
                "before that, save a checkpoint of ranks that no notebook holds",
                default="",
                metavar="PATH",
            ),
        ),
        place=TERMINAL,
    ),
    Verb(
        "attach",
        "Show the cell that kept ranks run, and the following ones; Ctrl-C leaves, they go on.",
        "nbdist attach run-k3x9",
        attach_here,
        (_KEPT_RUN,),
        place=TERMINAL,
    ),
    Verb(
        "logs",
        "Show what the newest cell of kept ranks has printed.",
        "nbdist logs run-k3x9 -f",
        logs,
        (
            _KEPT_RUN,
            Option(("-f", "--follow"), "go on with what comes, until Ctrl-C", None, name="follows"),
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
