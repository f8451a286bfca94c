"""What is no large tensor: copied as plain data, and nothing else taken."""

import re
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from nbdist.checkpoint.rank import plain_state
from nbdist.errors import CheckpointError

STATE: dict[Any, Any] = {
    "milestones": Counter({3: 1, 5: 1}),
    "ordered": OrderedDict(b=[1, 2], a=(3, {"c": torch.ones(2)})),
    "numbers": [1, 2.5, 1j, True, None, "text", b"bytes", np.float64(3.5)],
    "dtype": torch.bfloat16,
    "shape": torch.Size((2, 3)),
    "set": {1, 2},
    4: {"deep": [[torch.zeros(3, requires_grad=True)]]},
}


def test_a_copy_does_not_change_with_what_it_was_made_of() -> None:
    """Lists, dicts and tensors are others, of the same classes; a view is cut to what it shows."""
    values = torch.arange(1000.0)
    state = {**STATE, "view": values[:2]}

    copy = plain_state.copy_plain(state, "state")

    state["ordered"]["b"].append(9)
    values.fill_(-1)
    assert type(copy["milestones"]) is Counter
    assert (type(copy["ordered"]), copy["ordered"]["b"]) == (OrderedDict, [1, 2])
    assert copy["view"].tolist() == [0, 1]
    assert copy["view"].untyped_storage().nbytes() == 8
    assert copy["numbers"] == STATE["numbers"]
    assert not copy[4]["deep"][0][0].requires_grad
    state["ordered"]["b"].pop()


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [1, object()]}, "state.a.1 (builtins.object)"),
        ({"a": OrderedDict(b={"c": lambda: 0})}, "state.a.b.c (builtins.function)"),
        ({2: {"x": {re.compile("a")}}}, "state.2.x.0 (re.Pattern)"),
    ],
)
def test_what_is_no_plain_data_is_named(state: dict[Any, Any], where: str) -> None:
    """With its place and its class."""
    with pytest.raises(CheckpointError, match=re.escape(f"{where} cannot be saved")):
        plain_state.copy_plain(state, "state")
