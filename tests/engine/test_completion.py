"""Looking at a rank's variables without running anything of theirs."""

import types
from typing import Any

import pytest
import torch

from nbdist.engine import completion


class Loud:
    """Every way of asking it runs its code, which must not happen."""

    kind = "a class's own"

    def __init__(self) -> None:
        self.value = 3
        self.asked: list[str] = []

    @property
    def computed(self) -> int:
        """Runs."""
        self.asked.append("computed")
        return 1

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise AttributeError(name)

    def __dir__(self) -> list[str]:
        self.asked.append("__dir__")
        return []


class Slots:
    """No __dict__."""

    __slots__ = ("only",)


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The user's variables of a shell; `In` is IPython's own."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    names: list[str] = []
    variables = {"model": model, "loud": Loud(), "t": torch.ones(2, 3), "np": types, "In": names,
                 "slots": Slots(), "f": len}  # fmt: skip
    shell = types.SimpleNamespace(user_ns=variables, user_ns_hidden={"In": names})
    monkeypatch.setattr(completion, "get_ipython", lambda: shell)
    return variables


def test_the_users_variables_with_their_types(space: dict[str, Any]) -> None:
    """Not IPython's own, unless the user has taken the name."""
    names = completion.attributes(())

    assert names == {"model": "instance", "loud": "instance", "t": "instance", "np": "module",
                     "slots": "instance", "f": "function"}  # fmt: skip
    space["In"] = 3

    assert "In" in completion.attributes(())


def test_attributes_of_objects_modules_and_torch_modules(space: dict[str, Any]) -> None:
    """Also below a torch module's children, which are in no __dict__ of their names."""
    assert {"0", "training", "forward"} <= completion.attributes(("model",)).keys()
    assert {"weight", "bias", "in_features"} <= completion.attributes(("model", "0")).keys()
    assert {"shape", "grad"} <= completion.attributes(("t",)).keys()
    assert completion.attributes(("np",))["SimpleNamespace"] == "class"
    assert "only" in completion.attributes(("slots",))
    assert completion.attributes(("nothing", "x")) == {}
    assert completion.attributes(("len",))["__name__"] == "instance"


def test_nothing_of_the_users_runs(space: dict[str, Any]) -> None:
    """No property, no __getattr__, no __dir__: what lies behind a property is not known."""
    loud = space["loud"]

    assert {"value", "kind", "computed"} <= completion.attributes(("loud",)).keys()
    assert completion.attributes(("loud", "computed")) == {}
    assert completion.attributes(("loud", "missing")) == {}
    assert completion.glance(("loud",))["found"]
    assert loud.asked == []


def test_a_glance_tells_type_shape_and_documentation(space: dict[str, Any]) -> None:
    """No value: to show one may wait for other ranks."""
    tensor = completion.glance(("t",))["data"]["text/plain"]

    assert tensor.startswith("Type: Tensor\nShape: (2, 3), torch.float32, cpu")
    assert "Return the number of items" in completion.glance(("f",))["data"]["text/plain"]
    assert "Every way of asking it" in completion.glance(("loud",))["data"]["text/plain"]
    assert not completion.glance(("nothing",))["found"]
