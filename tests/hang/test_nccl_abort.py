"""NCCL on a rank, as far as it goes without a GPU: finding backends, and voiding a cell."""

import contextlib
import io
import pickle
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from torch.distributed import distributed_c10d as c10d

from nbdist.errors import NbdistError
from nbdist.hang.rank import debug_checks, nccl_abort


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A group of one rank, with Gloo."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_without_nccl_nothing_happens(group: Any, tmp_path: Path) -> None:
    """A group without NCCL is neither aborted nor renewed, and works as before."""
    before = group._get_backend(torch.device("cpu"))
    nccl_abort.renew(group, dist.FileStore(str(tmp_path / "new"), 1), timedelta(seconds=5))
    total = torch.ones(3)
    dist.all_reduce(total)

    assert nccl_abort.backend(group) is None
    assert nccl_abort.backends() == []
    assert nccl_abort.abort() == 0
    assert group._get_backend(torch.device("cpu")) is before
    assert total.tolist() == [1.0, 1.0, 1.0]


class FakeNccl:
    """Records what is called; its abort ends when its barrier or its event lets it."""

    def __init__(
        self, name: str, calls: list[str], hang: threading.Event | threading.Barrier | None = None
    ) -> None:
        self.name, self.calls, self.hang = name, calls, hang

    def abort(self) -> None:
        self.calls.append(self.name)
        if self.hang is not None:
            self.hang.wait(20)
        if self.name == "broken":
            raise RuntimeError("unhandled system error")


def test_all_groups_are_aborted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell is voided first; no abort ends before the other has begun, and both are counted."""
    calls: list[str] = []
    meeting = threading.Barrier(2)
    backends = [FakeNccl("newest", calls, meeting), FakeNccl("world", calls, meeting)]
    monkeypatch.setattr(nccl_abort, "backends", lambda: backends)
    monkeypatch.setattr(nccl_abort, "void", lambda: calls.append("void"))

    assert nccl_abort.abort() == 2
    assert calls[0] == "void"
    assert sorted(calls[1:]) == ["newest", "world"]


def test_an_abort_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL's reason; the other groups are aborted even so."""
    calls: list[str] = []
    backends = [FakeNccl("broken", calls), FakeNccl("world", calls)]
    monkeypatch.setattr(nccl_abort, "backends", lambda: backends)
    with pytest.raises(NbdistError, match=r"unhandled system error.*%dist_restart"):
        nccl_abort.abort()

    assert sorted(calls) == ["broken", "world"]


def test_an_abort_that_hangs_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller comes back at the deadline with the number of groups."""
    hang = threading.Event()
    monkeypatch.setattr(nccl_abort, "backends", lambda: [FakeNccl("world", [], hang)])
    began_s = time.monotonic()
    try:
        with pytest.raises(NbdistError, match=r"1 of 1 groups within 0\.2 s"):
            nccl_abort.abort(deadline_s=0.2)
    finally:
        hang.set()

    assert time.monotonic() - began_s < 5


# Blocks in C, as a wait for the GPU does, until the test opens the gate; then it would bind.
CELL = "result = None\nreached.set()\nresult = gate.acquire(timeout=30)\nafter = True"


def run_cell(code: str, beside: Any) -> Any:
    """Run a cell in this thread, with `beside` in another one meanwhile; its result."""
    shell = InteractiveShell.instance()
    names = {"reached": threading.Event(), "gate": threading.Semaphore(0)}
    shell.user_ns.update(names, after=False)
    other = threading.Thread(target=beside, args=(names["reached"], names["gate"]))
    other.start()
    with contextlib.redirect_stdout(io.StringIO()):  # the shell shows the failure there
        result = shell.run_cell(code)
    other.join()
    return shell.user_ns, result


def test_a_voided_cell_fails_and_binds_nothing() -> None:
    """The call that was blocked returns, but what it returned is never bound."""
    answers = []

    def beside(reached: threading.Event, gate: threading.Semaphore) -> None:
        assert reached.wait(20)
        answers.append(nccl_abort.void())
        gate.release()

    names, result = run_cell(CELL, beside)

    assert answers == [True]
    assert isinstance(result.error_in_exec, nccl_abort.Void)
    assert "is void" in str(result.error_in_exec)
    assert names["result"] is None
    assert names["after"] is False


def test_without_a_cell_nobody_is_hit() -> None:
    """Outside of a cell void says no, and no exception comes later."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(nccl_abort.void()))
    thread.start()
    thread.join()
    for _ in range(1000):
        pass

    assert answers == [False]


