"""What a run's folder tells of its newest cell, and what somebody sees who looks on; no ranks."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nbdist.cells import journal
from nbdist.cells.journal import CellHead
from nbdist.cells.kept_run import KeptRun, NewestCell
from nbdist.cells.kernel import kept_runs, onlooker
from nbdist.cells.outputs import CellResult, Event
from nbdist.cluster import run_owner
from nbdist.cluster.kernel import keep, run_dir, runs
from nbdist.cluster.run_owner import Detachment, Keep, Run
from nbdist.core import host
from nbdist.core.versions import VERSION
from nbdist.errors import NotRunning
from tests.support.ranks import temporary_folder

HERE = host.this_machine().host
KEEP = Keep(3600.0, "", (), VERSION, "python", 1000.0)
CODE = "# a comment\n\nfor step in steps:\n    pass"


class Seen:
    """A sink that keeps the text of what it is given."""

    def __init__(self) -> None:
        self.text = ""

    def draw(self, events: Sequence[Event]) -> None:
        self.text += "".join(getattr(event, "text", "") for event in events)

    def close(self, result: CellResult) -> None:
        self.text += "closed"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run of three ranks, the last on another host, that this process holds."""
    with temporary_folder(tmp_path / "tmp"):
        path = run_dir.create()
        run_dir.write_keep(path, KEEP)
        run_dir.write_ranks(path, [HERE, HERE, "elsewhere"])
        (path / journal.FOLDER).mkdir()
        yield path


def write(folder: Path, rank: int, *records: bytes, pid: int | None = None, run: int = 4) -> None:
    """A rank's journal of a cell."""
    head = CellHead(run, 7, CODE, (0, 1, 2), 0.0, pid or os.getpid(), time.time() - 90)
    (folder / journal.FOLDER / str(rank)).write_bytes(head.line() + b"".join(records))


def says(text: str) -> bytes:
    parts = [{"msg_type": "stream", "date": "2026"}, {}, {"name": "stdout", "text": text}]
    return journal.pack_message([json.dumps(part).encode() for part in parts])


ENDED = journal.pack_reply({"status": "ok"}) + journal.pack_end()
FAILED = journal.pack_reply({"status": "error", "ename": "E", "evalue": "", "traceback": []})


def newest(folder: Path) -> NewestCell:
    [entry] = kept_runs.find()
    assert (entry.run.folder, entry.cell is None) == (str(folder), False)
    assert entry.cell is not None
    return entry.cell


def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_a_cell_that_runs_has_no_end(folder: Path) -> None:
    """A record that is being written is none yet; another rank's older cell does not count."""
    write(folder, 0, says("one\n"), says("two\n")[:-3])
    write(folder, 1, ENDED, run=3)
    cell = newest(folder)

    assert cell.ended_s is None
    assert (cell.failed, cell.gone, cell.unseen) == ((), (), (1, 2))
    assert cell.phrase(time.time()) == "[7] for step in steps:, running for 2 min"


def test_a_cell_ends_with_its_last_rank(folder: Path) -> None:
    """A rank whose process was killed ends it too; how each has ended is told."""
    write(folder, 0, says("one\n"), FAILED, journal.pack_end())
    write(folder, 1, says("one\n"), pid=dead_pid())
    cell = newest(folder)

    assert cell.ended_s is not None
    assert abs(cell.ended_s - time.time()) < 5
    assert (cell.failed, cell.gone) == ((0,), (1,))
    assert cell.phrase(cell.ended_s + 7200) == (
        "[7] for step in steps:, ended 2 h ago, failed on rank 0, rank 1 is gone"
    )


def test_text_that_looks_like_an_end_is_none(folder: Path) -> None:
    """The end is found by the lengths of records, not by their text."""
    write(folder, 0, says(journal.pack_end().decode()))
    write(folder, 1, ENDED)

    assert newest(folder).ended_s is None


@pytest.mark.parametrize("text", ["", "{", "[]\n", '{"run": 1}\n'])
def test_what_is_no_journal_is_none(folder: Path, text: str) -> None:
    """A file that has just been made, or is damaged, tells nothing."""
    (folder / journal.FOLDER / "0").write_text(text)

    assert [entry.cell for entry in kept_runs.find()] == [None]
    assert onlooker.newest(runs.read(folder)) is None


