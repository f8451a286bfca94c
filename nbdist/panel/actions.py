"""What the panel's buttons do: each calls what a magic calls, and says what came of it."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from IPython.utils.capture import capture_output

from nbdist.cells.kernel.session import Session
from nbdist.cluster import view as ranks_view
from nbdist.commands import checkpoint, compare
from nbdist.core.view import View
from nbdist.hang.kernel.maintenance import RESTART_S
from nbdist.notebook.notebook import NOTEBOOK, Record
from nbdist.notebook.verb import parse
from nbdist.panel import strategy_form
from nbdist.panel.job_queue import Job
from nbdist.panel.state import BUTTONS
from nbdist.panel.strategy_form import Value
from nbdist.strategy.choice import Strategy
from nbdist.switch import view as strategy_view

TRACES = Path("traces")
CHECKPOINTS = Path("checkpoints")


@dataclass(frozen=True, slots=True)
class Shows:
    """Where an action shows more than its last line.

    Attributes:
        progress: What it waits for.
        detail: Something long: a title, and what it is.
    """

    progress: Callable[[str], None]
    detail: Callable[[str, View], None]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is chosen on the panel.

    Attributes:
        name: The strategy.
        values: Its fields, those left alone too.
        rank: To be restarted; None for those that have ended.
    """

    name: str
    values: Mapping[str, Value]
    rank: int | None

    @property
    def typed(self) -> str:
        """The strategy as it would be typed."""
        return strategy_form.typed(self.name, self.values)


def job(name: str, chosen: Chosen, current: Strategy | None, code: str) -> Job:
    """What pressing a button asks for.

    Args:
        name: Of a button whose jobs run between cells.
        chosen: What is chosen on the panel.
        current: The strategy that counts; None without ranks.
        code: The last cell on all ranks.
    """
    typed: str = BUTTONS[name].magic
    argument: object = None
    if name == "apply":
        typed, argument = f"{typed} {chosen.typed}", (chosen.name, tuple(chosen.values.items()))
    elif name == "restart" and chosen.rank is not None:
        typed, argument = f"{typed} {chosen.rank}", chosen.rank
    elif name == "compare" and current is not None:
        now = strategy_form.typed(current.name, strategy_form.values_of(current))
        strategies = list(dict.fromkeys([now, chosen.typed]))
        quoted = " ".join(f'"{one}"' if " " in one else one for one in strategies)
        typed, argument = f"{typed} {quoted} -- (the last cell)", (tuple(strategies), code)
    return Job(name, typed, argument)


def status(session: Session, shows: Shows) -> None:
    """Show every rank's state and stacks; takes up to two seconds."""
    found = session.status(wants_stacks=True)
    up_s = time.time() - session.started_s
    view = ranks_view.status(session.topology, found, up_s, NOTEBOOK.mode_phrase)
    shows.detail(f"status at {time.strftime('%H:%M:%S')}", view)


def _apply(argument: Any, _shows: Shows) -> str:
    name, values = argument
    given = strategy_form.given(dict(values))
    return strategy_view.switched(NOTEBOOK.session.strategy.switch(name, **given)).text


def _restart(rank: Any, shows: Shows) -> str:
    ranks = None if rank is None else (rank,)
    done = NOTEBOOK.session.upkeep.restart(ranks, RESTART_S, shows.progress)
    return ranks_view.restarted(done.ranks, done.elapsed_s, done.notes).text


def _save(_argument: Any, _shows: Shows) -> str:
    return "written: " + ", ".join(map(str, NOTEBOOK.session.traces.save(TRACES)))


def _checkpoint(_argument: Any, shows: Shows) -> str:
    path = CHECKPOINTS / time.strftime("%Y-%m-%d-%H%M%S")
    return checkpoint.saved(str(path), is_async=False).text


def _compare(argument: Any, shows: Shows) -> str:
    strategies, code = argument
    with capture_output() as caught:
        view = compare.compared(strategies, code, lambda one: shows.progress(one.text.rstrip(":")))
    printed = f"<pre>{html.escape(caught.stdout)}</pre>" if caught.stdout else ""
    shows.detail("comparison", View(view.text, (view.html or view.text) + printed))
    return "done, see below"


def _start(_argument: Any, shows: Shows) -> str:
    started = NOTEBOOK.start(NOTEBOOK.options, shows.progress)
    found = ranks_view.started(started.session.topology, started.elapsed_s, started.notes)
    return found.text.splitlines()[0]


_ACTIONS: Mapping[str, Callable[[Any, Shows], str]] = {
    "apply": _apply,
    "restart": _restart,
    "save": _save,
    "checkpoint": _checkpoint,
    "compare": _compare,
    "start": _start,
}


def act(one: Job, shows: Shows) -> str:
    """Do a job, in the main thread, and say what it came to; raises what its magic raises."""
    return _ACTIONS[one.name](one.argument, shows)


def record(name: str, ranks: str | None) -> Record | None:
    """How the next cell is recorded by a button, on these ranks: as its magic would."""
    from nbdist.commands import VERBS, cell_options  # which have this file's verb

    verb = VERBS[BUTTONS[name].magic.strip("%")]
    return cell_options(parse(verb, f"--ranks {ranks}" if ranks else "").values).record
