"""A strategy as it was typed, and what that means for certain ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.core import strategy
from nbdist.core.strategy import Choice
from nbdist.core.topology import Topology


@dataclass(frozen=True, slots=True)
class Asked:
    """A strategy as it was typed, before it is known how many ranks there will be.

    Attributes:
        name: None where the degrees say it.
        given: Degrees and options by name, in order of the names.
    """

    name: str | None
    given: tuple[tuple[str, object], ...] = ()


def asked(name: str | None, given: Mapping[str, object]) -> Asked | None:
    """What was typed, or None for nothing."""
    typed = [(w, value) for w, value in given.items() if value is not None and value is not False]
    if name is None and not typed:
        return None
    return Asked(name, tuple(sorted(typed)))


def check(one: Asked, world_size: int) -> None:
    """Refuse what cannot be had with so many ranks, wherever they will be.

    Raises:
        OptionError: See core.strategy.choose.
    """
    strategy.choose(one.name, dict(one.given), world_size)


def chosen(one: Asked, topology: Topology) -> Choice:
    """What was typed, for these ranks.

    Raises:
        OptionError: See core.strategy.choose.
    """
    return strategy.choose(
        one.name,
        dict(one.given),
        topology.world_size,
        device_type=topology.ranks[0].device.split(":")[0],
        backend=topology.backend,
    )
