"""A GPU's memory that runs out: what held it is told below the error, and it is usable again.

Written without a GPU at hand. Like the code that they test they are not verified on one.
"""

import re
from collections.abc import Iterator

import pytest

from nbdist.errors import DistributedError
from nbdist.notebook.session import Session
from tests.support.ranks import started

pytestmark = [pytest.mark.gpu(1), pytest.mark.cluster]

FAILS = """
def train():
    hidden = [torch.ones(2**28, device=device)]  # 1 GiB each
    while True:
        hidden.append(hidden[-1] * 2)
train()
"""


@pytest.fixture
def session() -> Iterator[Session]:
    """One rank on a GPU."""
    with started(1, gpus="0") as session:
        yield session


def test_out_of_memory_is_explained(session: Session) -> None:
    """The allocator's numbers, the frame's list by name, remedies; afterwards all of it is free."""
    with pytest.raises(DistributedError, match="out of memory") as caught:
        session.run(FAILS)
    lines = caught.value.advice.splitlines()

    assert re.match(r"rank 0 ran out of memory of its GPU 0: 1\.1 GB requested", lines[0])
    assert any("hidden in train" in line for line in lines)
    assert any(line.startswith("  half the batch") for line in lines)
    (memory,) = session.memory().ranks
    held = int(memory.blocks.size_bytes.sum())
    assert held > 0.8 * memory.limit_bytes - 2 * 2**30
    assert memory.device == "cuda"
    done = session.run(
        "import sys, gc; sys.last_value = sys.last_traceback = None; gc.collect()\n"
        "torch.cuda.empty_cache(); print(torch.cuda.memory_allocated() < 2**30)"
    )
    assert done[0].text.strip() == "True"
