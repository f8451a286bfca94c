"""One line tells what is waited for, and its result takes its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.core.progress import Progress
from nbdist.core.view import View
from nbdist.notebook import progress_line
from nbdist.notebook.progress_line import ProgressLine, ShownProgress, line_html


class _Handle:
    def __init__(self, shown: list[str]) -> None:
        self.shown = shown

    def update(self, view: View) -> None:
        self.shown.append(f"update {view.text}")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is displayed, updated and published, in order."""
    texts: list[str] = []

    def display(view: View, *, display_id: bool) -> _Handle:
        assert display_id
        texts.append(f"display {view.text}")
        return _Handle(texts)

    def publish(bundle: dict[str, Any]) -> None:
        texts.append(f"publish {bundle['text/plain']}")

    monkeypatch.setattr(progress_line, "DisplayHandle", _Handle)
    monkeypatch.setattr(progress_line, "display", display)
    monkeypatch.setattr(progress_line, "publish", publish)
    return texts


_NOTEBOOK = SimpleNamespace(kernel=object())


@pytest.mark.parametrize(
    ("shell", "is_stored", "expected"),
    [
        # In a notebook one display is updated and becomes the result.
        (
            _NOTEBOOK,
            "",
            ["display starting: controller", "update starting: 2 of 2 ranks", "update table"],
        ),
        # IPython's terminal cannot update: every step is a line of its own.
        (
            SimpleNamespace(),
            "",
            ["publish starting: controller", "publish starting: 2 of 2 ranks", "publish table"],
        ),
        # In a script, and where outputs are stored, there is the result alone.
        (None, "", ["publish table"]),
        (_NOTEBOOK, "1", ["publish table"]),
    ],
)
def test_two_lines_and_a_result(
    shown: list[str],
    monkeypatch: pytest.MonkeyPatch,
    shell: object,
    is_stored: str,
    expected: list[str],
) -> None:
    """As the place where the verb runs can show them."""
    monkeypatch.setattr(progress_line, "get_ipython", lambda: shell)
    monkeypatch.setenv("NBDIST_TEST", is_stored)
    line = ProgressLine("starting")
    line("controller")
    line("2 of 2 ranks")
    line.finish(View("table"))

    assert shown == expected


def test_a_result_without_progress(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing had to be waited for the result is displayed by itself."""
    monkeypatch.setattr(progress_line, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    ProgressLine("starting").finish(View("table"))

    assert shown == ["display table"]


# What takes long.

HALF = Progress("switch", "moving", 1, 2, "tensors")


class _Kernel:
    """Runs a cell."""

    cell = "a"

    def get_parent(self, _channel: str) -> dict[str, Any]:
        return {"header": {"msg_id": self.cell}}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    """Of a notebook."""
    kernel = _Kernel()
    monkeypatch.setattr(progress_line, "get_ipython", lambda: SimpleNamespace(kernel=kernel))
    return kernel


@pytest.mark.usefixtures("kernel")
def test_progress_is_one_line_that_goes_away(shown: list[str]) -> None:
    """Updated in place; blank at the end, as nothing takes its place."""
    line = ShownProgress()
    line(Progress("switch", "planning"))
    line(HALF)
    line(None)
    line(None)

    assert shown[:3] == [
        "display switch: planning",
        "update switch: moving 1 of 2 tensors, 50%",
        "update ",
    ]


def test_a_result_takes_the_lines_place_in_its_cell_alone(
    shown: list[str], kernel: _Kernel
) -> None:  # fmt: skip
    """Of another cell it is a result of its own."""
    line = ShownProgress()
    line(HALF)
    line(None)
    was_replaced = line.replace(View("done"))
    line(HALF)
    kernel.cell = "b"

    assert was_replaced
    assert shown[-2:] == ["update done", "display switch: moving 1 of 2 tensors, 50%"]
    assert not line.replace(View("of b"))
    assert not line.replace(View("again"))


@pytest.mark.usefixtures("kernel")
def test_no_progress_in_stored_outputs_or_for_nobody(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NBDIST_TEST=1, and while what is done belongs to no cell."""
    line = ShownProgress()
    with line.silenced():
        line(HALF)
    monkeypatch.setenv("NBDIST_TEST", "1")
    line(HALF)
    line(None)

    assert shown == []
    assert not line.replace(View("result"))


@pytest.mark.usefixtures("kernel")
def test_in_a_cell_on_ranks_it_stands_beside_the_bars(shown: list[str]) -> None:
    """No line of its own, which would stand above what the cell shows then."""
    line, noted = ShownProgress(), list[str]()
    line.note = noted.append
    line(HALF)
    line(None)

    assert noted == ["switch: moving 1 of 2 tensors, 50%", ""]
    assert shown == []


@pytest.mark.usefixtures("kernel")
def test_a_line_of_before_is_not_replaced(shown: list[str]) -> None:
    """It would stand above what was shown since."""
    line = ShownProgress()
    line(HALF)
    line(None)
    line.begin()

    assert not line.replace(View("result"))
    assert shown[-1] == "update "


def test_a_terminal_has_a_line_for_each_thing(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """And none for each percent."""
    monkeypatch.setattr(progress_line, "get_ipython", SimpleNamespace)
    line = ShownProgress()
    for progress in (
        Progress("switch", "planning"),
        HALF,
        Progress("switch", "moving", 2, 2),
        None,
    ):
        line(progress)

    assert shown == ["publish switch: planning", "publish switch: moving 1 of 2 tensors, 50%"]


def test_its_bar_is_as_long_as_it_is_far() -> None:
    """None where that is not known; words of others are text."""
    assert "width:50%" in line_html("half", 0.5)
    assert line_html("<b>", None) == "<div>&lt;b&gt;</div>"
