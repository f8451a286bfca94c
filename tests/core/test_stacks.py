"""Stacks as a person reads them: the cell's lines, without what lies under and between."""

from nbdist.core import stacks
from nbdist.core.stacks import Frame, ThreadStack

CELL = "/tmp/ipykernel/123.py"
CELLS = {CELL: 12}
SITE = "/env/lib/python3.11/site-packages"
SHELL = [
    Frame("<frozen runpy>", 198, "_run_module_as_main"),
    Frame(f"{SITE}/ipyparallel/engine/app.py", 900, "main"),
    Frame("/env/lib/python3.11/asyncio/base_events.py", 600, "run_forever"),
    Frame(f"{SITE}/IPython/core/interactiveshell.py", 3300, "run_cell"),
    Frame(f"{SITE}/IPython/core/interactiveshell.py", 3500, "run_code"),
]
USER = [
    Frame(CELL, 3, "<module>", "step()"),
    Frame(CELL, 1, "step"),
    Frame("/work/nbdist/hang/rank/call_log.py", 40, "call"),
    Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
]

# As Python 3.11 writes it; the second report is that of the process itself.
DUMP = f"""Fatal Python error: Segmentation fault

Current thread 0x00007f0000000001 (most recent call first):
  File "/elsewhere/worker.py", line 1 in child

Fatal Python error: Aborted

Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000003 (most recent call first):
  File "{CELL}", line 1 in step
  File "{CELL}", line 3 in <module>
  File "{SITE}/IPython/core/interactiveshell.py", line 3500 in run_code

Extension modules: numpy, torch (total: 2)
"""


def test_a_stack_begins_at_the_cell_and_leaves_our_wrappers_out() -> None:
    """What runs the cell is cut off, and nbdist's frames between the user and torch are."""
    shown = stacks.user_part([*SHELL, *USER])

    assert [frame.function for frame in shown] == ["<module>", "step", "all_reduce"]


def test_a_cell_run_inside_a_cell_keeps_the_outer_one() -> None:
    """The cut is at the first shell: `get_ipython().run_cell` in a cell hides nothing."""
    shown = stacks.user_part([*SHELL, *USER[:1], *SHELL[3:], *USER[1:2]])

    assert [frame.line for frame in shown if frame.file == CELL] == [3, 1]


def test_an_idle_engine_has_no_stack() -> None:
    """Waiting for the next cell is nothing; a call by name in the main thread is something."""
    idle = [*SHELL[:3], Frame("/env/lib/python3.11/selectors.py", 468, "select")]
    call = [*SHELL[:3], Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 1, "barrier")]

    waiting = [
        Frame("/env/lib/python3.11/threading.py", 1002, "_bootstrap"),
        Frame("/work/train.py", 5, "load"),
        Frame("/env/lib/python3.11/threading.py", 331, "wait"),
    ]

    assert stacks.user_part(idle) == ()
    assert [frame.function for frame in stacks.user_part(waiting)] == ["load", "wait"]
    assert [frame.function for frame in stacks.user_part(call)] == ["barrier"]


def test_a_line_names_cell_or_file() -> None:
    """A cell by its number, a library from its package on, another file by its base name."""
    texts = [
        stacks.frame_text(frame, CELLS)
        for frame in (*USER[:2], USER[3], Frame("/work/project/train.py", 0, "<module>"))
    ]

    assert texts == [
        "cell [12], line 3: step()",
        "cell [12], line 1, in step",
        "torch/distributed/distributed_c10d.py, line 3252, in all_reduce",
        "train.py, an unknown line",
    ]


def test_threads_that_do_nothing_are_left_out_and_the_cell_comes_first() -> None:
    """The engine's own threads are not the user's business."""
    threads = [
        ThreadStack("IOPub", False, tuple(SHELL[1:3])),
        ThreadStack("worker", False, (Frame("/work/train.py", 5, "load"),)),
        ThreadStack("MainThread", False, (*SHELL, *USER[:1])),
    ]

    assert stacks.stacks_text(threads, CELLS) == (
        "MainThread:\n  cell [12], line 3: step()\nworker:\n  train.py, line 5, in load"
    )


def test_a_dump_is_read_innermost_last_and_only_its_last_report() -> None:
    """faulthandler writes the innermost first, and children write into the same file."""
    waiting, main = stacks.parse_dump(DUMP)

    assert (waiting.is_current, main.is_current) == (False, True)
    assert [(frame.line, frame.function) for frame in main.frames] == [
        (3500, "run_code"),
        (3, "<module>"),
        (1, "step"),
    ]
    assert stacks.stacks_text((waiting, main), CELLS) == (
        "MainThread:\n  cell [12], line 3\n  cell [12], line 1, in step"
    )


def test_a_dump_without_python_frames_is_read() -> None:
    """Text of another kind, or of none, gives no threads."""
    text = "Thread 0x01 [gloo] (most recent call first):\n  <no Python frame>\n"

    assert stacks.parse_dump("") == ()
    assert [thread.frames for thread in stacks.parse_dump(text)] == [()]


def test_cells_are_read_as_they_were_noted() -> None:
    """The newest number counts; a line that was cut off by the end of the process does not."""
    text = "1 /tmp/a b.py\n2 /tmp/c.py\n7 /tmp/a b.py\n8 /tmp/c."

    assert stacks.parse_cells(text) == {"/tmp/a b.py": 7, "/tmp/c.py": 2}
    assert stacks.parse_cells("") == {}