class _Member:
    """A group of ranks 2 and 5, as `renew` sees it on rank 5."""

    bound_device_id = torch.device("cuda", 1)
    group_name = "7"

    def __init__(self) -> None:
        self.registered: list[Any] = []

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def _backend_id(self, _kind: Any) -> int:
        raise RuntimeError("no such type yet")

    def _register_backend(self, *registered: Any) -> None:
        self.registered.append(registered)


class _NewNccl:
    """torch's backend, as far as `renew` uses it; notes at which level it was made."""

    class Options:
        is_high_priority_stream = False
        config = None
        global_ranks_in_group: tuple[int, ...] = ()
        group_name = "7"
        _timeout = None

    def __init__(self, _store: Any, rank: int, size: int, options: Any = None) -> None:
        self.rank, self.size, self.options = rank, size, options
        self.level = dist.get_debug_level()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.device = device


@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])
def test_a_renewed_backend_can_be_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: dist.DebugLevel
) -> None:
    """It knows its global ranks, which a split reads; torch's checks do not see it made."""
    group, store = _Member(), dist.FileStore(str(tmp_path / "store"), 1)
    old = _NewNccl(store, 1, 2, _NewNccl.Options())
    monkeypatch.setattr(nccl_abort, "backend", lambda _: old)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(debug_checks, "around", lambda backend, *_: backend)
    monkeypatch.setitem(c10d._world.pg_group_ranks, group, {2: 0, 5: 1})
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        nccl_abort.renew(group, store, timedelta(seconds=5))  # type: ignore[arg-type]
        after = dist.get_debug_level()
    finally:
        dist.set_debug_level(before)
    [(device, kind, made)] = group.registered

    assert (device, int(kind), type(made)) == (torch.device("cuda"), 255, _NewNccl)
    assert made is not old
    assert made.options.global_ranks_in_group == [2, 5]
    assert made.device == torch.device("cuda", 1)
    assert made.level != dist.DebugLevel.DETAIL
    assert after == level


@pytest.mark.parametrize("kind", ["ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"])
def test_each_kind_of_backend_is_found(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """By what torch's own class can do, where this torch is built with it; Gloo's is none."""
    if not hasattr(c10d, kind):
        pytest.skip(f"this torch has no {kind}")
    found = Mock(spec=getattr(c10d, kind))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl_abort, "void", lambda: None)
    monkeypatch.setitem(c10d._world.pg_names, Mock(_get_backend=lambda _: found), "0")

    assert nccl_abort.abort() == 1
    found.abort.assert_called_once_with()


@pytest.mark.skipif(not hasattr(c10d, "FlightRecorderHook"), reason="torch attaches no recorder")
def test_a_recorder_is_attached_to_the_new_backend(group: Any) -> None:
    """It numbers the calls from 1 again, as a new backend's own does, and sees each once."""
    from torch._C import _distributed_c10d
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # "fake" is known then

    fake = dist.new_group([0], backend="fake")
    held: Any = c10d._world.pg_flight_recorder_hooks
    held[fake] = c10d.FlightRecorderHook.attach(fake, [0])
    before, name = held[fake], fake.name()
    dist.all_reduce(torch.ones(1), group=fake)
    kind = debug_checks.unused_type(fake)
    fake._register_backend(torch.device("cpu"), kind, fake._get_backend(torch.device("cpu")))
    nccl_abort._record(fake, kind)
    dist.all_reduce(torch.ones(1), group=fake)
    entries = pickle.loads(_distributed_c10d._dump_fr_trace(True, False, False, "fake"))["entries"]

    assert held[fake] is not before
    assert fake.name() == name == "custom"
    assert [entry["collective_seq_id"] for entry in entries] == [1, 1]
    assert len({entry["pg_id"] for entry in entries}) == 2


def test_types_are_given_from_above_and_never_twice(group: Any) -> None:
    """Each new backend of a group gets a type that it has not had."""
    numbers = []
    for _ in range(3):
        kind = debug_checks.unused_type(group)
        numbers.append(int(kind))
        backend = group._get_backend(torch.device("cpu"))
        group._register_backend(torch.device("cpu"), kind, backend)

    assert numbers == [255, 254, 253]
