"""A check asks every rank, and lets them meet only where something differs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nbdist.errors import OptionError
from nbdist.lints.kernel import replicas
from nbdist.lints.replicas import PARAMETER, Look, ModelLook

W = Look(PARAMETER, "w", "all", 7, 12)


class Ranks:
    """Two ranks that answer every call with what the test says."""

    def __init__(self, *replies: Any) -> None:
        self.ranks = (0, 1)
        self.calls: list[tuple[Any, ...]] = []
        self._replies = list(replies)

    def recover_if_needed(self) -> None:
        self.calls.append(("recover",))

    def call_all(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.calls.append((function, *args, options.get("is_collective", False)))
        return self._replies.pop(0)


def looks(*tensors: Look) -> list[tuple[ModelLook, ...]]:
    return [(ModelLook("model", "ddp", (tensor,)),) for tensor in tensors]


def test_equal_ranks_do_not_meet() -> None:
    """One call, after a recovery that an earlier cell has left to be done."""
    session = Ranks(looks(W, W))
    result = replicas.check(session)  # type: ignore[arg-type]

    assert result.is_healthy
    assert session.calls == [("recover",), (replicas.look, False)]


def test_what_differs_is_measured_by_all_ranks() -> None:
    """Collective, with the same list; the size comes with the difference."""
    session = Ranks(looks(W, replace(W, digest=8)), [[0.5], [0.5]])
    result = replicas.check(session)  # type: ignore[arg-type]

    (difference,) = result.differences
    assert (difference.groups, difference.largest) == (((0,), (1,)), 0.5)
    assert session.calls[-1] == (replicas.spread, (replace(difference, largest=None),), True)


def test_every_is_a_number_of_steps() -> None:
    """Below 0 there is none."""
    session = Ranks(None)
    replicas.check_every(session, 10)  # type: ignore[arg-type]

    assert session.calls == [(replicas.set_every, 10, False)]
    with pytest.raises(OptionError, match="use 1 or more steps, or 0 to end it"):
        replicas.check_every(session, -1)  # type: ignore[arg-type]
