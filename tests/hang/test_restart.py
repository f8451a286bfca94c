"""A rank comes back under its number with all groups; the others keep what they have."""

import contextlib
import os
import signal
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nbdist.cells.kernel import wait
from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.cluster.kernel import rank_server
from nbdist.cluster.kernel.cluster import Cluster
from nbdist.cluster.kernel.start import StartOptions
from nbdist.errors import (
    DistributedError,
    Interrupted,
    NbdistError,
    OptionError,
    RankBusy,
    RankGone,
    StartError,
)
from nbdist.hang.kernel import restart as hang_restart
from nbdist.notebook.session import Session
from nbdist.notebook.session import start as start_session
from tests.support import processes
from tests.support.kernel import Kernel
from tests.support.ranks import SUM, session_of, silent, temporary_folder, texts, until

DEADLINE_S = 60.0
TOLD_S = 3.0  # a death is told within a second; the rest is for a busy machine
PAIR_SUM = "total = torch.ones(1) * (rank + 1); dist.all_reduce(total, group=pair); print(total)"


def restart(
    session: Session, *ranks: int, progress: Callable[[str], None] = lambda _: None
) -> hang_restart.RestartResult:
    return hang_restart.restart(session, session.health, ranks, DEADLINE_S, progress)


def kill(session: Session, *ranks: int) -> None:
    pids = session.cluster.processes.pids()
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    assert until(lambda: set(ranks) <= set(session.cluster.processes.exits))


def test_a_killed_rank_comes_back_and_the_other_keeps_all(pair: Session) -> None:
    """Same number, new process, every group right; once more for rank 0, which lives and is idle.

    The numbers: 1 + 2 over two ranks.
    """
    texts(pair, "kept = [rank, rank]\ndef step(): pass\npair = dist.new_group([1, 0])")
    before = pair.cluster.processes.pids()
    kill(pair, 1)
    done = restart(pair, 1)
    after = pair.cluster.processes.pids()

    assert done.ranks == (1,)
    assert done.elapsed_s < DEADLINE_S
    assert (after[0], set(after)) == (before[0], {0, 1})
    assert after[1] != before[1]
    assert pair.cluster.processes.exits == {}
    assert texts(pair, "import os; print(os.getpid())") == [f"{after[0]}\n", f"{after[1]}\n"]
    [note] = done.notes
    assert note.startswith("rank 1 is missing kept, step: ")
    assert "%%rank [1]" in note
    assert "%dist_sync_model" in note
    assert texts(pair, SUM) == ["3.0\n"] * 2
    assert texts(pair, PAIR_SUM) == ["tensor([3.])\n"] * 2
    assert texts(pair, "print('kept' in globals())") == ["True\n", "False\n"]
    assert texts(pair, "print(torch.initial_seed())", ranks="1") == ["7\n"]

    texts(pair, "later = dist.new_group([0, 1])")
    again = restart(pair, 0)

    assert "rank 0 is missing os" in again.notes[0]  # rank 1 has it from the cell above
    assert pair.cluster.processes.pids()[1] == after[1]
    assert texts(pair, SUM) == ["3.0\n"] * 2
    assert texts(pair, PAIR_SUM) == ["tensor([3.])\n"] * 2
    assert texts(pair, PAIR_SUM.replace("pair", "later")) == ["tensor([3.])\n"] * 2
    kill(pair, 0)  # the death of a new process is told as that of an old one
    assert pair.cluster.processes.exits[0].how == "signal SIGKILL"


def test_after_a_restart_all_build_a_model_together_or_the_new_rank_alone(pair: Session) -> None:
    """In a cell for all ranks they get rank 0's values; in one of its own the new rank sends none.

    Until the new rank has the others' values it builds models without a word to them, but in a
    cell that all run the others wait for it.
    """
    build = (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model = DDP(torch.nn.Linear(1, 1).requires_grad_())\n"
    )
    value = "print(model.module.weight.item())"
    kill(pair, 1)
    restart(pair, 1)
    together = texts(pair, f"torch.manual_seed(rank)\n{build}{value}")
    alone = texts(pair, f"torch.manual_seed(1)\n{build}{value}", ranks="1")

    assert together[0] == together[1]
    assert alone[0] != together[1]
    assert texts(pair, SUM) == ["3.0\n"] * 2


