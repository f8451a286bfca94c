"""One line tells what is waited for, and its result takes its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.view import progress
from nbdist.view.mime import View
from nbdist.view.progress import ProgressLine


class _Handle:
    """Stands for IPython's DisplayHandle."""

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

    monkeypatch.delenv("NBDIST_TEST", raising=False)
    monkeypatch.setattr(progress, "DisplayHandle", _Handle)
    monkeypatch.setattr(progress, "display", display)
    monkeypatch.setattr(progress, "publish", publish)
    return texts


def run() -> None:
    """Two lines and a result."""
    line = ProgressLine("starting")
    line("controller")
    line("2 of 2 ranks")
    line.finish(View("table"))


def test_in_a_notebook(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook one display is updated and becomes the result."""
    monkeypatch.setattr(progress, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    run()

    assert shown == [
        "display starting: controller",
        "update starting: 2 of 2 ranks",
        "update table",
    ]


def test_a_result_without_progress(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing had to be waited for the result is displayed by itself."""
    monkeypatch.setattr(progress, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    ProgressLine("starting").finish(View("table"))

    assert shown == ["display table"]


def test_in_a_terminal(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In IPython's terminal, which cannot update, every step is a line of its own."""
    monkeypatch.setattr(progress, "get_ipython", SimpleNamespace)
    run()

    assert shown == [
        "publish starting: controller",
        "publish starting: 2 of 2 ranks",
        "publish table",
    ]


def test_in_a_script(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside IPython only the result is printed."""
    monkeypatch.setattr(progress, "get_ipython", lambda: None)
    run()

    assert shown == ["publish table"]


def test_stored_outputs_have_the_result_alone(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Under NBDIST_TEST=1 there is no line and no update, which timing would decide."""
    monkeypatch.setattr(progress, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setenv("NBDIST_TEST", "1")
    run()

    assert shown == ["publish table"]
