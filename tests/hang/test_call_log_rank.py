"""The call log of a rank: every collective of the user is in it, with its place and number."""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import logging
import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.engine import shell_hooks
from nbdist.hang import call_log as layout
from nbdist.hang.rank import call_log
from nbdist.hang.rank.recorder import GROUP_CALLS, TRANSFERS
from nbdist.hang.records import Call, CallLog, SourceLine
from nbdist.rpc.rank import cell_hooks
from nbdist.rpc.wire import CELL_RUN


@pytest.fixture(name="log")
def _log() -> Iterator[layout.CallLogWriter]:
    """A world of one rank, recorded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    log = call_log.open_log(None, 0)
    call_log.install(log)
    try:
        yield log
    finally:
        call_log.uninstall()
        dist.destroy_process_group()


def now() -> CallLog:
    _, snapshot = call_log.snapshot()
    assert snapshot is not None
    return layout.read(snapshot)


def last() -> Call:
    return now().calls[-1]


# What is recorded of one call


def test_call_is_recorded_with_its_place(log: layout.CallLogWriter) -> None:
    """The operation, the tensor, the number, and the line of this file."""
    dist.all_reduce(torch.ones(3))
    line = sys._getframe().f_lineno - 1
    call = last()

    assert (call.op, call.detail, call.group, call.number) == ("all_reduce", "float32[3]", "0", 1)
    assert (call.state, call.peer) == ("done", None)
    source = "dist.all_reduce(torch.ones(3))"
    assert call.place == SourceLine(None, "test_call_log_rank.py", line, source)
    assert now().groups["0"].calls == 1


DETAILS = {
    "broadcast": (lambda x: dist.broadcast(x, 0), "float32[2, 3], src=0"),
    "broadcast by name": (lambda x: dist.broadcast(tensor=x, group_src=0), "float32[2, 3], src=0"),
    "reduce": (lambda x: dist.reduce(x, 0, dist.ReduceOp.MAX), "float32[2, 3], dst=0, op=MAX"),
    "all_reduce": (lambda x: dist.all_reduce(x, op=dist.ReduceOp.MIN), "float32[2, 3], op=MIN"),
    "all_gather": (lambda x: dist.all_gather([torch.ones_like(x)], x), "float32[2, 3]"),
    "scatter": (lambda x: dist.scatter(x, [x], 0), "float32[2, 3], src=0"),
    "gather": (lambda x: dist.gather(x, [x.clone()]), "float32[2, 3], dst=0"),
    "reduce_scatter": (lambda x: dist.reduce_scatter(x.clone(), [x]), "float32[2, 3]"),
    "all_gather_object": (lambda x: dist.all_gather_object([None], 1), ""),
    "broadcast_object_list": (lambda x: dist.broadcast_object_list([1], 0), ""),
    "barrier": (lambda _: dist.barrier(), ""),
    "monitored_barrier": (lambda _: dist.monitored_barrier(), ""),
}


@pytest.mark.parametrize("name", DETAILS)
def test_detail(log: layout.CallLogWriter, name: str) -> None:
    """Each operation's name and detail; what it calls by itself is not recorded."""
    function, detail = DETAILS[name]
    function(torch.ones(2, 3))

    assert [(c.op, c.detail) for c in now().calls] == [(name.removesuffix(" by name"), detail)]


def test_every_collective_of_torch_is_in_a_table(log: layout.CallLogWriter) -> None:
    """A public function of torch.distributed that takes a group is wrapped, or known not to be."""
    known_others = {
        "get_backend", "get_backend_config", "get_backend_impl", "get_global_rank",
        "get_group_rank", "get_process_group_ranks", "get_rank", "get_world_size",
        "new_subgroups", "set_timeout", "shrink_group",
    }  # fmt: skip
    functions = {name: vars(c10d)[name] for name in c10d.__all__}
    takes_group = {
        name
        for name, function in functions.items()
        if type(function) is FunctionType and "group" in inspect.signature(function).parameters
    }

    assert {name for name in takes_group if not _is_ours(functions[name])} <= known_others
    assert set(functions) >= {"all_reduce", "send"} <= takes_group


def _is_ours(function: Any) -> bool:
    return bool(function.__code__.co_filename.endswith("recorder.py"))