def test_a_rank_that_wrote_bytes_of_no_text_is_told_as_dead_and_comes_back(
    pair: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """Its log is read when it ends, before anybody is told: that must not fail."""
    texts(pair, r"import os; os.write(1, b'out \xff\n'); os.write(2, b'err \xff\n')", ranks="1")
    log = next(pair.cluster.run_dir.glob("profile/log/ipengine-*-1.log"))
    assert until(lambda: log.read_bytes().count(b"\xff") == 2)
    os.kill(pair.cluster.processes.pids()[1], signal.SIGKILL)

    assert until(lambda: 1 in pair.cluster.processes.exits, TOLD_S)
    assert pair.cluster.processes.exits[1].how == "signal SIGKILL"
    restart(pair, 1)
    assert texts(pair, SUM) == ["3.0\n"] * 2
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.faults
def test_two_of_three_and_then_all_come_back(runs: Path) -> None:
    """Ranks that have ended and were not named come along; with nobody left nothing is lacking."""
    with session_of(StartOptions(world_size=3, gpus="none")) as session:
        texts(session, "kept = 1")
        kill(session, 0, 2)
        some = restart(session, 2)
        sums = texts(session, SUM)
        printed = texts(session, "print('kept' in globals())")
        kill(session, 0, 1, 2)
        everybody = restart(session, 0, 1, 2)
        later = texts(session, SUM)

    assert some.ranks == (0, 2)
    assert "rank 0 had ended too, and restarted as well" in some.notes
    assert sums == ["6.0\n"] * 3
    assert printed == ["False\n", "True\n", "False\n"]
    assert everybody.notes == ()
    assert later == ["6.0\n"] * 3


@pytest.mark.faults
def test_a_new_rank_has_the_meshes_of_the_others(runs: Path) -> None:
    """Making one is collective, so no cell on the new rank alone could; the sums are right.

    Of rank + 1: along the first dimension over 0 and 2, 1 and 3; along the second 0 and 1, 2 and 3.
    """
    make = (
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (2, 2))\nkept = 1"
    )
    add = (
        "for dim in (0, 1):\n    total = torch.ones(1) * (rank + 1)\n"
        "    dist.all_reduce(total, group=mesh.get_group(dim)); print(total.item())"
    )
    with session_of(StartOptions(world_size=4, gpus="none")) as session:
        texts(session, make)
        kill(session, 2)
        done = restart(session, 2)
        sums = texts(session, add)

    [note] = done.notes
    assert note.startswith("rank 2 is missing init_device_mesh, kept: ")
    assert sums == ["4.0\n3.0\n", "6.0\n3.0\n", "4.0\n7.0\n", "6.0\n7.0\n"]


def test_a_busy_rank_is_replaced_with_its_children(pair: Session) -> None:
    """Only a rank that stays has to be idle; the old process's children end with it."""
    cell = CellRequest(
        "import subprocess, time\nchild = subprocess.Popen(['sleep', '301'])\ntime.sleep(300)", (1,)
    )
    with contextlib.closing(pair.begin(cell)):
        engine = psutil.Process(pair.cluster.processes.pids()[1])
        assert until(lambda: "sleep" in [child.name() for child in engine.children()])
        children = [child for child in engine.children() if child.name() == "sleep"]
        with pytest.raises(RankBusy, match=r"rank 1 is still .* %dist_restart 0-1"):
            restart(pair, 0)
        done = restart(pair, 1)

    assert done.ranks == (1,)
    assert processes.wait_gone([engine, *children], 0) == []
    assert texts(pair, SUM) == ["3.0\n"] * 2


