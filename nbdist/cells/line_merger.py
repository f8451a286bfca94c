"""Line k of every rank, grouped with line k of the others.

The output of several ranks is read as lines. Line k of a rank is shown
together with line k of the other ranks, equal texts once: `[0-3] loss 2.31`.
A value of several lines (a printed tensor, dict or model) counts as one line.
It is shown when every chosen rank has its line k or has ended. A rank that is
behind by BEHIND_S is not waited for until it has caught up, so a cell in which
only rank 0 prints is shown live.

Time is an argument everywhere: nothing here reads a clock.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.cells import tqdm_bars
from nbdist.core.ranks import rank_label
from nbdist.core.units import MARK, SPAN, compared, marked, visible

BEHIND_S = 1.0
# "Erase to the end of the line" and "erase the line", with which some bars begin a redraw.
_ERASE = re.compile(r"\x1b\[[02]?K")
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_OPENING, _CLOSING = "([{", ")]}"
_INNER = f" \t{_CLOSING}"  # what a line within a value begins with, unless it is empty
# Longer ones are shown line by line.
_MOST_VALUE_LINES = 1000
# The values of more ranks than these are shown as the first and the last.
_MOST_VALUES = 4


@dataclass(frozen=True, slots=True)
class Line:
    """Whole lines to show on one stream, the ranks' label already in front of each.

    Attributes:
        stream: "stdout" or "stderr".
        text: One or more; ends with a newline.
    """

    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """The unfinished line of one stream, which replaces the one shown before.

    The text has no newline, and is empty when there is no unfinished line any more.
    """

    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """Something that is no line (a figure, say), at its place among a rank's lines."""

    rank: int
    payload: Any


@dataclass(slots=True)
class _Run:
    """Lines that came at once; ranks that print much are merged run by run.

    A bar, and a block of several lines that is compared as one, is a run of its own.
    """

    lines: list[str]
    arrived_s: float
    is_bar: bool = False
    n_taken: int = 0

    @property
    def n_left(self) -> int:
        return len(self.lines) - self.n_taken


@dataclass(slots=True)
class _RankLines:
    """The lines of one rank on one stream, and those of them still to be shown."""

    rank: int
    items: deque[_Run | Attachment] = field(default_factory=deque)
    partial: str = ""
    partial_since_s: float = 0.0
    next_index: int = 0
    has_ended: bool = False
    is_behind: bool = False
    _read_of: str = ""
    _visible: str = ""

    def visible(self) -> str:
        """The visible part of the unfinished line, read once for each that was written."""
        if self._read_of is not self.partial:
            last = self.partial.removesuffix("\n").rpartition("\n")[2]
            self._read_of, self._visible = self.partial, _read(last)[0]
        return self._visible


def overwrite(text: str) -> str:
    r"""The part of a line that a terminal shows after its carriage returns.

    A trailing `\r` (Windows line ends, or a bar about to be redrawn) erases nothing.
    """
    visible = ""
    for part in text.split("\r"):
        written = _ERASE.sub("", part) if "\x1b" in part else part
        visible = written if len(written) < len(part) else written + visible[len(written) :]
    return visible


def _read(raw: str) -> tuple[str, bool]:
    r"""Return a line's final text, and whether it is a progress bar.

    Text written over spaces (tqdm blanks a bar out with `leave=False`) is a plain line.
    """
    head, redrawn, last = raw.rstrip("\r").rpartition("\r")
    if not redrawn:
        return overwrite(last), False
    text, before = overwrite(raw), overwrite(head)
    if not text.strip():
        return "", False
    if before and not before.strip():
        return overwrite(last), False
    return text, True


def _compact(raw: str) -> str:
    r"""The same unfinished line without redraws that cannot be seen any more.

    Keeping them all would grow for ever. `_read` gives the same for both, whatever else
    comes: what follows the last `\r` is kept apart from what it overwrites.
    """
    if "\r" not in raw:
        return raw
    body = raw.rstrip("\r")
    head, redrawn, last = body.rpartition("\r")
    if "\r" in head:
        body = f"\r{overwrite(head)}{redrawn}{last}"
    return body + "\r" if raw.endswith("\r") else body


