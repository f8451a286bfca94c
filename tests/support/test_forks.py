"""Forks that stand for new processes: what is their own, and how their end is known."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forks import ForkServer
from tests.support.processes import processes_of_run, wait_gone
from tests.support.torch_ranks import run_ranks

ENV = {"PATH": os.defpath, "NBDIST_RUN": f"of-forks-{os.getpid()}"}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ForkServer]]:
    """Two, with a module that is imported once."""
    both = [ForkServer(("textwrap",), ENV) for _ in range(2)]
    yield both
    for process in both:
        process.stop()

    assert wait_gone(processes_of_run(ENV["NBDIST_RUN"])) == []


def test_a_fork_has_its_own_environment_main_module_and_streams(
    servers: list[ForkServer], tmp_path: Path
) -> None:
    """The import is there; what one fork does is not in the next one."""
    text = (
        "import os, sys, pickle\nclass Here: pass\n"
        "assert type(pickle.loads(pickle.dumps(Here()))) is Here\n"
        "print('textwrap' in sys.modules, __name__, sys.argv, sys.path[0] == '', os.environ['ONE'],"
        " 'NBDIST_RUN' in os.environ, sys.stdin.read() == '', 'json.tool' in sys.modules,"
        " flush=True)\n"
        "import json.tool\nos.environ['TWO'] = '2'\nprint('err', file=sys.stderr)"
    )
    for number in ("1", "2"):
        fork = servers[0].fork(text, {"ONE": number}, tmp_path / "log")

        assert fork.wait(20) == 0
    assert (tmp_path / "log").read_text().splitlines() == [
        "True __main__ ['-c'] True 1 False True False",
        "err",
        "True __main__ ['-c'] True 2 False True False",
        "err",
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("1/0", 1),
        ("import os; os._exit(5)", 5),
        ("import os; os.kill(os.getpid(), 11)", -11),
    ],
)
def test_an_end_is_told_as_of_a_process(
    servers: list[ForkServer], tmp_path: Path, text: str, code: int
) -> None:
    """Exit codes, and signals as negative numbers."""
    assert servers[0].fork(text, ENV, tmp_path / "log").wait(20) == code


def test_strings_hash_differently_in_forks_of_two_servers(
    servers: list[ForkServer], tmp_path: Path
) -> None:
    """So code that takes a set's order for equal on all ranks is found out."""
    for server in servers:
        server.fork("print(hash('a word'))", ENV, tmp_path / "log").wait(20)

    assert len(set((tmp_path / "log").read_text().split())) == 2


def counts_forks(n_forks: int) -> None:
    assert Path(f"/proc/{os.getppid()}/cmdline").read_bytes().count(b"/forks.py") == n_forks


@pytest.mark.parametrize(
    ("variables", "n_forks"),
    [({}, 1), pytest.param({"TORCH_SHOW_CPP_STACKTRACES": "0"}, 0, marks=pytest.mark.faults)],
)
def test_ranks_are_forks_unless_a_variable_of_torchs_is_given(
    tmp_path: Path, variables: dict[str, str], n_forks: int
) -> None:
    """It may be read by the import."""
    run_ranks(tmp_path, 1, counts_forks, arguments={"n_forks": n_forks}, **variables)
