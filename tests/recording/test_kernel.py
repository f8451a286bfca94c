"""What a session takes in of its ranks' traces and memory, when some of them give nothing."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.errors import Interrupted, TraceError
from nbdist.memory.kernel.recordings import Memories
from nbdist.memory.snapshot import MemoryOptions, empty
from nbdist.recording import kernel as recording_kernel
from nbdist.trace.kernel.recordings import Traces
from nbdist.trace.read import RecordedTrace
from nbdist.trace.trace import COMPUTE, TraceOptions
from nbdist.variables import pack
from tests.support.traces import Did, rank_trace


def answered(value: Any) -> Future[Any]:
    """A call that has ended with a value, or raised it."""
    future: Future[Any] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def parcel(rank: int) -> Future[Any]:
    recording = RecordedTrace(rank_trace(rank, [Did(COMPUTE, 0, 1)]), 10**18)
    return answered(pack.send(pack.pack({"recording": recording}), ()))


def memory_parcel(rank: int, duration_ns: int = 1) -> Future[Any]:
    """A rank's memory, without blocks."""
    memory = replace(empty(rank, "one", ""), duration_ns=duration_ns)
    strategy = "ddp" if duration_ns else ""
    return answered(pack.send(pack.pack({"memory": memory, "strategy": strategy}), ()))


class Ranks:
    """A session whose ranks answer `finish` as they are told to."""

    def __init__(self, answers: dict[int, Callable[[], Future[Any]]]):
        self.answers = answers
        self.gone: set[int] = set()
        self.busy: set[int] = set()
        self.interrupted: list[int] = []
        self.variables = SimpleNamespace(folders=self.folders)
        places = [SimpleNamespace(host=f"host {rank}") for rank in answers]
        self.topology = SimpleNamespace(ranks=places)

    @contextlib.contextmanager
    def folders(self, _ranks: object) -> Iterator[tuple[str, ...]]:
        yield ()

    def chosen(self, _ranks: object) -> tuple[int, ...]:
        return tuple(self.answers)

    def call_all(self, *_: object, **__: object) -> None:
        """Ranks begin."""

    def call(self, rank: int, _name: str, *_: object) -> Future[Any]:
        return self.answers[rank]()

    def end_of(self, rank: int) -> str:
        return f"exit code {rank}"

    def is_busy(self, rank: int) -> bool:
        return rank in self.busy

    def is_connected(self, rank: int) -> bool:
        return rank not in self.gone

    def interrupt(self, rank: int) -> None:
        self.interrupted.append(rank)


def begun(ranks: Ranks) -> Traces:
    traces = Traces(ranks, ranks.variables)  # type: ignore[arg-type]
    traces.begin(TraceOptions())
    return traces


@pytest.mark.parametrize(
    ("records", "options", "first"),
    [(Traces, TraceOptions(), parcel), (Memories, MemoryOptions(), memory_parcel)],
    ids=["trace", "memory"],
)
def test_ranks_that_give_nothing_are_named_with_their_reasons(
    records: Any, options: object, first: Callable[[int], Future[Any]]
) -> None:
    """One has ended, one still runs its cell, one raised, one sent what cannot be read."""
    ranks = Ranks({
        0: lambda: first(0),
        1: Future,
        2: Future,
        3: lambda: answered(TraceError("The file could not be written.")),
        4: lambda: answered(pack.PackedValue((3,), (), b"no", "")),
    })  # fmt: skip
    ranks.gone, ranks.busy = {1}, {2}
    recordings = records(ranks, ranks.variables)
    recordings.begin(options)
    record = recordings.finish()

    assert [rank.rank for rank in record.ranks] == [0, 1, 2, 3, 4]
    assert [rank.host for rank in record.ranks] == ["one", "host 1", "host 2", "host 3", "host 4"]
    problems = [rank.problem for rank in record.ranks]
    assert problems[:4] == [
        "",
        f"It ended (exit code 1) before its {records.noun} was read.",
        f"It is still running its cell, so its {records.noun} was not read.",
        "The file could not be written.",
    ]
    assert problems[4].startswith(f"Its {records.noun} did not arrive: ")
    assert recordings.last is record
    assert recordings.token == ""


def test_a_rank_that_ends_or_is_too_slow_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first at once, the second at the deadline."""
    monkeypatch.setattr(recording_kernel, "FINISH_S", 0.05)
    monkeypatch.setattr(recording_kernel, "POLL_S", 0.01)
    ranks = Ranks({0: Future, 1: Future})

    def ending() -> Future[Any]:
        ranks.gone.add(0)
        return Future()

    ranks.answers[0] = ending
    traces = begun(ranks)

    problems = [rank.problem for rank in traces.finish().ranks]

    assert problems == [
        "It ended while its trace was read.",
        "Its trace did not arrive within 0 s.",
    ]


class Pressed(Future[Any]):
    """A wait that the user interrupts."""

    def result(self, timeout: float | None = None) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_while_traces_are_read_ends_that() -> None:
    """The ranks that still work on theirs are interrupted; what was there before stays."""
    ranks = Ranks({0: lambda: parcel(0), 1: lambda: parcel(1)})
    traces = begun(ranks)
    before = traces.finish()
    ranks.answers[1] = Pressed

    with pytest.raises(Interrupted, match="were not read"):
        traces.finish()

    assert ranks.interrupted == [1]
    assert traces.last is before


def test_the_failure_of_a_recorded_cell_goes_first() -> None:
    """Its trace is taken in, and where none can be, the cell's error is still what is raised."""
    ranks = Ranks({0: lambda: parcel(0)})
    traces = Traces(ranks, ranks.variables)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError), traces.recording(TraceOptions()):
        _ = 1 / 0

    assert traces.count == 1

    def refuse(*_: object) -> Any:
        raise TraceError("no folder")

    ranks.variables.folders = refuse
    with pytest.raises(ZeroDivisionError), traces.recording(TraceOptions()):
        _ = 1 / 0
    with pytest.raises(TraceError, match="no folder"), traces.recording(TraceOptions()):
        pass


def test_nothing_recorded_is_told_with_what_to_do(tmp_path: Path) -> None:
    """Whether it is shown or saved."""
    traces = Traces(Ranks({0: Future}), None)  # type: ignore[arg-type]

    with pytest.raises(TraceError, match=r"recorded yet\..*%%dist_profile"):
        _ = traces.last
    with pytest.raises(TraceError, match="Nothing has been recorded yet"):
        traces.save(tmp_path)