def _split(text: str) -> list[str]:
    """Lines; a value whose brackets or marks stay open, and are closed later, is one of them.

    Where a print begins and ends is not known: one message has those of a fifth of a second.
    """
    lines = text.split("\n")
    if not any(opening in text for opening in (*_OPENING, MARK)):
        return lines
    values = [[lines[0]]]
    depth: int | None = None  # of the last value; most lines need not be looked at for it
    is_marked = lines[0].count(MARK) % 2 == 1
    for line in lines[1:]:
        was_marked = is_marked
        is_marked ^= line.count(MARK) % 2 == 1
        if was_marked and len(values[-1]) < _MOST_VALUE_LINES:
            values[-1].append(line)
            continue
        if line[:1] in _INNER and "\r" not in line:
            depth = _opened(values[-1][0]) if depth is None else depth
            if depth > 0 and len(values[-1]) < _MOST_VALUE_LINES:
                values[-1].append(line)
                depth += _opened(line)
                continue
        values.append([line])
        depth = None
    return ["\n".join(value) for value in values]


def _opened(line: str) -> int:
    """How many brackets a line leaves open, less those of lines before it that it closes."""
    if "\r" in line:  # a bar
        return 0
    seen = _ESCAPE.sub("", line) if "\x1b" in line else line
    return sum(map(seen.count, _OPENING)) - sum(map(seen.count, _CLOSING))


def label_lines(ranks: Iterable[int], text: str) -> str:
    """`[0-3] text`, further lines indented to the text's column."""
    return _labelled(f"[{rank_label(ranks)}] ", text)


def _labelled(label: str, text: str) -> str:
    return label + text.replace("\n", "\n" + " " * len(label))


def alike(texts: Iterable[tuple[int, str]]) -> list[tuple[list[int], str]]:
    """Ranks with a text, by the texts that compare as equal; such a text has the values of all."""
    groups: dict[str, tuple[list[int], list[str]]] = {}
    for rank, text in texts:
        key = compared(text, MARK) if MARK in text else text  # `#` may be a text of the user's
        ranks, equal = groups.setdefault(key, ([], []))
        ranks.append(rank)
        equal.append(text)
    return [(ranks, _joined(equal)) for ranks, equal in groups.values()]


def _joined(texts: Sequence[str]) -> str:
    """Texts that compare as equal as one: a value of each, where they differ."""
    if len({*texts}) == 1:
        return texts[0]
    rows = zip(*(re.findall(SPAN, text) for text in texts), strict=True)
    values = (marked(_all_of([visible(value) for value in row])) for row in rows)
    return re.sub(SPAN, lambda _: next(values), texts[0])


def _all_of(values: Sequence[str]) -> str:
    """`2.31, 2.32`, and `2.31 ... 2.40` of many ranks."""
    if len({*values}) == 1:
        return values[0]
    texts = [value.strip() for value in values]
    return ", ".join(texts) if len(texts) <= _MOST_VALUES else f"{texts[0]} ... {texts[-1]}"


