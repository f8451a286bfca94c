"""State of the panel and of its buttons: records and tables, no widgets."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nbdist.cells.tqdm_bars import percent
from nbdist.core.topology import RankPlace
from nbdist.monitor.samples import Sample

# Numbers that are older than this are shown with their age.
OLD_S = 3.0


# monitor.samples.STATES -> a sign that tells it without colour, and one of Okabe and Ito's.
SIGNS: Mapping[str, tuple[str, str]] = {
    "idle": ("○", "#009E73"),
    "running": ("▶", "#0072B2"),
    "waiting": ("◷", "#E69F00"),
    "stopped": ("‖", "#CC79A7"),
    "dead": ("✕", "#D55E00"),
    "unknown": ("?", "#999999"),
}


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank at one moment.

    Attributes:
        kind: A key of SIGNS.
        doing: The same in words: "running cell [3]", "waiting in all_reduce(...) at line 3".
        busy_s: For how long it has been running, or waiting; 0 where it does neither.
        memory_bytes: Used on its device (of a CPU: by its process); None where it is not known.
        limit_bytes: The most that there is of it; None likewise.
        utilisation: Of its device, 0 to 1; None likewise.
        age_s: How old memory and utilisation are.
    """

    rank: int
    host: str
    device: str
    kind: str
    doing: str
    busy_s: float = 0.0
    memory_bytes: float | None = None
    limit_bytes: float | None = None
    utilisation: float | None = None
    age_s: float = 0.0

    @property
    def share(self) -> float | None:
        """Which part of the memory is used, 0 to 1; None where that is not known."""
        if self.memory_bytes is None or not self.limit_bytes:
            return None
        return min(1.0, self.memory_bytes / self.limit_bytes)


def row_of(place: RankPlace, sample: Sample | None, now_s: float) -> RankRow:
    """The row of a rank, by where it runs and its newest sample, now by the sample's clock."""
    device = f"{place.device} {place.device_name}".strip()
    if sample is None:
        return RankRow(place.rank, place.host, device, "unknown", "no sample yet")
    doing, percent = sample.doing, sample.utilisation
    used, limit = _memory(sample)
    return RankRow(
        place.rank,
        place.host,
        device,
        doing.state,
        doing.text,
        busy_s=sample.doing_s or 0.0,
        memory_bytes=used,
        limit_bytes=limit,
        utilisation=None if percent is None else percent / 100,
        age_s=max(0.0, now_s - sample.time_s) + sample.age_s,
    )


def _memory(sample: Sample) -> tuple[float | None, float | None]:
    """Used and most bytes: of the GPU, by all processes; without one the rank's of the host's."""
    if sample.gpu is not None:
        return sample.gpu.used_bytes, sample.gpu.total_bytes
    if sample.usage is None:
        return None, None
    usage = sample.usage
    used_bytes = usage.rss_bytes if usage.pss_bytes is None else usage.pss_bytes
    return used_bytes, usage.host_limit_bytes


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A line of the log.

    Attributes:
        at_s: When, in seconds since the epoch.
        kind: "note", "done", "failed".
    """

    at_s: float
    text: str
    kind: str = "note"


@dataclass(frozen=True, slots=True)
class Question:
    """Question that is asked before a button does something that costs much.

    Attributes:
        name: The button's.
        text: What it would cost; a sentence or two.
        choices: Strategies as typed, of which any can be compared with the current one.
        preset: Those of them that are chosen until somebody chooses others.
        rank: Whose restart it is; None for another one.
        code: Of the cell that would run.
    """

    name: str
    text: str
    choices: tuple[str, ...] = ()
    preset: tuple[str, ...] = ()
    rank: int | None = None
    code: str = ""


@dataclass(frozen=True, slots=True)
class PanelState:
    """All that the panel shows.

    Attributes:
        title: `2 ranks on 1 host, gloo`; why there are no ranks, where there are none.
        ranks: In rank order.
        waits: Who waits for whom, a line for each cause.
        strategy: The one that counts, described.
        models: What is prepared: `model: 12.6 million parameters`.
        batch: The effective batch, or "" before a loop over a prepared loader.
        cell: What the notebook runs: `cell [4]`, or "".
        bar: The progress bar that the running cell draws, with its rank, or "".
        doing: How far something is that takes long, a switch or a recording, or "".
        acting: What the panel is doing now, and since when, or "".
        queued: What it will do when the cell ends, in order.
        armed: What happens with the next cell on ranks.
        question: What has to be confirmed first, or None.
        log: Oldest first.
    """

    title: str
    is_running: bool = False
    ranks: tuple[RankRow, ...] = ()
    waits: tuple[str, ...] = ()
    strategy: str = ""
    models: tuple[str, ...] = ()
    batch: str = ""
    cell: str = ""
    bar: str = ""
    doing: str = ""
    acting: str = ""
    queued: tuple[str, ...] = ()
    armed: tuple[str, ...] = ()
    question: Question | None = None
    log: tuple[LogEntry, ...] = ()

    @property
    def is_busy(self) -> bool:
        """Whether there is something to interrupt."""
        busy = any(row.kind in {"running", "waiting"} for row in self.ranks)
        return busy or bool(self.cell or self.acting)


def bar_share(bar: str) -> float | None:
    """How far a progress bar is, 0 to 1, by the percentage that stands in it; None without one."""
    done = percent(bar)
    return None if done is None else done / 100


def bar_text(bar: str) -> str:
    """Text of a bar beside its picture: tqdm's stands between two strokes."""
    return re.sub(r"\s*\|[^|]*\|\s*", " ", bar).strip()


