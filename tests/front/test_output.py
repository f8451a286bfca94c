"""What ranks write and display, as a reader sees it."""

import re
from pathlib import Path

import pytest

from tests.support.kernel import Kernel

_IMPORTS = (
    "%%distributed\nimport ctypes, os, subprocess, sys, time\n"
    "from IPython.display import HTML, clear_output, display, update_display"
)
_NOT_SHOWN = "not shown: 1 display of rank 1 (%%distributed --tabs shows all)\n"
_TEXTS = {
    "pieces of one line": (
        "for piece in 'abc': print(piece, end='', flush=True)\nprint()",
        "[0-1] abc\n",
    ),
    "an unfinished last line": ("print('no newline', end='')", "[0-1] no newline\n"),
    "output of C code": ("os.write(1, b'raw\\n');", "[0-1] raw\n"),
    "output of libc": (
        "libc = ctypes.CDLL(None); libc.puts(b'from C'); libc.fflush(None);",
        "[0-1] from C\n",
    ),
    "a child process": ("subprocess.run(['echo', 'child']);", "[0-1] child\n"),
    "a shell command's stderr": ("!echo oops >&2", "[0-1] oops\n"),
    "a thread": (
        (
            "import threading\nt = threading.Thread(target=print, args=('thread',))\n"
            "t.start(); t.join()"
        ),
        "[0-1] thread\n",
    ),
    "text that is no UTF-8": ("os.write(1, b'a\\xff\\n');", "[0-1] a\ufffd\n"),
    "colours": ("print('\\x1b[31mred\\x1b[0m')", "[0-1] red\n"),
}
_LINES = 100_000


def of_rank(text: str, rank: int) -> list[str]:
    """A rank's lines, shown together with the other's or, where that is late, alone."""
    shown = [line.partition("] ")[::2] for line in text.splitlines()]
    return [line for label, line in shown if label in {"[0-1", f"[{rank}"}]


@pytest.fixture
def ready(kernel: Kernel) -> Kernel:
    """The shared kernel, what the cells here import at hand."""
    assert kernel.run(_IMPORTS).status == "ok"
    return kernel


@pytest.mark.parametrize("name", _TEXTS)
def test_lines_are_merged_in_rank_order(ready: Kernel, name: str) -> None:
    """Equal lines come once with their ranks, others per rank, all of them whole."""
    code, shown = _TEXTS[name]
    cell = ready.run(f"%%distributed\n{code}")

    assert (cell.status, cell.visible) == ("ok", shown)


def test_output_of_c_code_at_the_very_end_is_not_lost(ready: Kernel) -> None:
    """What is written past Python just before the cell ends is in the cell, every time."""
    texts = [ready.run("%%distributed\nos.write(1, b'raw\\n' * 50);").text for _ in range(20)]

    assert texts == ["[0-1] raw\n" * 50] * 20


def test_a_childs_characters_stay_whole(ready: Kernel) -> None:
    """Text of a child that is read in pieces is decoded as one."""
    cell = ready.run("%%distributed\nsubprocess.run(['echo', 'x' + 'é' * 20_000]);")

    assert cell.text == "[0-1] x" + "é" * 20_000 + "\n"


def test_stderr_stays_stderr(ready: Kernel) -> None:
    """Both streams are kept apart, from Python, C and children alike."""
    cell = ready.run(
        "%%distributed\nprint('out'); print('err', file=sys.stderr)\nos.write(2, b'raw\\n')\n"
        "subprocess.run(['sh', '-c', 'echo child >&2']);"
    )

    assert cell.text == "[0-1] out\n"
    assert sorted(cell.stderr.splitlines()) == ["[0-1] child", "[0-1] err", "[0-1] raw"]


_WAIT = "while not os.path.exists({gate!r}): time.sleep(0.01)"


@pytest.mark.parametrize(
    ("code", "live", "text"),
    [
        (
            f"print('before')\n{_WAIT}\nprint('after')",
            "[0-1] before",
            "[0-1] before\n[0-1] after\n",
        ),
        # Rank 0's line is not held back for ever by rank 1, which has none; then they join again.
        (
            f"print('one', rank)\nif rank:\n    {_WAIT}\nprint('two')",
            "[0] two",
            "[0] one 0\n[1] one 1\n[0] two\n[1] two\n",
        ),
        # So is an unfinished line.
        (
            f"print('epoch 1 ...', end='', flush=True)\n{_WAIT}\nprint(' done')",
            "epoch 1 ...",
            "[0-1] epoch 1 ... done\n",
        ),
    ],
)
def test_output_is_shown_while_the_cell_runs(
    ready: Kernel, shared_folder: Path, code: str, live: str, text: str
) -> None:
    """A line is there before the cell goes on: the cell waits for a file that we then write."""
    gate = shared_folder / "gate"
    handle = ready.start(f"%%distributed\n{code.format(gate=str(gate))}")
    shown = ready.wait_output(handle, live)
    gate.touch()
    cell = ready.finish(handle)
    gate.unlink()

    assert shown.status == "running"
    assert text.splitlines()[-1] not in shown.visible.splitlines()
    assert cell.text.partition("elapsed: ")[0].endswith(text)


