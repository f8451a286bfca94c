"""%dist_bench in a notebook, from Python and in a terminal, with real ranks."""

import functools
import json
import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import processes
from tests.support.cells import Cell
from tests.support.kernel import Kernel
from tests.support.terminal import nbdist

# A hundred runs of small sizes take well under a second. The rest of the time is not used,
# and on a machine that is busy none of them is left out.
_SHORT = "--sizes 1K:4K --seconds 100"
_SUM = "%%distributed\nx = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nx.item()"
_MISTAKES = {
    "%dist_bench --seconds 0": "0 is not above 0",
    "%dist_bench all_reduce": "unrecognized arguments: all_reduce",
    "%dist_bench --save nowhere/a.json": "There is no folder nowhere to save a.json in",
    "%dist_bench --load a.json --ops reduce": "--load shows what was measured before",
}


def rows(text: str) -> list[list[str]]:
    """The cells of the rows that were measured."""
    pattern = r"^(\w+) +(\d+ \w*B) +([\d.]+) +([\d.]+) +([\d.]+)  ok$"
    return [[*cells] for cells in re.findall(pattern, text, re.MULTILINE)]


def ended_well(cell: Cell) -> str:
    """The text of what a cell shows in the end."""
    assert cell.status == "ok", cell.visible
    return cell.plain[-1]


@pytest.mark.usefixtures("drawn")
def test_a_notebook_measures_its_ranks(kernel: Kernel, shared_folder: Path) -> None:
    """Rows, caveat, model and picture; the file and the session keep them."""
    cell = kernel.run(f"%dist_bench --ops all_reduce,broadcast {_SHORT} --save links.json")
    text = ended_well(cell)
    again = kernel.run("%dist_bench --load links.json")
    printed = kernel.run(
        "import nbdist; b = nbdist.session().bandwidth\n"
        "row = b.last.rows[-1]\n"
        "(row.op, row.size_bytes, len(b.last.rows), b.model.world_size)"
    )
    after = kernel.run(_SUM)

    assert text.startswith("2 ranks on 1 host, gloo, CPU\nThese are not speeds of links")
    sizes = ["1 KiB", "4 KiB"]
    assert [row[:2] for row in rows(text)] == [
        [op, size] for op in ("all_reduce", "broadcast") for size in sizes
    ]
    page = cell.data("text/html")[-1]
    assert '<img class="nbdist-figure" alt=' in page
    assert "NVLink 4" in page
    assert ended_well(again) == text
    assert printed.plain == ["('broadcast', 4096, 4, 2)"]
    assert after.text == "[0-1] 3.0\n"
    assert json.loads((shared_folder / "links.json").read_text())["world_size"] == 2


def test_from_python(kernel: Kernel) -> None:
    """session.bench returns numbers, nbdist.bench a view."""
    numbers = kernel.run(
        "import nbdist\n"
        "found = nbdist.session().bench(['all_to_all', 'send_recv'], [4096, 8192], limit_s=100)\n"
        "[(row.op, row.size_bytes, row.wrong, row.busbw(2) > 0) for row in found.rows]"
    )
    shown = kernel.run("nbdist.bench('reduce_scatter,all_gather,reduce', '4K', limit_s=100)")

    assert ended_well(numbers) == str(
        [(op, size, (), True) for op in ("all_to_all", "send_recv") for size in (4096, 8192)]
    ).replace("), (", "),\n (")
    assert [row[0] for row in rows(ended_well(shown))] == ["reduce_scatter", "all_gather", "reduce"]


@pytest.mark.parametrize("code", _MISTAKES)
def test_a_mistake_is_an_ordinary_error(kernel: Kernel, code: str) -> None:
    """It fails the cell with what is wrong and what works."""
    kernel.run(code).check_failure("OptionError", re.escape(_MISTAKES[code]))


