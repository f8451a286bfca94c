"""docs/architecture.md's table of packages and its picture, made from docstrings and imports.

`python -m tests.support.house_page` writes both. A package stands on the floor above the highest
one that it imports; an arrow that follows from two others is left out.
"""

from __future__ import annotations

import ast
import html

from tests import test_house as house

PAGE = house.ROOT / "docs" / "architecture.md"
PICTURE = house.ROOT / "docs" / "pictures" / "house.svg"
BEGIN, END = "<!-- packages: made by tests/support/house_page.py -->\n", "<!-- end -->\n"
SIDES = ("pure", "kernel", "rank", "view", "agent", "controller", "notebook")
WIDTH, BOX_WIDTH, BOX_HEIGHT, FLOOR_HEIGHT = 1060, 92, 30, 74
XMLNS = "http://www.w3.org/2000/svg"
COLOURS = {"rank": "#e8f0d8", "notebook": "#f4e3cf", "pure": "#dde8f3"}


def packages() -> list[str]:
    """All packages, the lowest first."""
    return [name for name in house.FLOORS if (house.PACKAGE / name).is_dir()]


def imports() -> dict[str, set[str]]:
    """Package -> other packages that its files import."""
    edges: dict[str, set[str]] = {name: set() for name in packages()}
    for module, targets in house.graph().items():
        here = module.split(".")[1] if "." in module else ""
        if here in edges:
            edges[here] |= {word for t in targets if (word := t.split(".")[1]) in edges} - {here}
    return edges


def floors(edges: dict[str, set[str]]) -> list[list[str]]:
    """Packages by their height: each above the highest one that it imports."""
    height: dict[str, int] = {}
    for name in packages():  # the lower ones come first, which tests/test_house.py holds
        height[name] = 1 + max((height[below] for below in edges[name]), default=-1)
    return [
        [name for name in packages() if height[name] == level]
        for level in range(max(height.values()) + 1)
    ]


def shown_arrows(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that do not follow from others."""
    reach = {name: house.reachable(name, edges) for name in edges}
    return [
        (name, below)
        for name in packages()
        for below in sorted(edges[name])
        if not any(below in reach[other] for other in edges[name] - {below})
    ]


def picture() -> str:
    """The floors as SVG."""
    edges = imports()
    levels = floors(edges)
    height = FLOOR_HEIGHT * len(levels)
    middle: dict[str, tuple[float, float]] = {}
    for level, names in enumerate(levels):
        top = height - FLOOR_HEIGHT * (level + 1) + (FLOOR_HEIGHT - BOX_HEIGHT) / 2
        for place, name in enumerate(names):
            middle[name] = (WIDTH * (place + 0.5) / len(names), top)
    arrows = [
        f'<line x1="{middle[name][0]:.0f}" y1="{middle[name][1] + BOX_HEIGHT:.0f}" '
        f'x2="{middle[below][0]:.0f}" y2="{middle[below][1]:.0f}" stroke="#999"/>'
        for name, below in shown_arrows(edges)
    ]
    boxes = [
        f'<a href="../../nbdist/{name}"><rect x="{x - BOX_WIDTH / 2:.0f}" y="{y:.0f}" rx="4" '
        f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}" fill="{COLOURS[_colour(name)]}" stroke="#555"/>'
        f'<text x="{x:.0f}" y="{y + 20:.0f}" text-anchor="middle" font-family="sans-serif">'
        f"{html.escape(name)}</text></a>"
        for name, (x, y) in middle.items()
    ]
    return "\n".join(
        [
            f'<svg xmlns="{XMLNS}" viewBox="0 0 {WIDTH} {height}" font-size="13">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *arrows,
            *boxes,
            "</svg>\n",
        ]
    )


def _colour(name: str) -> str:
    here = house.side(f"nbdist.{name}")
    return here if here in COLOURS else "pure"


def table() -> str:
    """The packages from the bottom up, with the first sentence of their docstrings."""
    rows = ["| package | runs | what belongs there |", "|---|---|---|"]
    for name in packages():
        text = (house.PACKAGE / name / "__init__.py").read_text(encoding="utf-8")
        first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
        modules = [m for m in house.sources() if m.startswith(f"nbdist.{name}.")]
        here = {house.side(module) for module in modules}
        sides = ", ".join(word for word in SIDES if word in here)
        rows.append(f"| [`{name}/`](../nbdist/{name}) | {sides} | {first} |")
    return "\n".join(rows) + "\n"


def page(before: str) -> str:
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{table()}{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
