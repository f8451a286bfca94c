"""What a recovery did on each rank, and what a person has to know of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbdist.core.ranks import rank_label

# All living ranks have to come to a recovery by then, and then to be connected as soon.
DEADLINE_S = 15.0
# In a checksum's place: each rank holds another part, so there is nothing to compare.
SHARDED = "sharded"
# Between a checksum's two halves, parameters and buffers.
HALVES = "/"


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `groups.recover` did on one rank.

    Attributes:
        generation: How often the groups have been recovered now.
        renewed: torch's names of the groups that work again.
        skipped: Name -> global ranks of the groups that stay broken.
        models: Names of the DDP and FSDP2 models that were reset.
        gradients: Model -> how many of its parameters had a gradient that was cleared.
        checksums: Model -> checksum of its parameters, HALVES, checksum of its buffers;
            SHARDED for a model of which each rank holds a part.
    """

    generation: int
    renewed: tuple[str, ...]
    skipped: Mapping[str, tuple[int, ...]]
    models: tuple[str, ...]
    gradients: Mapping[str, int]
    checksums: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MadeGroup:
    """A process group that the user's code made, as one rank knows it.

    Attributes:
        name: torch's name.
        ranks: Global ranks, in the group's order.
        backend: As torch was asked for it: "gloo", "cpu:gloo,cuda:nccl".
        timeout_s: Of its collectives.
        description: The user's; torch says "undefined" where there is none.
        tag: torch's tag; empty mostly.
        count: torch's count of named groups once this one was made.
        is_member: Whether this rank is in it.
        is_open: Whether it still exists here; True where this rank is no member.
    """

    name: str
    ranks: tuple[int, ...]
    backend: str
    timeout_s: float
    description: str
    tag: str
    count: int
    is_member: bool
    is_open: bool


def merge_made(lists: Iterable[Sequence[MadeGroup]]) -> tuple[MadeGroup, ...]:
    """All groups that the given ranks know of, each once, in an order that fits every list.

    What a member says of a group wins over what others say: only members know whether it
    still exists.
    """
    merged: list[MadeGroup] = []
    for made in lists:
        place = 0
        for group in made:
            index = next((i for i, one in enumerate(merged) if one.name == group.name), None)
            if index is None:
                merged.insert(place, group)
                place += 1
                continue
            if group.is_member and not merged[index].is_member:
                merged[index] = group
            place = index + 1
    return tuple(merged)


def notes(results: Mapping[int, Recovered]) -> tuple[str, ...]:
    """What a person has to know after a recovery, one plain line each, most important last.

    Args:
        results: Rank -> what it answered.
    """
    return (
        *_broken(results),
        *_cleared(results),
        *apart({rank: one.checksums for rank, one in results.items()}),
    )


def _cleared(results: Mapping[int, Recovered]) -> list[str]:
    names = {n: None for one in results.values() for n, count in one.gradients.items() if count}
    if not names:
        return []
    return [f"gradients of {', '.join(names)} were cleared: they may be half made"]


def apart(checksums: Mapping[int, Mapping[str, str]]) -> tuple[str, ...]:
    """A line per model whose parameters differ between ranks.

    Args:
        checksums: Rank -> model -> checksum, as in Recovered.
    """
    lines = []
    for name in dict.fromkeys(n for one in checksums.values() for n in one):
        ranks_of: dict[str, list[int]] = {}
        for rank, own in sorted(checksums.items()):
            if (text := own.get(name, SHARDED)) != SHARDED:
                # Buffers such as running means differ between ranks in a sound run too.
                ranks_of.setdefault(text.split(HALVES)[0], []).append(rank)
        if len(ranks_of) > 1:
            who = " and ".join(_ranks(ranks) for ranks in ranks_of.values())
            lines.append(
                f"{name}: the parameters of {who} differ (one has stepped, the other has not): "
                "%dist_sync_model makes them equal"
            )
    return tuple(lines)


def _broken(results: Mapping[int, Recovered]) -> list[str]:
    """A line per group that stays broken, with the ranks that it lacks."""
    skipped = {n: ranks for one in results.values() for n, ranks in one.skipped.items()}
    lines = []
    for name, ranks in skipped.items():
        missing = [rank for rank in ranks if rank not in results]
        if not missing:
            lines.append(f"group {name} (ranks {rank_label(ranks)}) could not be recovered")
            continue
        lines.append(
            f"group {name} (ranks {rank_label(ranks)}) stays broken until {_ranks(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} back: %dist_restart {rank_label(missing)}"
        )
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_label(ranks)}"