def test_killed_workers_of_a_data_loader_leave_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sockets are in the run folder: gone with a restart of their rank, and with the run."""
    code = """
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.ones(9999999)), num_workers=2)
        for batch in loader:
            print("on")
    """
    # pytest's own folders are too long for the address of a socket.
    with tempfile.TemporaryDirectory(prefix="n-") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        with temporary_folder(Path(temporary)):
            session = start_session(
                StartOptions(world_size=1, gpus="none"), silent, lambda _: None
            ).session
        try:
            folder = session.cluster.run_dir / "mp.0"
            session.begin(CellRequest(textwrap.dedent(code), (0,)))
            is_used = until(lambda: len(list(folder.glob("listener-*"))) == 2)
            kill(session, 0)
            restart(session, 0)
            remaining = list(folder.glob("*"))
        finally:
            session.stop()

        assert list(Path(temporary).glob("*")) == []
        assert (is_used, remaining) == (True, [])


def test_a_process_that_does_not_come_is_told_and_tried_again(
    pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit code and last words are in the error, the rank counts as ended, the next works."""
    folder = tmp_path / "site"
    folder.mkdir()
    code = """
        import os, sys
        if "NBDIST_REPLACES" in os.environ:
            print("my last words", flush=True)
            os._exit(5)
    """
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    texts(pair, "kept = 1")
    with monkeypatch.context() as patch:
        patch.setattr(rank_server, "_server", None)  # that of all tests stays
        patch.setenv("PYTHONPATH", str(folder))
        with pytest.raises(StartError, match=r"rank 1 ended before .*exit code 5(.|\n)*my last"):
            restart(pair, 1)
    end = pair.cluster.processes.exits[1]
    restart(pair, 1)

    assert end.how == "exit code 5"
    assert texts(pair, SUM) == ["3.0\n"] * 2
    assert texts(pair, "print(kept)", ranks="0") == ["1\n"]


