"""A failure on a rank is a failure in the notebook; an interrupt gives everything back."""

import signal
import time

import psutil
import pytest

from tests.support.kernel import Handle, Kernel

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
    "a shell command": "%%distributed\nprint('go')\n!sleep 60",
    "inside another magic": "%%time\n%%distributed\nprint('go')\ntime.sleep(60)",
    "a call from Python": "import nbdist\nnbdist.session().run('print(\"go\"); time.sleep(60)')",
}


@pytest.fixture
def ready(kernel: Kernel) -> Kernel:
    """The shared kernel, what the cells here import at hand."""
    assert kernel.run(_GO).status == "ok"
    return kernel


def _interrupt(kernel: Kernel, handle: Handle) -> float:
    """Interrupt a cell that has begun; how long the kernel took to give the notebook back."""
    kernel.wait_output(handle, "go")
    pressed_s = time.monotonic()
    kernel.interrupt()
    kernel.finish(handle, 30)
    return time.monotonic() - pressed_s


# --- exceptions -----------------------------------------------------------------------------------


def test_an_error_on_one_rank_fails_the_cell(ready: Kernel) -> None:
    """Reply and error output are real, the rank is named, and the others' output is kept."""
    cell = ready.run("%%distributed\nprint('before', rank)\nif rank == 1: raise ValueError('boom')")

    assert cell.status == "error"
    assert cell.error is not None
    assert cell.error.ename == "DistributedError"
    assert cell.error.evalue == "rank 1 raised ValueError: boom"
    assert cell.error.traceback.startswith("rank 1 raised ValueError:\n")
    assert "raise ValueError('boom')" in cell.error.traceback
    assert "/nbdist/" not in cell.error.traceback
    assert cell.text == "[0] before 0\n[1] before 1\n"


def test_tracebacks_through_torch_do_not_show_nbdist(ready: Kernel) -> None:
    """Every collective goes through nbdist's recorder, whose frames no traceback has, nor %tb's."""
    cell = ready.run(
        "%%distributed\ntry:\n    dist.broadcast('no tensor', src=0)\n"
        "except TypeError as error:\n    raise KeyError('lost') from error"
    )
    again = ready.run("%%distributed\n%tb")
    inside = ready.run("%%distributed\ndist.all_reduce(torch.ones(1), async_op=True).wait('long')")

    assert cell.error is not None
    assert "in broadcast(" in cell.error.traceback
    assert "KeyError: 'lost'" in cell.error.traceback
    assert inside.error is not None
    assert "TypeError: wait()" in inside.error.traceback  # raised by C++ below nbdist's frame
    assert "recorder.py" not in cell.error.traceback + again.text + inside.error.traceback


def test_an_equal_error_is_shown_once(ready: Kernel) -> None:
    """All ranks fail alike: one traceback, all ranks named."""
    cell = ready.run("%%distributed\nobject().nope")

    assert cell.error is not None
    assert cell.error.evalue.startswith("ranks 0-1 raised AttributeError: ")
    assert cell.error.traceback.count("Traceback (most recent call last)") == 1


def test_different_errors_are_all_shown_root_cause_first(ready: Kernel) -> None:
    """Each distinct traceback comes once, the first to fail at the top."""
    cell = ready.run(
        "%%distributed\nif rank == 0:\n    time.sleep(0.5)\n    raise KeyError('second')\n"
        "raise ValueError('first')"
    )

    assert cell.error is not None
    assert cell.error.evalue == (
        "rank 1 raised ValueError: first; rank 0 raised KeyError: 'second'"
    )
    told = cell.error.traceback
    assert told.index("ValueError: first") < told.index("KeyError: 'second'")
    assert cell.error.traceback.count("Traceback (most recent call last)") == 2


def test_a_rank_whose_peer_failed_is_no_root_cause(mortal: Kernel) -> None:
    """The end of a rank comes before the connection error that it leaves to the others."""
    cell = mortal.run(
        "%%distributed\nimport os\nif rank: os._exit(3)\ndist.all_reduce(torch.ones(1))", 30
    )

    assert cell.error is not None
    assert cell.error.evalue.startswith("rank 1 ended (exit code 3: ")


