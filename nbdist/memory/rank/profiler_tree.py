"""Reads what torch.profiler has recorded of a CPU's memory: allocations with their stacks.

The profiler's tree has operators, calls of Python and allocations, each within what it was called
from. A call says at which line its caller was, so every frame but the innermost has its line, and
that one too where an operator was called by a function of C that Python called. Stacks are kept
once each, without the lines that say nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nbdist.memory.blocks import Event
from nbdist.memory.snapshot import BACKWARD, AllocationFrame, Phase

# Before the number of a mark.
MARK = "nbdist memory "
# Torch calls a node of the backward so, and the function of C that runs all of them.
_NODE = "autograd::engine::evaluate_function: "
_RUN = "run_backward"
_SENDING = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "record_param_comms")
NO_LINK = -1
# How calls come about, not what is called: torch's dispatch, the profiler, the shell, nbdist.
_NOISE = re.compile(
    r"(^|[/\\])(torch[/\\](nn[/\\]modules[/\\]module|_ops|_tensor|overrides|utils[/\\]_contextlib"
    r"|autograd[/\\](profiler|graph|__init__|function)|profiler[/\\]\w+)\.py$"
    r"|(IPython|ipykernel|ipyparallel|nbdist|asyncio|tornado|zmq|traitlets)[/\\]"
    r"|(contextlib|runpy|selectors|threading|typing|functools)\.py$)"
    r"|^<frozen|^$"
)


@dataclass(frozen=True, slots=True)
class ProfilerHistory:
    """History of memory that a profiler has seen.

    Attributes:
        events: In order of time. All times are the host's clock, as the profiler has it.
        marks_ns: Time of each mark, by its number.
        stacks, names: As RankMemory has them.
        problem: What is missing, as a sentence.
    """

    events: tuple[Event, ...]
    backwards: tuple[Phase, ...]
    marks_ns: Mapping[int, int]
    stacks: tuple[tuple[AllocationFrame, ...], ...] = ()
    names: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Within:
    """Callers of a node of the tree.

    Attributes:
        link: The innermost call of Python.
        operator: The outermost operator below that call.
        is_cut: The link is not the caller, but the forward of a backward's node.
    """

    link: int = NO_LINK
    operator: str = ""
    is_cut: bool = False
    is_backward: bool = False


@dataclass(slots=True)
class _Reading:
    """Results of reading so far.

    Attributes:
        kinds: Names of torch's kinds of nodes, by number.
        names: Operators, each once, with its place.
        runs, nodes: Start and end of what ran a backward; of nodes with no such call around.
        others: Starts of operators outside of all of these.
        marks_ns: By number.
        forwards: Sequence number -> the call that made the operator which has it.
    """

    stacks: Stacks
    kinds: dict[int, str] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    nodes: list[tuple[int, int]] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    marks_ns: dict[int, int] = field(default_factory=dict)
    forwards: dict[int, int] = field(default_factory=dict)

    def visit(self, node: Any, children: Sequence[Any], within: _Within) -> _Within:
        """Note what a node says; what its children are called from."""
        number = int(node.tag)
        if number not in self.kinds:  # the names of torch's enumerations are slow to ask for
            self.kinds[number] = node.tag.name
        kind = self.kinds[number]
        step = _STEPS.get(kind)
        # Most calls of Python allocate nothing.
        if step is None or (kind in _CALLS and not children):
            if kind == "PyCCall":
                self.run_of(node, within)
            return within
        return step(self, node, node.typed[1], within)

    def allocation(self, node: Any, fields: Any, within: _Within) -> _Within:
        """Memory comes or goes."""
        if fields.device.type == "cpu" and fields.ptr:
            name = within.operator
            operator = self.names.setdefault(name, len(self.names)) if name else -1
            stack = self.stacks.place(within.link)
            self.events.append(
                Event(node.start_time_ns, fields.ptr, fields.alloc_size, stack, operator)
            )
        return within

    def python(self, node: Any, fields: Any, within: _Within) -> _Within:
        """A function of Python is called."""
        outer = within.link
        if not within.is_cut:
            outer = self.stacks.at(outer, fields.caller.line_number)
        call_site = fields.callsite
        file, function = _text(call_site, "file_name"), _text(call_site, "function_name")
        link = self.stacks.call(outer, file, call_site.line_number, function)
        return _Within(link, is_backward=within.is_backward)

    def c(self, node: Any, fields: Any, within: _Within) -> _Within:
        """A function of C is called by Python."""
        is_run = self.run_of(node, within)
        link = within.link
        if not within.is_cut:
            link = self.stacks.at(link, fields.caller.line_number)
        return _Within(link, is_backward=within.is_backward or is_run)

    def run_of(self, node: Any, within: _Within) -> bool:
        """Whether a function of C runs a backward; noted where it is in no other."""
        is_run = _RUN in _text(node, "name")
        if is_run and not within.is_backward:
            self.runs.append((node.start_time_ns, node.start_time_ns + node.duration_time_ns))
        return is_run

    def operator(self, node: Any, fields: Any, within: _Within) -> _Within:
        """An operator, a node of the backward, or somebody's own annotation."""
        name = node.name
        if name.startswith(MARK):
            self.marks_ns[int(name.removeprefix(MARK))] = node.start_time_ns
            return within
        if name.startswith(_NODE):
            return self._node(node, fields, within)
        if fields.scope.name == "USER_SCOPE":
            return within
        if fields.sequence_number >= 0 and fields.scope.name == "FUNCTION":
            # Operators in one another have the same number, and those that make no node of the
            # backward as well: the last one made it.
            self.forwards[fields.sequence_number] = within.link
        if not within.is_backward and not within.operator:
            self.others.append(node.start_time_ns)
        if not within.operator or name.startswith(_SENDING):
            return _Within(within.link, name, within.is_cut, within.is_backward)
        return within

    def _node(self, node: Any, fields: Any, within: _Within) -> _Within:
        if not within.is_backward:
            self.nodes.append((node.start_time_ns, node.start_time_ns + node.duration_time_ns))
        forward = self.forwards.get(fields.sequence_number)
        operator = node.name.removeprefix(_NODE).rpartition("::")[2]
        link = within.link if forward is None else forward
        return _Within(link, operator, is_cut=True, is_backward=True)


