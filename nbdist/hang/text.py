"""Calls, places and waits in words: what the diagnosis has found, as one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbdist.core.failures import ranks_phrase
from nbdist.hang.records import Call, CallLog, FlightRecorderEntry, RankView, SourceLine

# A line of source longer than this is cut.
SOURCE_CHARACTERS = 80
# More different clauses than this are written with less detail, and the rest as one clause.
MANY_CLAUSES = 4

# In these every rank has to give the same shape, kind of number, source and destination.
_ALIKE = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
    }
)
# The text for a rank whose part is missing: for one rank, and for several.
_MISSING = {
    "finished": ("finished without {calling}",) * 2,
    "raised": ("raised {how} before {it}",) * 2,
    "ended": ("ended{how} before {it}",) * 2,
    "gone": ("ended{how} before it or in it",) * 2,
    "absent": ("does not run this cell", "do not run this cell"),
    "stopped": ("is stopped (SIGSTOP)", "are stopped (SIGSTOP)"),
    "busy": ("still runs an earlier cell", "still run an earlier cell"),
    "running": (
        "has not come to {it} yet (still running{at})",
        "have not come to {it} yet (still running{at})",
    ),
    "threaded": (
        "has not come to {it} yet, but may in the background ({how})",
        "have not come to {it} yet, but may in the background ({how})",
    ),
    "waiting": ("waits in {theirs}", "wait in {theirs}"),
    "unknown": (
        "may have called {it} or not: its calls cannot be read",
        "may have called {it} or not: their calls cannot be read",
    ),
    "instead": ("called {theirs} instead",) * 2,
    "unlike": ("called {it} with {theirs}",) * 2,
    "earlier": ("called {theirs} instead of {mine} before",) * 2,
    "raised in": ("raised {how} in {theirs}",) * 2,
    "ended in": ("ended{how} in {theirs}",) * 2,
}
# The text where too many ranks called too different things.
_VAGUE = {"instead": "other collectives", "unlike": "other arguments"}


@dataclass(frozen=True, slots=True)
class CallText:
    """The reported part of a call; C++ issued it somewhere inside its line, or at that line."""

    op: str
    detail: str
    place: SourceLine | None
    is_inside: bool = False

    @property
    def kind(self) -> tuple[str, str]:
        """The fields that have to be equal on all ranks of one call."""
        return self.op, self.detail if self.op in _ALIKE else ""


@dataclass(frozen=True, slots=True)
class WaitText:
    """A rank that waits.

    Attributes:
        key: Equal for ranks that wait in the same call.
        members: The ranks of a group that is not the world; else empty.
        partner: "a send to" or "a recv from" for a transfer: what the other rank owes this one.
        since_s: The host's monotonic clock; a C++ wait may have begun later.
        group: The name of the group.
    """

    rank: int
    key: tuple[str, ...]
    act: CallText
    members: tuple[int, ...]
    partner: str
    since_s: float
    group: str = ""


@dataclass(frozen=True, slots=True)
class BlockingRank:
    """A rank's part in a call for which another rank waits.

    Attributes:
        kind: Why the rank is missing: a key of _MISSING.
        how: The rank's exception, or how its process ended.
        at: Where the rank is now.
        theirs: The call that it made or waits in instead.
        mine: The call that it should have made.
        is_open: The rank may still come, whatever state it is in.
    """

    rank: int
    kind: str
    how: str = ""
    at: SourceLine | None = None
    theirs: CallText | None = None
    mine: CallText | None = None
    is_open: bool = False


def act_of(call: Call) -> CallText:
    """Describe a call that Python recorded."""
    return CallText(call.op, call.detail, call.place)


def act_inside(call: FlightRecorderEntry, place: SourceLine | None) -> CallText:
    """A call that C++ issued."""
    return CallText(call.op, call.detail, place, is_inside=True)


def place_text(place: SourceLine | None, *, with_source: bool = True) -> str:
    """`line 7 of cell [12]: dist.all_reduce(x)`; empty where the place is not known."""
    if place is None:
        return ""
    where = f"cell [{place.cell}]" if place.cell is not None else place.file
    source = place.source.strip().removesuffix(":")
    if len(source) > SOURCE_CHARACTERS:
        source = source[: SOURCE_CHARACTERS - 3] + "..."
    text = f"line {place.line}" + (f" of {where}" if where else "")
    return f"{text}: {source}" if with_source and source else text


def call_signature(act: CallText) -> str:
    """`all_reduce(float32[3])`."""
    return f"{act.op}({act.detail})"


def call_text(act: CallText, *, with_source: bool = True, of: str = "") -> str:
    """`all_reduce(float32[3]) at line 7 of cell [12]: dist.all_reduce(x)`."""
    return f"{call_signature(act)}{of}{place_suffix(act, with_source=with_source)}"


def last_call(log: CallLog) -> str:
    """A dead rank's last act in torch.distributed; empty if it made no call."""
    if not log.calls:
        return ""
    call = log.waiting or log.calls[-1]
    end = {"waiting": "it was still in it", "issued": "not waited for"}
    text = call_text(act_of(call), with_source=False)
    return f"its last call was {text} ({end.get(call.state, 'which was over')})"


