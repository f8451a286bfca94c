"""What a rank tells of itself while its main thread is somewhere: in torch, asleep, computing."""

import dataclasses
import json
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

from nbdist.cluster.kernel.start import StartOptions
from nbdist.hang.kernel import health
from nbdist.hang.rank import graph_capture, main_thread
from nbdist.hang.records import FlightRecorderEntry, SourceLine, ThreadSnapshot
from nbdist.rpc.kernel.channel import Channel
from nbdist.rpc.wire import CELL_NUMBER
from tests.support.ranks import session_of, temporary_folder, until

DEADLINE_S = 20.0
WORLD = "0"


class Ranks:
    """Two ranks, and cells that run on one of them."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.cell = 100  # the number of the newest cell

    def run(self, rank: int, code: str) -> Callable[[], Any]:
        """Start a cell; the result waits for its end and fails the test if it raised."""
        done: SimpleQueue[Any] = SimpleQueue()
        self.cell += 1
        metadata = {CELL_NUMBER: self.cell}
        self.channel.execute(rank, code, metadata, lambda _: None, done.put)

        def end() -> None:
            reply = done.get(timeout=DEADLINE_S)
            if isinstance(reply, BaseException):
                raise reply

        return end

    def both(self, code: str) -> None:
        ends = [self.run(rank, code) for rank in (0, 1)]
        for end in ends:
            end()

    def snapshot(self, rank: int) -> ThreadSnapshot:
        snapshot = health.take_snapshot(self.channel.ask, rank).result(DEADLINE_S)
        assert isinstance(snapshot, ThreadSnapshot)
        return snapshot

    def snapshot_when(
        self, rank: int, is_right: Callable[[ThreadSnapshot], bool]
    ) -> ThreadSnapshot:
        """The first look for which the condition holds."""
        snapshots: list[ThreadSnapshot] = []

        def is_there() -> bool:
            snapshots.append(self.snapshot(rank))
            return is_right(snapshots[-1])

        assert until(is_there), snapshots[-1]
        return snapshots[-1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("looks")
    with temporary_folder(folder / "tmp"), session_of(StartOptions(2, gpus="none")) as session:
        assert session.cluster.channel is not None
        yield Ranks(session.cluster.channel)


def waits_beyond(number: int) -> Callable[[ThreadSnapshot], bool]:
    """Whether a rank waits in torch, and more calls are noted (torch does so a moment later)."""
    return lambda snapshot: (
        snapshot.is_in_torch and snapshot.is_asleep and number_of(snapshot) > number
    )


def number_of(snapshot: ThreadSnapshot) -> int:
    return snapshot.newest[WORLD].number if WORLD in snapshot.newest else 0


def line_of(snapshot: ThreadSnapshot) -> int:
    return snapshot.place.line if snapshot.place else 0


class Wait(NamedTuple):
    """A cell that waits on rank 0 until rank 1 runs its own."""

    code: str
    line: int  # of the code, the one that is told
    op: str
    detail: str
    other: str = ""  # rank 1's cell; the line of rank 0's that is told where it is empty
    before: str = "pass"  # run on both first
    innermost: str = ""  # file of the last frame, as far as it is known

    @property
    def source(self) -> str:
        return self.code.splitlines()[self.line - 1].strip()


WAITS = {
    "a collective": Wait(
        "x = torch.ones(3)\n\ndist.all_reduce(x)", 3, "all_reduce", "float32[3]",
        "dist.all_reduce(torch.ones(3))", innermost="torch/distributed/distributed_c10d.py",
    ),
    # wait() has no Python frame of torch's own, and is a wait in torch even so.
    "an asynchronous one": Wait(
        "work = dist.all_reduce(torch.ones(2), async_op=True)\nwork.wait()", 2, "all_reduce",
        "float32[2]", "dist.all_reduce(torch.ones(2))",
    ),
    # What C++ calls inside of backward() is told by the recorder.
    "DDP's backward": Wait(
        "def step():\n    loss.backward()\n\nstep()", 2, "all_reduce", "float32[25]",
        before="m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 5))\n"
        "loss = m(torch.ones(2, 4)).sum()",
    ),
    # The sharded parameters' gather, with the cell's line and not FSDP's own.
    "FSDP2's forward": Wait(
        "y = f(torch.ones(2, 8))", 1, "all_gather", "float32[36]",
        before="from torch.distributed.fsdp import fully_shard\n"
        "f = fully_shard(torch.nn.Linear(8, 8))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_told_with_its_line_and_its_call(ranks: Ranks, name: str) -> None:
    """Place, stack and the call by its name and shape, one ahead of the idle peer's."""
    wait = WAITS[name]
    ranks.both(wait.before)
    before = number_of(ranks.snapshot(1))
    end = ranks.run(0, wait.code)
    cell = ranks.cell
    snapshot = ranks.snapshot_when(0, waits_beyond(before))
    other = ranks.snapshot_when(
        1, lambda snapshot: snapshot.stack == ()
    )  # it may still import meanwhile
    ranks.run(1, wait.other or wait.source)()
    end()

    *_, last = lines = wait.code.splitlines()
    assert snapshot.place == SourceLine(cell, "", wait.line, wait.source)
    assert snapshot.stack[0] == f"cell [{cell}], line {len(lines)}: {last}"
    assert wait.innermost in snapshot.stack[-1]
    call = FlightRecorderEntry(wait.op, wait.detail, before + 1, is_pending=True)
    assert snapshot.newest[WORLD] == dataclasses.replace(call, group=WORLD)
    assert (other.place, number_of(other)) == (None, before)


