"""Parts common to PNG pictures of recordings: size, letters, a panel for each rank."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it takes half a second to import, and most sessions draw no picture
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANE, HEAD, LINE, DARK = "#f0f0f0", "#dcdcdc", "#6b6b6b", "#404040"
# In pixels of the file.
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1600, 170, 20, 50, 60
MOST_HEIGHT, LEAST_HEIGHT = 1100, 60
INNER = WIDTH - LEFT - RIGHT
DPI = 160
PIXEL = 72 / DPI  # as matplotlib counts the width of lines
# How many letters fit beside each other.
MOST_LETTERS = 140
FONT_PT = 7
READABLE = 11  # pixels of a row that a text needs
UNITS_NS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns"))


@contextmanager
def drawing(inner_height: int) -> Iterator[Figure]:
    """A figure with room for `inner_height` pixels of panels.

    Whatever the user has set in matplotlib is neither used nor changed.
    """
    import matplotlib.style  # `import matplotlib` alone does not load it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (WIDTH / DPI, (TOP + max(inner_height, LEAST_HEIGHT) + BOTTOM) / DPI)
    with matplotlib.style.context("default"), warnings.catch_warnings():
        # Letters that matplotlib's font lacks are boxes here; in the text they are all right.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure = Figure(figsize=size, dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        yield figure


def encode(figure: Figure) -> bytes:
    """The figure as a PNG, equal for equal figures. To be called inside `drawing`."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def rgb(colour: str) -> tuple[int, int, int]:
    """The three numbers of "#rrggbb"."""
    red, green, blue = bytes.fromhex(colour[1:])
    return red, green, blue


def panel(figure: Figure, top: int, high: int, header: int) -> Axes:
    """Axes of INNER x `high` pixels, with a grey header above them.

    Args:
        figure: Of `drawing`.
        top: Where the header begins, in pixels below the room for the legend.
        high: Height without the header.
        header: Its height.
    """
    from matplotlib.patches import Rectangle

    height = round(figure.get_figheight() * DPI)
    bottom = height - TOP - top - header - high
    axes = figure.add_axes(
        (LEFT / WIDTH, bottom / height, INNER / WIDTH, high / height), facecolor=LANE
    )
    band = Rectangle((0, 1), 1, header / high, transform=axes.transAxes, clip_on=False, color=HEAD)
    axes.add_patch(band).set(linewidth=0, antialiased=False)
    axes.tick_params(labelsize=FONT_PT)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def header(axes: Axes, height: int, name: str, words: str) -> None:
    """The name of a rank before its header, and words in it."""
    y = 1 + height / 2 / axes.bbox.height
    for x, text, side, weight in (
        (-0.006, name, "right", "bold"),
        (0.006, words, "left", "normal"),
    ):
        axes.text(
            x, y, text, ha=side, va="center", weight=weight, fontsize=FONT_PT,
            transform=axes.transAxes, parse_math=False,  # a dollar sign is one
        )  # fmt: skip


def axis(axes: Axes, title: str) -> None:
    """Numbers and their unit below a panel, the lowest one."""
    axes.xaxis.set_visible(True)
    axes.spines["bottom"].set_visible(True)
    axes.set_xlabel(title, fontsize=FONT_PT)


def legend(figure: Figure, entries: list[tuple[str, str]], nothing: str) -> None:
    """(colour, name) of each entry, above all; where there is none, what that means."""
    from matplotlib.patches import Patch

    if not entries:
        figure.text(0.5, 0.5, nothing, ha="center", fontsize=FONT_PT + 2)
        return
    handles = [Patch(color=colour, label=name) for colour, name in entries]
    figure.legend(
        handles=handles, loc="upper left", ncols=len(handles), frameon=False,
        fontsize=FONT_PT, borderpad=0.2,
    )  # fmt: skip
