"""What ends a step of a recorded cell, for one optimizer and several; the file on a full disk."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.optim import optimizer as optimizers

import nbdist
from nbdist.recording.rank import cell_hook
from nbdist.recording.rank.steps import CellRecording, Steps
from nbdist.rpc.rank import cell_hooks
from nbdist.rpc.wire import CELL_RECORDING
from nbdist.trace import chrome_trace
from nbdist.trace import rank as trace_rank
from tests.support.recordings import Place, forbid_parsing, own_profiler


def counted(letters: str, wanted: int | None = None) -> tuple[list[int], int | None]:
    """Optimizers by letter, and `.` for nbdist.step(): (marks that end steps, enough after)."""
    marks = itertools.count()
    steps = Steps(wanted, lambda: next(marks) and None)
    for number, letter in enumerate(letters):
        is_enough = steps.take_explicit() if letter == "." else steps.take_optimizer(ord(letter))
        if is_enough:
            return steps.ends, number
    assert next(marks) == steps.marks
    return steps.ends, None


@pytest.mark.parametrize(
    ("letters", "wanted", "expected"),
    [
        # Each step of one optimizer; with two wanted three are made, the first is left out.
        ("aaa", None, ([0, 1, 2], None)),
        ("aaaaa", 2, ([0, 1, 2], 2)),
        # Several of one loop make one together, that ends with the last; an odd one out is its own.
        ("abab", None, ([1, 3], None)),
        ("abcabcabc", None, ([2, 5, 8], None)),
        ("aab", None, ([0, 2], None)),
        # Enough is not before the last optimizer: one wanted step of two ends with the fourth call.
        ("ababab", 1, ([1, 3], 3)),
        # An explicit step counts alone, from the first on, whatever optimizers do around it.
        ("aa.aa.a", None, ([2, 3], None)),
        ("a.a.a.", 2, ([1, 2, 3], 5)),
    ],
)
def test_what_ends_a_step(
    letters: str, wanted: int | None, expected: tuple[list[int], int | None]
) -> None:
    """Marks that end steps, and the call after which there are enough."""
    assert counted(letters, wanted) == expected


def test_an_explicit_step_costs_nothing_where_nothing_is_recorded() -> None:
    """It finds no recording, and calls nothing."""
    assert cell_hook.state.running is None

    nbdist.step()

    assert cell_hook.state.running is None


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trace_rank._Recording:
    """A recording of this process, which is no rank."""
    monkeypatch.setattr(trace_rank, "this_rank", Place)
    monkeypatch.setattr(trace_rank._Recording, "_header", lambda self: {"ends": self.steps.ends})
    return trace_rank._Recording(trace_rank.TraceOptions(steps=1), tmp_path, "token")


def test_a_recording_ends_after_enough_steps_and_leaves_no_hook(
    recording: trace_rank._Recording,
) -> None:
    """Inside the optimizer's step; the optimizer goes on."""
    before = dict(optimizers._global_optimizer_post_hooks)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recording.start()
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    assert recording.steps.ends == [0, 1]
    assert dict(optimizers._global_optimizer_post_hooks) == before
    recording.stop()
    recording.export()
    assert recording.path.stat().st_mode & 0o777 == 0o600
    recording.export()  # a second time it is there already