def test_elapsed_times_are_told_when_they_differ(ready: Kernel) -> None:
    """One line names each rank's time, and none comes where they are alike."""
    cell = ready.run("%%distributed\nif rank: time.sleep(1.2)")
    even = ready.run("%%distributed\n1;")

    assert re.fullmatch(r"elapsed: \[0\] 0\.\d s, \[1\] \d\.\d s\n", cell.text), cell.text
    assert even.visible == ""


def test_200_kb_of_a_child_does_not_wedge(ready: Kernel) -> None:
    """A child that writes more than a pipe holds is read to its end, on both streams."""
    child = "import sys\nfor f in (sys.stdout, sys.stderr): f.write(('x' * 1023 + '\\\\n') * 200)"
    cell = ready.run(
        f"%%distributed\nsubprocess.run([sys.executable, '-c', '''{child}'''])\nprint('end')"
    )

    assert cell.status == "ok"
    for rank in (0, 1):
        assert of_rank(cell.text, rank) == ["x" * 1023] * 200 + ["end"]
        assert of_rank(cell.stderr, rank) == ["x" * 1023] * 200


@pytest.mark.parametrize(
    ("code", "mime"),
    [
        ("display(HTML(f'<b>{rank}</b>'))", "text/html"),
        ("import pandas\npandas.DataFrame({'a': [rank]})", "text/html"),
        ("import matplotlib.pyplot as plt\nplt.plot([rank, 1])\nplt.show()", "image/png"),
        ("import matplotlib.pyplot as plt\nplt.plot([rank, 1]);", "image/png"),
    ],
)
def test_rich_output_comes_from_rank_0(ready: Kernel, code: str, mime: str) -> None:
    """One figure, table or page is shown; the other rank's is counted."""
    cell = ready.run(f"%%distributed\n{code}")

    assert cell.status == "ok"
    assert len(cell.data(mime)) == 1
    assert _NOT_SHOWN in cell.text  # a slow one has a line of times as well


def test_a_display_is_updated_in_place(ready: Kernel) -> None:
    """display_id works within a cell and from a later one."""
    first = ready.start(
        "%%distributed\nh = display(HTML('1'), display_id=True)\nh.update(HTML('2'))"
    )
    within = ready.finish(first)
    later = ready.run("%%distributed\nh.update(HTML('3'))")

    assert within.data("text/html") == ["2"]
    assert later.data("text/html") == []
    assert ready.so_far(first).data("text/html") == ["3"]


@pytest.mark.parametrize("wait", [True, False])
def test_clear_output_clears(ready: Kernel, wait: bool) -> None:
    """Only what came after the last clear_output() is left."""
    cell = ready.run(
        f"%%distributed\nfor i in range(3):\n    clear_output(wait={wait})\n    print('n', i)"
    )

    assert cell.text == "[0-1] n 2\n"


def test_tabs_show_each_ranks_output(ready: Kernel) -> None:
    """--tabs gives all that each rank wrote and displayed, as text and as HTML."""
    cell = ready.run("%%distributed --tabs\nprint('hi', rank)\ndisplay(HTML(f'<b>{rank}</b>'))")

    tabs = cell.plain[-1]
    page = cell.data("text/html")[-1]
    assert "--- rank 0 ---\nhi 0\n" in tabs
    assert "--- rank 1 ---\nhi 1\n" in tabs
    assert "<b>0</b>" in page
    assert "<b>1</b>" in page
    assert "not shown" not in cell.text


def test_100_000_lines_are_in_the_file_and_their_ends_are_shown(ready: Kernel) -> None:
    """Nothing of a flood is lost: both ends are shown, and the file at the path has it all."""
    cell = ready.run(
        f"%%distributed\nfor i in range({_LINES}): print(f'line {{i}} of {{rank}}')", 110
    )

    lines = cell.text.splitlines()
    notes = [line for line in lines if line.startswith("...")]
    shown = [line for line in lines if not line.startswith("...")]
    path = Path(re.search(r"/\S+\.txt", notes[-1])[0])  # type: ignore[index]
    expected = [f"[{rank}] line {i} of {rank}" for i in range(_LINES) for rank in (0, 1)]
    expected += [line for line in shown if line.startswith("elapsed: ")]  # of unequal ranks
    assert cell.status == "ok"
    assert f"{len(expected) - 1000:,} lines not shown" in notes[-1]
    assert shown == expected[:500] + expected[-500:]
    assert sorted(path.read_text().splitlines()) == sorted(expected)
    assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0
