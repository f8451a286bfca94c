"""%dist_memory --keep, --since and --save in a real notebook: leaks of a real loop, by line."""

from pathlib import Path

import pytest

from tests.support.kernel import Kernel

_SETUP = """%%distributed
grown_model = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)
)
grown_optimizer = torch.optim.SGD(grown_model.parameters(), 0.1)
grown_losses, grown_cache = [], {}
grown_batch = torch.ones(512, 64)
"""
# Every step keeps the loss, with its graph that line 4 makes, and an entry of a dict.
_LOOP = """%%dist_memory
for step in range({first}, {last}):
    grown_optimizer.zero_grad()
    loss = grown_model(grown_batch).square().mean()
    loss.backward(retain_graph=True)
    grown_optimizer.step()
    grown_cache[step] = torch.ones(100_000) * step
    grown_losses.append(loss)
"""


@pytest.fixture(scope="module")
def ranks(_shared_kernel: Kernel) -> Kernel:
    """The shared kernel with a model."""
    assert _shared_kernel.run(_SETUP).status == "ok"
    return _shared_kernel


def told(kernel: Kernel, code: str) -> str:
    cell = kernel.run(code)

    assert cell.status == "ok", cell.visible
    return str(cell.visible)


def test_leaks_are_found_by_line(ranks: Kernel) -> None:
    """Between the ends of two recordings of a loop: both lines that keep memory come first."""
    told(ranks, _LOOP.format(first=0, last=4))
    told(ranks, "%dist_memory --keep grown_before")
    same = told(ranks, "%dist_memory --since grown_before")
    assert "is the last recording itself" in same
    told(ranks, _LOOP.format(first=4, last=10))
    text = told(ranks, "%dist_memory --since grown_before")

    rows = [line for line in text.splitlines() if line.startswith("+")]
    # Six entries of 400 kB more on each of two ranks, and six graphs that keep ReLU's output.
    cache = next(line for line in rows if "grown_cache[...]" in line)
    assert cache.startswith("+4.8 MB")
    assert "0 -> 12" in cache
    assert cache.endswith("0-1")
    graph = next(line for line in rows if "]:4 <module>" in line)
    assert {cache, graph} == {*rows[:2]}
    made = float(graph.split()[0]) * {"MB": 1e6, "kB": 1e3}[graph.split()[1]]
    assert made >= 0.8 * 2 * 6 * 512 * 256 * 4
    # What is as it was has not grown.
    assert "parameters" not in text


def test_moments_grow_by_name(ranks: Kernel) -> None:
    """Without a recording there are no lines, but variables have names."""
    told(ranks, "%dist_memory --now --keep grown_moment")
    told(ranks, "%%distributed\nfor i in range(3): grown_cache[f'new {i}'] = torch.ones(1000)")
    text = told(ranks, "%dist_memory --now --since grown_moment")

    row = next(line for line in text.splitlines() if line.startswith("+"))
    assert row.split()[:2] == ["+24.0", "kB"]
    assert "grown_cache[...]" in row
    assert "No lines are known" in text


def test_saved_folders(ranks: Kernel, shared_folder: Path) -> None:
    """Saved, shown again, and compared with: also by torch's own code."""
    text = told(ranks, "%dist_memory --now --save grown_saved")
    files = [shared_folder / "grown_saved" / f"rank{rank}.pickle" for rank in (0, 1)]
    assert text.count("written: grown_saved/rank") == 2
    assert all(path.stat().st_size for path in files)
    shown = told(ranks, "%dist_memory grown_saved")
    assert "parameters" in shown
    told(ranks, "%%rank 1\ngrown_more = torch.ones(50_000)")
    text = told(ranks, "%dist_memory --now --since grown_saved")
    row = next(line for line in text.splitlines() if "grown_more" in line)
    assert row.split()[:2] == ["+200.0", "kB"]
    assert row.split()[-1] == "1"
    files[1].write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    assert "is not a pickle of protocol 2 or later" in told(ranks, "%dist_memory grown_saved")
    assert not (shared_folder / "ran").exists()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--since grown_nothing", "Nothing is kept as 'grown_nothing'"),
        ("--keep 1x", "'1x' is not a valid name"),
        ("--keep a --save b", "--keep and --save cannot be combined"),
        ("grown_none", "is not a folder"),
        ("grown_none --now", "give a folder or --now, not both"),
    ],
)
def test_mistakes(ranks: Kernel, line: str, why: str) -> None:
    """Each is told with what there is."""
    cell = ranks.run(f"%dist_memory {line}")

    assert cell.status == "error"
    assert why in cell.visible