class LineMerger:
    """One stream (stdout or stderr) of all chosen ranks, merged line by line."""

    def __init__(self, stream: str, ranks: Iterable[int], *, is_patient: bool = False):
        """Merge the lines of the chosen ranks; `stream` is named in the returned lines.

        If patient, wait for ranks that are behind until they end, and show no bars: the result
        then depends on the text alone, not on its times.
        """
        self.stream = stream
        self.hidden_bar_ranks: set[int] = set()
        self._ranks = {rank: _RankLines(rank) for rank in sorted(ranks)}
        self._is_patient = is_patient
        self._bar = ""

    def feed(self, rank: int, text: str, now_s: float) -> None:
        """Take text as the rank wrote it: any number of lines, or part of one."""
        lines = self._ranks[rank]
        text = lines.partial + text
        *whole, partial = _split(text)
        if whole and "\r" not in text and "\x1b" not in text:
            lines.items.append(_Run(whole, now_s))
        else:
            for raw in whole:
                line, is_bar = _read(raw)
                lines.items.append(_Run([line], now_s, is_bar))
        if whole or not lines.partial:
            lines.partial_since_s = now_s
        lines.partial = _compact(partial)

    def block(self, rank: int, text: str, now_s: float) -> None:
        """Take several lines that are compared with the other ranks' as one."""
        self._end_partial(self._ranks[rank], now_s)
        self._ranks[rank].items.append(_Run([text.removesuffix("\n")], now_s))

    def attach(self, rank: int, payload: Any, now_s: float, *, ends_line: bool = True) -> None:
        """Place a payload, which comes back in an Attachment, after the rank's text so far.

        Without `ends_line` it comes before a line of which a part has been written.
        """
        if ends_line:
            self._end_partial(self._ranks[rank], now_s)
        self._ranks[rank].items.append(Attachment(rank, payload))

    def end(self, rank: int, now_s: float) -> None:
        """The rank writes no more: an unfinished line of it becomes a whole one."""
        lines = self._ranks[rank]
        self._end_partial(lines, now_s)
        lines.has_ended = True

    def due(self, now_s: float) -> list[Line | Bar | Attachment]:
        """Take the items that can be shown now, in order."""
        events: list[Line | Bar | Attachment] = []
        while True:
            for lines in self._ranks.values():
                while lines.items and isinstance(item := lines.items[0], Attachment):
                    events.append(item)
                    lines.items.popleft()
            group = self._next_group(now_s)
            if not group:
                break
            events.extend(self._show_runs(group) or self._show(group))
        if not self._is_patient:
            events.extend(self._live_bar(now_s))
        return events

    def next_due_s(self) -> float | None:
        """When `due` may have more to show although nothing arrives; None for never."""
        if self._is_patient:
            return None
        heads = [
            item.arrived_s + BEHIND_S
            for lines in self._ranks.values()
            if lines.items and isinstance(item := lines.items[0], _Run)
        ]
        partials = [
            lines.partial_since_s + BEHIND_S
            for lines in self._ranks.values()
            if _is_prompt(lines) and not self._bar
        ]
        return min(heads + partials, default=None)

    def _end_partial(self, lines: _RankLines, now_s: float) -> None:
        if lines.partial:
            line, is_bar = _read(lines.partial.removesuffix("\n"))
            if line or "\r" not in lines.partial:  # a bar that was blanked out is no line
                lines.items.append(_Run([line], now_s, is_bar))
            lines.partial = ""

    def _next_group(self, now_s: float) -> list[_RankLines]:
        """The ranks whose line k can be shown, k being the lowest not shown."""
        ready = [lines for lines in self._ranks.values() if lines.items]
        if not ready:
            return []
        index = min(lines.next_index for lines in ready)
        group = [lines for lines in ready if lines.next_index == index]
        missing = [
            lines
            for lines in self._ranks.values()
            if not lines.items
            and lines.next_index <= index
            and not lines.has_ended
            and not lines.is_behind
        ]
        if missing:
            oldest_s = min(_first(lines).arrived_s for lines in group)
            if self._is_patient or now_s < oldest_s + BEHIND_S:
                return []
            for lines in missing:
                lines.is_behind = True
        return group

    def _show(self, group: list[_RankLines]) -> Iterator[Line]:
        bar_ranks = {lines.rank for lines in group if _first(lines).is_bar}
        merged = alike([(lines.rank, _take(lines, 1)[0]) for lines in group])
        self._note_caught_up(group)
        # Bars differ in their rates alone: one is enough to read.
        bars = [ranks for ranks, _ in merged if bar_ranks.issuperset(ranks)]
        for ranks in bars[1:]:
            self.hidden_bar_ranks.update(ranks)
        for ranks, text in merged:
            if ranks not in bars[1:]:
                yield Line(self.stream, label_lines(ranks, text) + "\n")

    def _show_runs(self, group: list[_RankLines]) -> list[Line]:
        """Show the lines that all of the group have now at once; empty for single lines."""
        index = group[0].next_index
        # Where a rank that is ahead stands, it has to be looked at again.
        ahead = [
            lines.next_index - index for lines in self._ranks.values() if lines.next_index > index
        ]
        count = min([_first(lines).n_left for lines in group] + ahead)
        if count < 2:
            return []
        texts = [_take(lines, count) for lines in group]
        self._note_caught_up(group)
        return [Line(self.stream, _merged([lines.rank for lines in group], texts))]

    def _note_caught_up(self, group: list[_RankLines]) -> None:
        furthest = max(lines.next_index for lines in self._ranks.values())
        for lines in group:
            lines.is_behind = lines.is_behind and lines.next_index < furthest

    def _live_bar(self, now_s: float) -> Iterator[Bar]:
        text, bars = "", dict[int, str]()
        for lines in self._ranks.values():
            is_prompt = _is_prompt(lines)
            is_due = not is_prompt or now_s >= lines.partial_since_s + BEHIND_S
            if not (lines.partial and not lines.items and is_due) or not (part := lines.visible()):
                continue
            if not is_prompt:
                bars[lines.rank] = part
            elif not bars:  # of prompts, which stand and do not count, the lowest rank's
                text = label_lines([lines.rank], part)
                break
        text = tqdm_bars.together(bars) or text
        if text != self._bar:
            self._bar = text
            yield Bar(self.stream, text)


