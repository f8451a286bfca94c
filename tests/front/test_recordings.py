"""What %%dist_profile and %%dist_memory have in common, typed in real kernels with two ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.front import test_memory as memory_cells
from tests.front import test_trace as trace_cells
from tests.support.kernel import Kernel
from tests.support.recordings import ran


@dataclass(frozen=True, slots=True)
class Subject:
    """One of the two.

    Attributes:
        magic, shows: Of a cell that is recorded, and of the last record.
        step: A call of a step, which `train` defines.
        train: A cell.
        ranks: Of the last record: rank, steps, whether there is anything, problem.
        word: In what is shown of a record.
    """

    magic: str
    shows: str
    step: str
    train: str
    ranks: Callable[[Kernel], object]
    word: str


TRACE = Subject(
    "%%dist_profile", "%dist_trace", "step()", trace_cells.TRAIN, trace_cells.ranks, "compute"
)
MEMORY = Subject(
    "%%dist_memory", "%dist_memory", "mem_step()", memory_cells.TRAIN, memory_cells.ranks,
    "parameters",
)  # fmt: skip
WRONG = (
    ("--steps 0", "not a valid number of steps"), ("--ranks 7", "7"), ("--what", "unrecognized"),
)  # fmt: skip


@pytest.fixture(scope="module", params=[TRACE, MEMORY], ids=["trace", "memory"])
def subject(_shared_kernel: Kernel, request: pytest.FixtureRequest) -> Subject:
    """The shared kernel's ranks have something to train."""
    recorded: Subject = request.param
    for code in ("import nbdist", f"%%distributed\n{recorded.train}"):
        cell = _shared_kernel.run(code)
        assert cell.status == "ok", cell.visible
    return recorded


def test_wrong_options_record_nothing(kernel: Kernel, subject: Subject) -> None:
    """They are refused before anything runs."""
    wrong_here = (("--most-events 0", "not a valid number of events"),) if subject is MEMORY else ()
    for line, message in (*WRONG, *wrong_here):
        cell = kernel.run(f"{subject.magic} {line}\nprint('ran')")

        cell.check_failure("OptionError", message)
        assert "ran" not in cell.text


def test_so_many_steps_are_recorded_and_the_cell_goes_on(kernel: Kernel, subject: Subject) -> None:
    """Below the cell's output stands what was recorded; the last record is shown again."""
    code = f"for n in range(5): {subject.step}; print('made', n)"
    cell = ran(kernel, f"{subject.magic} --steps 2\n{code}")

    assert cell.visible.index("made 4") < cell.visible.index(subject.word)
    assert subject.ranks(kernel) == [(0, 2, True, ""), (1, 2, True, "")]
    assert ran(kernel, subject.shows).plain == cell.plain
    ran(kernel, f"%%time\n{subject.magic}\n{subject.step}")
    assert subject.ranks(kernel) == [(0, 1, True, ""), (1, 1, True, "")]


def test_a_cell_that_fails_keeps_what_was_recorded(kernel: Kernel, subject: Subject) -> None:
    """Its error is the cell's, and the next record is whole."""
    code = f"for n in range(2): {subject.step}\nif rank: raise ValueError('mine')"
    cell = kernel.run(f"{subject.magic}\n{code}")

    cell.check_failure("DistributedError", "mine")
    assert subject.word in cell.visible
    assert subject.ranks(kernel) == [(0, 2, True, ""), (1, 2, True, "")]
    ran(kernel, f"{subject.magic} --steps 1\nfor n in range(2): {subject.step}")
    assert subject.ranks(kernel) == [(0, 1, True, ""), (1, 1, True, "")]


def test_an_interrupt_keeps_what_was_recorded(kernel: Kernel, subject: Subject) -> None:
    """It ends the cell as ever, also a rank that waits in a collective, and the groups recover."""
    code = f"""
import time
for n in range(2): {subject.step}
print('waiting')
dist.all_reduce(torch.ones(2)) if rank else time.sleep(60)
"""
    handle = kernel.start(f"{subject.magic}\n{code}")
    kernel.wait_output(handle, "waiting")
    kernel.interrupt()
    cell = kernel.finish(handle)

    cell.check_failure("KeyboardInterrupt")
    assert subject.ranks(kernel) == [(0, 2, True, ""), (1, 2, True, "")]
    ran(kernel, f"{subject.magic}\n{subject.step}")
    assert subject.ranks(kernel) == [(0, 1, True, ""), (1, 1, True, "")]