def test_chained_and_grouped_exceptions_are_shown_whole(ready: Kernel) -> None:
    """Causes and the parts of an ExceptionGroup are in the traceback."""
    chained = ready.run(
        "%%distributed\ntry: 1 / 0\nexcept ZeroDivisionError as e: raise RuntimeError('x') from e"
    )
    group = ready.run("%%distributed\nraise ExceptionGroup('g', [ValueError('a'), KeyError('b')])")

    assert chained.error is not None
    assert "ZeroDivisionError" in chained.error.traceback
    assert "direct cause" in chained.error.traceback
    assert "KeyError: 'b'" in group.visible


def test_an_exception_that_cannot_be_printed_still_fails(ready: Kernel) -> None:
    """A broken __str__ costs the message, not the failure."""
    cell = ready.run(
        "%%distributed\nclass Broken(Exception):\n    def __str__(self): return 1 / 0\n"
        "raise Broken()"
    )
    after = ready.run("%%distributed\nkept")

    assert cell.status == "error"
    assert cell.error is not None
    assert "Broken" in cell.error.traceback
    assert after.text == "[0] 0\n[1] 1\n"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("sys.exit(3)", "raised SystemExit: 3"),
        ("raise SystemExit", "raised SystemExit"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("raise asyncio.CancelledError", "raised CancelledError"),
        ("raise GeneratorExit", "raised GeneratorExit"),
        ("await asyncio.wait_for(asyncio.sleep(9), 0.01)", "raised TimeoutError"),
        ("%nosuchmagic", "`%nosuchmagic` not found"),
        ("%%nosuchmagic\n1", "`%%nosuchmagic` not found"),
        ("%%bash\nexit 3", "raised CalledProcessError"),
    ],
)
def test_endings_of_every_kind_fail_the_cell(ready: Kernel, code: str, told: str) -> None:
    """Whatever is raised, the cell fails with an ordinary exception and the ranks go on."""
    cell = ready.run(f"%%distributed\n{code}", 30)
    after = ready.run("%%distributed\nkept")

    assert cell.status == "error"
    assert cell.error is not None
    assert cell.error.ename == "DistributedError"
    assert f"ranks 0-1 {told}" in cell.error.evalue or told in cell.error.evalue
    assert after.text == "[0] 0\n[1] 1\n"


def test_an_error_that_ipython_shows_and_passes_over_fails_the_cell(ready: Kernel) -> None:
    """%run shows its script's error and replies ok; that is no success here."""
    ready.run("open('failing_script.py', 'w').write('1 / 0')")
    cell = ready.run("%%distributed\n%run failing_script.py")

    assert cell.status == "error"
    assert cell.error is not None
    assert cell.error.evalue.startswith("ranks 0-1 raised ZeroDivisionError")
    assert "failing_script.py" in cell.error.traceback


def test_the_traceback_can_be_seen_again(ready: Kernel) -> None:
    """%tb on the ranks shows the last error, as the refusal of pdb says."""
    ready.run("%%distributed\n{}['key']")
    cell = ready.run("%%distributed\n%tb")

    assert "KeyError: 'key'" in cell.visible


def test_a_missing_module_says_where_to_install_it(ready: Kernel) -> None:
    """The message names the ranks' Python and the way that its sys.path may differ."""
    cell = ready.run("%%distributed\nimport no_such_module")

    assert cell.error is not None
    assert "No module named 'no_such_module'" in cell.error.evalue
    assert "-m pip install" in cell.error.evalue
    assert "%dist_reset" in cell.error.evalue


def test_nothing_of_ours_is_a_usage_error(kernel: Kernel) -> None:
    """nbval and Run All pass over IPython's UsageError; no error of ours derives from it."""
    cell = kernel.run(
        "from IPython.core.error import UsageError\nimport nbdist.errors\n"
        "ours = [e for e in vars(nbdist.errors).values() if isinstance(e, type)]\n"
        "len(ours) > 5, any(issubclass(e, UsageError) for e in ours)"
    )

    assert cell.plain == ["(True, False)"]


