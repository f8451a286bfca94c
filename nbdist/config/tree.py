"""A configuration file as a tree that knows its places, so that it can be changed in them.

`config.json_reader` and `config.yaml_reader` read text into a Document. A Fix says what to change
by a path of keys; `apply_fix` makes it in the text and leaves everything else as it was typed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

JSON = "JSON"
YAML = "YAML"

# What a Fix does.
SET = "set"
RENAME = "rename"
REMOVE = "remove"
ADD = "add"

# Words that YAML 1.1 takes for something else than text.
_NO_TEXT = re.compile(
    r"(?i:y|n|yes|no|on|off|true|false|null|~|nan|inf|none)|[-+]?[0-9.].*|", re.ASCII
)
_PLAIN = re.compile(r"[A-Za-z_/.][\w/.@+-]*(?: [\w/.@+-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it stands.

    Attributes:
        start, end: Its text is text[start:end].
        line: From 1.
        value: Of a scalar.
        entries: Of a mapping, as typed; None for anything else.
        items: Of a list; None for anything else.
        is_flow: It stands in brackets, as in JSON.
    """

    start: int
    end: int
    line: int
    value: Any = None
    entries: tuple[ConfigEntry, ...] | None = None
    items: tuple[Node, ...] | None = None
    is_flow: bool = False
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A key of a mapping with its value.

    Attributes:
        start, end, line: Of the key in the text, with quotation marks; lines count from 1.
    """

    key: str
    start: int
    end: int
    line: int
    node: Node


@dataclass(frozen=True, slots=True)
class Flaw:
    """Defect that the format does not allow, and that was read nevertheless.

    Attributes:
        line: From 1.
        found: As typed.
        why: Why it matters, a clause.
        what: What to do, a clause.
        start, end: What to take out of the text; both 0 where nothing can be.
    """

    name: str
    line: int
    found: str
    why: str
    what: str
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Document:
    """A file that was read.

    Attributes:
        name: As the user named it.
        syntax: JSON or YAML.
        root: A mapping.
        flaws: In the order of the lines.
    """

    name: str
    text: str
    syntax: str
    root: Node
    flaws: tuple[Flaw, ...] = ()

    def entry(self, *path: str) -> ConfigEntry | None:
        """Find the entry under a path of keys; None where there is none. The last of two counts."""
        entries, entry = self.root.entries, None
        for key in path:
            entry = next((e for e in reversed(entries or ()) if e.key == key), None)
            entries = entry.node.entries if entry else None
        return entry

    def value(self, *path: str) -> Any:
        """The value under a path, as Python has it; None where nothing stands there."""
        entry = self.entry(*path)
        return None if entry is None else plain(entry.node)

    def has(self, *path: str) -> bool:
        """Whether something stands under a path, be it null."""
        return self.entry(*path) is not None

    def entries(self, *path: str) -> tuple[ConfigEntry, ...]:
        """The keys of the mapping under a path; none where there is no mapping."""
        node = self.node(*path)
        return () if node is None else node.entries or ()

    def node(self, *path: str) -> Node | None:
        """Find the node under a path; the root without a path, None where there is no node."""
        entry = self.entry(*path)
        return self.root if not path else entry.node if entry else None

    def line(self, *path: str) -> int:
        """The line of a key, or of the nearest key above it; 0 where there is none."""
        for length in range(len(path), 0, -1):
            entry = self.entry(*path[:length])
            if entry is not None:
                return entry.line
        return 0


@dataclass(frozen=True, slots=True)
class Fix:
    """A change of a document.

    Attributes:
        action: SET, RENAME, REMOVE or ADD.
        path: Of the key; of ADD with the new key.
        value: The new value, or the new name of the key.
    """

    action: str
    path: tuple[str, ...]
    value: Any = None


def plain(node: Node) -> Any:
    """A node as Python's dicts, lists and scalars."""
    if node.entries is not None:
        return {entry.key: plain(entry.node) for entry in node.entries}
    if node.items is not None:
        return [plain(item) for item in node.items]
    return node.value


def walk(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ConfigEntry]]:
    """Every key below a node with its path, in the order of the text."""
    for entry in node.entries or ():
        yield (*path, entry.key), entry
        yield from walk(entry.node, (*path, entry.key))
    for item in node.items or ():
        yield from walk(item, path)


