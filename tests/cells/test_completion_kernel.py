"""Names of a rank that is idle, that runs a cell, or that cannot answer."""

import asyncio
import fcntl
from pathlib import Path

import pytest

from nbdist.cells.completion import Reply
from nbdist.cells.kernel import completion
from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.notebook.session import Session
from tests.support.ranks import until

MADE = """
import threading, torch, torch._dynamo
only_here, model = rank + 3, torch.nn.Linear(2, 3)
class Secret:
    @property
    def ran(self):
        raise SystemExit("a property was run")
secret = Secret()
"""
# Waits for a file's lock with the interpreter's own held: no other thread of the process runs.
HOLDS = "import ctypes; file = open({!r}); _ = ctypes.PyDLL(None).flock(file.fileno(), 2)"


@pytest.fixture
def session(pair: Session) -> Session:
    """Two ranks with some names."""
    pair.run(MADE)
    return pair


def completed(session: Session, code: str, rank: int = 0) -> list[str]:
    reply = asyncio.run(completion.complete(session, rank, code, len(code)))
    return list(reply["matches"])


def inspected(session: Session, code: str) -> Reply:
    return asyncio.run(completion.inspect(session, 0, code, len(code), 0))


def test_each_rank_has_its_own_names(session: Session) -> None:
    """The rank that is asked answers, with the keys of a dictionary as well."""
    session.run("mine_alone = 1", ranks="1")

    assert completed(session, "mine_al", rank=1) == ["mine_alone"]
    assert completed(session, "mine_al", rank=0) == []
    assert any("here" in text for text in completed(session, "{'here': 1}['"))


def test_a_busy_rank_is_looked_at(session: Session) -> None:
    """Names that the running cell has just made, attributes, no value; no property is run."""
    code = "begun = threading.Event(); go_on = threading.Event(); begun.set(); go_on.wait(60)"
    session.begin(CellRequest(code, (0,)))

    assert until(lambda: completed(session, "begu") == ["begun"])
    assert completed(session, "model.wei") == ["weight"]
    assert completed(session, "secret.ra") == ["ran"]
    assert completed(session, "secret.ran.re") == []
    shown = inspected(session, "model.weight")["data"]["text/plain"]

    assert shown.startswith("Type: Parameter\nShape: (3, 2)")
    assert shown.endswith("Rank 0 is busy: no value is shown.")
    assert not inspected(session, "nothing_such")["found"]
    session.interrupt(0)

    assert until(lambda: session.busy_ranks == ())


def test_a_rank_that_cannot_answer_had_its_names_before(session: Session, tmp_path: Path) -> None:
    """Its C code holds the interpreter: the names of the last time, of attributes none."""
    completed(session, "only_h")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        session.begin(CellRequest(HOLDS.format(lock.name), (0,)))

        assert until(lambda: completed(session, "model.wei") == [])  # it has begun
        assert completed(session, "only_h") == ["only_here"]
        assert inspected(session, "model")["data"]["text/plain"] == "Rank 0 is not answering."
    assert until(lambda: session.busy_ranks == (), 30.0)


def test_a_dead_rank_has_nothing_to_offer(pair: Session) -> None:
    """And asking it is no error: there is no place for one below the cursor."""
    pair.run("gone = 1")

    assert completed(pair, "gon") == ["gone"]
    pair.call(0, "os:_exit", 3)

    assert until(lambda: not pair.is_connected(0))
    assert completed(pair, "gon") == ["gone"]
    assert inspected(pair, "gone")["data"]["text/plain"] == "Rank 0 is not answering."