def test_the_exception_can_be_caught_and_read(kernel: Kernel) -> None:
    """session.run() raises it with the ranks, and a plain `except Exception` takes it."""
    cell = kernel.run(
        "import nbdist\ntry:\n    nbdist.session().run('1 / 0', ranks='1')\n"
        "except Exception as error:\n    print(type(error).__name__, error.ranks, error)"
    )

    assert cell.text == (
        "DistributedError (1,) rank 1 raised ZeroDivisionError: division by zero\n"
    )


def test_a_rank_that_is_killed_fails_the_cell_and_the_next_ones_name_it(mortal: Kernel) -> None:
    """A rank's end mid-cell is told with its signal; the others keep their variables."""
    kernel = mortal
    kernel.run(_GO)
    handle = kernel.start("%%rank[1]\nprint('go', os.getpid(), flush=True)\ntime.sleep(60)")
    pid = int(kernel.wait_output(handle, "go").text.split()[2])
    psutil.Process(pid).send_signal(signal.SIGKILL)
    cell = kernel.finish(handle, 10)
    following = [kernel.run(code) for code in ("%%distributed\nkept", "%%rank[1]\nkept", "%sync")]
    other = kernel.run("%%rank[0]\nkept")
    status = kernel.run("%dist_status")

    assert cell.error is not None
    assert cell.error.ename == "DistributedError"
    assert "rank 1 ended (signal SIGKILL: sent by somebody else)" in cell.error.evalue
    assert [c.error and c.error.ename for c in following] == ["RankGone"] * 3
    assert all(c.error and "signal SIGKILL" in c.error.evalue for c in following)
    assert following[0].error is not None
    assert "%dist_reset" in following[0].error.evalue
    assert other.text == "[0] 0\n"
    assert "ended (signal SIGKILL: sent by somebody else)" in status.plain[0]


# --- interrupts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _BUSY)
def test_an_interrupt_gives_notebook_and_ranks_back(ready: Kernel, name: str) -> None:
    """Within 2 s the cell ends with KeyboardInterrupt; variables are kept, the ranks usable."""
    handle = ready.start(_BUSY[name])
    back_s = _interrupt(ready, handle)
    cell = ready.so_far(handle)
    after = ready.run("%%distributed\nkept")

    assert back_s < _BACK_S
    assert cell.status == "error"
    assert cell.error is not None
    assert cell.error.ename == "KeyboardInterrupt"
    assert "back, variables kept" in cell.error.evalue
    assert after.text == "[0] 0\n[1] 1\n"


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
    after = ready.run("%%distributed\nkept")

    assert cell.error is not None
    assert cell.error.evalue == "ranks 0-1 are back, variables kept"
    assert after.text == "[0] 0\n[1] 1\n"


def test_an_interrupt_before_the_cell_has_begun_is_not_lost(ready: Kernel) -> None:
    """A rank that is still busy with something else is interrupted as soon as its cell begins."""
    ready.run("%%rank[1]\nasyncio.get_running_loop().call_later(0.1, time.sleep, 1.5)")
    ready.run("%%rank[0]\ntime.sleep(0.3)")
    handle = ready.start("%%distributed\nprint('go')\ntime.sleep(60)")
    ready.wait_output(handle, "go")
    ready.interrupt()
    cell = ready.finish(handle, 30)
    after = ready.run("%%distributed\nkept")

    assert cell.error is not None
    assert cell.error.evalue == "ranks 0-1 are back, variables kept"
    assert after.text == "[0] 0\n[1] 1\n"


def test_code_that_catches_the_interrupt_goes_on(ready: Kernel) -> None:
    """A rank may save something on KeyboardInterrupt; what it prints is shown."""
    handle = ready.start(
        "%%distributed\nprint('go')\ntry:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('saved')"
    )
    _interrupt(ready, handle)
    cell = ready.so_far(handle)

    assert cell.text.endswith("[0-1] saved\n")
    assert cell.error is not None
    assert cell.error.ename == "KeyboardInterrupt"


