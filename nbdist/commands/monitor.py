"""The verb that shows what ranks use and do, and lets Prometheus read it."""

from __future__ import annotations

import time
from argparse import Namespace

from nbdist.core import units
from nbdist.core.option import Option, positive_number, whole_number
from nbdist.core.units import shown
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.monitor import prometheus
from nbdist.monitor import view as monitor_view
from nbdist.monitor.kernel.monitor import Monitor
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.progress_line import ProgressLine
from nbdist.notebook.verb import Verb

# The first sample takes tens of milliseconds; two make a rate.
FIRST_S = 10.0


def dist_monitor(values: Namespace) -> View | None:
    """Show what was recorded of all ranks; record from now on."""
    monitor = NOTEBOOK.session.monitor
    flags = {
        "--seconds": values.seconds is not None,
        "--prometheus": values.port is not None,
        "--off": values.is_off,
    }
    chosen = [flag for flag, is_given in flags.items() if is_given]
    if len(chosen) > 1:
        raise OptionError(f"%dist_monitor: choose one of {', '.join(chosen)}.")
    if values.is_off:
        state = "recording stopped" if monitor.is_running else "nothing is being recorded"
        monitor.stop()
        return View(f"{state}; what was recorded is kept; %dist_monitor resumes")
    if values.port is not None:
        served = monitor.serve(values.port)
        token_path, port = shown(served.token_path), shown(served.port)
        url = served.url.replace(str(served.port), port)
        return monitor_view.serving(url, token_path, prometheus.scrape_config(port, token_path))
    if values.seconds is not None:
        _record(monitor, values.seconds)
        return None
    is_new = not monitor.is_running
    monitor.wait(time.monotonic(), FIRST_S)  # an older sample may show a cell that has ended
    return _view(monitor, _BEGUN if is_new else "")


_BEGUN = "recording from now on, once a second; %dist_monitor shows it again, --off stops it"


def _view(monitor: Monitor, note: str = "") -> View:
    notes = [*monitor.problems, *filter(None, [note])]
    return monitor_view.monitor(
        monitor.latest(), monitor.history, monitor.findings(is_past=True), notes
    )


def _record(monitor: Monitor, seconds: float) -> None:
    """Record for so long, with a line that tells how far it is, and show it then."""
    progress = ProgressLine("recording")
    began_s = time.monotonic()
    end_s = began_s + seconds
    note = ""
    try:
        newest_s = began_s
        while time.monotonic() < end_s and monitor.wait(newest_s, end_s - time.monotonic()):
            if not monitor.is_running:  # the ranks were stopped meanwhile
                break
            newest_s = max(newest_s, monitor.latest()[0].time_s)
            left_s = max(0.0, end_s - time.monotonic())
            progress(
                f"{units.seconds(left_s)} left; interrupt to stop early and show what was recorded"
            )
    except KeyboardInterrupt:
        note = f"interrupted after {units.seconds(time.monotonic() - began_s)}; recording continues"
    progress.finish(_view(monitor, note))


VERBS = (
    Verb(
        "dist_monitor",
        "Show what every rank uses and does, now and since the recording began.",
        "%dist_monitor --seconds 30",
        dist_monitor,
        (
            Option(
                ("--seconds",),
                "record for S seconds first; an interrupt ends it early",
                positive_number,
                metavar="S",
            ),
            Option(
                ("--prometheus",),
                "serve the numbers to Prometheus on this port of 127.0.0.1 (0 picks a free one)",
                whole_number("a valid port (0 to 65535; 0 picks a free one)", 0, 65535),
                metavar="PORT",
                name="port",
            ),
            Option(("--off",), "stop recording and serving", None, name="is_off"),
        ),
    ),
)
