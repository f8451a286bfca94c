"""A failure on a rank is a failure in the notebook; an interrupt gives everything back."""

import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.cells import Cell
from tests.support.kernel import Kernel

_BACK_S = 2.0
_GO = "%%distributed\nimport asyncio, os, signal, subprocess, sys, time\nkept = rank"
_BUSY = {
    "a sleep": "%%distributed\nprint('go')\ntime.sleep(60)",
    "a Python loop": "%%distributed\nprint('go')\nwhile True: pass",
    "an await": "%%distributed\nprint('go')\nawait asyncio.sleep(60)",
    "an async loop": "%%distributed\nprint('go')\nwhile True: await asyncio.sleep(0.01)",
    "one rank of two": "%%rank[1]\nprint('go')\ntime.sleep(60)",
    "a rank that waits for nobody": "%%distributed\nprint('go')\nif rank: time.sleep(60)",
    "a child process": "%%distributed\nprint('go')\nsubprocess.run(['sleep', '60'])",
    # Said by the command: IPython 9.18 raises UnboundLocalError for one that is being started.
    "a shell command": "%%distributed\n!echo go; sleep 60",
    "inside another magic": "%%time\n%%distributed\nprint('go')\ntime.sleep(60)",
    "a call from Python": "import nbdist\nnbdist.session().run('print(\"go\"); time.sleep(60)')",
}

_PLACE = re.compile(r"\n\[(0|1|0-1)\] at line \d of cell \[\d+\]: \S")
_CATCHES = "%%distributed\nprint('go')\ntry: time.sleep(60)\nexcept KeyboardInterrupt: {}"


@pytest.fixture
def ready(kernel: Kernel) -> Iterator[Kernel]:
    """The shared kernel, what the cells here import at hand; in the end all variables are kept."""
    assert kernel.run(_GO).status == "ok"
    yield kernel
    after = kernel.run("%%distributed\nkept")

    assert after.text == "[0] 0\n[1] 1\n"


def _interrupt(kernel: Kernel, code: str) -> tuple[Cell, float]:
    """Interrupt a cell once it has begun; how it ended, and how long after the press."""
    handle = kernel.start(code)
    kernel.wait_output(handle, "go")
    pressed_s = time.monotonic()
    kernel.interrupt()
    return kernel.finish(handle, 30), time.monotonic() - pressed_s


# --- exceptions -----------------------------------------------------------------------------------


def test_an_error_on_one_rank_fails_the_cell(ready: Kernel) -> None:
    """Reply and error output are real, the rank is named, and the others' output is kept."""
    cell = ready.run("%%distributed\nprint('before', rank)\nif rank == 1: raise ValueError('boom')")

    assert cell.status == "error"
    cell.check_failure("DistributedError", "^rank 1 raised ValueError: boom$")
    assert cell.failure.traceback.startswith("rank 1 raised ValueError:\n")
    assert "raise ValueError('boom')" in cell.failure.traceback
    assert "/nbdist/" not in cell.failure.traceback
    assert cell.text == "[0] before 0\n[1] before 1\n"


def test_tracebacks_through_torch_do_not_show_nbdist(ready: Kernel) -> None:
    """Every collective goes through nbdist's recorder, whose frames no traceback has.

    Nor that of %tb on the ranks, which shows the last error again.
    """
    cell = ready.run(
        "%%distributed\ntry:\n    dist.broadcast('no tensor', src=0)\n"
        "except TypeError as error:\n    raise KeyError('lost') from error"
    )
    again = ready.run("%%distributed\n%tb")
    inside = ready.run("%%distributed\ndist.all_reduce(torch.ones(1), async_op=True).wait('long')")

    assert "in broadcast(" in cell.failure.traceback
    assert "KeyError: 'lost'" in cell.failure.traceback
    assert "KeyError: 'lost'" in again.visible
    assert "TypeError: wait()" in inside.failure.traceback  # raised by C++ below nbdist's frame
    assert "recorder.py" not in cell.failure.traceback + again.text + inside.failure.traceback


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("object().nope", ("^ranks 0-1 raised AttributeError: ",)),
        # The ranks' Python is named, and the way that its sys.path may differ.
        (
            "import no_such_module",
            ("No module named 'no_such_module'", "-m pip install", "%dist_reset"),
        ),
    ],
)
def test_an_equal_error_is_shown_once(ready: Kernel, code: str, texts: tuple[str, ...]) -> None:
    """All ranks fail alike: one traceback, all ranks named."""
    cell = ready.run(f"%%distributed\n{code}")

    assert cell.status == "error"
    cell.check_failure("DistributedError", *texts)
    assert cell.failure.traceback.count("Traceback (most recent call last)") == 1