def test_an_interrupt_gives_notebook_and_ranks_back(kernel: Kernel) -> None:
    """In the middle of it; nothing is kept of it, and all groups work."""
    kernel.run("%%distributed\nkept = rank; own = dist.new_group([0, 1])")
    running = kernel.start("%dist_bench --ops all_reduce,all_to_all --sizes 64M --seconds 300")
    kernel.wait_output(running, "measuring: all_reduce of 64 MiB")
    kernel.interrupt()
    cell = kernel.finish(running, 30)
    after = kernel.run("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x, group=own)\nx.item()")
    again = kernel.run(f"%dist_bench --ops all_reduce {_SHORT}")

    cell.check_failure("KeyboardInterrupt", "interrupted at all_reduce of 64 MiB; its results are")
    assert after.text.endswith("[0-1] 2.0\n"), after.visible
    assert len(rows(ended_well(again))) == 2


_PRESS = """
import signal
from nbdist.bandwidth import kernel as bandwidth
real = bandwidth.measure
def measure(call, rank, *args):
    future = real(call, rank, *args)
    if rank == {rank}:
        signal.raise_signal(signal.SIGINT)
    return future
bandwidth.measure = measure
"""


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.faults)])
def test_an_interrupt_while_the_ranks_are_asked(kernel: Kernel, rank: int) -> None:
    """Rank 0 would otherwise wait for rank 1, which was never asked."""
    kernel.run(_PRESS.format(rank=rank))
    cell = kernel.run("%dist_bench --ops all_reduce --sizes 64M --seconds 300")
    kernel.run("bandwidth.measure = real")
    after = kernel.run(_SUM)

    cell.check_failure("KeyboardInterrupt")
    assert after.text.endswith("[0-1] 3.0\n"), after.visible


@pytest.mark.faults
def test_a_rank_that_dies_while_it_is_measured(fresh: Kernel) -> None:
    """It is told at once, and with another process in its place it can be measured again."""
    kernel = fresh
    pid = int(kernel.run("%%rank[1]\nimport os; os.getpid()").text.split()[1])
    running = kernel.start("%dist_bench --ops all_reduce --sizes 64M --seconds 300")
    kernel.wait_output(running, "measuring: all_reduce of 64 MiB")
    psutil.Process(pid).kill()
    cell = kernel.finish(running, 30)
    gone = kernel.run(f"%dist_bench {_SHORT}")
    restarted = kernel.run("%dist_restart 1", 120)
    again = kernel.run(f"%dist_bench --ops all_reduce {_SHORT}")

    for failed in (cell, gone):
        failed.check_failure("RankGone", "%dist_restart 1 brings it back")
    assert restarted.status == "ok", restarted.visible
    assert len(rows(ended_well(again))) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "1"], "nbdist bench: 1 rank sends nothing. Use -n 2 or more."),
        (["-n", "2", "--sizes", "4"], "less than one float32 for each of 2 ranks"),
        (["--auto"], "unrecognized arguments: --auto"),
    ],
)
def test_wrong_use_in_a_terminal(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 before any rank is started."""
    from nbdist.frontend import cli

    code = cli.main(["bench", *words])
    said = capsys.readouterr()

    assert (code, said.out) == (2, "")
    assert message in said.err


def test_a_terminal_shows_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each text in place of the one before, and nothing in a file."""
    from nbdist.commands import bandwidth

    bandwidth._tell("to a file")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bandwidth._tell("all_reduce of 1 KiB")
    bandwidth._tell("")

    assert capsys.readouterr().err == "\r\x1b[Kall_reduce of 1 KiB\r\x1b[K"


def test_a_terminal_starts_ranks_measures_and_ends_them(tmp_path: Path) -> None:
    """The ranks' table on stderr, the result on stdout; a file of it can be shown again."""
    (tmp_path / "tmp").mkdir()
    bench = functools.partial(nbdist, "bench", folder=tmp_path)
    done = bench("-n", "2", "--ops", "broadcast", *_SHORT.split(), "--save", "links.json")
    again = bench("--load", "links.json")

    assert done.returncode == 0, done.stderr
    assert len(rows(done.stdout)) == 2
    assert done.stderr.startswith("2 ranks on 1 host, ready in ")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert processes.open_run_dirs(tmp_path / "tmp", "nbdist-*/*") == []