def state_of(log: CallLog | None, view: RankView) -> str:
    """`waiting in all_reduce(float32[3]) at line 7 of cell [12]`; empty if it does not wait.

    For a call that C++ issued this is likely, not certain: the recorder sees some never end.
    """
    call = None if log is None or log.state != "running" else log.waiting
    if call is not None:
        return f"waiting in {call_text(act_of(call), with_source=False)}"
    snapshot = view.snapshot
    if view.state != "running" or snapshot is None:
        return ""
    calls: list[FlightRecorderEntry] = [*snapshot.device_calls] if snapshot.is_held else []
    calls += snapshot.newest.values() if snapshot.is_in_torch and snapshot.is_asleep else ()
    for pending in [call for call in calls if call.is_pending]:
        return f"waiting in {call_text(act_inside(pending, snapshot.place), with_source=False)}"
    return ""


def line(waits: Sequence[WaitText], needs: Mapping[int, Sequence[BlockingRank]]) -> str:
    """Write who waits where, and for what, in one line, grouped and by rank."""
    blocks: dict[frozenset[BlockingRank], list[WaitText]] = {}
    for main, causes in _with_causes(waits, needs):
        blocks.setdefault(causes, []).extend(main)
    within = blocks.pop(frozenset(), [])  # they wait for others of this line alone
    if not blocks:
        return "; ".join([*_clauses(within), "they wait for each other"])
    whom = {
        wait.rank: f" for {ranks_phrase(sorted({need.rank for need in needs[wait.rank]}))}"
        for wait in within
    }
    reasons = (text for causes, block in blocks.items() for text in _block(block, causes))
    return "; ".join([*reasons, *_clauses(within, whom)])


def blamed_ranks(
    waits: Sequence[WaitText], needs: Mapping[int, Sequence[BlockingRank]]
) -> tuple[int, ...]:
    """The ranks that the line gives as the reason; in a circle all that are waited for."""
    causes = {need.rank for _, causes_of in _with_causes(waits, needs) for need in causes_of}
    return tuple(sorted(causes or {need.rank for wait in waits for need in needs[wait.rank]}))


def _with_causes(
    waits: Sequence[WaitText], needs: Mapping[int, Sequence[BlockingRank]]
) -> list[tuple[list[WaitText], frozenset[BlockingRank]]]:
    """Group waiting ranks by their call, with the reasons that are reported."""
    calls: dict[tuple[str, ...], list[WaitText]] = {}
    for wait in waits:
        calls.setdefault(wait.key, []).append(wait)
    here = {wait.rank for wait in waits}
    with_causes = []
    for of_call in calls.values():
        # Ranks that do what most of them do; the others are reported as a reason.
        kinds = [wait.act.kind for wait in of_call]
        most = max(kinds, key=kinds.count)  # the lowest rank's where two are as many
        main = [wait for wait in of_call if wait.act.kind == most]
        lacks = (need for wait in main for need in needs[wait.rank])
        causes = frozenset(n for n in lacks if n.kind != "waiting" or n.rank not in here)
        with_causes.append((main, causes))
    return with_causes


def _block(waits: Sequence[WaitText], causes: Iterable[BlockingRank]) -> list[str]:
    """Ranks that wait for the same reasons, then the reasons."""
    it, calling = _it(waits)
    place = waits[0].act.place

    def reasons(*, is_short: bool) -> dict[tuple[str, str], list[int]]:
        ranks_by_text: dict[tuple[str, str], set[int]] = {}
        for need in sorted(causes, key=lambda need: need.rank):
            fields = _fields(need, place, is_short=is_short) | {"it": it, "calling": calling}
            if need.kind == "unlike" and it != "it":
                fields["it"] = "its own"
            singular, plural = (text.format(**fields) for text in _MISSING[need.kind])
            ranks_by_text.setdefault((singular, plural), set()).add(need.rank)
        return {texts: sorted(ranks) for texts, ranks in ranks_by_text.items()}

    ranks_by_text = reasons(is_short=False)
    if len(ranks_by_text) > MANY_CLAUSES:
        ranks_by_text = reasons(is_short=True)
    return _clauses(waits) + _few(
        [(ranks, texts[len(ranks) > 1]) for texts, ranks in ranks_by_text.items()],
        "are needed as well",
    )


