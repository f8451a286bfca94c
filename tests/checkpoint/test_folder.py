"""A checkpoint is whole at every moment of a save, which removes nothing that is not its own."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbdist.checkpoint import folder
from nbdist.checkpoint import manifest as checkpoint_manifest
from nbdist.core.host import started, this_machine
from nbdist.errors import CheckpointError
from tests.support.kernel import run_python
from tests.support.stopping import read_step, save

ROOT = Path(__file__).resolve().parents[2]
_SAVER = (
    "import sys\n"
    "from pathlib import Path\n"
    "from nbdist.checkpoint import folder as checkpoint_folder\n"
    "checkpoint_folder.prepare(Path(sys.argv[1]), 'other.ipynb')\n"
    "print('saving', flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.mark.parametrize("old_step", [0, 1])
def test_a_process_that_ends_anywhere_leaves_a_whole_checkpoint(
    old_step: int, tmp_path: Path
) -> None:
    """Before each single operation of a save in turn: the old one or the new one, never neither.

    And the next save leaves nothing but its own folder.
    """
    done = run_python("-m", "tests.support.stopping", str(tmp_path / "f"), str(old_step))
    reports = [json.loads(line) for line in done.stdout.splitlines()]

    assert done.returncode == 0, done.stderr
    assert [report["code"] for report in reports] == [9] * (len(reports) - 1) + [0]
    assert len(reports) > 30
    assert {"os.rename", "os.mkdir", "os.fsync", "os.remove"} <= {
        report["operation"] for report in reports
    }
    steps = [report["step"] for report in reports]
    assert set(steps) == {old_step, 2}
    assert steps == sorted(steps), "once the new one is found, the old one is not any more"
    assert all(report["is_whole"] for report in reports)
    assert all(report["last"] == 3 for report in reports)
    assert all(report["left"] == [] for report in reports)


def test_everything_is_on_disk_before_the_first_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file and its folder are flushed before the earlier checkpoint moves, names after it."""
    path = tmp_path / "c"
    save(path, 1)
    done: list[str] = []
    plain_fsync, plain_rename = os.fsync, os.rename

    def fsync(handle: int) -> None:
        done.append(f"fsync {Path(f'/proc/self/fd/{handle}').readlink().name}")
        plain_fsync(handle)

    def rename(old: Path, new: Path, **ways: int) -> None:
        done.append(f"rename {Path(old).name} {Path(new).name}")
        plain_rename(old, new, **ways)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(path, 2)

    names = (".metadata", "__0_0.distcp", "nbdist.json", ".c.nbdist-new")
    assert sorted(done[:4]) == sorted(f"fsync {name}" for name in names)
    assert done[4:] == [
        "rename c .c.nbdist-old",
        "rename .c.nbdist-new c",
        f"fsync {tmp_path.name}",
    ]


@pytest.fixture
def saver() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts processes that have begun to save to a path, and wait."""
    started = []

    def start(path: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _SAVER, str(path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_two_that_save_to_one_path_are_told_and_neither_is_swept(
    tmp_path: Path, saver: Callable[[Path], subprocess.Popen[str]]
) -> None:
    """The second is refused with the first one's notebook and process; its folder stays."""
    path, other = tmp_path / "c", tmp_path / "d"
    save(path, 1)
    process = saver(path)

    with pytest.raises(
        CheckpointError, match=rf"another run \(other\.ipynb\), process {process.pid}"
    ):
        folder.prepare(path)
    save(other, 1)
    assert (tmp_path / ".c.nbdist-new").is_dir()

    process.send_signal(signal.SIGKILL)
    process.wait()
    save(other, 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "d"]
    assert read_step(path) == (1, True)


def test_a_killed_save_that_nobody_has_waited_for_counts_as_ended(
    tmp_path: Path, saver: Callable[[Path], subprocess.Popen[str]]
) -> None:
    """A process that has ended and is still listed (a zombie) saves nothing any more."""
    process = saver(tmp_path / "c")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    save(tmp_path / "c", 1)

    assert read_step(tmp_path / "c") == (1, True)


def test_the_same_process_is_told_that_it_still_saves(tmp_path: Path) -> None:
    """A second save while an asynchronous one goes on has its own sentence."""
    folder.prepare(tmp_path / "c")

    with pytest.raises(CheckpointError, match="is still being saved, since"):
        folder.prepare(tmp_path / "c")
    folder.abandon(tmp_path / "c")

    assert list(tmp_path.iterdir()) == []


def test_another_hosts_save_is_never_swept(tmp_path: Path) -> None:
    """Whether its process lives cannot be told from here, so it is named and stays."""
    path = tmp_path / "c"
    folder.prepare(path)
    lock = tmp_path / ".c.nbdist-lock"
    owner = json.loads(lock.read_text())
    owner["machine"]["host"] = "node7"
    lock.write_text(json.dumps(owner))

    save(tmp_path / "d", 1)
    with pytest.raises(CheckpointError, match=r"on node7, since .* remove .*\.c\.nbdist-lock"):
        folder.prepare(path)


