"""Growth of memory between two snapshots, as a table."""

from __future__ import annotations

from collections.abc import Iterator

from nbdist.core import units
from nbdist.core.failures import ranks_phrase
from nbdist.core.ranks import rank_label
from nbdist.core.view import View, table
from nbdist.memory.call_site import frame_text
from nbdist.memory.diff import Amount, BlockChange, SnapshotDiff
from nbdist.memory.snapshot import CATEGORIES
from nbdist.recording.view.iframe import clip

MOST_ROWS = 20
_MOST_NAME = 40
_NOTHING = "-"


def growth_view(growth: SnapshotDiff, since: str) -> View:
    """View of %dist_memory --since; `since` as it was typed."""
    before = list(_totals(growth, since))
    after = [*_rest(growth), *growth.notes]
    if not growth.grown:
        return View("\n".join([*before, *after]))
    head = ["grown", "before", "after", "blocks", "what", "name", "line", "ranks"]
    rows = [_cells(change) for change in growth.grown[:MOST_ROWS]]
    return table(head, rows, before=before, after=after)


def _cells(change: BlockChange) -> list[str]:
    kind = change.kind
    size = f" of {units.size(kind.size_bytes)}" if kind.size_bytes else ""
    return [
        f"+{units.size(change.grown_bytes)}",
        units.size(change.before.size_bytes),
        units.size(change.after.size_bytes),
        f"{change.before.count} -> {change.after.count}{size}",
        CATEGORIES[kind.category],
        clip(kind.name, _MOST_NAME) if kind.name else _NOTHING,
        frame_text(kind.lines[0]) if kind.lines else _NOTHING,
        rank_label(sorted(change.ranks)),
    ]


def _totals(growth: SnapshotDiff, since: str) -> Iterator[str]:
    """A line for ranks that are alike."""
    alike: dict[tuple[Amount, Amount], list[int]] = {}
    for rank, amounts in growth.ranks.items():
        alike.setdefault(amounts, []).append(rank)
    for (before, after), ranks in alike.items():
        change = after.size_bytes - before.size_bytes
        change_text = f"{'+' if change >= 0 else '-'}{units.size(abs(change))}"
        yield (
            f"{ranks_phrase(ranks)} since {since}: {change_text}, from "
            f"{units.size(before.size_bytes)} to {units.size(after.size_bytes)} in use"
        )


def _rest(growth: SnapshotDiff) -> Iterator[str]:
    if not growth.grown and growth.ranks:
        yield "nothing has grown"
    remaining = growth.grown[MOST_ROWS:]
    if remaining:
        total = sum(change.grown_bytes for change in remaining)
        yield f"{len(remaining)} more have grown: +{units.size(total)}"
    if growth.shrunk:
        total = -sum(change.grown_bytes for change in growth.shrunk)
        kinds = dict.fromkeys(CATEGORIES[change.kind.category] for change in growth.shrunk)
        yield f"shrunk or gone: -{units.size(total)} ({', '.join(kinds)})"
