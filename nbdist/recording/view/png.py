"""What PNG pictures of recordings have in common: size, letters, colours."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # it takes half a second to import, and most sessions draw no picture
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BACK, LANE, HEAD, LINE = 0xFFFFFF, 0xF0F0F0, 0xDCDCDC, 0x6B6B6B
# In pixels of the file.
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1600, 170, 20, 50, 60
MOST_HEIGHT = 1100
INNER = WIDTH - LEFT - RIGHT
DPI = 160
# How many letters fit beside each other.
MOST_LETTERS = 140
FONT_PT = 7
READABLE = 11  # pixels of a row that a text needs
UNITS_NS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns"))

Pixels = npt.NDArray[np.uint8]


@contextmanager
def drawing(inner_height: int) -> Iterator[tuple[Figure, Axes]]:
    """A figure, and axes of INNER x `inner_height` pixels without a frame.

    Whatever the user has set in matplotlib is neither used nor changed.
    """
    import matplotlib.style  # `import matplotlib` alone does not load it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = TOP + inner_height + BOTTOM
    with matplotlib.style.context("default"), warnings.catch_warnings():
        # Letters that matplotlib's font lacks are boxes here; in the text they are all right.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes(
            (LEFT / WIDTH, BOTTOM / height, INNER / WIDTH, inner_height / height)
        )
        axes.set_yticks([])
        axes.tick_params(labelsize=FONT_PT)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        yield figure, axes


def written(figure: Figure) -> bytes:
    """The figure as a PNG, equal for equal figures. To be called inside `drawing`."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def rgb(colour: int | str) -> tuple[int, int, int]:
    """0xRRGGBB or "#rrggbb" as three numbers."""
    number = int(colour[1:], 16) if isinstance(colour, str) else colour
    return number >> 16, number >> 8 & 255, number & 255


def short(text: str, most: int) -> str:
    """In one line of so many letters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def left(axes: Axes, y: float, words: str, *, weight: str = "normal") -> None:
    """Words before the drawn area."""
    _words(axes, -0.006, y, words, "right", weight)


def inside(axes: Axes, y: float, words: str, *, weight: str = "normal") -> None:
    """Words at the beginning of the drawn area."""
    _words(axes, 0.006, y, words, "left", weight)


def legend(figure: Figure, entries: list[tuple[str, str]]) -> None:
    """(colour, name) of each entry, above all."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for colour, name in entries]
    figure.legend(
        handles=handles, loc="upper left", ncols=max(1, len(handles)), frameon=False,
        fontsize=FONT_PT, borderpad=0.2,
    )  # fmt: skip


def _words(axes: Axes, x: float, y: float, words: str, side: str, weight: str) -> None:
    axes.text(
        x,
        y,
        words,
        transform=axes.get_yaxis_transform(),
        ha=side,
        va="center",
        weight=weight,
        fontsize=FONT_PT,
        parse_math=False,  # a dollar sign is one
    )
