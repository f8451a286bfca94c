"""Actions of the panel's buttons: each runs its verb's line, and shows what the verb shows."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from IPython.utils.capture import capture_output

from nbdist.cluster import view as ranks_view
from nbdist.core.view import View
from nbdist.notebook.notebook import NOTEBOOK, SHOWN
from nbdist.notebook.verb import Verb, parse
from nbdist.panel import strategy_form
from nbdist.panel.job_queue import PanelJob
from nbdist.panel.state import BUTTONS
from nbdist.panel.strategy_form import Value
from nbdist.strategy.choice import Strategy

# Stands in a button's line for the moment in which it runs.
_TIME = "TIME"


@dataclass(frozen=True, slots=True)
class Shows:
    """Places in which an action shows more than its last line.

    Attributes:
        progress: What it waits for.
        detail: Something long: a title, and what it is as HTML.
    """

    progress: Callable[[str], None]
    detail: Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Choices made on the panel.

    Attributes:
        rank: To be restarted; None for those that have ended.
        compared: Strategies as typed, to be compared with the current one.
    """

    name: str
    values: Mapping[str, Value]
    rank: int | None
    compared: tuple[str, ...] = ()

    @property
    def typed(self) -> str:
        """The strategy as it would be typed."""
        return strategy_form.typed(self.name, self.values)


def job(name: str, chosen: Chosen, current: Strategy | None, code: str) -> PanelJob:
    """Make the job of a button whose jobs run between cells.

    `current` is the strategy that counts, None without ranks; `code` the last cell on all ranks.
    """
    magic, _, line = BUTTONS[name].magic.partition(" ")
    typed = ""
    if name == "apply":
        line = chosen.typed
    elif name == "restart" and chosen.rank is not None:
        line = str(chosen.rank)
    elif name == "compare" and current is not None:
        now = strategy_form.typed(current.name, strategy_form.values_of(current))
        strategies = dict.fromkeys([now, *chosen.compared])
        quoted = " ".join(
            f'"{typed_as}"' if " " in typed_as else typed_as for typed_as in strategies
        )
        line, typed = f"{quoted} -- {code}", f"{quoted} -- (the last cell)"
    return PanelJob(name, f"{magic} {typed or line}".rstrip(), line)


def act(job: PanelJob, verbs: Mapping[str, Verb], shows: Shows) -> str:
    """Do a job, in the main thread, and say what it came to; raises what its magic raises.

    What is printed or displayed meanwhile would stand below whatever cell ran last, so it goes
    where the panel shows what is long.
    """
    title = BUTTONS[job.name].below
    views: list[View] = []

    def take(view: View) -> None:
        views.append(view)
        shows.progress(view.text.partition("\n")[0].rstrip(":"))

    with SHOWN.redirected(take, shows.progress), capture_output() as caught:
        try:
            if (view := _run(job, verbs, shows)) is not None:
                views.append(view)
            del views[:-1]  # headings, of what is in the result
        finally:
            texts = [text for text in (caught.stdout, caught.stderr) if text]
            # No updates: those are pictures of the panel itself.
            bundles = [output.data for output in caught.outputs if not output.update]
            parts = [
                *(view.html or _plain(view.text) for view in views if title),
                *map(_plain, texts),
                *(data.get("text/html") or _plain(data.get("text/plain", "")) for data in bundles),
            ]
            if parts:
                shows.detail(title or job.typed, "".join(parts))
    return "done, see below" if title else views[-1].text


def _run(job: PanelJob, verbs: Mapping[str, Verb], shows: Shows) -> View | None:
    if job.name == "start":  # with the options of the last start, whatever has set them
        started = NOTEBOOK.start(NOTEBOOK.options, shows.progress)
        return ranks_view.start_view(started.session.topology, started.elapsed_s, started.notes)
    line = job.line
    if job.name == "checkpoint":
        line = line.replace(_TIME, time.strftime("%Y-%m-%d-%H%M%S"))
    view: View | None = answer(job.name, line, verbs)
    return view


def answer(name: str, line: str, verbs: Mapping[str, Verb]) -> Any:
    """Run a button's verb with this line and return its answer; in any thread."""
    verb = verbs[BUTTONS[name].magic.partition(" ")[0].lstrip("%")]
    return verb.run(parse(verb, line).values)


def _plain(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"
