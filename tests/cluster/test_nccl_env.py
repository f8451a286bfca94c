"""NCCL's environment: what ranks get, and what of the user's takes protection away."""

import pytest

from nbdist.cluster import nccl_env


def test_every_variable_that_is_needed_is_given() -> None:
    """Without anything set a rank gets what keeps its process alive through an abort."""
    assert nccl_env.environment({}) == {
        "TORCH_DIST_USE_NCCL2": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }


def test_every_row_has_a_reason() -> None:
    """No variable is set without a reason that a person can read."""
    assert all(len(row.reason) > 30 for row in nccl_env.ENVIRONMENT)
    assert len({row.name for row in nccl_env.ENVIRONMENT}) == len(nccl_env.ENVIRONMENT)


def test_ranks_take_the_backend_that_was_tried_unless_the_user_chose() -> None:
    """torch 2.15 has two, reads the choice when it is imported, and knows "0" alone."""
    assert nccl_env.at_import({}) == {"TORCH_DIST_USE_NCCL2": "0"}
    assert nccl_env.at_import({"TORCH_DIST_USE_NCCL2": "1"}) == {}
    assert nccl_env.backend_note("2.14.1+cu130", {}) == ""
    assert "TORCH_DIST_USE_NCCL2=1 in" in nccl_env.backend_note("2.15.0", {})
    assert nccl_env.backend_note("2.16.0.dev20261120", {"TORCH_DIST_USE_NCCL2": "1"}) == ""


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
def test_the_users_value_wins(name: str) -> None:
    """A variable that is set is not given, under its older name either; the others are."""
    variables = nccl_env.environment({name: "3"})

    assert not any("ASYNC_ERROR_HANDLING" in name for name in variables)
    assert variables["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_what_is_given_conflicts_with_nothing() -> None:
    """Neither nothing nor our own variables are complained about."""
    assert nccl_env.conflicts({}) == ()
    assert nccl_env.conflicts(nccl_env.environment({})) == ()


def test_a_value_that_breaks_abort_is_told() -> None:
    """Name, value, what it does and what to do about it are in one sentence each."""
    (sentence,) = nccl_env.conflicts({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "PATH": "/bin"})

    assert sentence.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING=3 was kept.")
    assert "cannot be aborted safely: torch ends the process" in sentence
    assert sentence.endswith("Set it to 0, or remove it.")


@pytest.mark.parametrize(
    ("name", "value", "is_told"),
    [
        ("TORCH_DIST_USE_NCCL2", "1", True),
        ("TORCH_DIST_USE_NCCL2", "false", True),
        ("TORCH_DIST_USE_NCCL2", "0", False),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", True),
        ("NCCL_BLOCKING_WAIT", "1", True),
        ("TORCH_NCCL_BLOCKING_WAIT", "false", False),
        ("TORCH_NCCL_ENABLE_MONITORING", "True", True),
        ("TORCH_NCCL_ENABLE_MONITORING", "no", False),
        ("TORCH_NCCL_DESYNC_DEBUG", "1", True),
        ("TORCH_FR_BUFFER_SIZE", "0", True),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "100", False),
        ("NCCL_DEBUG", "INFO", False),
    ],
)
def test_which_values_are_told(name: str, value: str, is_told: bool) -> None:
    """Older names count, torch's ways to say no are understood, and any size of a buffer will do.

    A flight recorder without room is told, but breaks no abort.
    """
    sentences = nccl_env.conflicts({name: value})

    assert bool(sentences) == is_told
    assert all(name in sentence for sentence in sentences)
    assert all(
        ("aborted" in s) == ("BUFFER" not in name) for s in sentences if "DESYNC" not in name
    )
