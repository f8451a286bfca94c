"""Tables in pages of docs that a run of tests has measured."""

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version

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