def _clauses(waits: Sequence[WaitText], whom: Mapping[int, str] | None = None) -> list[str]:
    """`ranks 0-2 wait in all_reduce(float32[3]) at line 7 of cell [12]: ...`, for each call."""
    groups: dict[tuple[tuple[str, str], tuple[int, ...]], set[str]] = {}
    for wait in waits:
        groups.setdefault((wait.act.kind, wait.members), set()).add(wait.group)

    def text_of(wait: WaitText, *, is_short: bool) -> str:
        act = wait.act
        if is_short:
            return f" in {act.op}{place_suffix(act)}"
        of = f" of {ranks_phrase(wait.members)}" if wait.members else ""
        if len(groups[act.kind, wait.members]) > 1:  # the same call, but not to each other
            of = f" in group {wait.group}{of}"
        return f"{(whom or {}).get(wait.rank, '')} in {call_text(act, of=of)}"

    def by_text(*, is_short: bool) -> dict[str, list[int]]:
        ranks_by_text: dict[str, list[int]] = {}
        for wait in sorted(waits, key=lambda wait: wait.rank):
            ranks_by_text.setdefault(text_of(wait, is_short=is_short), []).append(wait.rank)
        return ranks_by_text

    ranks_by_text = by_text(is_short=False)
    if len(ranks_by_text) > MANY_CLAUSES:
        ranks_by_text = by_text(is_short=True)
    return _few(
        [
            (ranks, f"wait{'' if len(ranks) > 1 else 's'}{text}")
            for text, ranks in ranks_by_text.items()
        ],
        "wait too",
    )


def _few(clauses: Sequence[tuple[list[int], str]], rest_text: str) -> list[str]:
    """The clauses with their ranks, those above MANY_CLAUSES in one."""
    # One more takes no more room than to say so.
    n_shown = MANY_CLAUSES + (len(clauses) == MANY_CLAUSES + 1)
    shown = [f"{ranks_phrase(ranks)} {text}" for ranks, text in clauses[:n_shown]]
    rest = sorted({rank for ranks, _ in clauses[n_shown:] for rank in ranks})
    return [*shown, f"{ranks_phrase(rest)} {rest_text}"] if rest else shown


def _it(waits: Sequence[WaitText]) -> tuple[str, str]:
    """How these calls are named again: as they are, and after "without"."""
    partners = {wait.partner for wait in waits}
    if len(partners) == 1 and waits[0].partner:
        whose = ranks_phrase(sorted({wait.rank for wait in waits}))
        return (f"{waits[0].partner} {whose}",) * 2
    it = "it" if len({wait.key for wait in waits}) == 1 else "them"
    return it, f"calling {it}"


def _fields(need: BlockingRank, near: SourceLine | None, *, is_short: bool) -> dict[str, str]:
    """The values that fill the texts of _MISSING."""
    at = place_text(need.at)
    how = {"raised": need.how or "an error", "raised in": need.how or "an error"}
    how["threaded"] = need.how
    return {
        "how": how.get(need.kind, f" ({need.how})" if need.how else ""),
        "at": f": {at}" if at and not is_short else "",
        "theirs": _theirs(need, near, is_short=is_short),
        "mine": call_signature(need.mine) if need.mine else "",
    }


def _theirs(need: BlockingRank, near: SourceLine | None, *, is_short: bool) -> str:
    act = need.theirs
    if act is None:
        return "it"
    if is_short and need.kind in _VAGUE:
        return _VAGUE[need.kind]
    what = act.detail or "()" if need.kind == "unlike" else call_signature(act)
    return what if is_short else what + place_suffix(act, near, with_source=need.kind == "waiting")


def place_suffix(act: CallText, near: SourceLine | None = None, *, with_source: bool = True) -> str:
    """` at line 7 of cell [12]: ...`, to be put behind; only the line if `near` is as near."""
    place = act.place
    if place is None:
        return ""
    if near is not None and (near.cell, near.file) == (place.cell, place.file):
        where = f"line {place.line}"
    else:
        where = place_text(place, with_source=with_source)
    return f" {'inside' if act.is_inside else 'at'} {where}"