def _text(fields: Any, name: str) -> str:
    """A text of torch's; empty where its memory is used for something else by now.

    The profiler keeps the names of code that is gone (torch 2.13), as of a module that a traceback
    has loaded.
    """
    try:
        return str(getattr(fields, name))
    except UnicodeDecodeError:
        return ""


_CALLS = frozenset({"PyCall", "PyCCall"})
_STEPS = {
    "Allocation": _Reading.allocation,
    "PyCall": _Reading.python,
    "PyCCall": _Reading.c,
    "TorchOp": _Reading.operator,
}


def read(roots: Iterable[Any], cells: Mapping[str, int]) -> ProfilerHistory:
    """Read the CPU's memory from the profiler's tree.

    `roots` are torch's `_ProfilerEvent`s that are in no other, `cells` has numbers by file name.
    """
    reading = _Reading(Stacks(cells))
    # Without recursion: calls can be as deep as Python allows.
    todo: list[tuple[Any, _Within]] = [(node, _Within()) for node in reversed(list(roots))]
    while todo:
        node, within = todo.pop()
        children = node.children
        inner = reading.visit(node, children, within)
        todo.extend((child, inner) for child in reversed(children))
    return ProfilerHistory(
        events=tuple(sorted(reading.events, key=lambda event: event.time_ns)),
        backwards=tuple(_backwards(reading)),
        marks_ns=reading.marks_ns,
        stacks=tuple(reading.stacks.unique),
        names=tuple(reading.names),
    )


