"""What holds an old model or parameter: named where a person can change it, and only there."""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nbdist.parallel.reshard import rebind
from nbdist.parallel.tp import hooks
from nbdist.rpc.rank import namespace


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The user's variables: none at first."""
    variables: dict[str, Any] = {}
    monkeypatch.setattr(namespace, "everything", lambda: variables)
    return variables


def test_partials_belong_to_who_wrote_the_function() -> None:
    """tp's hooks are partials of its functions, and no hooks of the user's."""
    assert rebind.is_internal(functools.partial(hooks._as_placed, ()))
    assert not rebind.is_internal(functools.partial(lambda gradient: gradient))


def test_a_bound_method_is_named_by_who_holds_it(user: dict[str, Any]) -> None:
    """A variable with the old model's forward is named; a frame of a failed cell is not."""

    class Holder:
        pass

    old, new = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    in_a_frame = old.forward  # as in the frames of an error that is shown
    pair = [rebind.Replacement(old, new, "model")]
    assert rebind.rebind(pair).stale == []

    user["call"] = user["trainer"] = None
    user["call"] = old.forward
    user["trainer"] = Holder()
    user["trainer"].calls = [in_a_frame]
    report = rebind.rebind([rebind.Replacement(old, new, "model")])

    assert sorted(report.stale) == [
        "call.__self__ (model)",
        "trainer.calls[0].__self__ (model)",
    ]


def test_what_a_failed_cell_was_doing_is_dropped_not_named(
    user: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator in a frame of the last traceback: nobody can assign it again."""

    def weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
        yield from model.parameters()

    def fail(model: torch.nn.Module) -> None:
        iterator = weights(model)
        next(iterator)
        next(iterator).item()

    old, new = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    try:
        fail(old)
    except RuntimeError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    pairs = [rebind.Replacement(old, new, "model")]
    pairs += [rebind.Replacement(p, p, "weight") for p in old.parameters()]
    user["held"] = Holder(list(old.parameters())[:1])
    del old

    assert rebind.rebind(pairs).stale == ["held.items[0] (weight)"]


class Holder:
    def __init__(self, items: list[torch.Tensor]) -> None:
        self.items = tuple(items)
