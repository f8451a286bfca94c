"""What Accelerate's PartialState is told of a rank's device and backend."""

import sys
from types import ModuleType
from typing import Any

import pytest

from nbdist.engine import partial_state


@pytest.mark.parametrize(
    ("device_type", "backend", "given", "taken"),
    [
        ("cpu", "gloo", {}, (True, {})),
        ("cuda", "gloo", {}, (False, {"backend": "gloo"})),  # ranks share the GPU
        ("cuda", "nccl", {}, (False, {})),
        ("cpu", "gloo", {"cpu": False, "timeout": 3}, (False, {"timeout": 3})),
        ("cuda", "gloo", {"backend": "ucc"}, (False, {"backend": "ucc"})),
        ("cuda", "gloo", {"backend": None}, (False, {"backend": "gloo"})),  # the Trainer's
    ],
)
def test_defaults_are_those_of_the_rank(
    monkeypatch: pytest.MonkeyPatch,
    device_type: str,
    backend: str,
    given: dict[str, Any],
    taken: tuple[bool, dict[str, Any]],
) -> None:
    """Accelerate would take a visible GPU for one with NCCL; what the caller says counts."""

    class PartialState:
        def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
            self.taken = cpu, kwargs

    module: Any = ModuleType("accelerate.state")
    module.PartialState = PartialState
    monkeypatch.setitem(sys.modules, "accelerate.state", module)

    partial_state.install(device_type, backend)

    assert module.PartialState(**given).taken == taken
