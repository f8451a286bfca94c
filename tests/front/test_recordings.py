"""What %%dist_profile and %%dist_memory have in common, typed in real kernels with two ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.front import test_memory as memory_cells
from tests.front import test_trace as trace_cells
from tests.support.kernel import Kernel
from tests.support.recordings import ran

pytestmark = [pytest.mark.cluster, pytest.mark.engine]


@dataclass(frozen=True, slots=True)
class Subject:
    """One of the two.

    Attributes:
        magic: Of a cell that is recorded.
        step: A call of a step, which `train` defines.
        train: A cell.
        ranks: Of the last record: rank, steps, whether there is anything, problem.
        word: In what is shown of a record.
    """

    magic: str
    step: str
    train: str
    ranks: Callable[[Kernel], object]
    word: str


TRACE = Subject("%%dist_profile", "step()", trace_cells.TRAIN, trace_cells.ranks, "compute")
MEMORY = Subject(
    "%%dist_memory", "mem_step()", memory_cells.TRAIN, memory_cells.ranks, "parameters"
)
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
    own = (("--most-events 0", "not a valid number of events"),) if subject is MEMORY else ()
    for line, told in (*WRONG, *own):
        cell = kernel.run(f"{subject.magic} {line}\nprint('ran')")

        assert cell.error is not None
        assert cell.error.ename == "OptionError"
        assert told in cell.error.evalue
        assert "ran" not in cell.text


def test_a_cell_that_fails_keeps_what_was_recorded(kernel: Kernel, subject: Subject) -> None:
    """Its error is the cell's, and the next record is whole."""
    code = f"for n in range(2): {subject.step}\nif rank: raise ValueError('mine')"
    cell = kernel.run(f"{subject.magic}\n{code}")

    assert cell.error is not None
    assert cell.error.ename == "DistributedError"
    assert "mine" in cell.error.evalue
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

    assert cell.error is not None
    assert cell.error.ename == "KeyboardInterrupt"
    assert subject.ranks(kernel) == [(0, 2, True, ""), (1, 2, True, "")]
    ran(kernel, f"{subject.magic}\n{subject.step}")
    assert subject.ranks(kernel) == [(0, 1, True, ""), (1, 1, True, "")]
