"""A new controller takes the place of one that has ended; the ranks keep all they have."""

import contextlib
import json
import os
import signal
import stat
import time
from pathlib import Path

import pytest
from ipyparallel.controller import app, heartmonitor

from nbdist.cells.kernel import wait
from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.cluster.controller import hub
from nbdist.errors import RankGone, StartError
from nbdist.hang.kernel import restart
from nbdist.notebook.session import Session
from tests.support.ranks import SUM, texts, until

LONG = """
import time
from pathlib import Path
Path(f"{folder}/runs.{rank}").touch()
while not Path("{folder}/end").exists():
    time.sleep(0.01)
after = 1
"""


def test_a_hub_without_a_database_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """ipyparallel's module sleeps as ever afterwards; one that has no clock is left alone."""
    assert app.time is time, "ipyparallel's controller has another way to wait now"
    with hub.without_pause():
        app.time.sleep(3600)
        assert app.time.monotonic() > 0
    assert app.time is time

    monkeypatch.delattr(app, "time")
    with hub.without_pause():
        assert not hasattr(app, "time")


def end_controller(session: Session, number: int = signal.SIGKILL) -> None:
    pid = session.cluster.processes.controller_pid()
    assert pid is not None
    os.kill(pid, number)
    assert until(lambda: None in session.cluster.processes.exits)


def test_ranks_keep_their_variables_and_work_goes_on(pair: Session) -> None:
    """After a SIGKILL and after a SIGTERM, which takes the connection files along.

    Then collectives, the interrupt and the notice of a death work as before.
    """
    texts(pair, "kept = [rank]")
    pids = pair.cluster.processes.pids()
    notes = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        end_controller(pair, number)
        notes.append(restart.reconnect(pair))

        assert texts(pair, SUM) == ["3.0\n"] * 2
        assert texts(pair, "print(kept)") == ["[0]\n", "[1]\n"]
        assert pair.cluster.processes.pids() == pids
        assert restart.reconnect(pair) == ""
    keys = list(pair.cluster.run_dir.rglob("ipcontroller-*.json"))
    cell = pair.begin(CellRequest("import time\ntime.sleep(300)", (0, 1)))
    cell.press()
    with pytest.raises(KeyboardInterrupt, match="ranks 0-1 are back"):
        wait.wait(lambda: cell)
    os.kill(pids[1], signal.SIGKILL)
    channel = pair.cluster.channel
    assert channel is not None

    assert "signal SIGKILL" in notes[0]
    assert "kept their variables" in notes[0]
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    assert until(lambda: 1 not in channel.engine_ids, 5)  # the new controller heard of it
    assert until(lambda: 1 in pair.cluster.processes.exits)
    with pytest.raises(RankGone, match=r"rank 1 has ended \(rank 1: signal SIGKILL"):
        texts(pair, "1")


def test_a_cell_in_which_the_controller_ends_fails_at_once(
    pair: Session, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its ranks finish it unheard and count as busy until then; no old answer is printed."""
    cell = pair.begin(CellRequest(LONG.replace("{folder}", str(tmp_path)), (0, 1)))
    with contextlib.closing(cell):
        assert until(lambda: len(list(tmp_path.glob("runs.*"))) == 2)
        began_s = time.monotonic()
        end_controller(pair)
        with pytest.raises(RankGone, match="controller ended"):
            wait.wait(lambda: cell)
    failed_s = time.monotonic() - began_s
    note = restart.reconnect(pair)
    busy = pair.busy_ranks
    (tmp_path / "end").touch()

    def is_idle() -> bool:
        restart.reconnect(pair)  # as each cell does
        return not pair.busy_ranks

    assert failed_s < 3.0  # within a second; the rest is for a busy machine
    assert "ranks 0-1 are still in a cell" in note
    assert busy == (0, 1)
    assert until(is_idle, 10)
    assert texts(pair, "print(after)") == ["1\n", "1\n"]
    assert texts(pair, SUM) == ["3.0\n"] * 2
    assert capsys.readouterr().out == ""


def test_a_cell_sent_to_a_dead_controller_keeps_no_rank_busy(pair: Session) -> None:
    """No rank has ever got it; the next cell runs as soon as the ranks are reached again."""
    pid = pair.cluster.processes.controller_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankGone, match="controller ended"):
        texts(pair, SUM)

    assert texts(pair, SUM) == ["3.0\n"] * 2


def test_ranks_that_hang_unheard_are_freed(pair: Session, tmp_path: Path) -> None:
    """Their cell ended for the notebook with its controller: nobody else watches or can press."""
    texts(pair, "kept = [rank]")
    code = f"open('{tmp_path}/runs.' + str(rank), 'w')\nif rank == 0: dist.barrier()"
    cell = pair.begin(CellRequest(code, (0, 1)))
    assert until(lambda: len(list(tmp_path.glob("runs.*"))) == 2)
    end_controller(pair)
    with pytest.raises(RankGone, match="controller ended"):
        wait.wait(lambda: cell)

    def is_idle() -> bool:
        pair.maintenance.make_whole()  # as each cell does
        return not pair.busy_ranks

    assert until(is_idle, 10)
    assert texts(pair, SUM) == ["3.0\n"] * 2
    assert texts(pair, "print(kept)") == ["[0]\n", "[1]\n"]


def test_a_rank_that_ended_meanwhile_is_known_and_comes_back(pair: Session) -> None:
    """The list of engines that the controller left still has it; a restart gives it its number."""
    end_controller(pair)
    os.kill(pair.cluster.processes.pids()[1], signal.SIGKILL)
    assert until(lambda: 1 in pair.cluster.processes.exits)
    texts_of_note = restart.reconnect(pair)
    channel = pair.cluster.channel
    assert channel is not None
    registered = channel.engine_ids
    done = restart.restart(pair, pair.health, (1,), 60, lambda _: None)

    assert texts_of_note
    assert registered == (0,)
    assert done.ranks == (1,)
    assert texts(pair, SUM) == ["3.0\n"] * 2


def test_without_the_list_of_engines_it_says_so_and_can_be_tried_again(pair: Session) -> None:
    """The form in which ipyparallel keeps its engines is its own: read, and refused otherwise."""
    [path] = pair.cluster.run_dir.rglob("engines*.json")
    whole = path.read_text()
    texts(pair, "kept = 1")
    end_controller(pair)
    path.write_text('{"other": {}}')
    with pytest.raises(StartError, match="list of engines"):
        restart.reconnect(pair)
    is_known = None in pair.cluster.processes.exits
    path.write_text(whole)
    restart.reconnect(pair)

    assert set(json.loads(whole)) == {"engines", "next_id"}
    assert set(json.loads(whole)["engines"]) == {"0", "1"}
    assert is_known
    assert texts(pair, "print(kept)") == ["1\n", "1\n"]


def test_a_new_heart_is_told_at_its_first_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and only of an answer to one of the last two beats; ipyparallel's process uses it."""
    told: list[set[bytes]] = []

    def note(self: hub.FirstBeats, hearts: set[bytes]) -> None:
        told.append(hearts)
        self.hearts.update(hearts)

    monkeypatch.setattr(hub.FirstBeats, "handle_new_hearts", note)
    monitor = hub.FirstBeats()
    for heart, beat in ((b"old", b"9.5"), (b"new", b"0.0"), (b"new", b"0.0")):
        monitor.handle_pong([heart, beat])

    assert told == [{b"new"}]
    assert heartmonitor.HeartMonitor is hub.FirstBeats
    assert "HeartMonitor" in heartmonitor._setup_heartmonitor.__code__.co_names
