"""The result of a recovery on each rank, and the notes on it for a person."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbdist.core.failures import ranks_are, ranks_phrase

# All living ranks have to come to a recovery by then, and then to be connected as soon.
DEADLINE_S = 15.0
# In a checksum's place: each rank holds another part, so there is nothing to compare.
SHARDED = "sharded"
# Between a checksum's two halves, parameters and buffers.
HALVES = "/"
# More groups than these are counted: a mesh of many ranks has dozens.
SHOWN_GROUPS = 4


@dataclass(frozen=True, slots=True)
class RecoveryResult:
    """The result of `process_groups.recover` on one rank.

    Attributes:
        skipped: torch's name -> global ranks of the groups that stay broken, as a member is dead.
        gradients: DDP or FSDP2 model that was reset -> how many of its parameters had a gradient
            that was cleared.
        checksums: Model -> checksum of its parameters, HALVES, checksum of its buffers;
            SHARDED for a model of which each rank holds a part.
        closed: (global ranks, the ranks that lack it) of each group that stays broken because this
            rank has it and another member does not.
    """

    skipped: Mapping[str, tuple[int, ...]]
    gradients: Mapping[str, int]
    checksums: Mapping[str, str]
    closed: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A process group that the user's code made, as one rank knows it.

    Attributes:
        name: torch's name.
        ranks: Global ranks, in the group's order.
        backend: The backend that torch was asked for: "gloo", "cpu:gloo,cuda:nccl".
        timeout_s: The limit of a collective in the group.
        description: The user's description; torch says "undefined" where there is none.
        tag: torch's tag; empty mostly.
        count: torch's count of named groups once this one was made.
        is_member: Whether this rank is in the group.
        is_open: Whether the group still exists here; True where this rank is no member.
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


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """A device mesh that a variable of the user's holds, as one rank knows it.

    Attributes:
        device_type: "cpu" or "cuda".
        shape: Ranks along each dimension.
        ranks: Global ranks, the last dimension's beside each other.
        dim_names: Names of the dimensions, if they have any.
        groups: torch's name of this rank's group of each dimension; empty on a rank outside.
        root: The mesh that this one is a part of; None for a whole mesh.
    """

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dim_names: tuple[str, ...] | None
    groups: tuple[str, ...]
    root: MeshSpec | None


def merge_groups(lists: Iterable[Sequence[GroupSpec]]) -> tuple[GroupSpec, ...]:
    """All groups that the given ranks know of, each once, in an order that fits every list.

    A member's record of a group wins over the others': only members know whether the group
    still exists, and it does where all of them have it.
    """
    merged: list[GroupSpec] = []
    for groups in lists:
        place = 0
        for group in groups:
            names = [other.name for other in merged]
            if group.name in names:
                place = names.index(group.name)
                before = merged[place]
                if group.is_member and (not before.is_member or before.is_open):
                    merged[place] = group
            else:
                merged.insert(place, group)
            place += 1
    return tuple(merged)


def notes(
    results: Mapping[int, RecoveryResult], restart_verb: Callable[[Sequence[int]], str]
) -> tuple[str, ...]:
    """Lines that a person has to read after a recovery, the most important last.

    `restart_verb` is the line that brings ranks back.
    """
    groups = {
        tuple(sorted(ranks)) for result in results.values() for ranks in result.skipped.values()
    }
    everybody = {*results, *(rank for ranks in groups for rank in ranks)}
    ordered = sorted(groups, key=lambda ranks: (-len(ranks), ranks))
    lacking = [ranks for ranks in ordered if not set(ranks) <= set(results)]
    failed = [ranks for ranks in ordered if ranks not in lacking]
    lines = [f"{_groups(failed, everybody)} could not be recovered"] if failed else []
    if lacking:
        missing = sorted({rank for ranks in lacking for rank in ranks}.difference(results))
        lines.append(
            f"{_groups(lacking, everybody)} {'stays' if len(lacking) == 1 else 'stay'} broken "
            f"until {ranks_are(missing)} back: {restart_verb(missing)}"
        )
    lines += _closed_lines(results)
    models = {
        n: None for result in results.values() for n, count in result.gradients.items() if count
    }
    if models:
        lines.append(f"gradients of {', '.join(models)} were cleared: they may be incomplete")
    checksums = {rank: result.checksums for rank, result in results.items()}
    return (*lines, *parameter_differences(checksums))


def _closed_lines(results: Mapping[int, RecoveryResult]) -> list[str]:
    """One for the groups of the same ranks that the same ones of them have."""
    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank, result in sorted(results.items()):
        for key in dict.fromkeys(result.closed):
            holders.setdefault(key, []).append(rank)
    return [
        f"a group of {ranks_phrase(sorted(members))} stays broken: {ranks_phrase(missing)} "
        f"{'have' if len(missing) > 1 else 'has'} destroyed it or not made it, and "
        f"{ranks_phrase(ranks)} still {'have' if len(ranks) > 1 else 'has'} it. Destroy it there "
        "too (dist.destroy_process_group), then make a new one on all ranks"
        for (members, missing), ranks in holders.items()
    ]


def parameter_differences(checksums: Mapping[int, Mapping[str, str]]) -> tuple[str, ...]:
    """A line per model whose parameters differ; checksums are by rank and model."""
    lines = []
    for name in dict.fromkeys(n for by_model in checksums.values() for n in by_model):
        ranks_of: dict[str, list[int]] = {}
        for rank, by_model in sorted(checksums.items()):
            if (text := by_model.get(name, SHARDED)) != SHARDED:
                # Buffers such as running means differ between ranks in a sound run too.
                ranks_of.setdefault(text.split(HALVES)[0], []).append(rank)
        if len(ranks_of) > 1:
            who = " and ".join(ranks_phrase(ranks) for ranks in ranks_of.values())
            lines.append(
                f"{name}: the parameters of {who} differ (one has stepped, the other has not): "
                "%dist_sync_model makes them equal"
            )
    return tuple(lines)


def _groups(groups: Sequence[tuple[int, ...]], everybody: Collection[int]) -> str:
    """`the group of all ranks`, `the groups of ranks 0-1 and of ranks 1,3`: torch has no names."""
    names = [
        "of all ranks" if set(ranks) == set(everybody) else f"of {ranks_phrase(ranks)}"
        for ranks in groups[:SHOWN_GROUPS]
    ]
    if len(groups) > SHOWN_GROUPS:
        names.append(f"{len(groups) - SHOWN_GROUPS} more")
    listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
    return f"the group{'s' if len(groups) > 1 else ''} {listed}"
