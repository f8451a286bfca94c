"""%%dist_memory and %dist_memory, typed in real kernels with two real ranks."""

import pytest

from tests.support.kernel import Kernel
from tests.support.recordings import ran

TRAIN = """
mem_model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.ReLU(), torch.nn.Linear(40, 8))
mem_optimizer = torch.optim.Adam(mem_model.parameters())
def mem_step():
    mem_optimizer.zero_grad()
    mem_model(torch.ones(16, 24)).sum().backward()
    mem_optimizer.step()
"""
# Of the last record: rank, steps, whether there is a history, problem.
_RANKS = """
[(r.rank, len(r.step_ends_ns), r.duration_ns > 0, r.problem)
 for r in nbdist.session().memory().ranks]
"""
# Rank 0's bytes by category, at the end of the record, and the names of these owners.
_BYTES = """
from nbdist.memory import snapshot as s
def mem_bytes(one, category):
    b = one.blocks
    there = (b.end_ns == s.STAYS) & b.is_exact & (b.category == category)
    return {one.names[b.name[n]]: int(b.size_bytes[n]) for n in there.nonzero()[0]}
"""
# Elements of mem_model's parameters.
_SIZES = {"0.weight": 960, "0.bias": 40, "2.weight": 320, "2.bias": 8}


@pytest.fixture(scope="module")
def trained(_shared_kernel: Kernel) -> Kernel:
    """The shared kernel, its ranks with something to train."""
    for code in ("import nbdist", "%dist_reset", _BYTES, f"%%distributed\n{TRAIN}"):
        cell = _shared_kernel.run(code, 120.0)

        assert cell.status == "ok", cell.visible
    return _shared_kernel


def ranks(kernel: Kernel) -> object:
    return eval(kernel.run(_RANKS.strip()).plain[0])


def held(kernel: Kernel, category: str, rank: int = 0) -> dict[str, int]:
    cell = kernel.run(f"mem_bytes(nbdist.session().memory().ranks[{rank}], s.{category})")
    return dict(eval(cell.plain[0]))


def test_before_any_record_it_says_whose_memory_it_is(trained: Kernel) -> None:
    """Parameters by their names, without a history."""
    cell = ran(trained, "%dist_memory")

    assert "parameters" in cell.visible
    assert ranks(trained) == [(0, 0, False, ""), (1, 0, False, "")]
    assert held(trained, "PARAMETER", 1) == {name: 4 * n for name, n in _SIZES.items()}


@pytest.mark.usefixtures("drawn")
def test_a_cell_s_memory_is_recorded(trained: Kernel) -> None:
    """All its steps on all ranks; every owner with the bytes of its elements; a picture."""
    cell = ran(trained, "%%dist_memory\nfor n in range(3): mem_step()")

    assert 'src="data:image/png;base64,iVBOR' in cell.data("text/html")[-1]
    assert ranks(trained) == [(0, 3, True, ""), (1, 3, True, "")]
    sizes = {name: 4 * n for name, n in _SIZES.items()}
    assert held(trained, "PARAMETER") == sizes
    assert held(trained, "GRADIENT") == sizes
    assert held(trained, "OPTIMIZER") == {
        f"{name}: {key}": 4 if key == "step" else size
        for name, size in sizes.items()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_ranks_are_on_one_clock(trained: Kernel) -> None:
    """No rank is through a step before all have begun it: each step has all-reduces."""
    step = "for m in range(10): dist.all_reduce(torch.ones(3))"
    ran(trained, f"%%dist_memory\nimport nbdist\nfor n in range(9):\n    {step}\n    nbdist.step()")
    ends = "a, b = (r.step_ends_ns for r in nbdist.session().memory().ranks)"
    order = "len(a), all(x < y for x, y in zip(a, b[1:])), all(x < y for x, y in zip(b, a[1:]))"

    assert trained.run(f"{ends}\n({order})").plain == ["(9, True, True)"]


def test_a_step_ends_where_the_cell_says_so(trained: Kernel) -> None:
    """Then optimizers no longer count; only what is wanted of ranks, stacks and events is there."""
    code = "import nbdist\nfor n in range(4): mem_step(); mem_step(); nbdist.step()"
    ran(trained, f"%%dist_memory --ranks 1 --no-stacks --steps 3 --most-events 20\n{code}")
    assert ranks(trained) == [(1, 3, True, "")]
    printed = trained.run("[(len(r.stacks), r.lost > 0) for r in nbdist.session().memory().ranks]")
    assert printed.plain == ["[(0, True)]"]


def test_lines_of_the_cell_are_told(trained: Kernel) -> None:
    """By the cell's number, exactly; the backward's with the line of its forward."""
    code = "mem_x = torch.ones(8, 24)\nmem_h = mem_model(mem_x)\nmem_h.sum().backward()"
    ran(trained, f"%%dist_memory\n{code}")
    printed = trained.run(
        "mem_one = nbdist.session().memory().ranks[0]\n"
        "sorted({(mem_one.names[o], f.line) for o, p in zip(mem_one.blocks.operator, "
        "mem_one.blocks.stack) if p >= 0 and o >= 0 for f in mem_one.stacks[p][-1:] "
        "if f.file.startswith('cell [') and f.is_line_known})"
    )
    lines = dict(eval(printed.plain[0]))

    # The magic's own line is the first.
    assert (lines["aten::ones"], lines["aten::linear"], lines["aten::sum"]) == (2, 3, 4)
    assert lines["AddmmBackward0"] == 3


def test_cells_without_memory_or_gradients_are_recorded(trained: Kernel) -> None:
    """Nothing allocated; nothing kept for a backward."""
    ran(trained, "%%dist_memory\npass")
    assert ranks(trained) == [(0, 0, True, ""), (1, 0, True, "")]
    ran(trained, "%%dist_memory\nwith torch.no_grad(): mem_model(torch.ones(64, 24)).sum()")
    kinds = trained.run(
        "mem_b = nbdist.session().memory().ranks[0].blocks\n"
        "sorted({s.CATEGORIES[c] for c in mem_b.category[mem_b.start_ns >= 0]})"
    )

    assert kinds.plain == ["['temporary']"]


def test_of_this_moment(trained: Kernel) -> None:
    """--now has no history and leaves the last record as it is."""
    ran(trained, "%%dist_memory\nmem_step()")
    cell = ran(trained, "%dist_memory --now")

    assert "parameters" in cell.visible
    assert ranks(trained) == [(0, 1, True, ""), (1, 1, True, "")]


def test_from_python(trained: Kernel) -> None:
    """The same without a magic: a record for each rank that was chosen."""
    cell = ran(
        trained,
        "found = nbdist.session().record_memory('memory_row = torch.ones(1000)', ranks='1')\n"
        "print([(one.rank, 4000 in one.blocks.size_bytes) for one in found.ranks])\n"
        "print(found is nbdist.session().memory())",
    )

    assert cell.visible.splitlines()[-2:] == ["[(1, True)]", "True"]