def test_async_call_is_issued_then_waited_for(log: layout.CallLogWriter) -> None:
    """One record for both, at the place of wait(); the second wait of the same work is done too."""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    issued = last()
    work.wait()
    line = sys._getframe().f_lineno - 1
    done = last()

    assert (issued.state, issued.ended_s, issued.number) == ("issued", None, 1)
    assert (done.op, done.state, done.number, len(now().calls)) == ("all_reduce", "done", 1, 1)
    assert done.place is not None
    assert done.place.line == line
    assert done.began_s >= issued.began_s


def test_unknown_work_is_a_wait(log: layout.CallLogWriter) -> None:
    """Work that no recorded call returned is waited for under the name "wait", uncounted."""
    options = dist.AllreduceOptions()
    dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([torch.ones(3)], options).wait()

    assert [(c.op, c.number, c.group, c.state) for c in now().calls] == [("wait", 0, "", "done")]
    assert now().groups["0"].calls == 0


def test_functional_collective_is_a_wait(log: layout.CallLogWriter) -> None:
    """What DTensor waits in is recorded."""
    from torch.distributed import _functional_collectives as functional

    result = functional.all_reduce(torch.full((3,), 2.0), "sum", dist.group.WORLD)
    assert (result + 1).tolist() == [3.0, 3.0, 3.0]

    assert [(c.op, c.detail) for c in now().calls] == [("wait", "float32[3]")]


def test_call_that_raises_is_not_counted(log: layout.CallLogWriter) -> None:
    """It stays in the ring as raised; the next call gets its number."""
    with pytest.raises(ValueError, match="group_rank"):
        dist.broadcast(torch.ones(1))
    with pytest.raises(RuntimeError):
        dist.all_gather([torch.ones(4)], torch.ones(3))
    dist.barrier()

    assert [(c.state, c.number) for c in now().calls][-2:] == [("raised", 1), ("done", 1)]
    assert now().groups["0"].calls == 1


def test_wrong_arguments_are_told_by_torch(log: layout.CallLogWriter) -> None:
    """The recorder stays out of the message, and records nothing after it."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'tensor'"):
        dist.all_reduce()
    with pytest.raises((TypeError, AttributeError), match=r"[tT]ensor"):
        dist.all_reduce("three")
    dist.barrier()
    assert last().number == 1


def test_new_and_destroyed_groups(log: layout.CallLogWriter) -> None:
    """A group is known before its first call and gone with its end; forming it is a call."""
    pair = dist.new_group([0])
    formed = last()
    before = now()
    dist.all_reduce(torch.ones(1), group=pair)
    counted = now()
    dist.destroy_process_group(pair)

    forming = ("new_group", "ranks 0", "0", 1)
    assert (formed.op, formed.detail, formed.group, formed.number) == forming
    assert {name: g.calls for name, g in before.groups.items()} == {"0": 1, "1": 0}
    assert {name: g.calls for name, g in counted.groups.items()} == {"0": 1, "1": 1}
    assert [*now().groups] == ["0"]
    assert last().group == "1"


def test_no_member_records_nothing(log: layout.CallLogWriter) -> None:
    """A call with NON_GROUP_MEMBER does nothing in torch and nothing here."""
    with pytest.warns(UserWarning, match="does not belong to"):
        dist.all_reduce(torch.ones(1), group=dist.GroupMember.NON_GROUP_MEMBER)
    assert not now().calls


def test_compiled_function_is_one_graph(log: layout.CallLogWriter) -> None:
    """torch.compile(fullgraph=True) with a collective works as without the log; not recorded."""

    def double(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x * 2

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert "all_reduce" not in [call.op for call in now().calls]


def test_uninstall_leaves_torch_as_it_was(log: layout.CallLogWriter) -> None:
    """Wrapped twice it is still wrapped once, and afterwards not at all."""
    call_log.install(log)
    wrapper = dist.all_reduce
    assert dist.all_reduce is c10d.all_reduce
    assert not _is_ours(wrapper.__wrapped__)
    call_log.uninstall()

    for name in (*GROUP_CALLS, *TRANSFERS):
        assert not hasattr(dist, name) or not _is_ours(getattr(dist, name))
    assert dist.all_reduce is wrapper.__wrapped__
    assert not hasattr(dist.Work.wait, "__wrapped__")
    call_log.install(log)


def test_reset_counts_from_nothing(log: layout.CallLogWriter) -> None:
    """The next call after a recovery is number 1, and what was issued before waits no more."""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    call_log.reset(2)
    assert (now().generation, last().state, now().groups["0"].calls) == (2, "raised", 0)
    work.wait()
    dist.barrier()
    assert (last().op, last().number) == ("barrier", 1)


# The file


def test_file_can_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    """Folder 0700, file 0600, its space allocated, nothing else left in the folder."""
    log = call_log.open_log(tmp_path, 3)
    path = tmp_path / "boxes" / "3"

    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 >= layout.SIZE_BYTES
    assert [entry.name for entry in path.parent.iterdir()] == ["3"]
    log.set_cell(5, "running")
    read = layout.read(path.read_bytes())
    assert (read.rank, read.pid, read.run, call_log.problem()) == (3, os.getpid(), 5, "")


def test_new_process_leaves_the_old_box_as_it_was(tmp_path: Path) -> None:
    """Who has the dead rank's log mapped can still read it when the next has its own."""
    call_log.open_log(tmp_path, 0).set_cell(7, "running")
    with (tmp_path / "boxes" / "0").open("rb") as file:
        old = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    call_log.open_log(tmp_path, 0)

    assert layout.read(old).run == 7
    assert layout.read((tmp_path / "boxes" / "0").read_bytes()).run == 0


