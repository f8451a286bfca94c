"""What the notebook knows of ranks by their call logs, also where these are on another host."""

import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.cluster.kernel.processes import Exit
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.exit_cause import CRASH_FILE
from nbdist.hang import call_log
from nbdist.hang.call_log import DONE, SIZE_BYTES, CallLogWriter
from nbdist.hang.kernel.health import LOOK_PAUSE_S, CallLogFiles, Health
from nbdist.hang.records import CallLog, SourceLine, ThreadSnapshot

AHEAD_S = 5000.0


class LateCallbacks(Future[Any]):
    """Done a moment before those who wait for it are told, as every future may be."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: list[Callable[[Any], object]] = []

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Keep it until `tell`."""
        self.callbacks.append(fn)

    def tell(self) -> None:
        """Call whoever waits for an answer."""
        for callback in self.callbacks:
            callback(self)


class FakeChannel:
    """One engine, which answers when the test says so."""

    engine_ids = (0,)

    def __init__(self) -> None:
        self.asked: list[LateCallbacks] = []

    def ask(self, _engine: int, _name: str) -> Future[Any]:
        self.asked.append(LateCallbacks())
        return self.asked[-1]


def content() -> bytes:
    """A log of another host, whose clock is ahead."""
    log = CallLogWriter(bytearray(SIZE_BYTES), 0, 77)
    log.set_cell(3, "running")
    log.end(log.begin(log.group("0", (0,)), b"barrier\0", b""), 2)
    return bytes(log.memory)


def health_of(
    channel: FakeChannel,
    run_dir: Path,
    exits: dict[int | None, Exit] | None = None,
    n_ranks: int = 1,
) -> Health:
    """Of ranks on other hosts: no process of this machine. Rank 0 is engine 0, and so on."""
    processes = SimpleNamespace(pids=dict, exits={} if exits is None else exits)
    cluster: Any = SimpleNamespace(run_dir=run_dir, channel=channel, processes=processes)
    places = tuple(SimpleNamespace(rank=rank, engine_id=rank) for rank in range(n_ranks))
    topology: Any = SimpleNamespace(ranks=places, engine_of_rank=lambda rank: rank)
    return Health(Ranks(cluster, topology))


def test_a_rank_that_made_no_call_is_told_with_the_line_in_which_it_was_seen(
    tmp_path: Path,
) -> None:
    """What it answered last in its cell; of an earlier cell nothing."""
    channel = FakeChannel()
    health = health_of(channel, tmp_path)
    health.ask([0], 0.0)
    place = SourceLine(cell=4, file="", line=3, source="step()")
    channel.asked[0].set_result(ThreadSnapshot(place, (), is_in_torch=False, is_asleep=False))
    health.views({0: ("running", "")})
    health.note_exit(0, -9, is_ours=False)
    seen = health.last_words_of(0)
    health.forget_snapshots()  # another cell begins
    health.note_exit(0, -9, is_ours=False)

    assert seen == "last seen at line 3 of cell [4]: step()"
    assert health.last_words_of(0) == ""


def test_what_a_rank_of_another_host_has_left_tells_its_end(tmp_path: Path) -> None:
    """Its agent has sent the files; the memory of this machine says nothing of its SIGKILL."""
    exits: dict[int | None, Exit] = {}
    health = health_of(FakeChannel(), tmp_path, exits)
    dump = 'Current thread 0x1 (most recent call first):\n  File "/code/lib.py", line 9 in step\n'
    (tmp_path / CRASH_FILE.format(rank=0)).write_text(f"Fatal Python error\n\n{dump}")
    ends = []
    for code, unreachable in ((-11, ""), (-9, ""), (None, "node2 cannot be reached: silent")):
        exits[0] = Exit(0, code, unreachable)
        health.note_exit(0, code, is_ours=False)
        ends.append(health.end_of(0))

    assert ends == [
        "signal SIGSEGV in lib.py, line 9, in step",
        "signal SIGKILL: sent by somebody else, or by the system for memory",
        "node2 cannot be reached: silent",
    ]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGABRT, "ranks 0-1 called all_reduce with different shapes: "),
        (-signal.SIGSEGV, "ranks 0-1 called all_reduce with different shapes: "),
        (-signal.SIGKILL, "its last call was all_reduce(float32[10])"),
    ],
)
def test_memory_that_was_written_over_is_told_by_the_shapes(
    code: int, words: str, tmp_path: Path
) -> None:
    """Which signal ends a rank then depends on what lay there; SIGKILL comes from outside."""
    (tmp_path / "boxes").mkdir()
    for rank, shape in enumerate(("float32[10]", "float32[1000000]")):
        log = CallLogWriter(bytearray(SIZE_BYTES), rank, 77)
        log.set_cell(3, "running")
        log.begin(log.group("0", (0, 1)), call_log.pack_what("all_reduce", shape), b"")
        (tmp_path / "boxes" / str(rank)).write_bytes(bytes(log.memory))
    health = health_of(FakeChannel(), tmp_path, {0: Exit(0, code)}, n_ranks=2)
    health.note_exit(0, code, is_ours=False)
    health.close()

    assert health.last_words_of(0).startswith(words)