def _backwards(reading: _Reading) -> Iterator[Phase]:
    """Phases of backward; without recorded calls from nodes with no other operator between."""
    others = sorted(reading.others)
    place = 0
    start, end = 0, -1
    for first, last in sorted([*reading.runs, *reading.nodes]):
        while place < len(others) and others[place] < end:
            place += 1
        is_apart = place < len(others) and others[place] < first
        if end < 0 or (is_apart and first >= end):
            if end >= 0:
                yield Phase(BACKWARD, start, end)
            start, end = first, last
        else:
            end = max(end, last)
    if end >= 0:
        yield Phase(BACKWARD, start, end)


@dataclass(slots=True)
class Stacks:
    """Every stack once, made from calls that are under way.

    Attributes:
        cells: File name -> number, for the code of cells.
        links: Every call once, with the place of the one that it was made from, or NO_LINK.
        unique: Every stack once, innermost frame first.
    """

    cells: Mapping[str, int]
    links: list[tuple[int, AllocationFrame]] = field(default_factory=list)
    unique: list[tuple[AllocationFrame, ...]] = field(default_factory=list)
    _places: dict[tuple[int, AllocationFrame], int] = field(default_factory=dict)
    _stacks: dict[tuple[AllocationFrame, ...], int] = field(default_factory=dict)
    _place_of_call: dict[int, int] = field(default_factory=dict)
    _files: dict[str, str] = field(default_factory=dict)

    def call(self, outer: int, file: str, line: int, function: str) -> int:
        """A function begins; `line` is its first one."""
        return self._place((outer, AllocationFrame(file, line, function, is_line_known=False)))

    def at(self, link: int, line: int) -> int:
        """The same function, now at this line."""
        if link == NO_LINK:
            return link
        outer, call = self.links[link]
        return self._place((outer, AllocationFrame(call.file, line, call.function)))

    def place(self, link: int) -> int:
        """The stack of a call, as a place in `unique`; -1 where nothing of it is worth showing."""
        place = self._place_of_call.get(link)
        if place is None:
            place = self._place_of_call[link] = self._new(link)
        return place

    def _new(self, link: int) -> int:
        frames = []
        while link != NO_LINK:
            link, call = self.links[link]
            if call.file not in self._files:
                self._files[call.file] = shown_file(call.file, self.cells)
            if file := self._files[call.file]:
                frames.append(replace(call, file=file))
        if not frames:
            return -1
        stack = tuple(frames)
        if stack not in self._stacks:
            self._stacks[stack] = len(self.unique)
            self.unique.append(stack)
        return self._stacks[stack]

    def _place(self, link: tuple[int, AllocationFrame]) -> int:
        place = self._places.get(link)
        if place is None:
            place = self._places[link] = len(self.links)
            self.links.append(link)
        return place


def visible_stacks(
    stacks: Sequence[tuple[AllocationFrame, ...]], cells: Mapping[str, int]
) -> tuple[tuple[tuple[AllocationFrame, ...], ...], npt.NDArray[np.int32]]:
    """Stacks of whole file names as `Stacks` has them, and the new place of each; the last is -1.

    A stack of which nothing is shown has no place: -1.
    """
    numbers: dict[tuple[AllocationFrame, ...], int] = {}
    files = {frame.file: shown_file(frame.file, cells) for stack in stacks for frame in stack}
    places = []
    for stack in stacks:
        visible = tuple(
            replace(frame, file=files[frame.file]) for frame in stack if files[frame.file]
        )
        places.append(numbers.setdefault(visible, len(numbers)) if visible else -1)
    return tuple(numbers), np.array([*places, -1], np.int32)


def shown_file(file: str, cells: Mapping[str, int]) -> str:
    """`cell [3]`, or the file as Python names it; empty for one that says nothing."""
    number = cells.get(file)
    if number is None and "ipy" in file:  # its beginning may be cut off
        number = next((cells[path] for path in cells if path.endswith(f"/{file}")), None)
    if number is not None:
        return f"cell [{number}]"
    if _NOISE.search(file):
        return ""
    if file.startswith("<") or Path(file).is_absolute():
        return file
    # The profiler cuts off what is on sys.path.
    paths = (Path(folder) / file for folder in sys.path)
    return next((str(path) for path in paths if path.is_file()), file)
