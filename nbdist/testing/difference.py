"""How the outputs of a cell differ from those stored, said rank by rank."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from nbdist.core.failures import ranks_phrase
from nbdist.core.ranks import parse_numbers
from nbdist.errors import OptionError

MOST_LINES = 10
MOST_CHANGES = 5
MOST_CHARACTERS = 160
# How a cell's merged lines begin; see cells/line_merger.py.
_LABEL = re.compile(r"\[([0-9][0-9,-]*)\] ")
_NOTEBOOK = -1
_KINDS = {
    "stdout": "printed",
    "stderr": "wrote to stderr",
    "text/plain": "showed",
    "ename": "raised",
    "evalue": "raised with the message",
}
Texts = Mapping[str, Sequence[str]]
# Of one rank: (its line, what is stored there, what it printed).
Change = tuple[int, tuple[str, ...], tuple[str, ...]]


def difference(stored: Texts, now: Texts) -> list[str]:
    """Lines that say which rank printed what in place of what; none where nothing differs.

    Texts are lists by kind: "stdout", "text/plain", "evalue". Lines with a label (`[0-1] text`)
    belong to these ranks, the others to the notebook. Ranks with equal changes are told together.
    HTML is told only where nothing else differs: it shows what the text has.
    """
    kinds = sorted({*stored, *now}, key=lambda kind: (kind == "text/html", kind))
    lines: list[str] = []
    for kind in kinds:
        if kind != "text/html" or not lines:
            lines += _of_kind(kind, stored.get(kind, ()), now.get(kind, ()))
    return lines


def _of_kind(kind: str, stored: Sequence[str], now: Sequence[str]) -> list[str]:
    before, after = "\n".join(stored).splitlines(), "\n".join(now).splitlines()
    verb = _KINDS.get(kind, f"showed as {kind}")
    if before == after:
        what = f"{verb} the same, in {len(now)} outputs in place of {len(stored)}"
        return [] if len(stored) == len(now) else [f"the notebook {what}"]
    by_source = _changes_by_source(before, after)
    if not by_source:
        at = next(n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
        return [
            f"each rank {verb} the same, in another order: the first line that differs is {at + 1}",
            *_pair((before[at],), (after[at],)),
        ]
    sources_by_changes: dict[tuple[Change, ...], list[int]] = defaultdict(list)
    for source, changes in sorted(by_source.items()):
        sources_by_changes[changes].append(source)
    return [
        line
        for changes, sources in sources_by_changes.items()
        for line in _said(sources, verb, changes)
    ]


def _changes_by_source(
    before: Sequence[str], after: Sequence[str]
) -> dict[int, tuple[Change, ...]]:
    """The changes of each rank, and of the notebook, that has any."""
    stored, now = _by_source(before), _by_source(after)
    changes = {at: tuple(_changes(stored[at], now[at])) for at in {*stored, *now}}
    return {source: those for source, those in changes.items() if those}


def _by_source(lines: Sequence[str]) -> defaultdict[int, list[str]]:
    """The lines of each rank without their label, and the notebook's own."""
    by_source: defaultdict[int, list[str]] = defaultdict(list)
    sources, width = [_NOTEBOOK], 0
    for line in lines:
        ranks = _ranks(line)
        if ranks:
            sources, width = ranks, line.index("] ") + 2
        elif not (width and line.startswith(" " * width)):  # a value's next line is indented
            sources, width = [_NOTEBOOK], 0
        for source in sources:
            by_source[source].append(line[width:])
    return by_source


def _ranks(line: str) -> list[int]:
    label = _LABEL.match(line)
    try:
        return [] if label is None else [*parse_numbers(label[1], "ranks")]
    except OptionError:  # a line of the user's own that looks like one: [3-1]
        return []


def _changes(before: Sequence[str], after: Sequence[str]) -> Iterator[Change]:
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for tag, first, last, now_first, now_last in matcher.get_opcodes():
        if tag != "equal":
            yield first + 1, tuple(before[first:last]), tuple(after[now_first:now_last])


def _said(sources: Sequence[int], verb: str, changes: Sequence[Change]) -> Iterator[str]:
    ranks = [source for source in sources if source != _NOTEBOOK]
    names = ["the notebook"] if _NOTEBOOK in sources else []
    who = " and ".join([*names, ranks_phrase(ranks)] if ranks else names)
    for number, stored, now in changes[:MOST_CHANGES]:
        yield f"{who} {verb} (line {number}):"
        yield from _pair(stored, now)
    if len(changes) > MOST_CHANGES:
        yield f"and {len(changes) - MOST_CHANGES} more in what {who} {verb}"


def _pair(stored: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    at = 0
    if len(stored) == len(now) == 1:
        at = _first_apart(stored[0], now[0])
    yield from _block("  expected: ", stored, at)
    yield from _block("  got:      ", now, at)


def _block(title: str, lines: Sequence[str], at: int) -> Iterator[str]:
    for number, line in enumerate(lines[:MOST_LINES] or ("nothing",)):
        yield f"{title if number == 0 else ' ' * len(title)}{_cut(line, at)}".rstrip()
    if len(lines) > MOST_LINES:
        yield f"{' ' * len(title)}... and {len(lines) - MOST_LINES} more lines"


def _first_apart(stored: str, now: str) -> int:
    pairs = zip(stored, now, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(stored), len(now)))


def _cut(line: str, at: int) -> str:
    """A long line around the character where it differs."""
    if len(line) <= MOST_CHARACTERS:
        return line
    begin = max(0, min(at - MOST_CHARACTERS // 3, len(line) - MOST_CHARACTERS))
    end = begin + MOST_CHARACTERS
    return f"{'...' * (begin > 0)}{line[begin:end]}{'...' * (end < len(line))}"