def test_an_error_in_answer_to_the_interrupt_is_shown(ready: Kernel) -> None:
    """What a rank raises instead of ending is told."""
    handle = ready.start(
        "%%distributed\nprint('go')\ntry:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    raise ValueError('while saving')"
    )
    _interrupt(ready, handle)
    cell = ready.so_far(handle)

    assert cell.error is not None
    assert cell.error.evalue == "ranks 0-1 raised ValueError: while saving"


def test_an_interrupt_while_idle_costs_nothing(ready: Kernel) -> None:
    """With no cell running the ranks take no notice."""
    ready.interrupt()
    after = ready.run("%%distributed\nkept")

    assert after.text == "[0] 0\n[1] 1\n"


def test_interrupting_a_local_cell_leaves_the_ranks_alone(ready: Kernel) -> None:
    """Ctrl-C in the kernel's own code is the kernel's alone, and works as ever."""
    handle = ready.start("import time; print('go'); time.sleep(60)")
    _interrupt(ready, handle)
    cell = ready.so_far(handle)
    after = ready.run("%%distributed\nkept")

    assert cell.error is not None
    assert cell.error.ename == "KeyboardInterrupt"
    assert after.text == "[0] 0\n[1] 1\n"


def test_an_interrupt_aborts_queued_cells(ready: Kernel) -> None:
    """Stopping a cell of Run All stops Run All."""
    first = ready.start(_BUSY["a sleep"])
    second = ready.start("%%distributed\nkept = 'overwritten'")
    _interrupt(ready, first)
    queued = ready.finish(second)
    after = ready.run("%%distributed\nkept")

    assert queued.status == "aborted"
    assert after.text == "[0] 0\n[1] 1\n"


def test_a_rank_that_fails_is_told_while_the_others_run(kernel: Kernel) -> None:
    """Its error is on the page after a second, not only when the last rank has ended."""
    handle = kernel.start("%%distributed\nimport time\nif rank == 1:\n    1 / 0\ntime.sleep(60)")
    told = kernel.wait_output(handle, "still running", 20)
    kernel.interrupt()
    cell = kernel.finish(handle, 20)

    assert told.status == "running"
    assert "rank 1 raised ZeroDivisionError: division by zero; rank 0 still running" in told.stderr
    assert cell.error is not None
    assert cell.error.ename == "DistributedError"


def test_a_name_of_the_notebook_on_a_rank_is_explained(kernel: Kernel) -> None:
    """The commonest mistake: a variable of the notebook in a distributed cell."""
    kernel.run("of_the_notebook = [1, 2, 3]")
    cell = kernel.run("%%distributed\nsum(of_the_notebook)")

    assert cell.error is not None
    assert "of_the_notebook exists in the notebook, not on the ranks" in cell.error.evalue


def test_an_interrupted_sync_gives_the_ranks_back(kernel: Kernel) -> None:
    """%sync that waits for a rank in vain ends with an interrupt, and the next one works."""
    cell = kernel.run(
        "import os, signal, threading\nfrom nbdist.cluster.kernel import ranks\nimport nbdist\n"
        "waiting = ranks.barrier(nbdist.session().call, 0, 'alone', 60.0)\n"
        "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "get_ipython().run_line_magic('sync', '--timeout 50')",
        timeout_s=20,
    )
    again = kernel.run("%sync")

    assert cell.error is not None
    assert cell.error.ename == "KeyboardInterrupt"
    assert "ranks 0-1 had not answered" in cell.error.evalue
    assert again.status == "ok"


def test_in_plain_python_the_error_carries_the_ranks_traceback(kernel: Kernel) -> None:
    """Where IPython does not draw it, the line on the rank is in the exception's notes."""
    cell = kernel.run(
        "import traceback\ntry:\n    nbdist.session().run('1 / 0')\n"
        "except Exception as error:\n    print(''.join(traceback.format_exception(error)))"
    )

    assert "ZeroDivisionError" in cell.text
    assert "line 1" in cell.text
    assert "1 / 0" in cell.text