def test_different_errors_are_all_shown_root_cause_first(ready: Kernel) -> None:
    """Each distinct traceback comes once, the first to fail at the top."""
    cell = ready.run(
        "%%distributed\nif rank == 0:\n    time.sleep(0.5)\n    raise KeyError('second')\n"
        "raise ValueError('first')"
    )

    text = "rank 1 raised ValueError: first; rank 0 raised KeyError: 'second'"
    assert cell.failure.evalue == text
    traceback = cell.failure.traceback
    assert traceback.index("ValueError: first") < traceback.index("KeyError: 'second'")
    assert traceback.count("Traceback (most recent call last)") == 2


def test_chained_and_grouped_exceptions_are_shown_whole(ready: Kernel) -> None:
    """Causes and the parts of an ExceptionGroup are in the traceback."""
    chained = ready.run(
        "%%distributed\ntry: 1 / 0\nexcept ZeroDivisionError as e: raise RuntimeError('x') from e"
    )
    group = ready.run("%%distributed\nraise ExceptionGroup('g', [ValueError('a'), KeyError('b')])")

    assert "ZeroDivisionError" in chained.failure.traceback
    assert "direct cause" in chained.failure.traceback
    assert "KeyError: 'b'" in group.visible


def test_an_exception_that_cannot_be_printed_still_fails(ready: Kernel) -> None:
    """A broken __str__ costs the message, not the failure."""
    code = "class Broken(Exception):\n    def __str__(self): return 1 / 0\nraise Broken()"
    cell = ready.run(f"%%distributed\n{code}")

    assert cell.status == "error"
    assert "Broken" in cell.failure.traceback


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit(3)", "ranks 0-1 raised SystemExit: 3"),
        ("raise SystemExit", "ranks 0-1 raised SystemExit"),
        ("raise KeyboardInterrupt", "ranks 0-1 raised KeyboardInterrupt"),
        ("raise asyncio.CancelledError", "ranks 0-1 raised CancelledError"),
        ("raise GeneratorExit", "ranks 0-1 raised GeneratorExit"),
        ("await asyncio.wait_for(asyncio.sleep(9), 0.01)", "ranks 0-1 raised TimeoutError"),
        ("%nosuchmagic", "`%nosuchmagic` not found"),
        ("%%nosuchmagic\n1", "`%%nosuchmagic` not found"),
        ("%%bash\nexit 3", "ranks 0-1 raised CalledProcessError"),
    ],
)
def test_endings_of_every_kind_fail_the_cell(ready: Kernel, code: str, message: str) -> None:
    """Whatever is raised, the cell fails with an ordinary exception and the ranks go on."""
    cell = ready.run(f"%%distributed\n{code}", 30)

    assert cell.status == "error"
    cell.check_failure("DistributedError", re.escape(message))


def test_an_error_that_ipython_shows_and_passes_over_fails_the_cell(ready: Kernel) -> None:
    """%run shows its script's error and replies ok; that is no success here."""
    ready.run("open('failing_script.py', 'w').write('1 / 0')")
    cell = ready.run("%%distributed\n%run failing_script.py")

    assert cell.status == "error"
    assert cell.failure.evalue.startswith("ranks 0-1 raised ZeroDivisionError")
    assert "failing_script.py" in cell.failure.traceback


def test_nothing_of_ours_is_a_usage_error(kernel: Kernel) -> None:
    """nbval and Run All pass over IPython's UsageError; no error of ours derives from it."""
    cell = kernel.run(
        "from IPython.core.error import UsageError\nimport nbdist.errors\n"
        "ours = [e for e in vars(nbdist.errors).values() if isinstance(e, type)]\n"
        "len(ours) > 5, any(issubclass(e, UsageError) for e in ours)"
    )

    assert cell.plain == ["(True, False)"]


def test_the_exception_can_be_caught_and_read(kernel: Kernel) -> None:
    """A plain `except Exception` takes it, with the ranks and, in its notes, the rank's line."""
    cell = kernel.run(
        "import nbdist, traceback\ntry:\n    nbdist.session().run('1 / 0', ranks='1')\n"
        "except Exception as error:\n    print(type(error).__name__, error.ranks, error)\n"
        "    print(''.join(traceback.format_exception(error)))"
    )

    text = "DistributedError (1,) rank 1 raised ZeroDivisionError: division by zero\n"
    assert cell.text.startswith(text)
    assert "ZeroDivisionError" in cell.text.removeprefix(text)
    assert "line 1" in cell.text
    assert "1 / 0" in cell.text


# --- interrupts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _BUSY)
def test_an_interrupt_gives_notebook_and_ranks_back(ready: Kernel, name: str) -> None:
    """Within 2 s the cell ends with KeyboardInterrupt; variables are kept, the ranks usable."""
    cell, back_s = _interrupt(ready, _BUSY[name])

    assert back_s < _BACK_S
    assert cell.status == "error"
    cell.check_failure("KeyboardInterrupt", "back, variables kept")
    if name != "a shell command":  # IPython waits for it by itself, and returns
        assert _PLACE.search(cell.failure.evalue), cell.failure.evalue


