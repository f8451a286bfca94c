"""A mesh on hosts: which axes lie within one, which cross to another, and what does not cross.

Ranks follow each other on a host (core.topology.plan; until a lost one comes back on another
host), and the last axis of a mesh is the innermost (strategy.choice.AXES). So tp lies within a
host where its degree divides the ranks of every host, and there is nothing to place by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nbdist.core.ranks import rank_label
from nbdist.core.topology import HostRanks
from nbdist.core.units import shown_host
from nbdist.errors import OptionError
from nbdist.strategy.choice import AXES, Strategy, label, rows_of
from nbdist.strategy.degrees import divisors, ranks
from nbdist.strategy.options import listed

# Axes whose ranks wait for each other in every block -> what they share.
_WITHIN = {"tp": "share each layer", "cp": "share each sequence"}
# Groups and hosts that a sentence names.
_MOST = 3


@dataclass(frozen=True, slots=True)
class AxisPlace:
    """Groups along one axis of a mesh, and the hosts that they cross.

    Attributes:
        axis: Of choice.AXES.
        groups: All, each with its ranks ascending.
        crossing: Those of them that have ranks on several hosts.
        hosts: The names of the hosts that these are on, in the order of their ranks.
    """

    axis: str
    groups: tuple[tuple[int, ...], ...]
    crossing: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]

    @property
    def degree(self) -> int:
        """How many ranks each group has."""
        return len(self.groups[0])


def ranks_of_host(world_size: int, hosts: int) -> int:
    """How many ranks each of so many hosts has.

    Raises:
        OptionError: They cannot be shared out evenly; with the numbers of hosts that can.
    """
    if world_size % hosts:
        fitting = ", ".join(map(str, divisors(world_size)))
        raise OptionError(
            f"{world_size} ranks cannot be spread evenly over {hosts} hosts. Use --nodes {fitting}."
        )
    return world_size // hosts


def places(choice: Strategy, ranks_on: Sequence[HostRanks]) -> tuple[AxisPlace, ...]:
    """Every axis on which more than one rank lies, outermost first; none of `single`."""
    host_of = _host_of(ranks_on)
    axes = []
    for axis in (axis for axis in AXES if getattr(choice.degrees, axis) > 1):
        groups = sorted({choice.degrees.peers(r, axis) for r in range(choice.degrees.product)})
        crossing = tuple(group for group in groups if len({host_of[r] for r in group}) > 1)
        names = dict.fromkeys(host_of[rank] for rank in sorted(set().union(*crossing)))
        axes.append(AxisPlace(axis, tuple(groups), crossing, tuple(names)))
    return tuple(axes)


def within(ranks_on: Sequence[HostRanks]) -> int:
    """The largest degree of an innermost axis whose groups all lie within a host; 0 for one host.

    So do all its divisors. 1 where the hosts have nothing in common, as 3 ranks and 1.
    """
    if len(ranks_on) < 2:
        return 0
    sizes = [len(host.ranks) for host in ranks_on]
    host_of = _host_of(ranks_on)

    def fits(degree: int) -> bool:
        return all(host_of[rank] == host_of[rank - rank % degree] for rank in host_of)

    return max(filter(fits, divisors(math.gcd(*sizes))))


def _host_of(ranks_on: Sequence[HostRanks]) -> dict[int, str]:
    return {rank: host.name for host in ranks_on for rank in host.ranks}


def copies(ranks_on: Sequence[HostRanks], tp: int) -> int:
    """Copies of the model under --shard hybrid on several hosts: one on each.

    Raises:
        OptionError: If the hosts are uneven, or tp leaves a copy nothing to split within a host.
    """
    sizes = {len(host.ranks) for host in ranks_on}
    per_host = min(sizes)
    why = ""
    if len(sizes) > 1:
        why = f"there are {_sizes(ranks_on)}"
    elif within(ranks_on) != per_host:
        why = "ranks of a host do not follow each other, since some came back on another one"
    elif per_host % tp:
        why = f"tp {tp} does not divide the {ranks(per_host)} of one"
    elif per_host == tp:
        used = f"tp {tp} takes all {ranks(tp)} of one" if tp > 1 else "each has 1 rank"
        why = f"{used}, and nothing is left to split"
    if why:
        raise OptionError(
            f"--shard hybrid keeps a copy of the model on each host: {why}. Use --shard full, "
            "start other ranks, or say with --replicas how many copies, whatever hosts they are on."
        )
    return len(ranks_on)


def notes(choice: Strategy, ranks_on: Sequence[HostRanks]) -> tuple[str, ...]:
    """Notes on axes that cross hosts and need not, a sentence each; none on one host."""
    if len(ranks_on) < 2:
        return ()
    return tuple(
        sentence
        for place in places(choice, ranks_on)
        for sentence in _note(choice, place, ranks_on)
    )


def _note(choice: Strategy, place: AxisPlace, ranks_on: Sequence[HostRanks]) -> Iterator[str]:
    if not place.crossing:
        return
    names = _few([shown_host(name) for name in place.hosts], "host")
    if place.axis in _WITHIN:
        named = "ranks " + _few([rank_label(group) for group in place.crossing], "group")
        fitting = divisors(within(ranks_on))[1:]
        instead = (
            f"--{place.axis} {listed(map(str, fitting), 'or')} stays within a host"
            if fitting
            else f"no degree does, for there are {_sizes(ranks_on)}: start more, as many on each"
        )
        yield (
            f"{place.axis} crosses hosts {names}: {named} {_WITHIN[place.axis]} over the network, "
            f"and every block waits for it; {instead}."
        )
    elif place.axis == "dp_shard" and {row.name for row in rows_of(choice)} & {"fsdp", "fsdp1"}:
        yield from _note_shards(choice, names, ranks_on)


def _note_shards(choice: Strategy, names: str, ranks_on: Sequence[HostRanks]) -> Iterator[str]:
    """Note how FSDP could gather within a host."""
    if choice.degrees.pp > 1:
        return
    try:
        count = copies(ranks_on, choice.degrees.tp)
    except OptionError:
        return
    yield (
        f"{label(choice)} gathers parameters over the network between {names}; --shard hybrid "
        f"gathers them within a host, with {count} copies of the model, one on each."
    )


def _sizes(ranks_on: Sequence[HostRanks]) -> str:
    """`3 ranks on n1, 1 rank on n2 and n3`."""
    names: dict[int, list[str]] = {}
    for host in ranks_on:
        names.setdefault(len(host.ranks), []).append(shown_host(host.name))
    return ", ".join(f"{ranks(size)} on {_few(those, 'host')}" for size, those in names.items())


def _few(texts: Sequence[str], what: str) -> str:
    """The first of them, and how many more there are."""
    more = len(texts) - _MOST
    rest = [f"{more} more {what}{'s' if more > 1 else ''}"] if more > 0 else []
    return listed([*texts[:_MOST], *rest])
