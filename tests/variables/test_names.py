"""Names of variables, and the line about each."""

import numpy as np
import pytest

from nbdist.errors import OptionError
from nbdist.variables import names


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([], r"name one variable or more\. For example: %dist_push loss"),
        *(([name], "is not a variable name") for name in ("a.b", "x[0]", "1x", "", "for", "a b")),
    ],
)
def test_what_is_no_name_is_refused(typed: list[str], message: str) -> None:
    """It is shown as typed."""
    with pytest.raises(OptionError, match=message):
        names.check_names(typed, "%dist_push")


def test_an_unknown_name_lists_close_ones() -> None:
    """The user's own, without private ones."""
    names.check_known(["loss"], {"loss"})
    with pytest.raises(
        OptionError, match=r"no variable lss; nothing was pushed\. Similar names: lo"
    ):
        names.check_known(["lss"], {"loss": 1, "_lss": 2, "weights": 3})
    with pytest.raises(OptionError, match=r"nothing was pushed\.$"):
        names.check_known(["lss"], {"weights"})


def test_a_name_that_some_ranks_lack_says_which_have_it() -> None:
    """And how to take it from there."""
    names.check_on_ranks({0: {}, 1: {}})
    with pytest.raises(OptionError) as caught:
        names.check_on_ranks({0: {}, 1: {"w": ("ww",)}, 2: {}, 3: {"w": ()}})

    assert str(caught.value) == (
        "w exists on ranks 0,2, not on ranks 1,3; nothing was pulled. %dist_pull w --ranks 0,2 "
        "pulls it from there."
    )


def test_a_name_that_no_rank_has_lists_close_ones() -> None:
    """Each once."""
    with pytest.raises(OptionError) as several:
        names.check_on_ranks({0: {"los": ("loss",)}, 1: {"los": ("loss", "lost")}})
    with pytest.raises(OptionError) as error:
        names.check_on_ranks({1: {"los": ()}})

    assert str(several.value) == (
        "los does not exist on any of ranks 0-1; nothing was pulled. Similar names: loss, lost."
    )
    assert str(error.value) == "los does not exist on rank 1; nothing was pulled."


def test_values_are_described_by_kind() -> None:
    """Without any of their content."""
    assert names.describe(np.zeros((2, 3), np.float32)) == "array float32 (2, 3)"
    assert names.describe({"a": 1, "b": 2}) == "dict of 2"
    assert names.describe(3) == "int"
    assert names.describe_list([np.zeros(3), np.ones(3)]) == "list of 2 arrays float64 (3,)"
    assert names.describe_list([1, 2]) == "list of 2, each int"
    assert names.describe_list([1, "a"]) == "list of 2: int; str"