# A second press 50 ms later can come when the cell has just ended, and then hits ipykernel itself
# (docs/limits.md): once the cell's reply did not come within 30 s. `make faults` has that one.
@pytest.mark.parametrize("gap_s", [0.0, pytest.param(0.05, marks=pytest.mark.faults)])
def test_two_presses_are_no_worse_than_one(ready: Kernel, gap_s: float) -> None:
    """Pressing again at once leaves no rank running and makes no false claim."""
    handle = ready.start(_BUSY["a sleep"])
    ready.wait_output(handle, "go")
    ready.interrupt()
    signal.sigtimedwait([], gap_s)
    ready.interrupt()
    cell = ready.finish(handle, 30)

    assert cell.failure.evalue.startswith("ranks 0-1 are back, variables kept\n[0-1] at line 3 of")


def test_an_interrupt_before_the_cell_has_begun_is_not_lost(ready: Kernel) -> None:
    """A rank that is still busy with something else is interrupted as soon as its cell begins."""
    ready.run("%%rank[1]\nasyncio.get_running_loop().call_later(0.1, time.sleep, 1.5)")
    ready.run("%%rank[0]\ntime.sleep(0.3)")
    cell, _ = _interrupt(ready, _BUSY["a sleep"])

    assert cell.failure.evalue.startswith("ranks 0-1 are back, variables kept")


def test_code_that_catches_the_interrupt_goes_on(ready: Kernel) -> None:
    """A rank may save something on KeyboardInterrupt; what it prints is shown."""
    cell, _ = _interrupt(ready, _CATCHES.format("print('saved')"))

    assert cell.text.endswith("[0-1] saved\n")
    cell.check_failure("KeyboardInterrupt")


def test_an_error_in_answer_to_the_interrupt_is_shown(ready: Kernel) -> None:
    """What a rank raises instead of ending is told."""
    cell, _ = _interrupt(ready, _CATCHES.format("raise ValueError('while saving')"))

    assert cell.failure.evalue == "ranks 0-1 raised ValueError: while saving"


def test_an_interrupt_while_idle_costs_nothing(ready: Kernel) -> None:
    """With no cell running the ranks take no notice."""
    ready.interrupt()


def test_interrupting_a_local_cell_leaves_the_ranks_alone(ready: Kernel) -> None:
    """Ctrl-C in the kernel's own code is the kernel's alone, and works as ever."""
    cell, _ = _interrupt(ready, "import time; print('go'); time.sleep(60)")

    cell.check_failure("KeyboardInterrupt")


def test_an_interrupt_aborts_queued_cells(ready: Kernel) -> None:
    """Stopping a cell of Run All stops Run All."""
    first = ready.start(_BUSY["a sleep"])
    second = ready.start("%%distributed\nkept = 'overwritten'")
    ready.wait_output(first, "go")
    ready.interrupt()
    ready.finish(first, 30)
    queued = ready.finish(second)

    assert queued.status == "aborted"


def test_a_name_of_the_notebook_on_a_rank_is_explained(kernel: Kernel) -> None:
    """The commonest mistake: a variable of the notebook in a distributed cell."""
    kernel.run("of_the_notebook = [1, 2, 3]")
    cell = kernel.run("%%distributed\nsum(of_the_notebook)")

    assert "of_the_notebook exists in the notebook, not on the ranks" in cell.failure.evalue


def test_a_name_of_the_ranks_in_the_notebook_is_explained(kernel: Kernel) -> None:
    """The other way round: also of names that nbdist gave them."""
    kernel.run("%%distributed\nof_the_ranks = torch.ones(2)")
    cells = [kernel.run(code) for code in ("of_the_ranks.sum()", "rank", "nobody_has_this")]

    assert [cell.failure.ename for cell in cells] == ["NameError"] * 3
    assert cells[0].stderr == (
        "of_the_ranks is on ranks 0-1, not in the notebook: run the cell with %%distributed, or "
        "copy it with %dist_pull of_the_ranks\n"
    )
    assert "rank is on ranks 0-1" in cells[1].stderr
    assert cells[2].stderr == ""


def test_an_interrupted_sync_gives_the_ranks_back(kernel: Kernel) -> None:
    """%sync that waits for a rank in vain ends with an interrupt, and the next one works."""
    cell = kernel.run(
        "import os, signal, threading\nfrom nbdist.cluster.kernel import ranks\nimport nbdist\n"
        "waiting = ranks.barrier(nbdist.session().call, 0, 'alone', 60.0)\n"
        "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "get_ipython().run_line_magic('sync', '--timeout 50')",
        timeout_s=20,
    )
    again = kernel.run("%dist_sync")

    cell.check_failure("KeyboardInterrupt", "ranks 0-1 had not answered")
    assert again.status == "ok"
