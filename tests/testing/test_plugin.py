"""`pytest --nbdist` runs notebooks with nbval; without the option it is not there."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest

from nbdist.core.units import MARK, PADDING
from tests.support import lab, processes

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SANITIZE = Path(__file__).parents[2] / "nbdist" / "nbval_sanitize.cfg"
# What the plugin's own module brings along: `nbdist` itself, which loads next to nothing.
_LOADED = {
    "",
    ".core",
    ".core.units",
    ".core.versions",
    ".errors",
    ".testing",
    ".testing.plugin",
}


def write(path: Path, *cells: tuple[str, str]) -> None:
    """A notebook of cells with what each has printed."""
    sources, printed = zip(*cells, strict=True)
    lab.write_notebook(path, *sources, printed=printed)


def told(text: str, outcome: str) -> set[str]:
    """The cells with this outcome, of a run with -rA."""
    return set(re.findall(rf"^{outcome} (\w+\.ipynb::Cell ?\d+)", text, re.MULTILINE))


def test_without_the_option_nothing_is_loaded(pytester: pytest.Pytester) -> None:
    """No module of nbdist but the plugin's, and no notebook is collected."""
    write(pytester.path / "some.ipynb", ("1 / 0", ""))
    pytester.makepyfile(
        """
        import json, sys
        def test_it():
            ours = [name for name in sys.modules if name.split(".")[0] == "nbdist"]
            with open("loaded.json", "w") as file:
                json.dump(ours, file)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:nbval")

    result.assert_outcomes(passed=1)
    loaded = json.loads((pytester.path / "loaded.json").read_text())
    assert set(loaded) == {f"nbdist{module}" for module in _LOADED}


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["--nbdist", "-p", "no:nbval"], "ERROR: --nbdist needs nbval: pip install nbval"),
        (
            ["--nbdist-ranks", "2", "-p", "no:nbval"],
            "ERROR: --nbdist-ranks and --nbdist-gpus are for --nbdist: add it",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    pytester: pytest.Pytester, typed: list[str], line: str
) -> None:
    """nbval, or the option that the others are for; nothing runs."""
    result = pytester.runpytest_subprocess(*typed)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [text for text in result.errlines if text] == [line]


def test_nbvals_options_are_set_and_typed_ones_win() -> None:
    """Time limits and this environment's kernel, unless another was named."""
    from nbdist.testing import notebooks  # it imports nbval, which takes two seconds

    plain = notebooks.nbval_options(Namespace(nbval_lax=False, nbval_kernel_name=None))
    other = notebooks.nbval_options(Namespace(nbval_lax=True, nbval_kernel_name="own"))

    assert {"--nbval", "--nbval-current-env"} <= {*plain}
    assert not {"--nbval", "--nbval-current-env"} & {*other}
    assert "--nbval-cell-timeout=300" in plain
    assert "--nbval-kernel-startup-timeout=120" in plain


def put_plain(pytester: pytest.Pytester) -> None:
    """A notebook without ranks, and what else the settings that are typed are seen by."""
    names = "NBDIST_TEST", "NBDIST_RANKS", "NBDIST_GPUS"
    write(
        pytester.path / "plain.ipynb",
        (f"import os\nprint([os.environ.get(name) for name in {names}])", "['1', '2', 'none']\n"),
        ("print('in', '/tmp/one', 'of colour red')", "in /tmp/other of colour blue\n"),
        ("print('[0-1] loss 3.31')", "[0] loss 3.31\n[1] loss 3.32\n"),
    )
    (pytester.path / "own.cfg").write_text("[colours]\nregex: red|blue\nreplace: COLOUR\n")
    pytester.makeconftest(
        """
        import os
        def pytest_report_header(config):
            o = config.option
            limits = o.nbval_cell_timeout, o.nbval_kernel_startup_timeout
            return f"limits {limits}, here {os.environ.get('NBDIST_TEST')}"
        """
    )


def check_plain(result: pytest.RunResult) -> None:
    """Its kernel has them and pytest has not; both sanitize files count; typed limits win."""
    text = result.stdout.str()

    assert "limits (77.0, 120.0), here None" in text
    result.stdout.fnmatch_lines(
        [
            "Cell 2 of plain.ipynb: the outputs are not those stored",
            "    print('?0-1? loss 3.31')",
            "rank 1 printed (line 1):",
            "  expected: loss 3.32",
            "  got:      loss 3.31",
        ]
    )
    assert "assert reference_output" not in text  # nbval's own


def test_on_two_ranks_each_failure_is_told_and_nothing_is_left(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that prints something else, one that raises, and a mistyped option fail their cells.

    No cell stops the ranks: they and what they have started have ended when pytest has. Another
    notebook is compared with the settings that were typed.
    """
    monkeypatch.setenv("NBDIST_PRELOAD", "0")
    put_plain(pytester)
    start = (
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "with open(f'pids{rank}', 'w') as file:\n"
        "    _ = file.write(f'{os.getpid()} {child.pid}')"
    )
    write(
        pytester.path / "ranks.ipynb",
        ("%load_ext nbdist", ""),
        ("# NBVAL_IGNORE_OUTPUT\n%dist_init", ""),
        ("%%distributed\nprint('step', rank)\nworld_size", "[0] step 0\n[1] step 1\n[0-1] 2\n"),
        (f"%%distributed\n{start}", ""),
        ("%%distributed\nprint('loss', 3.31 + rank / 100)", "[0-1] loss 3.31\n"),
        ("%%distributed\nassert rank == 0, 'not mine'", ""),
        ("%dist_status --nope", ""),
    )
    result = pytester.runpytest_subprocess(
        "--nbdist", "--nbdist-ranks=2", "--nbdist-gpus=none", "--nbval-cell-timeout=77",
        "--nbval-sanitize-with=own.cfg", "-rA",
    )  # fmt: skip
    text = result.stdout.str()
    pids = [
        int(pid) for rank in "01" for pid in (pytester.path / f"pids{rank}").read_text().split()
    ]

    check_plain(result)
    passed, failed = (
        {f"ranks.ipynb::Cell {n}" for n in cells} for cells in ((0, 1, 2, 3), (4, 5, 6))
    )
    assert told(text, "PASSED") == {*passed, "plain.ipynb::Cell 0", "plain.ipynb::Cell 1"}, text
    assert told(text, "FAILED") == {*failed, "plain.ipynb::Cell 2"}
    result.stdout.fnmatch_lines(
        ["rank 1 printed (line 1):", "  expected: loss 3.31", "  got:      loss 3.32"]
    )
    assert "rank 1 raised AssertionError: not mine" in text
    assert "OptionError" in text
    assert "left by" not in text  # the guardian had ended all in time
    assert processes.wait_gone(pids, 0.0) == []


VALUES = {
    "another value": ("import nbdist\nprint('loss', nbdist.shown(2.5), 'ok')", "loss {2.25} ok\n"),
    "a longer one": ("print(f'{nbdist.shown(2.5):>9}|')", "{    12.25}|\n"),
    "the same table": (
        "from nbdist.core.view import table\nprint(table('ab', [[nbdist.shown(1), 'x']]).text)",
        "[   ]a  b\n{1234}  x\n",
    ),
    "another claim": ("print('loss', nbdist.shown(2.5), 'ok')", "loss {2.5} wrong\n"),
    "no value": ("print('loss')", "loss {2.5}\n"),
    "on another line": ("print('loss')\nprint(nbdist.shown(2.5))", "loss {2.5}\n"),
    "a number that is compared": ("print('loss 2.5', nbdist.shown(1))", "loss 2.25 {1}\n"),
}


@pytest.mark.parametrize("options", [["--nbdist"], ["--nbval"]])
def test_values_are_not_compared_and_all_else_is(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """With plain nbval too, which is handed the file; a difference is told without marks."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    stored = str.maketrans({"{": MARK, "}": MARK, "[": PADDING, "]": PADDING})
    cells = [(source, printed.translate(stored)) for source, printed in VALUES.values()]
    write(pytester.path / "some.ipynb", *cells)
    settings = [] if options == ["--nbdist"] else ["--nbval-sanitize-with", str(SANITIZE)]

    result = pytester.runpytest_subprocess(*options, *settings, "-rA")
    text = result.stdout.str()

    cells_of = {
        outcome: re.findall(rf"^{outcome} \S+::Cell (\d)", text, re.MULTILINE)
        for outcome in ("PASSED", "FAILED")
    }
    assert cells_of == {"PASSED": [*"012"], "FAILED": [*"3456"]}, text
    if options == ["--nbdist"]:
        assert "  expected: loss # wrong\n  got:      loss # ok\n" in text
    assert not {MARK, PADDING} & {*text}


def test_stored_outputs_have_values() -> None:
    """Numbers, not placeholders, stand in nbdist's notebooks; the top says where they are from."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        assert path.stat().st_size < 1_000_000, path
        cells = json.loads(path.read_text())["cells"]
        assert "The measured numbers below are from " in "".join(cells[0]["source"]), path
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        texts = ["".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for o in outputs]
        assert [
            text for text in texts if re.search(r"(?<!\S)#(?= s\b|  |$)", text, re.MULTILINE)
        ] == [], path