def join_path(path: tuple[str, ...]) -> str:
    """A path as it is told: zero_optimization.stage."""
    return ".".join(path)


def remove_flaw(document: Document, flaw: Flaw) -> str:
    """The text without a flaw."""
    return document.text[: flaw.start] + document.text[flaw.end :]


def apply_fix(document: Document, fix: Fix) -> str:
    """The document's text with one change made in its place."""
    start, end, new = _CHANGES[fix.action](document, fix)
    return document.text[:start] + new + document.text[end:]


def _set(document: Document, fix: Fix) -> tuple[int, int, str]:
    entry = document.entry(*fix.path)
    if entry is None:
        return _add(document, fix)
    node = entry.node
    new = write_value(fix.value, document.syntax)
    is_in_lines = not node.is_flow and (node.entries is not None or node.items is not None)
    if is_in_lines or node.start == node.end:  # on the lines below the key, or nowhere
        colon = document.text.index(":", entry.end) + 1
        return colon, max(node.end, colon), f" {new}"
    return node.start, node.end, new


def _rename(document: Document, fix: Fix) -> tuple[int, int, str]:
    entry = document.entry(*fix.path)
    assert entry is not None, fix
    new = json.dumps(fix.value) if document.syntax == JSON else str(fix.value)
    return entry.start, entry.end, new


def _remove(document: Document, fix: Fix) -> tuple[int, int, str]:
    siblings = document.entries(*fix.path[:-1])
    entry = document.entry(*fix.path)
    assert entry is not None, fix
    place = siblings.index(entry)
    node = document.node(*fix.path[:-1])
    assert node is not None, fix
    if not node.is_flow:
        text = document.text
        start = text.rfind("\n", 0, entry.start) + 1
        newline = text.find("\n", max(entry.node.end, entry.end))
        end = len(text) if newline < 0 else newline + 1
        parent = document.entry(*fix.path[:-1])
        if parent is not None and len(siblings) == 1:  # it would be left empty
            return parent.end + 1, end, " {}\n"
        return start, end, ""
    if place + 1 < len(siblings):
        return entry.start, siblings[place + 1].start, ""
    before = siblings[place - 1].node.end if place else node.start + 1
    return before, entry.node.end, ""


def _add(document: Document, fix: Fix) -> tuple[int, int, str]:
    *above, key = fix.path
    node, text = document.node(*above), document.text
    if node is None or node.entries is None:
        whole = Fix(ADD if node is None else SET, tuple(above), {key: fix.value})
        return (_add if node is None else _set)(document, whole)
    name = json.dumps(key) if document.syntax == JSON else key
    new = f"{name}: {write_value(fix.value, document.syntax)}"
    if not node.entries:
        return node.start, node.end, f"{{{new}}}"
    last = node.entries[-1]
    indent = text[text.rfind("\n", 0, last.start) + 1 : last.start]
    indent = indent if indent.isspace() else ""
    if not node.is_flow:
        newline = text.find("\n", max(last.node.end, last.end))
        at = len(text) if newline < 0 else newline
        return at, at, f"\n{indent}{new}"
    is_in_lines = text.count("\n", node.start, last.start) > 0
    return last.node.end, last.node.end, f",\n{indent}{new}" if is_in_lines else f", {new}"


_CHANGES = {SET: _set, RENAME: _rename, REMOVE: _remove, ADD: _add}


def write_value(value: Any, syntax: str) -> str:
    """A value as it is typed in a file, on one line."""
    if syntax == JSON:
        return json.dumps(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key}: {write_value(item, syntax)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(write_value(item, syntax) for item in value)}]"
    literal = json.dumps(value)
    if isinstance(value, str):
        # Whether a text means itself in YAML 1.1 without quotation marks.
        is_odd = _NO_TEXT.fullmatch(value) is not None and value != "none"
        is_plain = not is_odd and _PLAIN.fullmatch(value) is not None
        return value if is_plain else "'" + value.replace("'", "''") + "'"
    # Without the point 1e-05 is a text.
    is_short = isinstance(value, float) and "e" in literal and "." not in literal
    return literal.replace("e", ".0e") if is_short else literal