LOADER = """import os, time
class D(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, i):
        while not os.path.exists({!r}): time.sleep(0.01)
        return i
for x in torch.utils.data.DataLoader(D(), num_workers=1): pass"""


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import os, time\nwhile not os.path.exists({!r}):\n    time.sleep(1)", 3),
        (LOADER, 7),
    ],
    ids=["time.sleep", "a data loader"],
)
def test_another_sleep_is_no_wait_in_torch(
    ranks: Ranks, tmp_path: Path, code: str, line: int
) -> None:
    """It is told with its line."""
    gate = tmp_path / "gate"
    end = ranks.run(0, code.format(str(gate)))
    snapshot = ranks.snapshot_when(
        0, lambda snapshot: snapshot.is_asleep and line_of(snapshot) == line
    )
    gate.touch()
    end()

    source = code.splitlines()[line - 1].strip()
    assert snapshot.place == SourceLine(ranks.cell, "", line, source)
    assert not snapshot.is_in_torch


def test_computing_is_not_asleep(ranks: Ranks, tmp_path: Path) -> None:
    """A loop of matrix products is never taken to wait, however often it is looked at."""
    gate = tmp_path / "gate"
    end = ranks.run(
        0,
        "import os\na = torch.ones(300, 300)\n"
        f"while not os.path.exists({str(gate)!r}):\n    b = a @ a",
    )
    ranks.snapshot_when(0, lambda snapshot: line_of(snapshot) > 2)
    snapshots = [ranks.snapshot(0) for _ in range(20)]
    gate.touch()
    end()

    assert not any(snapshot.is_asleep for snapshot in snapshots)
    assert {line_of(snapshot) for snapshot in snapshots} <= {0, 3, 4}


def test_a_module_of_the_users(ranks: Ranks, tmp_path: Path) -> None:
    """The innermost line is in the user's file, which is named; the cell is in the stack."""
    gate = tmp_path / "gate"
    (tmp_path / "users_module.py").write_text(
        "import os, time\ndef wait(path):\n    while not os.path.exists(path):\n"
        "        time.sleep(0.2)\n"
    )
    end = ranks.run(
        0,
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport users_module\n"
        f"users_module.wait({str(gate)!r})",
    )
    snapshot = ranks.snapshot_when(
        0, lambda snapshot: snapshot.is_asleep and snapshot.place is not None
    )
    gate.touch()
    end()

    assert snapshot.place == SourceLine(None, "users_module.py", 4, "time.sleep(0.2)")
    assert snapshot.stack[0].startswith(f"cell [{ranks.cell}], line 3")


# New backends inside the same ProcessGroup, as a recovery makes them; one process.
SWAP = """
import json, sys, tempfile
import torch, torch.distributed as dist
from nbdist.hang.rank import main_thread as looks

def counts():
    return {name: [c.op, c.number] for (_, name), c in looks.newest_collectives().items()}

folder = tempfile.mkdtemp(dir=sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(folder + "/0", 1), rank=0, world_size=1)
group = dist.new_group([0])
counts_after = [counts()]
for _ in range(3):
    dist.all_reduce(torch.ones(2))
dist.barrier(group=group)
counts_after.append(counts())
world = dist.group.WORLD
backend = dist.ProcessGroupGloo(dist.FileStore(folder + "/1", 1), 0, 1)
world._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType(7), backend)
world._set_group_name(world.group_name)
looks.mark_recovered()
counts_after.append(counts())
dist.all_reduce(torch.ones(2))
dist.all_reduce(torch.ones(2), group=group)
counts_after.append(counts())
print(json.dumps(counts_after))
"""