def test_names_of_code_that_is_gone_cost_no_trace(
    recording: trace_rank._Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch parses all names where it is asked to keep events of several cycles."""
    forbid_parsing(monkeypatch)
    recording.start()
    torch.ones(3)
    recording.stop()
    recording.export()

    assert (recording.problem, recording.path.exists()) == ("", True)


def test_a_mark_launches_a_kernel_inside_itself(
    recording: trace_rank._Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU has only annotations that launch something; not into a graph that is captured.

    A CPU tensor stands for the GPU's: its operator is where the GPU's launch would be.
    """
    recording.start()
    recording._marked = torch.ones(1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    recording._mark()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    recording._mark()
    recording.stop()
    recording.export()

    raw = chrome_trace.read(recording.path)
    names = np.array([raw.heads[number].name for number in raw.head])
    start_ns, end_ns = raw.start_ns, raw.start_ns + raw.duration_ns
    marks = np.flatnonzero(names == "nbdist.step")
    inside = [
        int(((names == "aten::zero_") & (start_ns >= start_ns[m]) & (end_ns <= end_ns[m])).sum())
        for m in marks[np.argsort(start_ns[marks])]
    ]
    assert inside == [1, 0]
    assert recording._marked.item() == 0


def test_a_trace_that_finds_no_room_is_told(
    recording: trace_rank._Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libkineto leaves a part of the file and says nothing: no part stays, and the error tells."""
    recording.start()
    torch.ones(3).sum()
    recording.stop()

    def full(_profiler: object, path: str) -> None:
        Path(f"{path}.tmp").write_text("{")

    monkeypatch.setattr(trace_rank.profile, "export_chrome_trace", full)
    with pytest.raises(trace_rank.TraceError, match=r"could not be written to .*are free.*--steps"):
        recording.export()

    assert list(recording.path.parent.iterdir()) == []


def test_a_profiler_that_runs_already_is_told_and_left_alone(
    recording: trace_rank._Recording, tmp_path: Path
) -> None:
    """It goes on, and has its trace."""
    profiler = own_profiler()
    profiler.start()
    recording.start()
    recording.stop()
    profiler.stop()
    profiler.export_chrome_trace(str(tmp_path / "own.json"))

    assert (tmp_path / "own.json").exists()
    with pytest.raises(trace_rank.TraceError, match="Another profiler is running on this rank"):
        recording.export()


def test_a_profiler_of_the_cell_ends_the_recording_and_is_told(
    recording: trace_rank._Recording, tmp_path: Path
) -> None:
    """torch has one at a time."""
    recording.start()
    with own_profiler():
        torch.ones(3)
    recording.stop()

    with pytest.raises(trace_rank.TraceError, match="used its own profiler"):
        recording.export()


class Kernel:
    """A kernel that runs cells with the metadata that they are given."""

    def __init__(self) -> None:
        self.metadata: dict[str, object] = {}
        self.shell = SimpleNamespace(showtraceback=self.format_error)
        self.at_error: list[str] = []
        cell_hook.install(self.shell)
        cell_hooks.install(self, [cell_hook.around_cell])

    def get_parent(self, _channel: str) -> dict[str, object]:
        return {"metadata": self.metadata}

    async def do_execute(self, code: str) -> str:
        if code == "fail":
            raise KeyboardInterrupt
        if code == "error":
            self.shell.showtraceback()
        return f"{code} {cell_hook.state.running is not None}"

    def format_error(self) -> None:
        recording = cell_hook.state.running
        self.at_error = list(recording.calls) if isinstance(recording, Noted) else []

    def run(self, code: str, token: str | None = None) -> str:
        self.metadata = {} if token is None else {CELL_RECORDING: token}
        return asyncio.run(self.do_execute(code))


class Noted(CellRecording):
    noun = "trace"

    def __init__(self, token: str):
        super().__init__(token, None, lambda: None)
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def after_step(self) -> None:
        self.calls.append("step")


@pytest.fixture
def noted() -> Iterator[Noted]:
    cell_hook.state.armed = noted = Noted("mine")
    yield noted
    cell_hook.state.armed = None


def test_only_the_cell_that_is_meant_is_recorded_and_only_once(noted: Noted) -> None:
    """Not one that comes before it, such as when its own was never sent; nor the next."""
    kernel = Kernel()

    states = [
        kernel.run("a"),
        kernel.run("b", "other"),
        kernel.run("c", "mine"),
        kernel.run("d", "mine"),
    ]

    assert states == ["a False", "b False", "c True", "d False"]
    assert noted.calls == ["start", "stop"]


def test_a_recording_ends_before_an_error_is_formatted(noted: Noted) -> None:
    """That is no part of the cell, and takes long where Python's calls are recorded."""
    kernel = Kernel()

    kernel.run("error", "mine")

    assert kernel.at_error == ["start", "stop"]
    kernel.run("error")
    assert kernel.at_error == []


def test_a_recording_ends_with_a_cell_that_fails(noted: Noted) -> None:
    """An interrupt is one way."""
    kernel = Kernel()

    with pytest.raises(KeyboardInterrupt):
        kernel.run("fail", "mine")

    assert noted.calls == ["start", "stop"]
    assert cell_hook.state.running is None
    assert kernel.run("after", "mine") == "after False"
