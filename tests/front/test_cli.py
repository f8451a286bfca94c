"""The command line in real processes: help, wrong use, programs on ranks, status and stop."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import __version__
from nbdist.commands import VERBS, WORDS
from nbdist.frontend import cli
from nbdist.notebook.verb import NOTEBOOK
from tests.front.conftest import START_TIMEOUT_S
from tests.support import processes
from tests.support.kernel import Kernel
from tests.support.ranks import started, temporary_folder
from tests.support.terminal import begun, nbdist

PROGRAM = """\
import sys
from beside import VALUE

print(f"rank {rank} of {world_size}", sys.argv[1:], __file__.endswith("train.py"), VALUE)
x = torch.ones(1) * (rank + 1)
dist.all_reduce(x)
if __name__ == "__main__":
    print("sum", x.item())
    sys.exit(0)
print("never")
"""
FAILING = """\
def step():
    if rank == 1:
        raise ValueError("a bad batch")

step()
"""
LONG = "import time\nprint('begun', flush=True)\ntime.sleep(300)\n"
HANGING = """\
from IPython.display import display

display({"text/plain": "shown", "text/html": "<b>shown</b>"}, raw=True)
print("\\n".join(map(str, range(1200))))
if rank == 0:
    dist.all_reduce(torch.ones(1))
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with programs, and one for runs in it; short, so that sockets fit."""
    path = Path(tempfile.mkdtemp(prefix="cli-"))
    (path / "tmp").mkdir()
    (path / "train.py").write_text(PROGRAM)
    (path / "beside.py").write_text("VALUE = 7\n")
    (path / "failing.py").write_text(FAILING)
    yield path
    left = processes.open_run_dirs(path / "tmp", "nbdist-*/*")
    shutil.rmtree(path)

    assert left == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is the package's, under both spellings."""
    codes = [cli.main([word]) for word in ("version", "--version")]

    assert (codes, capsys.readouterr().out) == ([0, 0], f"nbdist {__version__}\n" * 2)


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """Each verb has a line, those of a notebook with their percent signs."""
    code = cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()

    assert code == 0
    for verb in VERBS.values():
        name = verb.typed if verb.place == NOTEBOOK else verb.word
        assert any(line.split() == [name, *verb.help.split()] for line in lines), name
    for word in ("doctor", "run", "status", "stop", "version"):
        assert any(line.startswith(f"  {word} ") for line in lines)


def test_nothing_typed_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    """The help goes to stderr then, and the exit code is 2."""
    code = cli.main([])
    said = capsys.readouterr()

    assert (code, said.out) == (2, "")
    assert said.err.startswith("usage: nbdist VERB")