def test_numbers_count_from_the_last_recovery(tmp_path: Path) -> None:
    """After it there is nothing, then 1: in a group with a new backend and in one without."""
    done = subprocess.run(
        [sys.executable, "-c", SWAP, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    start, before, marked, after = json.loads(done.stdout)

    assert start == {}
    assert before == {"0": ["all_reduce", 3], "1": ["barrier", 1]}
    assert marked == {}
    assert after == {"0": ["all_reduce", 1], "1": ["all_reduce", 1]}


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "record_id": 5,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 4,
        "is_p2p": False,
        "profiling_name": "nccl:_all_gather_base",
        "input_sizes": [[2, 3], [4]],
        "input_dtypes": ["BFloat16", "Float"],
        "retired": False,
        **changes,
    }


def test_entries_that_do_not_count() -> None:
    """Groups without a name, and what was before the mark."""
    others = [entry(process_group=("", "")), entry(record_id=3)]
    call = FlightRecorderEntry(
        "all_gather_into_tensor", "bfloat16[2, 3]", 3, is_pending=True, group="0"
    )

    assert list(main_thread.calls_of(others, mark=3, base={})) == []
    assert list(main_thread.calls_of([*others, entry()], mark=3, base={0: 1})) == [
        (("nccl", "0"), call)
    ]


@pytest.mark.parametrize(
    ("recorded", "name"),
    [
        ("nccl:_reduce_scatter_base", "reduce_scatter_tensor"),
        ("nccl:all_reduce_barrier", "barrier"),
        ("gloo:all_gather", "all_gather"),
    ],
)
def test_calls_of_the_recorder_have_their_python_names(recorded: str, name: str) -> None:
    """C++'s own would mean nothing to who has called them."""
    ((_, call),) = main_thread.calls_of([entry(profiling_name=recorded)], -1, {})

    assert call.op == name


def test_what_was_counted_and_not_yet_noted_is_read_again() -> None:
    """The entries are kept only when they hold every call of the status."""
    status = {"0": {"last_enqueued_collective": 4}, "1": {"last_enqueued_collective": 2}}
    noted = [entry(op_id=4), entry(pg_id=1, op_id=2)]

    assert main_thread.is_complete(status, noted)
    assert not main_thread.is_complete(status, noted[:1])
    assert not main_thread.is_complete(status, [entry(op_id=3), noted[1]])


def test_a_barrier_has_no_detail() -> None:
    """Without tensors there is nothing to say."""
    barrier = entry(profiling_name="gloo:barrier", input_sizes=[], input_dtypes=[])
    ((key, call),) = main_thread.calls_of([barrier], -1, {})

    assert key == ("gloo", "0")
    assert (call.op, call.detail, call.number, call.is_pending) == ("barrier", "", 4, True)


@pytest.mark.parametrize("kind", ["nccl", "nccl2"])
def test_each_backend_counts_for_itself(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Gloo's and NCCL's recorders use one name for a group, and numbers of their own."""
    gloo = entry(profiling_name="gloo:all_reduce", collective_seq_id=7, retired=True)
    nccl = [entry(profiling_name=f"{kind}:all_reduce", collective_seq_id=n) for n in (1, 2)]
    nccl.append(entry(profiling_name=f"{kind}:send 0->1", is_p2p=True))
    recorders = [
        main_thread._FlightRecorder(lambda *_, e=e: pickle.dumps({"entries": e}))  # type: ignore[misc]
        for e in ([gloo], nccl)
    ]
    monkeypatch.setattr(main_thread, "_recorders", recorders)

    newest = main_thread.newest_collectives()
    assert {key: call.number for key, call in newest.items()} == {
        ("gloo", "0"): 7,
        (kind, "0"): 2,
    }
    calls = [(c.op, c.number, c.is_transfer) for c in main_thread.device_calls()]
    assert calls == [("all_reduce", 1, False), ("all_reduce", 2, False), ("send 0->1", 4, True)]
    assert main_thread.snapshot().newest == {"0": newest["gloo", "0"]}


def test_recorders_that_have_a_name_are_asked_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 has one for each backend, and answers for Gloo where none is named."""

    def dump(_entries: bool, _stacks: bool, _active: bool, backend: str = "gloo") -> bytes:
        """dump(includeCollectives: bool | None, ..., backend: str = 'gloo') -> bytes"""
        return backend.encode()

    monkeypatch.setattr(main_thread._distributed_c10d, "_dump_fr_trace", dump)
    monkeypatch.delattr(main_thread._distributed_c10d, "_dump_nccl_trace", raising=False)
    asked = [read(True, False, False) for read in main_thread._dumps()]

    assert asked == [b"gloo", b"nccl2", b"nccl-lazy"]


def test_a_look_at_a_cpu_rank_reads_the_recorder_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading of a whole recorder holds the rank up for as long as it takes."""
    readings: list[bool] = []

    def dump(with_entries: bool, _stacks: bool, _active: bool) -> bytes:
        readings.append(with_entries)
        return pickle.dumps({"entries": [entry()]})

    recorder = main_thread._FlightRecorder(dump)
    monkeypatch.setattr(main_thread, "_recorders", [recorder])
    main_thread.snapshot()

    assert readings.count(True) == 1


def test_without_a_recorder_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch may have none: no error, and a look without numbers."""
    monkeypatch.setattr(main_thread, "_recorders", [])
    main_thread.mark_recovered()

    assert main_thread.newest_collectives() == {}


class _Kept:
    """Something whose end can be seen."""


def test_a_look_frees_nothing_of_the_main_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a function holds goes when it returns, also while a look at it is under way."""
    is_watching, may_end = threading.Event(), threading.Event()

    def end(_: object) -> bool:
        is_watching.set()
        return may_end.wait(DEADLINE_S)

    monkeypatch.setattr(main_thread._Sleep, "end", end)

    def looked_at() -> weakref.ref[_Kept]:
        in_frame = _Kept()
        thread.start()
        assert is_watching.wait(DEADLINE_S)
        return weakref.ref(in_frame)

    thread = threading.Thread(target=main_thread.snapshot)
    in_frame = looked_at()

    assert in_frame() is None

    may_end.set()
    thread.join(DEADLINE_S)


class _Graph:
    """Stands for torch.cuda.CUDAGraph, which a build without CUDA cannot make.

    Attributes:
        error: What its capture cannot begin with.
    """

    error: BaseException | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        del pool, capture_error_mode
        if self.error is not None:
            raise self.error

    def capture_end(self) -> None:
        if self.error is not None:
            raise self.error


def test_a_look_does_not_ask_the_recorder_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It knows what it knew before; whatever becomes of the capture, the next look asks."""
    monkeypatch.setattr(graph_capture, "CUDAGraph", _Graph)
    monkeypatch.setattr(_Graph, "capture_begin", _Graph.capture_begin)  # restored at the end
    monkeypatch.setattr(_Graph, "capture_end", _Graph.capture_end)
    graph_capture.install()
    noted = [entry(op_id=4)]
    is_held: list[bool] = []

    def dump(with_entries: bool, _stacks: bool, _active: bool) -> bytes:
        is_held.append(graph_capture._lock.locked())  # a capture waits for it
        status = {"0": {"last_enqueued_collective": len(noted)}}
        return pickle.dumps({"pg_status": status, "entries": noted if with_entries else []})

    recorder = main_thread._FlightRecorder(dump)

    def asked() -> int:
        is_held.clear()
        recorder.read()
        assert all(is_held)
        return len(is_held)

    assert asked() == 2
    calls, graph, other = dict(recorder.calls), _Graph(), _Graph()
    graph.capture_begin(capture_error_mode="global")
    other.capture_begin()
    noted.append(entry(op_id=5, record_id=6, profiling_name="nccl:all_reduce"))
    assert (asked(), recorder.read()) == (0, calls)
    graph.capture_end()
    assert asked() == 0
    other.error = RuntimeError("capture failed")
    with pytest.raises(RuntimeError, match="capture failed"):
        other.capture_end()
    with pytest.raises(RuntimeError, match="capture failed"):
        other.capture_begin()
    assert asked() == 2
    assert recorder.calls["nccl", "0"].op == "all_reduce"


def test_a_capture_that_nobody_ends_holds_no_look_off_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Begun by hand, and what was captured failed: it is over once its graph is gone."""
    monkeypatch.setattr(graph_capture, "CUDAGraph", _Graph)
    monkeypatch.setattr(_Graph, "capture_begin", _Graph.capture_begin)
    monkeypatch.setattr(_Graph, "capture_end", _Graph.capture_end)
    graph_capture.install()
    graph = _Graph()
    graph.capture_begin()
    with graph_capture.held_off() as may_ask:
        assert not may_ask
    del graph
    with graph_capture.held_off() as may_ask:
        assert may_ask
