"""A cell on several ranks: raw Jupyter messages in, what to show and what happened out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, ClassVar

from nbdist.cells.line_merger import Attachment, Bar, Line, LineMerger
from nbdist.core.failures import RankFailure, ranks_phrase, shortened
from nbdist.core.ranks import rank_label

# A result with these types alone is text and is merged line by line like print().
TEXT_TYPES = frozenset({"text/plain", "text/llm+plain"})
# A live widget: its messages go between the frontend and the rank. Worth nothing once stored.
WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"
# Python callers get this much of each rank's text back; the notebook shows all of it.
KEPT_TEXT_CHARACTERS = 1_000_000
# Times are shown when the slowest rank took this much longer than the fastest.
NOTABLE_DIFFERENCE_S = 0.5
NOTABLE_DIFFERENCE = 0.1

# A raw iopub message.
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DisplayOutput:
    """A figure, table or other display of one rank.

    Attributes:
        transient: {"display_id": ...} where the display can be updated.
        is_update: Replaces an earlier display of the same display_id.
    """

    rank: int
    data: Mapping[str, Any]
    metadata: Mapping[str, Any]
    transient: Mapping[str, Any]
    is_update: bool = False


@dataclass(frozen=True, slots=True)
class ClearOutput:
    """clear_output() of the rank whose displays are shown."""

    rank: int
    wait: bool


Event = Line | Bar | DisplayOutput | ClearOutput


@dataclass(frozen=True, slots=True)
class RankResult:
    """The result of one rank's cell.

    Attributes:
        status: "ok", "error", "died", "interrupted" or "unfinished" (given up on after
            an interrupt: the rank is still in C code).
        elapsed_s: From sending the cell to the rank's last word.
        text: Its printed text (stdout and results), the last million characters.
        outputs: Everything it wrote and displayed, in order, as notebook outputs, updates and
            clear_output() carried out. Of a longer text the last KEPT_TEXT_CHARACTERS, and
            a line that says so. Only where it was asked for.
    """

    rank: int
    status: str
    elapsed_s: float
    text: str = ""
    failure: RankFailure | None = None
    outputs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class CellResult:
    """The results of the chosen ranks, in rank order."""

    ranks: tuple[RankResult, ...]

    @property
    def failures(self) -> tuple[RankFailure, ...]:
        """The failures, in rank order."""
        return tuple(r.failure for r in self.ranks if r.failure is not None)

    def __getitem__(self, rank: int) -> RankResult:
        for result in self.ranks:
            if result.rank == rank:
                return result
        raise KeyError(f"rank {rank} did not run this cell: {ranks_phrase(self.numbers)} did")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ranks that ran the cell."""
        return tuple(r.rank for r in self.ranks)


