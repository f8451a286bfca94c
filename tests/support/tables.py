"""Tables in pages of docs that a run of tests has measured."""

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

END = "<!-- end of the table -->"


def begin(command: str) -> str:
    """The mark before what a command writes into a page; END is the mark after it."""
    return f"<!-- table: made by `{command}` -->"


def machine(*packages: str) -> str:
    """Where and with what it was measured, as a sentence."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"Measured with {versions}, Python {platform.python_version()}, "
        f"{platform.system()}, {psutil.cpu_count()} cores, {memory_gib:.0f} GiB."
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replaced(page: str, command: str, new: str) -> str:
    """The page with what stands between a command's mark and END replaced.

    Raises:
        ValueError: If a mark is missing.
    """
    before, first, rest = page.partition(begin(command))
    _, end, after = rest.partition(END)
    if not first or not end:
        raise ValueError(f"the page has no {begin(command)!r} followed by {END!r}")
    return f"{before}{first}\n\n{new}\n\n{END}{after}"


def fill(
    log: str, page: str, command: str, kind: type[Any], text: Callable[[list[Any]], str]
) -> None:
    """Write into a page, between a command's marks, what the records of a JSON lines file say."""
    records = [kind(**json.loads(line)) for line in Path(log).read_text().splitlines()]
    Path(page).write_text(replaced(Path(page).read_text(), command, text(records)))
