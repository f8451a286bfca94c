"""A notebook in nbdistributed's spelling runs with its first two lines changed."""

import re
from pathlib import Path

import pytest

from tests.front.conftest import START_TIMEOUT_S
from tests.support.kernel import Kernel

_DOCS = Path(__file__).resolve().parents[2] / "docs" / "coming_from_nbdistributed.md"
# As typed there -> the line here. The machines of these tests have no GPU 0 and 1.
_CHANGED = {
    "%load_ext nbdistributed": "%load_ext nbdist",
    "%dist_init --num-processes 2 --gpu-ids 0,1 --master-addr localhost": (
        "%dist_init --num-processes 2 --gpu-ids none --master-addr localhost --auto"
    ),
}
_BOTH = "[0] {}\n[1] {}\n"
_TRAIN = """
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(20):
    loss = (model(torch.ones(4, 2)) - 1).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print(f"below 0.01: {loss.item() < 0.01}")
"""
# (cell, what it shows: a regular expression for all of it)
_CELLS = [
    ("%load_ext nbdistributed", "(The nbdist extension is already loaded.*)?"),
    ("%dist_init --num-processes 2 --gpu-ids 0,1 --master-addr localhost", "--master-addr: not.*"),
    ("import torch\nimport torch.distributed as dist\n\nprint(f'Rank {rank} of {world_size}')",
     re.escape(_BOTH.format("Rank 0 of 2", "Rank 1 of 2"))),
    ("device, gpu_id", re.escape("[0-1] (device(type='cpu'), None)\n")),
    ("# a comment alone", ""),
    ("x = torch.ones(2, device=device) * (rank + 1)\ndist.all_reduce(x)\nx",
     re.escape("[0-1] tensor([3., 3.])\n")),
    ("%%rank[0]\nprint(f'rank {rank}')", re.escape("[0] rank 0\n")),
    ("%%rank [1]\nrank", re.escape("[1] 1\n")),
    ("%%rank[0,1]\nrank", re.escape(_BOTH.format(0, 1))),
    ("%%rank [0-1]\nrank", re.escape(_BOTH.format(0, 1))),
    ("%%distributed\nx.sum().item()", re.escape("[0-1] 6.0\n")),
    ("for param in [x]:\n    dist.broadcast(param.data, src=0)\nprint(f'{rank} received')",
     re.escape(_BOTH.format("0 received", "1 received"))),
    (_TRAIN, re.escape("[0] below 0.01: True\n")),
    ("%sync", "ranks 0-1 in step.*"),
    ("%dist_status", "2 ranks on 1 host, gloo, up for .*plain cells run on ranks 0-1"),
    ("%dist_mode", "plain cells run on ranks 0-1"),
    ("%dist_mode --disable", "plain cells run in the notebook"),
    ("here = 'in the notebook'\nhere", "'in the notebook'"),
    ("%%distributed\n'here' in dir()", re.escape("[0-1] False\n")),
    ("%dist_mode --enable", "plain cells run on ranks 0-1"),
    ("%dist_mode -d", "plain cells run in the notebook"),
    ("%dist_mode -e", "plain cells run on ranks 0-1"),
    ("'here' in dir()", re.escape("[0-1] False\n")),
    ("%dist_debug", "%dist_debug: %dist_status shows .*"),
    ("%dist_sync_ide", "%dist_sync_ide: not needed.*"),
    ("%timeline_save f.json", "%timeline_save: no timeline is kept.*"),
    ("%timeline_save", "%timeline_save: no timeline is kept.*"),
    ("%timeline_debug", "%timeline_debug: no timeline is kept.*"),
    ("%timeline_clear", "%timeline_clear: no timeline is kept.*"),
    ("%dist_init -n 2 -a localhost", "-a: not needed.*ranks 0-1 are already running.*"),
    ("%dist_init -n 2 --master-addr=localhost", "--master-addr: not needed.*already running.*"),
    ("%dist_reset --nuclear", "--nuclear: %dist_reset always .*2 ranks on 1 host, ready in .*"),
    ("%dist_init --num-processes 2", "ranks 0-1 are already running.*"),
    ("'x' in dir(), rank", re.escape(_BOTH.format("(False, 0)", "(False, 1)"))),
    ("%dist_shutdown", "ranks 0-1 stopped"),
    ("here", "'in the notebook'"),
]  # fmt: skip


def test_a_notebook_of_nbdistributed_runs_with_two_lines_changed(without_ranks: Kernel) -> None:
    """Every cell succeeds and shows what it should; nothing goes to the wrong place."""
    for code, wanted in _CELLS:
        cell = without_ranks.run(_CHANGED.get(code, code), START_TIMEOUT_S)

        assert cell.status == "ok", cell.visible
        shown = cell.visible
        assert re.fullmatch(f"(?:{wanted})\n?", shown, re.DOTALL), f"{code}\nshows\n{shown}"
    assert len(_CHANGED) == 2


@pytest.mark.parametrize(
    "spelling",
    sorted({re.split(r"[ \[\n]", code)[0] for code, _ in _CELLS if code.startswith("%")}),
)
def test_the_page_has_every_spelling(spelling: str) -> None:
    """docs/coming_from_nbdistributed.md has a row for each magic of the notebook above."""
    rows = [line for line in _DOCS.read_text().splitlines() if line.startswith("|")]

    assert any(re.search(rf"`{spelling}\b", row.split("|")[1]) for row in rows)