def test_somebody_who_looks_on_sees_what_is_here(folder: Path) -> None:
    """Ranks of other hosts are named; a killed rank is not waited for; what was lost is told."""
    write(folder, 0, says("both\n"), says("zero\n"), journal.pack_end(2_000_000))
    write(folder, 1, says("both\n"), pid=dead_pid())
    run, sink = runs.read(folder), Seen()
    head = onlooker.newest(run)
    assert head is not None
    failures = onlooker.show(run, head, sink, shows_all=True, follows=True)

    assert failures == ()
    *lines, end = sink.text.splitlines()
    assert end == "closed"
    assert sorted(lines) == [
        "[0-1] both",
        "[0] zero",
        "not shown: rank 2 on elsewhere, whose journals are not on this machine",
        "rank 0 could not write down 2.0 MB of its output: no space was left on its disk",
    ]


def test_what_has_been_written_is_shown_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without following, a cell that runs is shown as far as it is, however long a line is."""
    monkeypatch.setattr(onlooker, "PIECE_BYTES", 400)
    write(folder, 0, says("first\n"), says("x" * 1000 + "\n"), says("sec"))
    write(folder, 1, says("first\n"))
    run, sink = runs.read(folder), Seen()
    head = onlooker.newest(run)
    assert head is not None
    onlooker.show(run, head, sink, shows_all=False, follows=False)

    assert "[0-1] first\n" in sink.text
    assert sink.text.endswith("x\n[0] sec\nclosed")


def entry(*, keep: Keep = KEEP, until_s: float = 0.0, **options: bool) -> KeptRun:
    detachment = Detachment(2000.0, until_s, 1) if until_s else None
    state = run_owner.KEPT if until_s else run_owner.RUNNING
    owner = run_owner.RunOwner(4711, "1", host.this_machine(), 0.0, "there")
    run = Run("/tmp/run-a", state, owner, keep=keep, detachment=detachment)
    return KeptRun(run, None, **options)


def test_time_left_is_told_with_what_happens_then() -> None:
    """While a notebook holds the run, while none does, over, and without a guardian."""
    saved = replace(KEEP, save="/data/end")
    cases = [
        (entry(), "1 h from the notebook's end"),
        (entry(until_s=3800.0), "30 min"),
        (entry(keep=saved, until_s=3800.0), "30 min, then saved to /data/end"),
        (entry(keep=saved, until_s=1900.0), "over, being saved to /data/end"),
        (entry(until_s=1900.0), "over"),
        (
            entry(until_s=3800.0, has_guardian=False),
            "until `nbdist stop`: its guardian was killed",
        ),
    ]
    gpus = replace(KEEP, gpus=("H100", "H100", "A100"))

    assert [its.left(2000.0) for its, _ in cases] == [left for _, left in cases]
    assert entry(keep=gpus, until_s=3800.0).phrase(4600.0 - 2600.0) == (
        "kept, time left 30 min, up for 17 min, GPUs 2 H100, 1 A100, newest cell none"
    )
    assert entry().phrase(2000.0).startswith("held by kernel 4711, time left 1 h")


def test_a_keep_of_another_version_is_read_as_far_as_it_is_known(folder: Path) -> None:
    """So that it can be refused by its version."""
    written = {**asdict(KEEP), "version": "9.9", "later": [1]}
    del written["gpus"]
    (folder / run_owner.KEEP).write_text(json.dumps(written))

    assert run_dir.read_keep(folder) == replace(KEEP, version="9.9")


def test_a_damaged_keep_is_read_from_its_copy_and_without_one_nobody_removes_the_run(
    folder: Path,
) -> None:
    """It is never a dead run, which the doctor would clean away with its ranks."""
    owner = folder / run_owner.FILE
    written = json.loads(owner.read_text())
    owner.write_text(json.dumps({**written, "start": "0"}))  # its kernel has ended
    (folder / run_owner.KEEP).write_bytes(b"\xf8" * 90)

    assert run_dir.read_keep(folder) == KEEP
    assert runs.read(folder).state == run_owner.KEPT
    (folder / run_owner.KEEP_COPY).write_text('{"keep_s": "x"}')
    assert runs.read(folder).state == run_owner.UNKNOWN
    with pytest.raises(NotRunning, match="damaged"):
        keep.find("")
