"""A cell on several ranks: raw Jupyter messages in, what to show and what happened out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from nbdist.core.failures import RankFailure, ranks_phrase
from nbdist.core.lines import Attachment, Bar, Line, LineMerger
from nbdist.core.ranks import rank_label

# A result with these types alone is text and is merged line by line like print().
TEXT_TYPES = frozenset({"text/plain", "text/llm+plain"})
# Python callers get this much of each rank's text back; the notebook shows all of it.
KEPT_TEXT_CHARACTERS = 1_000_000
# Times are told when the slowest rank took this much longer than the fastest.
NOTABLE_DIFFERENCE_S = 0.5
NOTABLE_DIFFERENCE = 0.1


@dataclass(frozen=True, slots=True)
class Rich:
    """A figure, table or other display of one rank.

    Attributes:
        rank: Where it comes from.
        data: MIME bundle.
        metadata: Its metadata.
        transient: {"display_id": ...} where the display can be updated.
        is_update: Replaces an earlier display of the same display_id.
    """

    rank: int
    data: Mapping[str, Any]
    metadata: Mapping[str, Any]
    transient: Mapping[str, Any]
    is_update: bool = False


@dataclass(frozen=True, slots=True)
class Clear:
    """clear_output() of the rank whose displays are shown."""

    rank: int
    wait: bool


Event = Line | Bar | Rich | Clear


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank did with a cell.

    Attributes:
        rank: The rank.
        status: "ok", "error", "died", "interrupted" or "unfinished" (given up on after
            an interrupt: the rank is still in C code).
        elapsed_s: From sending the cell to the rank's last word.
        text: What it printed (stdout and results), the last million characters.
        failure: Why it failed, or None.
        outputs: Everything it wrote and displayed, in order, as notebook outputs, each
            stream's text within KEPT_TEXT_CHARACTERS; only where it was asked for.
    """

    rank: int
    status: str
    elapsed_s: float
    text: str = ""
    failure: RankFailure | None = None
    outputs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class CellResult:
    """What the chosen ranks did with a cell, in rank order."""

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


@dataclass(slots=True)
class _RankFeed:
    failure: RankFailure | None = None
    text: str = ""
    rich: list[Rich | Clear] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    has_ended: bool = False


