"""Text to ranks and back: `0,2-3` names three ranks, and three ranks print as `0,2-3`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nbdist.errors import OptionError

# Five digits: a range that is typed wrongly is refused before it is expanded into memory.
_SPAN = re.compile(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?")
_BRACKETS = re.compile(r"\s*\[(.*)\]\s*")


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks that the text names, ascending and each once.

    `0`, `0,2-3`, `[0,2-3]` and `all` are understood, with or without spaces:

    >>> parse_ranks("[0, 2-3]", world_size=4)
    (0, 2, 3)

    Raises:
        OptionError: If the text has another form, or names a rank that does not run.
    """
    if is_all(text):
        return tuple(range(world_size))
    ranks = set(parse_numbers(text, "ranks"))
    missing = [rank for rank in ranks if rank >= world_size]
    if missing:
        which = "rank {} does" if len(missing) == 1 else "ranks {} do"
        run = "1 rank runs" if world_size == 1 else f"{world_size} ranks run"
        raise OptionError(
            f"{which.format(rank_label(missing))} not exist: {run}, "
            f"{rank_label(range(world_size))}."
        )
    return tuple(sorted(ranks))


def rank_label(ranks: Iterable[int]) -> str:
    """Return the ranks as the shortest text that `parse_ranks` reads back.

    >>> rank_label((3, 0, 2))
    '0,2-3'
    """
    spans: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def is_all(text: str) -> bool:
    """Return whether the text asks for everything: `all` or `[all]`, in any case."""
    return _without_brackets(text).lower() == "all"


def parse_numbers(text: str, what: str) -> tuple[int, ...]:
    """Return the numbers that `0,2-3` names, in the order typed, repeated ones too.

    Brackets may stand around them. The message says `what` they are: `ranks`, `GPUs`.

    Raises:
        OptionError: If the text is empty or has another form, or a range runs backwards.
    """
    numbers: list[int] = []
    for part in _without_brackets(text).split(","):
        match = _SPAN.fullmatch(part)
        if not match:
            raise OptionError(f"{text!r} does not name {what}. Write them as 0, 0,2-3 or all.")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise OptionError(f"{first}-{last} in {text!r} runs backwards. Write {last}-{first}.")
        numbers += range(first, last + 1)
    return tuple(numbers)


def pack_ranks(ranks: Sequence[int]) -> bytes:
    """Return the ranks in their order, as runs of equal steps.

    Thousands of ranks fit into little space where they are regular, as a mesh's are:

    >>> pack_ranks((0, 2, 4, 6, 9))
    b'0:8:2,9:10:1'
    """
    runs: list[str] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and step > 0 and ranks[end] - ranks[end - 1] == step:
            end += 1
        runs.append(f"{ranks[at]}:{ranks[end - 1] + 1}:{max(step, 1)}")
        at = end
    return ",".join(runs).encode()


def unpack_ranks(packed: bytes) -> tuple[int, ...]:
    """Return the ranks that `pack_ranks` has packed."""
    runs = [run.split(":") for run in packed.decode().split(",") if run]
    return tuple(rank for run in runs for rank in range(*map(int, run)))


def _without_brackets(text: str) -> str:
    match = _BRACKETS.fullmatch(text)
    return (match[1] if match else text).strip()
