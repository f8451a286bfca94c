"""Run every benchmark, print the table, and write it to docs/benchmarks.md (`make bench`)."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks import Row

# In the order of the page.
MODULES = (
    "collective_cost",
    "lints",
    "strategies",
    "switching",
    "verification",
    "checkpoints",
    "start",
    "cells",
    "training",
    "transfer",
    "keeping",
    "idle",
    "monitoring",
    "many_ranks",
    "several_hosts",
    "tracing",
    "timeline",
)
PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
PACKAGES = ("torch", "ipyparallel", "ipykernel", "accelerate")
# Behind the table of a benchmark that draws one: what it shows, and where it is.
PICTURES = {
    "switching": "![Seconds against millions of parameters](pictures/switch_time.svg)",
    "many_ranks": "![Start and a trivial cell against ranks](pictures/many_ranks.svg)",
    "several_hosts": "![Start, a cell and a hang against ranks](pictures/several_hosts.svg)",
}
HEAD = ("what", "nbdist", "without it", "ratio", "promised", "how measured")


def run(names: Iterable[str]) -> Iterator[tuple[str, str, list[Row]]]:
    """(name, title, rows) of each benchmark; the title is the first line of its docstring."""
    for name in names:
        yield name, title_of(name), importlib.import_module(f"benchmarks.{name}").rows()


def title_of(name: str) -> str:
    """The first line of a benchmark's docstring."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or name  # importing all of them takes a while
    return text.splitlines()[0].rstrip(".")


def machine() -> str:
    """The machine in one line: what the numbers depend on, and nothing that names it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"{cores} cores, {memory_gib:.0f} GiB memory, {platform.system()} "
        f"{platform.machine()}, Python {platform.python_version()}, {packages}."
    )


def cells(row: Row) -> tuple[str, ...]:
    """A row as the texts of the table."""
    promises = []
    if row.most_ratio is not None:
        promises.append(f"ratio <= {row.most_ratio:g}")
    if row.most_more is not None:
        promises.append(f"<= {row.most_more:g} {row.unit} more")
    promise = " and ".join(promises)
    if promise:
        promise += ": kept" if row.is_kept else ": NOT KEPT"
    values = (f"{value:.4g} {row.unit}" for value in (row.ours, row.other))
    return (row.name, *values, f"{row.ratio:.3f}", promise or "-", row.how)


def page(tables: list[tuple[str, str, list[Row]]], where: str) -> str:
    """The whole page as markdown."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Each line compares nbdist with the same thing done without it;",
        "both sides ran alternately. Numbers are medians, except in rows that name one start.",
        "A ratio of 1 means that nbdist adds no cost.",
        "",
        where,
    ]
    for name, title, rows in tables:
        lines += ["", *section(name, title, rows)]
    return "\n".join(lines) + "\n"


def section(name: str, title: str, rows: list[Row]) -> list[str]:
    """One benchmark's part of the page, as lines."""
    lines = [f"## {title}", "", _line(HEAD), _line(["---"] * len(HEAD))]
    lines += [_line(cells(row)) for row in rows]
    return [*lines, "", PICTURES[name]] if name in PICTURES else lines


def merged(text: str, tables: list[tuple[str, str, list[Row]]], titles: list[str]) -> str:
    """A page with some benchmarks' parts made anew, in the order of the titles.

    Args:
        text: The page, measured on this machine.
        tables: What was measured anew.
        titles: Of all benchmarks, in order. Parts with other titles go.
    """
    head, *parts = text.rstrip("\n").split("\n\n## ")
    sections = {part.partition("\n")[0]: f"## {part}" for part in parts}
    sections |= {title: "\n".join(section(name, title, rows)) for name, title, rows in tables}
    return "\n\n".join([head, *(sections[title] for title in titles if title in sections)]) + "\n"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"


def main() -> int:
    """Run, print, write; 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(MODULES)}; all without it")
    parser.add_argument("--no-page", action="store_true", help="leave docs/benchmarks.md alone")
    options = parser.parse_args()
    unknown = sorted(set(options.modules) - set(MODULES))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}: choose of {', '.join(MODULES)}")
    # A user's kernels find compiled modules; with this of a container each would compile ours.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    tables = []
    for name, title, rows in run(options.modules or MODULES):
        if not rows:
            print(f"{title}: cannot be measured here\n")
            continue
        tables.append((name, title, rows))
        print(f"{title}\n", *("  " + "  ".join(cells(row)) + "\n" for row in rows), sep="")
        if not options.no_page:  # each at once: a later one may fail
            _write(tables, is_all=not options.modules)
    return int(not all(row.is_kept for *_, rows in tables for row in rows))


def _write(tables: list[tuple[str, str, list[Row]]], *, is_all: bool) -> None:
    """The page: made anew for another machine by all benchmarks, else the parts of these."""
    text = PAGE.read_text(encoding="utf-8")
    if is_all and machine() not in text:
        text = page([], machine())
    if machine() not in text:
        print(f"{PAGE.name} stays: it was measured elsewhere. This is {machine()}")
        return
    titles = [title_of(name) for name in MODULES]
    PAGE.write_text(merged(text, tables, titles), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