class CellFeed:
    """Folds the raw iopub messages of all chosen ranks into what to show.

    Text is merged over the ranks. Rich output is shown from the lowest rank that
    has any; what the others display is counted, and kept for tabs.
    """

    def __init__(
        self, ranks: Iterable[int], *, is_patient: bool = False, keeps_outputs: bool = False
    ):
        """Fold for `ranks`; see LineMerger for `is_patient`."""
        self.ranks = tuple(sorted(ranks))
        self._keeps_outputs = keeps_outputs
        self._feeds = {rank: _RankFeed() for rank in self.ranks}
        self._mergers = {
            name: LineMerger(name, self.ranks, is_patient=is_patient)
            for name in ("stdout", "stderr")
        }
        self._hidden_rich: dict[int, int] = defaultdict(int)
        self._shown_rank: int | None = None

    def feed(self, rank: int, message: Mapping[str, Any], now_s: float) -> None:
        """Take one raw iopub message of a rank; types that show nothing are passed over."""
        handler = _HANDLERS.get(message["header"]["msg_type"])
        if handler is not None:
            handler(self, rank, message["content"], now_s)
            if message["header"]["msg_type"] == "error":
                self._date_failure(rank, message["header"].get("date"))

    def end(self, rank: int, now_s: float) -> None:
        """The rank has no more output."""
        self._feeds[rank].has_ended = True
        for merger in self._mergers.values():
            merger.end(rank, now_s)

    def due(self, now_s: float) -> list[Event]:
        """What can be shown now, in order."""
        events: list[Event] = []
        for merger in self._mergers.values():
            for event in merger.due(now_s):
                events.extend(self._display(event) if isinstance(event, Attachment) else [event])
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
        """What the rank has printed so far (stdout and results)."""
        return self._feeds[rank].text

    def outputs(self, rank: int) -> tuple[dict[str, Any], ...]:
        """The rank's outputs in notebook format, where they were asked for."""
        return tuple(self._feeds[rank].outputs)

    def hidden(self) -> str:
        """What was not shown, in a sentence; empty when everything was."""
        told = []
        by_count: dict[int, list[int]] = defaultdict(list)
        for rank, count in self._hidden_rich.items():
            by_count[count].append(rank)
        for count, ranks in sorted(by_count.items()):
            noun = "display" if count == 1 else "displays"
            each = " each" if len(ranks) > 1 else ""
            told.append(f"{count} {noun}{each} of {ranks_phrase(sorted(ranks))}")
        bars = {r for merger in self._mergers.values() for r in merger.hidden_bar_ranks}
        if bars:
            told.append(f"progress bars of {ranks_phrase(sorted(bars))}")
        return f"not shown: {', '.join(told)} (--tabs shows all ranks)" if told else ""

    def _display(self, attachment: Attachment) -> list[Event]:
        payload = attachment.payload
        if self._shown_rank is None and attachment.rank == self.ranks[0]:
            self._shown_rank = attachment.rank
        if attachment.rank == self._shown_rank:
            return [payload]
        self._feeds[attachment.rank].rich.append(payload)
        if isinstance(payload, Rich) and not payload.is_update:
            self._hidden_rich[attachment.rank] += 1
        return []

    def _late_displays(self) -> list[Event]:
        """Displays of a higher rank, once every lower one has ended without any."""
        if self._shown_rank is not None:
            return []
        for rank in self.ranks:
            if self._feeds[rank].rich:
                self._shown_rank = rank
                self._hidden_rich.pop(rank, None)
                shown, self._feeds[rank].rich = list(self._feeds[rank].rich), []
                return shown
            if not self._feeds[rank].has_ended:
                break
        return []

    def _keep(self, rank: int, output: dict[str, Any]) -> None:
        if not self._keeps_outputs:
            return
        outputs = self._feeds[rank].outputs
        is_stream = output["output_type"] == "stream"
        if is_stream and outputs and outputs[-1].get("name") == output["name"]:
            text = outputs[-1]["text"] + output["text"]
            outputs[-1]["text"] = text[-KEPT_TEXT_CHARACTERS:]
        else:
            outputs.append(output)

    def _text(self, rank: int, text: str) -> None:
        kept = self._feeds[rank].text + text
        self._feeds[rank].text = kept[-KEPT_TEXT_CHARACTERS:]

    def _stream(self, rank: int, content: Mapping[str, Any], now_s: float) -> None:
        self._mergers[content["name"]].feed(rank, content["text"], now_s)
        if content["name"] == "stdout":
            self._text(rank, content["text"])
        self._keep(
            rank, {"output_type": "stream", "name": content["name"], "text": content["text"]}
        )

    def _result(self, rank: int, content: Mapping[str, Any], now_s: float) -> None:
        data = content["data"]
        self._keep(rank, {"output_type": "display_data", "data": data, "metadata": {}})
        if TEXT_TYPES.issuperset(data):
            self._mergers["stdout"].block(rank, data.get("text/plain", ""), now_s)
            self._text(rank, data.get("text/plain", "") + "\n")
        else:
            self._rich(rank, content, is_update=False)

    def _update(self, rank: int, content: Mapping[str, Any], _now_s: float) -> None:
        self._rich(rank, content, is_update=True)

    def _rich(self, rank: int, content: Mapping[str, Any], *, is_update: bool) -> None:
        rich = Rich(
            rank,
            content["data"],
            content.get("metadata", {}),
            content.get("transient", {}),
            is_update=is_update,
        )
        self._mergers["stdout"].attach(rank, rich)

    def _clear(self, rank: int, content: Mapping[str, Any], _now_s: float) -> None:
        self._mergers["stdout"].attach(rank, Clear(rank, wait=bool(content.get("wait"))))
        if self._keeps_outputs:
            self._feeds[rank].outputs.clear()

    def _error(self, rank: int, content: Mapping[str, Any], _now_s: float) -> None:
        self._feeds[rank].failure = RankFailure(
            rank, content["ename"], content["evalue"], tuple(content["traceback"])
        )

    def _date_failure(self, rank: int, date: Any) -> None:
        failure = self._feeds[rank].failure
        if isinstance(date, str):
            date = datetime.fromisoformat(date)
        if failure is not None and isinstance(date, datetime):
            self._feeds[rank].failure = RankFailure(
                rank, failure.name, failure.message, failure.traceback, date.timestamp()
            )


_HANDLERS = {
    "stream": CellFeed._stream,
    "display_data": CellFeed._result,
    "execute_result": CellFeed._result,
    "update_display_data": CellFeed._update,
    "clear_output": CellFeed._clear,
    "error": CellFeed._error,
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
