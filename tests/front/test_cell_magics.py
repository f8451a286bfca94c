"""Several cell magics above one cell, typed in a kernel with two ranks."""

import pytest

from tests.support.kernel import Kernel

STEP = "made = torch.ones(8) @ torch.ones(8)\nprint('made', int(made))"
BOTH, SECOND = ("[0-1] made 8", [0, 1]), ("[1] made 8", [1])


@pytest.fixture(scope="module")
def ranks(_shared_kernel: Kernel) -> Kernel:
    """The shared kernel, in which the last trace and memory can be asked for."""
    code = (
        "import nbdist\ndef recorded(of):\n    return [r.rank for r in of.ranks if not r.problem]"
    )
    assert _shared_kernel.run(code).status == "ok"
    return _shared_kernel


@pytest.mark.parametrize(
    ("magics", "record", "expected"),
    [
        ("%%dist_profile\n%%distributed", "trace", BOTH),
        ("%%distributed --timeout 100\n# below it\n%%dist_profile", "trace", BOTH),
        ("%%rank [1]\n%%dist_memory", "memory", SECOND),
        ("%%dist_memory --ranks 1\n\n%%rank[0,1]", "memory", (BOTH[0], [1])),
        ("%%dist_profile\n%%distributed --ranks 1", "trace", SECOND),
        ("%%time\n%%dist_profile\n%%rank [1]", "trace", SECOND),
        ("%%capture\n%%distributed\n%%dist_memory", "memory", ("", [0, 1])),
        ("%%timeit -n 1 -r 1\n%%dist_memory\n%%distributed", "memory", BOTH),
        ("%%distributed\n%%time\n%%dist_memory", "memory", ("] CPU times", [0, 1])),
        ("%%dist_profile\n%%time\n%%rank [1]", "trace", ("[1] CPU times", [1])),
        ("%%rank [1]\n# a comment\n%%time", "", ("[1] CPU times", [])),
    ],
)
def test_they_stack_in_any_order(
    ranks: Kernel, kernel: Kernel, magics: str, record: str, expected: tuple[str, list[int]]
) -> None:
    """The cell runs once, where one of them says; another records those ranks; IPython's go on."""
    text, recorded = expected
    cell = kernel.run(f"{magics}\n{STEP}")

    assert cell.status == "ok", cell.visible
    assert text in cell.text
    assert "not found" not in cell.visible
    if record:
        last = kernel.run(f"recorded(nbdist.session().{record}())")
        assert last.plain == [str(recorded)]


@pytest.mark.parametrize(
    ("magics", "sentence"),
    [
        ("%%distributed\n%%rank [0]", "%%distributed and %%rank stand above one cell"),
        ("%%distributed\n%%distributed", "both say where the cell runs"),
        ("%%local\n%%distributed", "both say where the cell runs"),
        ("%%dist_profile\n%%local", "%%local runs the cell in the notebook, and %%dist_profile"),
        ("%%dist_memory\n%%dist_profile", "Run the cell once under each"),
        ("%%time\n%%dist_profile\n%%dist_memory", "Run the cell once under each"),
        ("%%distributed --timeout 3\n%%dist_profile --timeout 5", "--timeout is given twice"),
        ("%%dist_profile --ranks 0\n%%rank [1]", "nothing is recorded on rank 0"),
        (
            "%%dist_profile\n%%dist_verify",
            "%%dist_verify runs the cell on all ranks",
        ),
        ("%%rank [0]\n%%dist_compare ddp fsdp", "so %%rank cannot"),
        ("%%dist_profile\n%%distribted", "Did you mean %%distributed?"),
    ],
)
def test_what_has_no_meaning_is_one_sentence(kernel: Kernel, magics: str, sentence: str) -> None:
    """Before anything runs."""
    cell = kernel.run(f"{magics}\nprint('ran')")

    cell.check_failure("OptionError", sentence)
    assert "ran\n" not in cell.text


def test_automatic_mode_and_python_take_them_too(ranks: Kernel, kernel: Kernel) -> None:
    """%%time above ours stays in the notebook; a call of the magic has the others in its cell."""
    kernel.run("%dist_mode all")
    timed = kernel.run(f"%%time\n%%rank [1]\n{STEP}")
    kernel.run("%dist_mode local")
    below = f"%%rank [0]\n{STEP}"
    called = kernel.run(f"get_ipython().run_cell_magic('dist_profile', '', {below!r})")

    assert "[1] made 8" in timed.text
    assert "\nCPU times" in timed.text
    assert "[0] made 8" in called.text
    assert kernel.run("recorded(nbdist.session().trace())").plain == ["[0]"]