def test_full_disk_is_told_and_nothing_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room: a sentence with the folder, no file, and a log in memory that works."""

    def no_room(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    log = call_log.open_log(tmp_path, 1)
    log.set_cell(5, "running")

    assert "No space left on device" in call_log.problem()
    assert str(tmp_path / "boxes") in call_log.problem()
    assert list((tmp_path / "boxes").iterdir()) == []
    assert layout.read(bytes(log.memory)).run == 5


# Cells


class Engine:
    """A real IPython shell of ipykernel, without sockets."""

    def __init__(self) -> None:
        from ipykernel.ipkernel import IPythonKernel

        self.kernel = IPythonKernel()
        self.shell = self.kernel.shell
        self.shell.showtraceback = lambda *_args, **_options: None  # it would need a socket
        self.shell.showsyntaxerror = self.shell.showtraceback
        self.kernel.log = logging.getLogger("test")
        cell_hooks.install(self.kernel, [call_log.around_cell, shell_hooks.top_level_await])

    def run(self, source: str, run: int | None = None) -> dict[str, Any]:
        """Run a cell as an execute_request does, with this run id in its metadata."""
        metadata = {} if run is None else {CELL_RUN: run}
        self.kernel.get_parent = lambda _channel=None: {"metadata": metadata, "header": {}}
        reply: dict[str, Any] = asyncio.run(self.kernel.do_execute(source, silent=True))
        return reply


@functools.cache
def engine() -> Engine:
    """One per process: IPython's shell is a singleton."""
    return Engine()


@pytest.mark.parametrize(
    ("source", "state"),
    [
        ("1 + 1", "finished"),
        ("1 / 0", "raised"),
        ("def (", "raised"),
        ("import asyncio\nawait asyncio.sleep(0)", "finished"),
        ("await 3", "raised"),
        ("", "finished"),
        ("get_ipython().run_cell('1 / 0', silent=True)\nseen = 1", "finished"),
    ],
)
def test_cell_begins_and_ends_in_the_box(
    log: layout.CallLogWriter, source: str, state: str
) -> None:
    """Its run id, "running" inside, and how it ended, whatever kind of cell it is."""
    rank = engine()
    states = []
    rank.shell.push({"note": lambda: states.append((now().run, now().state))})
    rank.run("note()", 41)
    before_s = time.monotonic()
    rank.run(source, 42)

    assert states == [(41, "running")]
    assert (now().run, now().state) == (42, state)
    assert before_s <= now().since_s <= time.monotonic()
    rank.run("1 + 1")  # of somebody else: without a run id
    assert now().run == 42


def test_function_of_an_earlier_cell(log: layout.CallLogWriter) -> None:
    """A call in a function of cell 7 that cell 12 calls is at its line of cell 7."""
    rank = engine()
    call_log.name_cells(rank.shell)
    rank.shell.push({"dist": dist, "torch": torch})
    rank.shell.execution_count = 7
    rank.run("def f():\n    x = torch.ones(3)\n    dist.all_reduce(x)", 1)
    rank.shell.execution_count = 12
    rank.run("f()\ndist.barrier()", 2)

    places = [call.place for call in now().calls]
    assert [(p.cell, p.line, p.source) for p in places if p] == [
        (7, 3, "dist.all_reduce(x)"),
        (12, 2, "dist.barrier()"),
    ]
    # The same text under another number.
    rank.shell.execution_count = 15
    rank.run("f()\ndist.barrier()", 3)
    assert [c.place.cell for c in now().calls if c.place][-2:] == [7, 15]