def test_a_rank_that_cannot_be_written_down_counts_as_ended(
    pair: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: no cell runs in a process that has joined no group, and the next works."""

    def write(_cluster: Cluster) -> None:
        raise StartError("No space left on device")

    texts(pair, "kept = 1")
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "_note_change", write)
        with pytest.raises(StartError, match="No space left"):
            restart(pair, 1)
    with pytest.raises(RankGone, match=r"rank 1 has ended .*%dist_restart 1"):
        texts(pair, "print(kept)")
    restart(pair, 1)

    assert texts(pair, SUM) == ["3.0\n"] * 2
    assert texts(pair, "print(kept)", ranks="0") == ["1\n"]


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("starting new processes", marks=pytest.mark.faults),
        "forming the groups again",
    ],
)
def test_an_interrupted_restart_leaves_nothing_half(pair: Session, moment: str) -> None:
    """The rank counts as ended and no process of it is left; the next restart brings it."""
    started: list[int] = []

    def press(step: str) -> None:
        started.extend(pid for pid in pair.cluster.processes.pids().values() if pid not in started)
        if step == moment:
            os.kill(os.getpid(), signal.SIGINT)

    texts(pair, "kept = 1")
    survivor = pair.cluster.processes.pids()[0]
    with pytest.raises(Interrupted, match="%dist_restart 1 tries again"):
        restart(pair, 1, progress=press)
    pids = pair.cluster.processes.pids()
    ended = set(pair.cluster.processes.exits)
    restart(pair, 1)

    assert pids == {0: survivor}
    assert ended == {1}
    assert processes.wait_gone([pid for pid in started if pid != survivor], 0) == []
    assert texts(pair, SUM) == ["3.0\n"] * 2
    assert texts(pair, "print(kept)", ranks="0") == ["1\n"]


def test_a_death_during_a_restart_is_told_at_once(pair: Session) -> None:
    """The other ranks would wait half a minute for the one that has ended; both come back."""

    def end_survivor(step: str) -> None:
        if step == "forming the groups again":
            kill(pair, 0)

    began_s = time.monotonic()
    with pytest.raises(NbdistError, match=r"rank 0 ended \(signal SIGKILL\) before it could"):
        restart(pair, 1, progress=end_survivor)
    failed_s = time.monotonic() - began_s
    again = restart(pair, *pair.health.dead)

    assert failed_s < DEADLINE_S / 3
    assert again.ranks == (0, 1)
    assert texts(pair, SUM) == ["3.0\n"] * 2


def test_a_death_while_all_ranks_are_asked_is_told_at_once(pair: Session) -> None:
    """As in %sync: the others do not wait for it, and are free for the next cell."""
    os.kill(pair.cluster.processes.pids()[1], signal.SIGSTOP)
    killer = threading.Timer(0.3, kill, (pair, 1))
    killer.start()
    began_s = time.monotonic()
    with pytest.raises(RankGone, match=r"rank 1 has ended \(rank 1: signal SIGKILL"):
        pair.sync()
    failed_s = time.monotonic() - began_s
    killer.join()

    assert failed_s < 5
    assert texts(pair, "print(rank)", ranks="0") == ["0\n"]


@pytest.mark.faults
def test_a_stopped_rank_is_told_as_stopped_by_an_interrupt(pair: Session) -> None:
    """It was idle: no code of it runs that could be to blame."""
    pid = pair.cluster.processes.pids()[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        cell = pair.begin(CellRequest("1", (0, 1)))
        cell.press()
        with pytest.raises(KeyboardInterrupt, match=r"rank 1 is stopped \(SIGSTOP\)") as caught:
            wait.wait(lambda: cell)
    finally:
        os.kill(pid, signal.SIGCONT)

    assert "C code" not in str(caught.value)
    assert until(lambda: not pair.busy_ranks)


def test_all_ranks_can_die_in_one_collective(pair: Session) -> None:
    """The cell fails with their deaths, and where they were; nobody is left to recover."""
    cell = pair.begin(
        CellRequest("print('on')\nwhile True: dist.all_reduce(torch.ones(2))", (0, 1))
    )
    logs = pair.health.logs
    assert until(lambda: all(log.state == "running" and log.calls for log in logs().values()))
    kill(pair, 0, 1)
    with pytest.raises(DistributedError, match=r"signal SIGKILL.* all_reduce\(float32\[2\]\) at"):
        wait.wait(lambda: cell)


def test_another_profile_is_refused_with_what_to_do() -> None:
    """Where other launchers start the engines, the way is a new start."""
    session: Any = SimpleNamespace(cluster=SimpleNamespace(can_restart=False), health=None)
    with pytest.raises(OptionError, match=r"profiles local, .*%dist_reset"):
        restart(session, 1)


@pytest.mark.faults
def test_nothing_outlives_a_kernel_killed_after_a_restart(tmp_path: Path) -> None:
    """New engines and a new controller end with the kernel, as those of the first start do."""
    (tmp_path / "tmp").mkdir()
    code = """
        import os, signal, time, nbdist
        from nbdist.hang.kernel import restart as repair
        session = nbdist.session()
        os.kill(session.cluster.processes.controller_pid(), signal.SIGKILL)
        while None not in session.cluster.processes.exits: time.sleep(0.01)
        repair.restart(session, session.health, (1,), 60, lambda step: None)
        print(session.cluster.run_dir)
    """
    with Kernel(cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")}) as kernel:
        kernel.run("%load_ext nbdist\n%dist_init -n 2")
        cell = kernel.run(textwrap.dedent(code))
        assert cell.status == "ok", cell.visible
        run_dir = Path(cell.text.splitlines()[-1])
        kernel.wait_output(
            kernel.start("%%distributed\nimport time\nprint('on', flush=True)\ntime.sleep(300)"),
            "on",
        )
        everything = [
            *processes.processes_of_run(str(run_dir)),
            *(
                p
                for p in processes.descendants(kernel.pid)
                if "guardian.py" in " ".join(p.cmdline())
            ),
        ]
        kernel.kill()

        assert len(everything) >= 5  # guardian, controller and its child, engines
        assert processes.wait_gone(everything, 5.0) == []
        assert processes.processes_of_run(str(run_dir)) == []
        assert not run_dir.exists()