@dataclass(frozen=True, slots=True)
class PanelPlan:
    """Plan of the chosen strategy, as the panel shows it.

    Attributes:
        text: What each rank would hold, or why it cannot be had.
        verdict: Of planner.plan: "safe", "risky", "no", "?"; "" where nothing was counted.
        share: Of the device's memory, in a step; None where that is not known.
    """

    text: str
    is_possible: bool
    verdict: str = ""
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Button:
    """One button: what it is called, what it stands for, and when it does something.

    Attributes:
        magic: What does the same when it is typed.
        when: "now", also while a cell runs; "between" cells, queued while one runs; "arms" for
            what happens with the next cell.
        needs: Facts (see `missing`) without which it does nothing.
        below: Title of what it shows, of one that shows too much for a line of the log.
    """

    name: str
    label: str
    magic: str
    help: str
    when: str
    needs: tuple[str, ...] = ("ranks",)
    below: str = ""


_BUTTONS = (
    Button(
        "interrupt", "Interrupt", "the stop button",
        "interrupt what runs on the ranks, and remove what waits for its end from the queue", "now",
    ),
    Button(
        "status", "Status", "%dist_status --stacks",
        "what every rank does, who waits for whom, and the Python stacks", "now",
        below="status",
    ),
    Button(
        "restart", "Restart rank", "%dist_restart",
        "replace this rank by a new process; its variables are lost; asks first if it is alive",
        "between",
    ),
    Button(
        "profile", "Profile next cell", "%%dist_profile",
        "record the next cell on ranks, and show below it where its time goes", "arms",
    ),
    Button(
        "memory", "Memory next cell", "%%dist_memory",
        "record what the next cell on ranks allocates, and show it below", "arms",
    ),
    Button(
        "save", "Save trace", "%dist_trace --save traces",
        "write the last recorded trace to the folder traces", "between", ("ranks", "trace"),
    ),
    Button(
        "checkpoint", "Save checkpoint", "%dist_save checkpoints/TIME",
        "save models, optimizers and what belongs to them to a folder named after the time",
        "between",
    ),
    Button(
        "compare", "Compare", "%dist_compare",
        "run the last cell on ranks again, under the current strategy and others that fit, "
        "then restore the state; asks first", "between", ("ranks", "code"), "comparison",
    ),
    Button("apply", "Apply", "%dist_strategy", "switch to this strategy", "between",
           ("ranks", "choice", "other")),
    Button("start", "Start ranks", "%dist_init", "start ranks, with the options of the last start",
           "between", ("none",), "ranks"),
    Button("cancel", "Cancel queued", "", "remove all jobs from the queue", "now", ("queue",)),
    Button("confirm", "Go on", "", "do what was asked about", "now", ("question",)),
    Button("dismiss", "Leave it", "", "do not do what was asked about", "now", ("question",)),
)  # fmt: skip
BUTTONS: Mapping[str, Button] = {button.name: button for button in _BUTTONS}

# Fact -> why a button that needs it does nothing without it.
_WHY = {
    "ranks": "no ranks are running",
    "none": "ranks are already running",
    "trace": "nothing has been recorded yet: use Profile next cell",
    "code": "no cell has run on all ranks to its end yet",
    "choice": "the chosen strategy is not possible with these ranks and models",
    "other": "this strategy is already in use",
    "queue": "nothing is queued",
    "question": "there is nothing to confirm",
}


def missing(name: str, facts: Collection[str]) -> str:
    """Why a button does nothing now; "" where it does something."""
    return next((_WHY[need] for need in BUTTONS[name].needs if need not in facts), "")
