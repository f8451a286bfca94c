"""Reads configuration files, JSON by json_reader and YAML by PyYAML, with every value's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from nbdist.config import json_reader
from nbdist.config.report import KNOWN
from nbdist.config.tree import JSON, YAML, ConfigEntry, Document, Flaw, Node
from nbdist.errors import OptionError

# Of other languages than those that are read.
_OTHERS = {".toml", ".ini", ".cfg", ".py", ".sh", ".ipynb"}
# A configuration has some hundreds of lines; a data set that is named by mistake has more.
LARGEST = 1_000_000


def load(path: str | Path) -> Document:
    """The configuration in a file.

    Raises:
        OptionError: If it cannot be read, or is neither JSON nor YAML; with the line.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() in _OTHERS:
        formats = "; ".join(f"{kind}: {what}" for kind, what in KNOWN.items())
        raise OptionError(
            f"{path} has an unknown format: {file.suffix} files are not read. Known formats: "
            f"{formats}."
        )
    try:
        size = file.stat().st_size
        if size > LARGEST:
            raise OptionError(f"{path} has {size:,} bytes, more than any configuration.")
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise OptionError(f"There is no file {path}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read as text ({error}).") from error
    return read(str(path), text)


def read(name: str, text: str, syntax: str = "") -> Document:
    """The whole text of a file as a Document.

    Where the syntax is not given, the suffix of the name says it, else the first character.

    Raises:
        OptionError: If it cannot be understood; with the line.
    """
    if not syntax:
        is_json = text.lstrip("\ufeff \t\r\n").startswith("{")
        by_suffix = {".json": JSON, ".yaml": YAML, ".yml": YAML}
        syntax = by_suffix.get(Path(name).suffix.lower(), JSON if is_json else YAML)
    if syntax == JSON:
        return json_reader.read(name, text)
    try:
        # compose makes no Python objects of it: tags cannot run anything.
        root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error)
        raise OptionError(f"{name}{line}: this is not valid YAML: {problem}.") from error
    if not isinstance(root, yaml.MappingNode):
        raise OptionError(
            f"{name}: a configuration is a mapping of keys to values, which this is not."
        )
    flaws: list[Flaw] = []
    loader = yaml.SafeLoader("")
    return Document(name, text, YAML, _node(root, loader, flaws, set()), tuple(flaws))


def _node(yaml_node: Any, loader: Any, flaws: list[Flaw], above: set[int]) -> Node:
    """A node of PyYAML's as ours; what an alias stands for is repeated."""
    start, line = yaml_node.start_mark.index, yaml_node.start_mark.line + 1
    if id(yaml_node) in above:
        raise OptionError(f"line {line}: an anchor stands for a mapping that it is in itself.")
    above = above | {id(yaml_node)}
    if isinstance(yaml_node, yaml.MappingNode):
        entries = _entries(yaml_node, loader, flaws, above)
        is_flow = bool(yaml_node.flow_style)
        end = yaml_node.end_mark.index if is_flow or not entries else entries[-1].node.end
        return Node(start, end, line, entries=tuple(entries), is_flow=is_flow)
    if isinstance(yaml_node, yaml.SequenceNode):
        items = tuple(_node(item, loader, flaws, above) for item in yaml_node.value)
        is_flow = bool(yaml_node.flow_style)
        end = yaml_node.end_mark.index if is_flow or not items else items[-1].end
        return Node(start, end, line, items=items, is_flow=is_flow)
    try:
        value = loader.construct_object(yaml_node)
    except (yaml.YAMLError, ValueError):  # a tag of somebody's own, or a date that is none
        value = yaml_node.value
    is_quoted = yaml_node.style in {"'", '"'}
    return Node(start, yaml_node.end_mark.index, line, value, is_quoted=is_quoted)


def _entries(
    mapping_node: Any, loader: Any, flaws: list[Flaw], above: set[int]
) -> list[ConfigEntry]:
    entries: list[ConfigEntry] = []
    lines: dict[str, int] = {}
    for key_node, value_node in mapping_node.value:
        key = str(getattr(key_node, "value", ""))
        line = key_node.start_mark.line + 1
        if key in lines:
            why = f"it is on line {lines[key]} already, and the last one counts"
            flaws.append(Flaw(key, line, "twice", why, "keep one of them"))
        lines.setdefault(key, line)
        node = _node(value_node, loader, flaws, above)
        place = key_node.start_mark.index, key_node.end_mark.index
        entries.append(ConfigEntry(key, *place, line, node))
    return entries