class _Tail:
    """The last KEPT_TEXT_CHARACTERS of a text that comes in any number of pieces."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._size = 0
        self.skipped = 0

    def add(self, text: str) -> None:
        """Append; once there is twice as much as is kept, the beginning is dropped."""
        self._pieces.append(text)
        self._size += len(text)
        if self._size > 2 * KEPT_TEXT_CHARACTERS:
            self._cut()

    def text(self) -> str:
        """The end of the text; `skipped` characters came before it."""
        self._cut()
        return self._pieces[0]

    def _cut(self) -> None:
        joined = "".join(self._pieces)
        self._pieces = [joined[-KEPT_TEXT_CHARACTERS:]]
        self._size = len(self._pieces[0])
        self.skipped += len(joined) - self._size


@dataclass(slots=True)
class _Output:
    """One entry of a rank's outputs: a stream's text, or a display."""

    stream: str = ""
    text: _Tail = field(default_factory=_Tail)
    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    display_id: Any = None

    def in_notebook_format(self) -> dict[str, Any]:
        if not self.stream:
            data, metadata = dict(self.data), dict(self.metadata)
            return {"output_type": "display_data", "data": data, "metadata": metadata}
        text = self.text.text()
        if self.text.skipped:
            text = f"... {self.text.skipped:,} characters before this are not kept\n{text}"
        return {"output_type": "stream", "name": self.stream, "text": text}


@dataclass(slots=True)
class _RankFeed:
    failure: RankFailure | None = None
    text: _Tail = field(default_factory=_Tail)
    unshown: list[DisplayOutput | ClearOutput] = field(default_factory=list)
    outputs: list[_Output] = field(default_factory=list)
    clears_outputs: bool = False
    has_rich: bool = False
    has_ended: bool = False


class OutputReducer:
    """Folds the raw iopub messages of all chosen ranks into what to show.

    Text is merged over the ranks. Rich output is shown from the lowest rank that
    has any: rank 0's at its place among the lines, another rank's once every lower
    one has ended without any (when all have ended, if patient). Output that the others
    display is counted, and kept for tabs.
    """

    def __init__(
        self, ranks: Iterable[int], *, is_patient: bool = False, keeps_outputs: bool = False
    ):
        """Fold for `ranks`; see LineMerger for `is_patient`."""
        self.ranks = tuple(sorted(ranks))
        self._is_patient = is_patient
        self._keeps_outputs = keeps_outputs
        self._feeds = {rank: _RankFeed() for rank in self.ranks}
        self._mergers = {
            name: LineMerger(name, self.ranks, is_patient=is_patient)
            for name in ("stdout", "stderr")
        }

    def feed(self, rank: int, message: Message, now_s: float) -> None:
        """Take one raw iopub message of a rank; types that show nothing are passed over."""
        handler = self._HANDLERS.get(message["header"]["msg_type"])
        if handler is not None:
            handler(self, rank, message, now_s)

    def end(self, rank: int, now_s: float) -> None:
        """The rank has no more output."""
        self._feeds[rank].has_ended = True
        for merger in self._mergers.values():
            merger.end(rank, now_s)

    def due(self, now_s: float) -> list[Event]:
        """Take the events that can be shown now, in order."""
        events: list[Event] = [] if self._is_patient else self._late_displays()
        for merger in self._mergers.values():
            for event in merger.due(now_s):
                events.extend(self._display(event) if isinstance(event, Attachment) else [event])
        if self._is_patient and all(feed.has_ended for feed in self._feeds.values()):
            events.extend(self._late_displays())
        return events

    def next_due_s(self) -> float | None:
        """When `due` may have more although nothing arrives; None for never."""
        times = (merger.next_due_s() for merger in self._mergers.values())
        return min((t for t in times if t is not None), default=None)

    def failure(self, rank: int) -> RankFailure | None:
        """The error that the rank has shown, if any."""
        return self._feeds[rank].failure

    def text(self, rank: int) -> str:
        """The rank's printed text so far (stdout and results)."""
        return self._feeds[rank].text.text()

    def outputs(self, rank: int) -> tuple[dict[str, Any], ...]:
        """The rank's outputs in notebook format, where they were asked for."""
        return tuple(output.in_notebook_format() for output in self._feeds[rank].outputs)

    def hidden(self, *, where: str = " (%%distributed --tabs shows all)") -> str:
        """A sentence on output that was not shown, and where it is; empty when all was shown."""
        by_count: dict[int, list[int]] = defaultdict(list)
        for rank, feed in self._feeds.items():
            displays = [out for out in feed.unshown if isinstance(out, DisplayOutput)]
            by_count[sum(not display.is_update for display in displays)].append(rank)
        by_count.pop(0, None)
        phrases = [
            f"{count} display{'' if count == 1 else 's'}{' each' if len(ranks) > 1 else ''} "
            f"of {ranks_phrase(ranks)}"
            for count, ranks in sorted(by_count.items())
        ]
        bars = {r for merger in self._mergers.values() for r in merger.hidden_bar_ranks}
        if bars:
            phrases.append(f"progress bars of {ranks_phrase(sorted(bars))}")
        return f"not shown: {', '.join(phrases)}{where}" if phrases else ""

    def _shown_rank(self) -> int | None:
        """The rank whose displays are shown; None while that is open."""
        for rank, feed in self._feeds.items():
            if feed.has_rich:
                return rank
            if not feed.has_ended:
                break
        return None

    def _display(self, attachment: Attachment) -> list[Event]:
        rank, payload = attachment.rank, attachment.payload
        shown_rank = self._shown_rank()
        # When a higher rank is found to be the one to show depends on when lower ones end.
        if rank == self.ranks[0] or (rank == shown_rank and not self._is_patient):
            return [payload]
        unshown = self._feeds[rank].unshown
        if unshown and isinstance(unshown[-1], ClearOutput):
            unshown.clear()
        if isinstance(payload, ClearOutput) and not payload.wait:
            unshown.clear()
        elif isinstance(payload, DisplayOutput) and shown_rank not in {None, rank}:
            unshown.append(replace(payload, data={}))  # only counted from here on
        else:
            unshown.append(payload)
        return []

    def _late_displays(self) -> list[Event]:
        """The outputs of a rank from before it was chosen as the one whose displays are shown."""
        rank = self._shown_rank()
        if rank is None:
            return []
        unshown, self._feeds[rank].unshown = self._feeds[rank].unshown, []
        return [payload for payload in unshown if isinstance(payload, DisplayOutput)]

    def _keep(self, rank: int, output: _Output) -> None:
        feed = self._feeds[rank]
        if not self._keeps_outputs:
            return
        if feed.clears_outputs:
            feed.outputs.clear()
            feed.clears_outputs = False
        feed.outputs.append(output)

    def _stream(self, rank: int, message: Message, now_s: float) -> None:
        name, text = message["content"]["name"], message["content"]["text"]
        self._mergers[name].feed(rank, text, now_s)
        feed = self._feeds[rank]
        if name == "stdout":
            feed.text.add(text)
        if self._keeps_outputs:
            if feed.clears_outputs or not feed.outputs or feed.outputs[-1].stream != name:
                self._keep(rank, _Output(stream=name))
            feed.outputs[-1].text.add(text)

    def _result(self, rank: int, message: Message, now_s: float) -> None:
        rich = self._rich(rank, message)
        display_id = rich.transient.get("display_id")
        if not rich.data and display_id is None:
            return
        self._keep(rank, _Output(data=rich.data, metadata=rich.metadata, display_id=display_id))
        # With a display_id it may be updated later, which a line cannot.
        is_text = display_id is None and TEXT_TYPES.issuperset(rich.data)
        text = rich.data.get("text/plain", "")
        if is_text or message["header"]["msg_type"] == "execute_result":
            self._feeds[rank].text.add(text.removesuffix("\n") + "\n")
        if is_text:
            self._mergers["stdout"].block(rank, text, now_s)
        else:
            self._attach(rich, now_s)

    def _update(self, rank: int, message: Message, now_s: float) -> None:
        rich = self._rich(rank, message, is_update=True)
        display_id = rich.transient.get("display_id")
        for output in self._feeds[rank].outputs:
            if display_id is not None and output.display_id == display_id:
                output.data, output.metadata = rich.data, rich.metadata
        self._attach(rich, now_s)

    def _rich(self, rank: int, message: Message, *, is_update: bool = False) -> DisplayOutput:
        content = message["content"]
        data = dict(content["data"])
        if self._is_patient:
            data.pop(WIDGET_TYPE, None)
        metadata, transient = content.get("metadata") or {}, content.get("transient") or {}
        return DisplayOutput(rank, data, metadata, transient, is_update=is_update)

    def _attach(self, rich: DisplayOutput, now_s: float) -> None:
        self._feeds[rich.rank].has_rich = True
        # An update changes a display elsewhere and leaves the line at hand alone.
        self._mergers["stdout"].attach(rich.rank, rich, now_s, ends_line=not rich.is_update)

    def _clear(self, rank: int, message: Message, now_s: float) -> None:
        wait = bool(message["content"].get("wait"))
        self._mergers["stdout"].attach(rank, ClearOutput(rank, wait=wait), now_s)
        self._feeds[rank].clears_outputs = True
        if not wait:
            self._feeds[rank].outputs.clear()

    def _error(self, rank: int, message: Message, _now_s: float) -> None:
        content, date = message["content"], message["header"].get("date")
        if isinstance(date, str):
            date = datetime.fromisoformat(date)
        self._feeds[rank].failure = RankFailure(
            rank,
            content["ename"],
            shortened(content["evalue"]),
            tuple(map(shortened, content["traceback"])),
            date.timestamp() if isinstance(date, datetime) else 0.0,
        )

    _HANDLERS: ClassVar[Mapping[str, Callable[..., None]]] = {
        "stream": _stream,
        "display_data": _result,
        "execute_result": _result,
        "update_display_data": _update,
        "clear_output": _clear,
        "error": _error,
    }


def elapsed_line(elapsed_s: Mapping[int, float]) -> str:
    """`elapsed: [0] 1.2 s, [1-3] 3.4 s` where the ranks differ notably, else nothing.

    Ranks whose times print alike share one entry.
    """
    if len(elapsed_s) < 2:
        return ""
    fastest, slowest = min(elapsed_s.values()), max(elapsed_s.values())
    if slowest - fastest < max(NOTABLE_DIFFERENCE_S, NOTABLE_DIFFERENCE * slowest):
        return ""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, seconds in sorted(elapsed_s.items()):
        by_text[f"{seconds:.1f} s"].append(rank)
    return "elapsed: " + ", ".join(f"[{rank_label(r)}] {text}" for text, r in by_text.items())
