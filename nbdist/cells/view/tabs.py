"""Every rank's own output side by side, in tabs that need no script and no kernel."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from itertools import count
from typing import Any
from uuid import uuid4

from nbdist.cells.line_merger import overwrite
from nbdist.cells.outputs import CellResult, RankResult
from nbdist.cells.truncate import SHOWN_CHARACTERS, SHOWN_LINES
from nbdist.core.units import is_stored
from nbdist.core.view import View

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Tells the tabs of several cells on one page apart. Numbers are alike in every run, so they
# are only for outputs that are compared: a page may have tabs of an earlier kernel too.
_number = count(1)

_STYLE = """
.{id} > input {{ position: absolute; opacity: 0; }}
.{id} > label {{ display: inline-block; padding: 2px 10px; cursor: pointer;
  border-bottom: 2px solid transparent; }}
.{id} > input:checked + label {{ border-bottom-color: currentColor; }}
.{id} > input:focus-visible + label {{ outline: 1px dotted currentColor; }}
.{id} > section {{ display: none; overflow-x: auto; }}
{checked} {{ display: block; }}
"""


def tabs(result: CellResult) -> View:
    """One tab per rank with all that it wrote and displayed; as text, one part per rank."""
    name = f"nbdist-tabs-{next(_number) if is_stored() else uuid4().hex}"
    checked = ", ".join(
        f".{name} > #{name}-{r.rank}:checked ~ #{name}-{r.rank}-out" for r in result.ranks
    )
    controls = "".join(
        f'<input type="radio" name="{name}" id="{name}-{r.rank}"{"" if i else " checked"}>'
        f'<label for="{name}-{r.rank}">rank {r.rank}{_state(r.status)}</label>'
        for i, r in enumerate(result.ranks)
    )
    sections = "".join(
        f'<section id="{name}-{r.rank}-out">{_outputs_html(r)}</section>' for r in result.ranks
    )
    style = _STYLE.format(id=name, checked=checked)
    page = f'<style>{style}</style><div class="{name}">{controls}{sections}</div>'
    text = "\n".join(f"--- rank {r.rank} ---\n{_outputs_text(r)}" for r in result.ranks)
    return View(text.rstrip("\n"), page)


def _state(status: str) -> str:
    return "" if status == "ok" else f" ({html.escape(status)})"


def _outputs_text(result: RankResult) -> str:
    parts = [
        _stream_text(output["text"])
        if output["output_type"] == "stream"
        else output["data"].get("text/plain", "") + "\n"
        for output in result.outputs
    ]
    if result.failure is not None:
        parts.append(f"{result.failure.name}: {result.failure.message}\n")
    return "".join(parts) or "(no output)\n"


def _stream_text(text: str) -> str:
    """The first and the last of it, as in the cell itself; ends with a newline."""
    lines = [overwrite(line) for line in text.removesuffix("\n").split("\n")]
    if len(lines) > 2 * SHOWN_LINES:
        skipped = len(lines) - 2 * SHOWN_LINES
        lines = [*lines[:SHOWN_LINES], f"... {skipped:,} lines", *lines[-SHOWN_LINES:]]
    shown = "\n".join(lines)
    if len(shown) > 2 * SHOWN_CHARACTERS:
        note = f"\n... {len(shown) - 2 * SHOWN_CHARACTERS:,} characters\n"
        shown = shown[:SHOWN_CHARACTERS] + note + shown[-SHOWN_CHARACTERS:]
    return f"{shown}\n"


def _outputs_html(result: RankResult) -> str:
    parts = [_output_html(output) for output in result.outputs]
    if result.failure is not None:
        trace = "\n".join(result.failure.traceback) or result.failure.message
        parts.append(_pre(trace))
    return "".join(parts) or "<pre>(no output)</pre>"


def _output_html(output: Mapping[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _pre(_stream_text(output["text"]))
    data = output["data"]
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            encoded = html.escape("".join(data[kind].split()))
            alt = html.escape(data.get("text/plain", "figure"))
            size = _size(output["metadata"].get(kind, {}))
            return f'<img src="data:{kind};base64,{encoded}" alt="{alt}"{size}>'
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            return f"<div>{data[kind]}</div>"
    return _pre(data.get("text/plain", ""))


def _size(metadata: Mapping[str, Any]) -> str:
    """The width and height that a figure asks for (retina figures have twice the pixels)."""
    return "".join(
        f' {side}="{metadata[side]:g}"'
        for side in ("width", "height")
        if isinstance(metadata.get(side), int | float)
    )


def _pre(text: str) -> str:
    return f"<pre>{html.escape(_ANSI.sub('', text))}</pre>"
