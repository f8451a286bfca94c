"""Strategies side by side, as text, HTML and a picture."""

import io
from dataclasses import replace

import pytest

from nbdist.comparison.comparison import ComparedRow, Comparison, HeldMemory
from nbdist.comparison.view import comparison_result, partial_result
from nbdist.core.units import compared

DDP = ComparedRow(
    "ddp", "", "ddp, dp 2", 2, 20_000_000, True, (0.5, 0.2, 0.0, 0.1, 0.2), 0.25, 4_000_000,
    4_000_000, HeldMemory(4_000_000, 4_000_000, 8_000_000), 16_000_000, 400_000_000,
)  # fmt: skip
TP = ComparedRow(
    "tp --sdpa math", "", "tp, tp 2", 1, 30_000_000, True, (0.9, 0.0, 0.0, 0.0, 0.1), None,
    1_500_000, None, HeldMemory(2_000_000, 2_000_000), None, 500_000_000,
)  # fmt: skip
REFUSED = ComparedRow("cp", "its attention has a mask & dropout.")


def test_the_text_has_every_number_and_every_reason() -> None:
    """A row for each strategy, what is unknown as a dash, and what the columns mean."""
    view = comparison_result(Comparison((DDP, TP, REFUSED), "ddp, dp 2", ("model",)))
    lines = view.text.splitlines()

    assert lines[1].split("  ")[0] == "ddp"
    assert lines[1].split()[1:8] == ["20.00", "50.0", "20.0", "0.0", "10.0", "20.0", "25.0"]
    assert [word.strip() for word in lines[1].split("  ") if word.strip()][-6:] == [
        "16.0 MB", "16.0 MB", "400.0 MB", "4.0 MB", "4.0 MB", "2",
    ]  # fmt: skip
    assert lines[2].split()[9] == "-"
    assert lines[3] == "cp: not run. its attention has a mask & dropout."
    assert "Restored under ddp, dp 2: model and the training state." in view.text
    assert "mask &amp; dropout" in view.html


@pytest.mark.parametrize("rows", [(DDP, TP), (DDP,), (TP,), (ComparedRow("ddp"),)])
def test_the_picture_is_one_image_and_leaves_matplotlib_alone(
    rows: tuple[ComparedRow, ...],
) -> None:
    """Also where there is nothing to draw in a panel; it is in the HTML, without the network."""
    import matplotlib as mpl
    from PIL import Image

    before = dict(mpl.rcParams)
    view = comparison_result(Comparison(rows, "ddp, dp 2"))

    assert Image.open(io.BytesIO(view.png)).width == 1600
    assert "data:image/png;base64," in view.html
    assert "http" not in view.html
    assert dict(mpl.rcParams) == before


def test_names_are_no_formulas_and_no_markup() -> None:
    """What was typed is shown as it is."""
    odd = ComparedRow("ddp $x^ <b>", step_ns=1, has_steps=True, parts=(1.0, 0.0, 0.0, 0.0, 0.0))
    view = comparison_result(Comparison((odd,), "ddp, dp 2"))

    assert view.png
    assert "<b>" not in view.html
    assert "ddp $x^ <b>" in view.text


def test_no_measured_number_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the picture."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    view = comparison_result(Comparison((DDP, TP), "ddp, dp 2", ("model",)))

    assert "<img" in view.html
    assert "<img" not in compared(view.html)
    assert set(view._repr_mimebundle_()) == {"text/plain", "text/html"}
    assert compared(view.text).splitlines()[1].split() == ["ddp", *"#" * 12, "2"]
    on_gpus = (replace(DDP, is_device=True), replace(TP, is_device=True))
    other = comparison_result(Comparison(on_gpus, "ddp, dp 2", ("model",)))
    assert compared(view.text) == compared(other.text)
    assert compared(view.html) == compared(other.html)


def test_all_refused_and_broken_off() -> None:
    """Reasons without a table; and what there is where the cell ended it."""
    view = comparison_result(Comparison((REFUSED,), "ddp, dp 2"))
    ended = list(partial_result([DDP], "back under ddp"))

    assert view.text.startswith("cp: not run.")
    assert view.png == b""
    assert ended[0].text.splitlines()[1].startswith("ddp")
    assert ended[1].text == "back under ddp"
    assert list(partial_result([], "")) == []
