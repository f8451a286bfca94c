"""Hints: what to do about errors whose reason is how ranks and notebook differ."""

import sys

import pytest

from nbdist.cells.hints import explain
from nbdist.cluster import host_memory
from nbdist.core.failures import RankFailure, summary
from nbdist.errors import StartError


def told(name: str, message: str) -> str:
    """The explained message of a failure."""
    return explain(RankFailure(1, name, message), {"data"}.__contains__).message


def test_a_missing_module_names_the_ranks_python() -> None:
    """The command that installs it is for the Python that the ranks run."""
    message = told("ModuleNotFoundError", "No module named 'nosuch'")

    assert message.startswith(f"No module named 'nosuch'. The ranks run {sys.executable}: ")
    assert f"{sys.executable} -m pip install NAME" in message


def test_a_name_of_the_notebook_is_explained() -> None:
    """A variable that the notebook has and the ranks have not is told as that."""
    message = told("NameError", "name 'data' is not defined")

    assert message.startswith("name 'data' is not defined. data exists in the notebook")
    assert message.endswith("or copy it with %dist_push data")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NameError", "name 'dta' is not defined"),
        ("NameError", "name 'data' is something else"),
        ("ValueError", "boom"),
        ("RuntimeError", "No module named 'data'"),
    ],
)
def test_other_errors_stay_as_they_are(name: str, message: str) -> None:
    """Nothing is added where nothing is known."""
    assert told(name, message) == message


def test_a_second_accelerator_with_other_settings_is_explained() -> None:
    """Accelerate's own text says to restart the runtime, which would not help."""
    message = told("ValueError", "AcceleratorState has already been initialized and cannot ...")

    assert "Run %dist_reset, then create yours before anything uses `accelerator`" in message


def test_a_mismatch_that_each_rank_tells_from_its_own_side_stands_once() -> None:
    """torch's message begins with the rank that tells it; explained, all ranks fail alike."""

    def call(rank: int) -> str:
        return (
            f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=0, "
            f"OpType=ALLGATHER, TensorShape=[{rank + 3}], TensorDtypes=Float"
        )

    failures = []
    for rank, other in [(1, 0), (0, 1)]:
        message = f"Detected mismatch between collectives on ranks. {call(rank)}, but {call(other)}"
        lines = ("Cell In[1], line 1", f"\x1b[31mRuntimeError\x1b[39m: {message}")
        failures.append(
            explain(RankFailure(rank, "RuntimeError", message, lines), {"data"}.__contains__)
        )

    assert summary(failures) == (
        "ranks 0-1 raised RuntimeError: the calls of the ranks do not match: rank 0 is in "
        "all_gather(float32[3]), rank 1 is in all_gather(float32[4]) (numbers are those within the "
        "group)"
    )


def test_more_ranks_than_memory_are_refused() -> None:
    """200 ranks at 0.25 GB need 50 GB; 20 GB hold 80."""
    with pytest.raises(StartError, match=r"200 ranks need about 50\.0 GB .*Use -n 80 or fewer"):
        host_memory.check(20_000_000_000, 200)
    host_memory.check(20_000_000_000, 80)