def _is_prompt(lines: _RankLines) -> bool:
    """Whether an unfinished line waits for its rest; a bar does not, it is shown at once."""
    return bool(lines.partial) and "\r" not in lines.partial and not lines.items


def _first(lines: _RankLines) -> _Run:
    run = lines.items[0]
    assert isinstance(run, _Run)  # attachments have been shown by now
    return run


def _take(lines: _RankLines, count: int) -> list[str]:
    """Remove and return so many of the rank's next lines, which came at once."""
    run = _first(lines)
    begin, run.n_taken = run.n_taken, run.n_taken + count
    if not run.n_left:
        lines.items.popleft()
    lines.next_index += count
    return run.lines[begin : run.n_taken]


def _merged(ranks: list[int], texts: list[list[str]]) -> str:
    """Equally many lines of each rank, line by line with their labels.

    Hundreds of thousands come at once, nearly always values of one line each.
    """
    wholes = ["\n".join(lines) for lines in texts]
    has_values = any(
        whole.count("\n") >= len(lines) or MARK in whole
        for whole, lines in zip(wholes, texts, strict=True)
    )
    if all(other == texts[0] for other in texts):
        label = f"[{rank_label(ranks)}] "
        if not has_values:
            return label + f"\n{label}".join(texts[0]) + "\n"
        return "".join([f"{_labelled(label, text)}\n" for text in texts[0]])
    labels: dict[tuple[int, ...], str] = {}
    all_different = "".join(f"[{rank}] %s\n" for rank in ranks)
    return "".join([
        all_different % row
        if len({*row}) == len(row) and not has_values
        else _row(ranks, row, labels)
        for row in zip(*texts, strict=True)
    ])  # fmt: skip


def _row(ranks: Sequence[int], row: Sequence[str], labels: dict[tuple[int, ...], str]) -> str:
    """One line of each rank; `labels` keeps those that have been made."""
    lines = []
    for same, text in alike(zip(ranks, row, strict=True)):
        key = tuple(same)
        if key not in labels:
            labels[key] = f"[{rank_label(same)}] "
        lines.append(f"{_labelled(labels[key], text)}\n")
    return "".join(lines)