@pytest.mark.parametrize("names", [("notes.txt",), ("nbdist.json", "notes.txt"), (".metadata",)])
def test_what_is_no_checkpoint_is_never_replaced(names: tuple[str, ...], tmp_path: Path) -> None:
    """A folder with other files, or a checkpoint that somebody put a file into, stays."""
    path = tmp_path / "mine"
    path.mkdir()
    for name in names:
        (path / name).write_text("dear")

    with pytest.raises(CheckpointError, match="would remove them"):
        folder.prepare(path)

    assert sorted(entry.name for entry in path.iterdir()) == sorted(names)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


def test_a_damaged_checkpoint_is_replaced(tmp_path: Path) -> None:
    """Its manifest is torn and its files are known by their names."""
    path = tmp_path / "c"
    save(path, 1)
    (path / checkpoint_manifest.MANIFEST).write_text("{")

    save(path, 2)

    assert read_step(path) == (2, True)


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    """With its size, so that it is found again."""
    (tmp_path / "c").write_text("weights")

    with pytest.raises(CheckpointError, match="is a file of 7 bytes"):
        folder.prepare(tmp_path / "c")


def test_folders_above_are_made_and_an_empty_one_is_taken(tmp_path: Path) -> None:
    """Neither has to be made by hand before."""
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "a" / "b" / "c", tmp_path / "empty"):
        save(path, 1)

        assert read_step(path) == (1, True)


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    """`latest -> step1` is still a link after a save to `latest`; one that dangles is followed."""
    save(tmp_path / "step1", 1)
    (tmp_path / "latest").symlink_to("step1")
    (tmp_path / "next").symlink_to("step2")

    save(folder.resolve(tmp_path / "latest"), 5)
    save(folder.resolve(tmp_path / "next"), 6)

    assert (tmp_path / "latest").is_symlink()
    assert read_step(tmp_path / "step1") == (5, True)
    assert read_step(tmp_path / "step2") == (6, True)


def test_paths_are_understood_as_a_shell_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`~`, relative ones, and those that name nothing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")

    assert folder.resolve("~/c") == tmp_path / "c"
    assert folder.resolve("a/../c") == tmp_path / "c"
    for odd, message in (("", "empty"), ("/", "root of the file system"), ("n" * 300, "too long")):
        with pytest.raises(CheckpointError, match=message):
            folder.resolve(odd)
    with pytest.raises(CheckpointError, match="cannot be followed"):
        folder.resolve("~nobody-of-this-name/c")


@pytest.mark.parametrize(
    ("name", "number", "code", "message"),
    [
        ("mkdir", 2, errno.EACCES, "Permission denied"),  # the folder above is there
        ("write", 1, errno.ENOSPC, r"the disk is full \([\d,]+ of [\d,]+ bytes are free"),
        ("fsync", 1, errno.EIO, "Input/output error"),
        ("fsync", 1, errno.EDQUOT, "your quota is used up"),
        ("rename", 1, errno.EFBIG, "exceed this process's size limit"),
        ("rename", 2, errno.EIO, "Input/output error"),  # the first has moved the earlier one away
    ],
)
def test_each_failure_is_told_and_leaves_the_earlier_one(
    name: str, number: int, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system refuses is said with numbers; nothing is left once the save is abandoned."""
    path = tmp_path / "c"
    save(path, 1)
    calls, plain = itertools.count(1), getattr(os, name)

    def refuse(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise OSError(code, os.strerror(code))
        return plain(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, name, refuse)
        with pytest.raises(CheckpointError, match=message):
            save(path, 2)
    assert read_step(path) == (1, True)
    folder.abandon(path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert read_step(path) == (1, True)


def test_a_save_whose_files_are_short_is_not_put_in_place(tmp_path: Path) -> None:
    """What is on disk is compared with the manifest before the earlier checkpoint moves."""
    path = tmp_path / "c"
    save(path, 1)
    new = folder.prepare(path)
    manifest = (path / checkpoint_manifest.MANIFEST).read_text()
    (new / checkpoint_manifest.MANIFEST).write_text(manifest)

    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        folder.commit(new, path)
    folder.abandon(path)

    assert read_step(path) == (1, True)


def test_a_save_is_given_up_while_others_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that comes while the folder is removed goes too, and so does the lock."""
    path = tmp_path / "one"
    new = folder.prepare(path)
    (new / "__1_0.distcp").write_bytes(b"early")
    late, rmdir = [new / "__3_0.distcp"], os.rmdir

    def rmdir_too_late(*args: Any, **options: Any) -> None:
        if late:
            late.pop().write_bytes(b"late")
        rmdir(*args, **options)

    monkeypatch.setattr(os, "rmdir", rmdir_too_late)
    folder.abandon(path)

    assert not late
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_seen_where_it_is_of_the_same_save(tmp_path: Path) -> None:
    """Not where another host has none of that name, nor where it has one of an earlier save."""
    saver = (this_machine(), os.getpid(), started(os.getpid()) or "")
    other = (replace(saver[0], host="other"), *saver[1:])
    folder.prepare(tmp_path / "c")

    assert folder.is_saved_by(tmp_path / "c", saver)
    assert not folder.is_saved_by(tmp_path / "c", other)
    assert not folder.is_saved_by(tmp_path / "d", saver)
    assert not folder.is_saved_by(tmp_path / "absent" / "c", saver)