@pytest.mark.parametrize("word", sorted(w for w, v in WORDS.items() if v.place != NOTEBOOK))
def test_each_verb_has_help_with_an_example(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help shows usage and an example as they are typed here, and does nothing."""
    code = cli.main([word, "--help"])
    said = capsys.readouterr().out

    assert code == 0
    assert said.startswith(f"usage: nbdist {word}")
    assert f"\nexample: nbdist {word}" in said
    assert "%" not in said.partition("example:")[2]


@pytest.mark.parametrize(
    ("word", "message"),
    [("docter", "Did you mean doctor?"), ("%dist_statsu", "Did you mean status"), ("xyzzy", "")],
)
def test_an_unknown_verb_names_close_ones(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, what was typed, and what may be meant."""
    code = cli.main([word])
    said = capsys.readouterr().err

    assert code == 2
    assert said.startswith(f"nbdist: there is no verb {word!r}.")
    assert message in said


@pytest.mark.parametrize("word", sorted(v.name for v in VERBS.values() if v.place == NOTEBOOK))
def test_a_verb_of_a_notebook_is_wrong_use_here(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a sentence on stderr with its own example; its help is shown all the same."""
    verb = VERBS[word]
    codes = [cli.main([typed]) for typed in (verb.name, verb.typed)]
    said = capsys.readouterr()
    helped = cli.main([word, "--help"])

    assert (codes, said.out) == ([2, 2], "")
    for line in said.err.splitlines():
        assert line.startswith(f"{verb.typed} works only in a notebook: ")
        assert line.endswith(f"for example {verb.example}")
    assert said.err.count("\n") == 2
    assert helped == 0
    assert capsys.readouterr().out.startswith(f"usage: {verb.typed}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "--nope"], "nbdist doctor: unrecognized arguments: --nope"),
        (["doctor", "now"], "nbdist doctor: unrecognized arguments: now"),
        (["run"], "no file is named"),
        (["run", "a.py", "b.py"], "2 files are named"),
        (["run", "no.py", "-n", "2"], "no.py cannot be read (No such file or directory)"),
        (["run", "-n", "2", "a.ipynb"], "nbconvert --to notebook --execute a.ipynb"),
        (["run", "a.py", "-n", "two"], "'two' is not a valid number of ranks"),
        (["run", "a.py", "--auto"], "unrecognized arguments: --auto"),
        (["stop", "run-x", "--all"], "choose --all or run-x"),
    ],
)
def test_wrong_use(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, the reason on stderr and no traceback."""
    code = cli.main(words)
    said = capsys.readouterr()

    assert (code, said.out) == (2, "")
    assert message in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("text", [b"x = (1,\n", b"\xff\xfe\n", b"x = 1\0\n"])
def test_what_is_no_program_starts_no_rank(
    text: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of syntax is told with its line before anything starts."""
    path = folder / "wrong.py"
    path.write_bytes(text)
    code = cli.main(["run", str(path), "-n", "2"])
    said = capsys.readouterr().err

    assert code == 1
    assert said.startswith(f"{path} is not a valid Python program, so no rank was started.\n")
    assert "Error: " in said
    assert "Traceback" not in said


def test_run_shows_the_ranks_output_and_ends_them(folder: Path) -> None:
    """A program sees its arguments, its path and its neighbours; equal lines come once."""
    done = nbdist("run", "-n", "2", "train.py", "--", "--lr", "0.1", folder=folder)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[0] rank 0 of 2 ['--lr', '0.1'] True 7",
        "[1] rank 1 of 2 ['--lr', '0.1'] True 7",
        "[0-1] sum 3.0",
    ]
    assert done.stderr.startswith("2 ranks on 1 host, ready in ")


def test_run_fails_with_the_ranks_traceback(folder: Path) -> None:
    """Exit code 1, and the failing rank's own lines of its own file."""
    done = nbdist("run", "failing.py", "-n", "2", folder=folder)

    assert done.returncode == 1
    assert "ValueError: a bad batch" in done.stderr
    assert "rank 1" in done.stderr
    assert re.search(r"failing\.py:5|failing\.py, line 5|failing\.py\", line 5", done.stderr)
    assert "nbdist/engine/script" not in done.stderr
    assert "Traceback (most recent call last):\n  File" not in done.stderr.partition("Error")[0]


def test_a_program_that_hangs_is_told_by_its_own_lines_and_in_its_words(folder: Path) -> None:
    """One in a package's folder too; all that it has printed is there, whatever its length."""
    path = folder / "site-packages" / "pkg" / "hanging.py"
    path.parent.mkdir(parents=True)
    path.write_text(HANGING)
    done = nbdist("run", str(path), "-n", "2", "--grace", "0", folder=folder)

    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("[0-1] ")] == [
        f"[0-1] {number}" for number in range(1200)
    ]
    assert "not shown: 1 display of rank 1\n" in done.stdout
    assert done.stderr.splitlines()[-1] == (
        "rank 0 waits in all_reduce(float32[1]) at line 6 of hanging.py: "
        "dist.all_reduce(torch.ones(1)); rank 1 finished without calling it; aborted after 0 s"
    )


@pytest.mark.faults
def test_run_tells_an_exit_code(folder: Path) -> None:
    """A program that ends itself with another code than 0 has failed."""
    (folder / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    done = nbdist("run", "leaving.py", "-n", "1", folder=folder)

    assert done.returncode == 1
    assert "the program exited with code 3" in done.stderr


def test_an_interrupt_ends_the_program_and_the_ranks(folder: Path) -> None:
    """Ctrl-C goes to the ranks as in a notebook; then they end, and the exit code says so."""
    (folder / "long.py").write_text(LONG)
    done = nbdist("run", "long.py", "-n", "2", folder=folder, press_at="[0-1] begun\n")

    assert done.returncode == 130
    last = done.stderr.splitlines()[-1]
    assert last == "interrupted: [0-1] at line 3 of long.py: time.sleep(300)"
    assert processes.open_run_dirs(folder / "tmp", "nbdist-*/*") == []


@pytest.mark.faults
def test_a_program_whose_ranks_are_stopped_says_so(folder: Path) -> None:
    """nbdist stop ends a program as well: exit code 1, and who did it."""
    (folder / "long.py").write_text(LONG)
    with begun("run", "long.py", "-n", "1", folder=folder) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        done = nbdist("stop", folder=folder)
        _, said = process.communicate(timeout=60)

    assert line == "[0] begun\n"
    assert done.returncode == 0, done.stderr
    assert process.returncode == 1
    assert "The ranks are gone: `nbdist stop` in a terminal ended them at " in said
    assert "Traceback" not in said


def test_doctor(folder: Path) -> None:
    """A table with a row for each check; the exit code says whether anything is bad."""
    done = nbdist("doctor", folder=folder)
    lines = done.stdout.splitlines()
    rows = {line.split(maxsplit=2)[1] for line in lines if line.split(maxsplit=1)[0] in _VERDICTS}

    assert re.match(r"\d+ bad, \d+ warn, \d+ ok$", lines[0])
    assert done.returncode == (not lines[0].startswith("0 bad"))
    assert {"system", "torch", "/dev/shm", "open", "GLOO_SOCKET_IFNAME", "leftovers"} <= rows


_VERDICTS = {"ok", "warn", "bad"}
_GONE = "The ranks are gone: `nbdist stop` in a terminal ended them at "


def test_doctor_fails_where_something_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and what to do about it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    code = cli.main(["doctor"])

    assert code == 1
    assert "bad OMP_NUM_THREADS: this is not a number of threads; set it" in capsys.readouterr().out


def test_status_lists_a_notebooks_cluster(kernel: Kernel, shared_folder: Path) -> None:
    """Its kernel, how many ranks, and where."""
    [run_dir] = processes.open_run_dirs(shared_folder / "tmp", "nbdist-*/run-*")
    done = nbdist("status", folder=shared_folder)

    head, row = done.stdout.splitlines()
    assert done.returncode == 0
    assert head.split() == ["run", "kernel", "ranks", "hosts", "since", "state", "notebook"]
    assert row.split()[:3] == [run_dir.name, str(kernel.pid), "2"]
    assert row.split()[-2:] == ["running", str(shared_folder)]


def test_the_magic_shows_the_running_ranks_too(kernel: Kernel) -> None:
    """%dist_doctor, its help, and nbdist.doctor(), beside running ranks."""
    cell = kernel.run("%dist_doctor")
    helped = kernel.run("%dist_doctor --help")
    called = kernel.run("import nbdist; 'leftovers' in nbdist.doctor().text")
    drawn = kernel.run("%dist_doctor --topology")
    both = kernel.run("%dist_doctor --topology --clean")

    assert cell.status == "ok", cell.visible
    text = cell.plain[0]
    assert "2 ranks on 1 host, gloo, up for" in text
    assert f"kernel {kernel.pid}" in text
    assert "<table>" in cell.data("text/html")[0]
    assert "example: %dist_doctor --clean" in helped.plain[0]
    assert called.plain == ["True"]
    assert drawn.plain[0].startswith("2 ranks on 1 host, gloo, ddp, dp 2\n")
    assert "interface lo: 127.0.0.1" in drawn.plain[0]
    assert "dp_replicate      2       1  each within a host  ranks 0-1" in drawn.plain[0]
    assert "<svg" in drawn.data("text/html")[0]
    assert "Type one." in both.visible


def test_clean_leaves_a_living_cluster_alone(kernel: Kernel, shared_folder: Path) -> None:
    """--clean in a terminal touches nothing of a notebook that lives."""
    done = nbdist("doctor", "--clean", folder=shared_folder)
    cell = kernel.run("%%distributed\nrank")

    assert done.stdout.startswith("nothing to clean")
    assert cell.text == "[0] 0\n[1] 1\n"


def test_several_clusters_have_to_be_chosen_from(kernel: Kernel, shared_folder: Path) -> None:
    """With two of them stop ends none unasked, and lists them; one is ended by its name."""
    [first] = processes.open_run_dirs(shared_folder / "tmp", "nbdist-*/run-*")
    with temporary_folder(shared_folder / "tmp"), started(1):
        both = processes.open_run_dirs(shared_folder / "tmp", "nbdist-*/run-*")
        [second] = set(both) - {first}
        asked = nbdist("stop", folder=shared_folder)
        wrong = nbdist("stop", "run-nope", folder=shared_folder)
        done = nbdist("stop", second.name, folder=shared_folder)
        left = kernel.run("%%distributed\nrank")

    assert (asked.returncode, wrong.returncode) == (2, 2)
    assert "2 clusters run. Name one, or end all with --all." in asked.stderr
    assert all(path.name in asked.stderr for path in both)
    assert "there is no cluster run-nope" in wrong.stderr
    assert (done.returncode, done.stdout) == (0, f"{second.name}: rank 0 stopped\n")
    assert left.text == "[0] 0\n[1] 1\n"


def test_stop_ends_a_cluster_and_its_notebook_says_so(fresh: Kernel, shared_folder: Path) -> None:
    """The running cell fails with the reason, later verbs too; new ranks are stopped by --all.

    With none left there is nothing to stop.
    """
    pids = [int(line.split()[1]) for line in
            fresh.run("%%distributed\nimport os; os.getpid()").text.splitlines()]  # fmt: skip
    fresh.run("%dist_mode all")
    running = fresh.start("import time; print('runs', flush=True); time.sleep(300)")
    fresh.wait_output(running, "[0-1] runs")
    done = nbdist("stop", folder=shared_folder)
    cell = fresh.finish(running)
    after = [fresh.run(code) for code in ("1", "%dist_status", "%sync")]
    local = fresh.run("'rank' in dir()")
    listed = nbdist("status", folder=shared_folder)
    again = fresh.run("%dist_reset -n 1", START_TIMEOUT_S)
    all_stopped = nbdist("stop", "--all", folder=shared_folder)
    ended = fresh.run("%dist_shutdown")
    none = nbdist("stop", folder=shared_folder)

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"run-\w+: ranks 0-1 stopped\n", done.stdout)
    assert processes.wait_gone(pids) == []
    assert cell.failure.ename == "RankGone"
    assert cell.failure.evalue.startswith(_GONE)
    for process in after:
        assert process.failure.ename == "NotRunning"
        assert process.failure.evalue.startswith(_GONE)
        assert "%dist_init -n 2" in process.failure.evalue
    assert local.plain == ["False"]
    assert listed.stdout == "you have no clusters running on this machine\n"
    assert again.status == "ok", again.visible
    assert re.fullmatch(r"run-\w+: rank 0 stopped\n", all_stopped.stdout)
    assert ended.failure.evalue.startswith(_GONE)
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr == "No cluster of yours runs on this machine.\n"


def test_an_interrupt_of_the_doctor_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends any verb with 130 and one line."""
    from nbdist.diagnostics import kernel as diagnostics_kernel

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(diagnostics_kernel, "collect", interrupted)

    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_goes_away_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """`nbdist --help | head -1` ends quietly, also when Python flushes what was left."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out, contextlib.redirect_stdout(out):
        code = cli.main(["--help"])

    assert code == 1
    assert capsys.readouterr().err == ""
