"""The name at the cursor, and the replies that frontends expect."""

import pytest

from nbdist.cells.completion import (
    inspect_reply,
    path_around,
    path_before,
    reply_of,
    reply_with,
    shift_reply,
)


@pytest.mark.parametrize(
    ("code", "path"),
    [
        ("", ("",)),
        ("lo", ("lo",)),
        ("y = model.lay", ("model", "lay")),
        ("print(a.b.", ("a", "b", "")),
        ("x + ", ("",)),
        ("f(x)[0].na", ("", "na")),
        ("größe.na", ("größe", "na")),
        ("3.re", ("", "re")),
    ],
)
def test_the_name_before_the_cursor(code: str, path: tuple[str, ...]) -> None:
    """Dotted names alone; what a call or an index returns has no name."""
    assert path_before(code, len(code)) == path


@pytest.mark.parametrize(
    ("code", "cursor", "path"),
    [
        ("model.layers", 8, ("model", "layers")),
        ("model.layers", 2, ("model",)),
        ("print(", 6, ("print",)),
        ("a.b(c", 5, ("c",)),
        ("", 0, ("",)),
    ],
)
def test_the_name_around_the_cursor(code: str, cursor: int, path: tuple[str, ...]) -> None:
    """The whole word; behind an opening bracket the function."""
    assert path_around(code, cursor) == path


def test_a_reply_has_the_names_that_begin_so() -> None:
    """Sorted, private ones only where asked for, in place of what was typed."""
    names = {"loss": "instance", "loader": "instance", "_lost": "instance", "model": "instance"}
    code = "x = lo"

    reply = reply_of(names, code, len(code))

    assert reply["matches"] == ["loader", "loss"]
    assert (reply["cursor_start"], reply["cursor_end"], reply["status"]) == (4, 6, "ok")
    assert reply["metadata"]["_jupyter_types_experimental"][1] == {
        "start": 4, "end": 6, "text": "loss", "type": "instance", "signature": "",
    }  # fmt: skip
    assert reply_of(names, "_", 1)["matches"] == ["_lost"]
    assert reply_of(names, "q", 1)["matches"] == []


def test_a_reply_for_the_text_below_a_magic_moves_with_it() -> None:
    """Every place in it; a reply without types as well."""
    reply = shift_reply(reply_with(["abc"], 1, 3), 20)
    typed = reply["metadata"]["_jupyter_types_experimental"][0]

    assert (reply["cursor_start"], reply["cursor_end"]) == (21, 23)
    assert (typed["start"], typed["end"]) == (21, 23)
    assert shift_reply({"cursor_start": 1, "cursor_end": 2}, 1)["cursor_start"] == 2


def test_nothing_found_is_said_as_jupyter_does() -> None:
    """found is False, and there is no data."""
    assert inspect_reply("") == {"status": "ok", "found": False, "data": {}, "metadata": {}}
    assert inspect_reply("x")["data"] == {"text/plain": "x"}
