"""JSON as people write it: comments, trailing commas and repeated keys are read, and told."""

from __future__ import annotations

import json
import re

from nbdist.config.tree import JSON, ConfigEntry, Document, Flaw, Node
from nbdist.errors import OptionError

_SPACE = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_WORD = re.compile(r"[^\s,:{}\[\]\"#]+")
_DEPTH = 50

_NO_COMMA = "JSON allows no comma after the last entry: every reader but DeepSpeed's refuses it"
_READERS = (
    "JSON has no comments: Accelerate, transformers and Python's json refuse the file ("
    "DeepSpeed itself reads it, as Hjson)"
)


def read(name: str, text: str) -> Document:
    """The whole text of a JSON file, whose name is for messages, as a Document.

    Raises:
        OptionError: If it cannot be understood; with the line.
    """
    reader = _Reader(name, text)
    start = reader.skip(1 if text.startswith("\ufeff") else 0)
    root, end = reader.value(start, 0)
    end = reader.skip(end)
    if end < len(text):
        raise reader.error(end, "there is something after the end of the configuration")
    if root.entries is None:
        raise reader.error(start, "a configuration is an object in ( )")
    flaws = tuple(sorted(reader.flaws, key=lambda flaw: flaw.line))
    return Document(name, text, JSON, root, flaws)


class _Reader:
    """Goes through the text once and remembers what is not JSON."""

    def __init__(self, name: str, text: str):
        self.name = name
        self.text = text
        self.flaws: list[Flaw] = []

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def error(self, at: int, what: str) -> OptionError:
        lines = self.text.splitlines() or [""]
        number = self.line(at)
        shown = lines[min(number, len(lines)) - 1].strip()[:60]
        return OptionError(f"{self.name}, line {number}: {what}, at {shown!r}.")

    def skip(self, at: int) -> int:
        """The next place that is neither space nor comment."""
        while True:
            space = _SPACE.match(self.text, at)
            assert space is not None
            at = space.end()
            match = _COMMENT.match(self.text, at)
            if match is None:
                return at
            before, end = len(self.text[:at].rstrip(" \t")), match.end()
            flaw = Flaw("comment", self.line(at), match[0], _READERS, "take it out", before, end)
            self.flaws.append(flaw)
            at = end

    def value(self, at: int, depth: int) -> tuple[Node, int]:
        if depth > _DEPTH:
            raise self.error(at, f"more than {_DEPTH} objects are nested")
        first = self.text[at : at + 1]
        if first == "{":
            return self.mapping(at, depth)
        if first == "[":
            return self.array(at, depth)
        if first == '"':
            text, end = self.string(at)
            return Node(at, end, self.line(at), text, is_quoted=True), end
        match = _WORD.match(self.text, at)
        if match is None:
            raise self.error(at, "a value is missing")
        return Node(at, match.end(), self.line(at), self.word(match)), match.end()

    def word(self, match: re.Match[str]) -> object:
        try:
            return json.loads(match[0])
        except ValueError:
            near = {"True": "true", "False": "false", "None": "null"}.get(match[0])
            hint = f": write {near}" if near else "; strings need double quotation marks"
            raise self.error(match.start(), f"{match[0]} is not a JSON value{hint}") from None

    def string(self, at: int) -> tuple[str, int]:
        match = _STRING.match(self.text, at)
        if match is None:
            raise self.error(at, "a quotation mark is not closed on its line")
        try:
            return str(json.loads(match[0], strict=False)), match.end()
        except ValueError as error:
            raise self.error(at, f"{match[0]} is not a JSON string") from error

    def mapping(self, at: int, depth: int) -> tuple[Node, int]:
        entries: list[ConfigEntry] = []
        index = self.skip(at + 1)
        while self.text[index : index + 1] != "}":
            if self.text[index : index + 1] != '"':
                raise self.error(index, "a key in double quotation marks, or }, is missing")
            key, end = self.string(index)
            colon = self.skip(end)
            if self.text[colon : colon + 1] != ":":
                raise self.error(colon, f'a colon after "{key}" is missing')
            node, after = self.value(self.skip(colon + 1), depth + 1)
            first = next((entry for entry in entries if entry.key == key), None)
            if first is not None:
                why = f"it is on line {first.line}, too: DeepSpeed refuses that, others take the "
                flaw = Flaw(key, self.line(index), "twice", f"{why}last", "keep one of them")
                self.flaws.append(flaw)
            entries.append(ConfigEntry(key, index, end, self.line(index), node))
            index = self.comma(after, "}")
        mapping = Node(at, index + 1, self.line(at), entries=tuple(entries), is_flow=True)
        return mapping, index + 1

    def array(self, at: int, depth: int) -> tuple[Node, int]:
        items: list[Node] = []
        index = self.skip(at + 1)
        while self.text[index : index + 1] != "]":
            node, after = self.value(index, depth + 1)
            items.append(node)
            index = self.comma(after, "]")
        array = Node(at, index + 1, self.line(at), items=tuple(items), is_flow=True)
        return array, index + 1

    def comma(self, at: int, closing: str) -> int:
        """The place after a comma and what is to be skipped, or the closing bracket's."""
        index = self.skip(at)
        mark = self.text[index : index + 1]
        if mark == closing:
            return index
        if mark != ",":
            raise self.error(index, f"a comma or {closing} is missing")
        following = self.skip(index + 1)
        if self.text[following : following + 1] == closing:
            self.flaws.append(
                Flaw("trailing comma", self.line(index), ",", _NO_COMMA, "take it out", index,
                     index + 1)
            )  # fmt: skip
        return following