def test_an_answer_is_taken_once_it_is_noted_when_it_came(tmp_path: Path) -> None:
    """In the moment in which it is done and not noted yet nothing is known, and nothing fails."""
    channel = FakeChannel()
    health = health_of(channel, tmp_path)
    assert health.log(0) is None
    (first,) = channel.asked
    written = content()
    asked_s = time.monotonic()
    first.set_result((asked_s + AHEAD_S, written))
    between = health.log(0)
    first.tell()
    noted_s = time.monotonic()
    log = health.log(0)

    assert between is None
    assert log is not None
    assert (log.rank, log.run, log.state) == (0, 3, "running")
    # Their clock's times, told by ours: the log was written before it was sent.
    assert asked_s - AHEAD_S - 60 < log.calls[0].began_s <= noted_s - AHEAD_S
    assert len(channel.asked) == 2, "one that is on its way is not asked again"
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes" / "0").write_bytes(written)  # as its agent sends it when the rank ends
    last = health.log(0)
    health.close()
    assert last is not None
    assert list(last.calls) == list(log.calls)


def test_many_ranks_are_asked_less_often(tmp_path: Path) -> None:
    """Each answer costs both sides a millisecond or more: of 64 ranks 32 in a second."""
    channel = FakeChannel()
    health = health_of(channel, tmp_path)
    for world, pause_s in ((1, LOOK_PAUSE_S), (64, 2.0)):
        health._ranks.topology.ranks = (SimpleNamespace(rank=0, engine_id=0),) * world
        health.forget_snapshots()
        asked_s = 100.0
        health.ask([0], asked_s)
        channel.asked[-1].set_result(ThreadSnapshot(None, (), False, False))
        health.views({0: ("running", "")})
        n_asked = len(channel.asked)
        health.ask([0], asked_s + pause_s - 0.1)
        assert len(channel.asked) == n_asked
        health.ask([0], asked_s + pause_s - 0.1, newer_than_s=asked_s + 0.1)
        assert len(channel.asked) == n_asked + 1, "what is about to be told needs a new answer"


def test_of_64_boxes_those_are_read_in_which_something_has_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times a second all are looked at; a rank that computes or waits writes nothing."""
    read: list[int] = []
    original = call_log.read

    def count(*args: Any) -> CallLog:
        log = original(*args)
        read.append(log.rank)
        return log

    monkeypatch.setattr(call_log, "read", count)
    writers = []
    for rank in range(64):
        (tmp_path / str(rank)).write_bytes(bytes(SIZE_BYTES))
        with (tmp_path / str(rank)).open("r+b") as file:
            writers.append(CallLogWriter(mmap(file.fileno(), 0), rank, 1000 + rank))
    files = CallLogFiles(tmp_path)
    looks = []
    for _ in range(3):
        for rank in range(64):
            assert files.read(rank) is not None
        looks.append(len(read))
        entry = writers[7].begin(writers[7].group("0", range(64)), b"barrier\0", b"")
    waiting = files.read(7)
    writers[7].end(entry, DONE)
    ended = files.read(7)
    files.close()

    assert looks == [64, 65, 66]
    assert waiting is not None
    assert waiting.waiting is not None
    assert ended is not None
    assert [call.state for call in ended.calls] == ["waiting", "waiting", "done"]
