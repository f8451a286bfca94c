"""Requests of Tab and Shift-Tab: the name before the cursor, and a frontend's reply to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Jupyter's content of a complete_reply or an inspect_reply.
Reply = dict[str, Any]

_BEFORE = re.compile(r"(?:[^\W\d]\w*\.)*(?:[^\W\d]\w*)?$")
_AFTER = re.compile(r"\w*")
_TYPES = "_jupyter_types_experimental"


def path_before(code: str, cursor: int) -> tuple[str, ...]:
    """The dotted name that ends at the cursor, in parts; the last one may be empty.

    The first is empty where the name goes on from what has none: `f(x).na`.

    >>> path_before("y = model.lay", 13)
    ('model', 'lay')
    """
    match = _BEFORE.search(code, 0, cursor)
    if match is None:
        return ("",)
    path = tuple(match.group().split("."))
    return ("", *path) if code[: match.start()].endswith(".") else path


def path_around(code: str, cursor: int) -> tuple[str, ...]:
    """The dotted name in whose last part the cursor stands, or the function in whose call.

    >>> path_around("model.layers", 8), path_around("print(", 6)
    (('model', 'layers'), ('print',))
    """
    path = path_before(code, cursor)
    rest = _AFTER.match(code, cursor)
    path = (*path[:-1], path[-1] + (rest.group() if rest else ""))
    if path[-1] or cursor == 0 or code[cursor - 1] != "(":
        return path
    return path_before(code, cursor - 1)


def reply_of(names: Mapping[str, str], code: str, cursor: int) -> Reply:
    """A complete_reply with those of the names that begin like the part before the cursor.

    `names` has a type for each, as frontends show it: instance, function, module, class.
    """
    last = path_before(code, cursor)[-1]
    fitting = sorted(name for name in names if name.startswith(last))
    if not last.startswith("_"):
        fitting = [name for name in fitting if not name.startswith("_")]
    return reply_with(fitting, cursor - len(last), cursor, names)


def reply_with(
    texts: Iterable[str], start: int, end: int, types: Mapping[str, str] | None = None
) -> Reply:
    """A complete_reply: texts that may replace the text between start and end."""
    texts = list(texts)
    typed = [
        {"start": start, "end": end, "text": text, "type": (types or {}).get(text, ""),
         "signature": ""}
        for text in texts
    ]  # fmt: skip
    return {
        "status": "ok",
        "matches": texts,
        "cursor_start": start,
        "cursor_end": end,
        "metadata": {_TYPES: typed},
    }


def shift_reply(reply: Reply, by: int) -> Reply:
    """A complete_reply for a cell whose code begins this many characters later."""
    metadata = dict(reply.get("metadata", {}))
    if _TYPES in metadata:
        metadata[_TYPES] = [
            {**entry, "start": entry["start"] + by, "end": entry["end"] + by}
            for entry in metadata[_TYPES]
        ]
    return {
        **reply,
        "cursor_start": reply["cursor_start"] + by,
        "cursor_end": reply["cursor_end"] + by,
        "metadata": metadata,
    }


def inspect_reply(text: str) -> Reply:
    """An inspect_reply with a text; found is False where there is none."""
    data = {"text/plain": text} if text else {}
    return {"status": "ok", "found": bool(text), "data": data, "metadata": {}}
