"""What a notebook front end would show of each cell, from a kernel's messages."""

import copy
import re
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NewType

Output = dict[str, Any]
Message = dict[str, Any]
Handle = NewType("Handle", str)
"""A cell that was sent: the id of its execute_request."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DISPLAYS = ("display_data", "execute_result")
_FIELDS = {  # of nbformat 4
    "stream": ("name", "text"),
    "display_data": ("data", "metadata"),
    "execute_result": ("data", "metadata", "execution_count"),
    "error": ("ename", "evalue", "traceback"),
}


class CellError(NamedTuple):
    """The last error output of a cell, its traceback without colours."""

    ename: str
    evalue: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Cell:
    """What a notebook would store of one executed cell.

    Attributes:
        status: The execute_reply's "ok", "error" or "aborted"; "running" without a reply.
        outputs: As in nbformat, in the order of arrival, adjacent text of one stream joined.
        seconds: From sending the cell until its reply and its last output; so far if running.
    """

    status: str
    outputs: list[Output]
    execution_count: int | None
    seconds: float

    @property
    def text(self) -> str:
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        return self._stream("stderr")

    @property
    def plain(self) -> list[str]:
        """The text/plain of each display and result."""
        return self.data("text/plain")

    @property
    def error(self) -> CellError | None:
        """The error a reader sees; None where a failed cell shows no error output."""
        errors = [o for o in self.outputs if o["output_type"] == "error"]
        if not errors:
            return None
        last = errors[-1]
        traceback = _ANSI.sub("", "\n".join(last["traceback"]))
        return CellError(last["ename"], _ANSI.sub("", last["evalue"]), traceback)

    @property
    def failure(self) -> CellError:
        """The same; a cell that shows no error fails the test."""
        assert self.error is not None, self.visible
        return self.error

    def check_failure(self, ename: str, *patterns: str) -> None:
        """The error has this name, and its text has these patterns."""
        assert self.failure.ename == ename, self.visible
        for pattern in patterns:
            assert re.search(pattern, self.failure.evalue), (pattern, self.failure.evalue)

    @property
    def visible(self) -> str:
        """All outputs as text, without colours."""
        return _visible(self.outputs)

    def data(self, mime: str) -> list[Any]:
        """What each display and result carries for `mime`."""
        shown = [o["data"] for o in self.outputs if o["output_type"] in _DISPLAYS]
        return [bundle[mime] for bundle in shown if mime in bundle]

    def _stream(self, name: str) -> str:
        streams = [o for o in self.outputs if o["output_type"] == "stream"]
        return "".join(o["text"] for o in streams if o["name"] == name)


@dataclass(slots=True)
class _Gathering:
    sent_s: float
    outputs: list[Output] = field(default_factory=list)
    reply: Message | None = None
    done_s: float | None = None
    is_idle: bool = False
    clears_next: bool = False

    def snapshot(self) -> Cell:
        reply = self.reply or {"status": "running"}
        return Cell(
            status=reply["status"],
            outputs=copy.deepcopy(self.outputs),
            execution_count=reply.get("execution_count"),
            seconds=(self.done_s or time.monotonic()) - self.sent_s,
        )

    def is_done(self) -> bool:
        return self.reply is not None and self.is_idle

    def clear(self, *, wait: bool) -> None:
        self.clears_next = wait
        if not wait:
            self.outputs.clear()

    def append(self, output: Output) -> None:
        if self.clears_next:
            self.clear(wait=False)
        last = self.outputs[-1] if self.outputs else None
        if last and _is_stream(last) and _is_stream(output) and last["name"] == output["name"]:
            last["text"] += output["text"]
        else:
            self.outputs.append(output)


class Notebook:
    """Turns a kernel's messages into cells as notebook front ends do."""

    def __init__(self) -> None:
        self._cells: dict[str, _Gathering] = {}
        self._displays: dict[str, list[Output]] = {}

    def sent(self, handle: Handle, sent_s: float) -> None:
        self._cells[handle] = _Gathering(sent_s)

    def cell(self, handle: Handle) -> Cell:
        return self._cells[handle].snapshot()

    def visible(self, handle: Handle) -> str:
        return _visible(self._cells[handle].outputs)

    def is_done(self, handle: Handle) -> bool:
        return self._cells[handle].is_done()

    def receive(self, message: Message) -> None:
        """Take one message of the iopub or shell channel; those of no cell are dropped."""
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "update_display_data":  # whoever sends it: a cell, a thread or a widget
            for output in self._displays.get(_display_id(content), []):
                output.update(data=content["data"], metadata=content["metadata"])
        cell = self._cells.get(message["parent_header"].get("msg_id", ""))
        if cell is None:
            return
        if kind == "execute_reply":
            cell.reply = content
        elif kind == "status":
            cell.is_idle = content["execution_state"] == "idle"
        else:
            self._output(cell, kind, message)
        if cell.is_done() and cell.done_s is None:
            cell.done_s = time.monotonic()

    def _output(self, cell: _Gathering, kind: str, message: Message) -> None:
        content = message["content"]
        if kind == "clear_output":
            cell.clear(wait=content["wait"])
        elif kind in _FIELDS:
            # Not nbformat's output_from_msg: where JupyterLab is installed it takes two seconds.
            new = {"output_type": kind, **{name: content[name] for name in _FIELDS[kind]}}
            cell.append(new)
            if display_id := _display_id(content):
                self._displays.setdefault(display_id, []).append(new)


def _is_stream(output: Output) -> bool:
    return str(output["output_type"]) == "stream"


def _display_id(content: Message) -> str:
    return str(content.get("transient", {}).get("display_id", ""))


def _visible(outputs: list[Output]) -> str:
    return "".join(_text_of(output) for output in outputs)


def _text_of(output: Output) -> str:
    """The text a reader sees of one output, without colours."""
    if "text" in output:
        text = str(output["text"])
    elif "data" in output:
        text = str(output["data"].get("text/plain", "")) + "\n"
    else:
        text = "\n".join([*output.get("traceback", ()), ""])
    return _ANSI.sub("", text)
