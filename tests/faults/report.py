"""Turns the measured cases of `make faults` into the table of docs/reliability.md.

python -m tests.faults.report build/faults.jsonl docs/reliability.md
"""

import json
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import psutil

from tests.support.faults import Measured

BEGIN = "<!-- table: made by `make faults` -->"
END = "<!-- end of the table -->"
_HEAD = (
    "fault",
    "ranks",
    "told after, s",
    "notebook back after, s",
    "variables kept",
    "next all_reduce right",
    "processes left",
)
_PACKAGES = ("torch", "ipyparallel", "ipykernel")


def read(path: Path) -> list[Measured]:
    """The measured cases of a JSON lines file, in its order."""
    return [Measured(**json.loads(line)) for line in path.read_text().splitlines()]


def table(cases: Iterable[Measured]) -> str:
    """The cases as a Markdown table: by class in the order of their first case, by name, ranks."""
    cases = list(cases)
    order = {key: at for at, key in reversed(list(enumerate(_key(case) for case in cases)))}
    kinds = list(dict.fromkeys(case.kind for case in cases))
    ordered = sorted(cases, key=lambda c: (kinds.index(c.kind), order[_key(c)], c.n))
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, ordered)]
    return "\n".join(_line(row) for row in rows)


def machine() -> str:
    """Where and with what it was measured, as a sentence."""
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"Measured with {packages}, Python {platform.python_version()}, "
        f"{platform.system()}, {psutil.cpu_count()} cores, {memory_gib:.0f} GiB."
    )


def replaced(page: str, new: str) -> str:
    """The page with what stands between its two marks replaced.

    Raises:
        ValueError: If a mark is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN!r} followed by {END!r}")
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


def _key(case: Measured) -> tuple[str, str]:
    return case.kind, case.case


def _row(case: Measured) -> tuple[str, ...]:
    return (
        case.case,
        str(case.n),
        _seconds(case.told_s),
        _seconds(case.back_s),
        _yes(is_so=case.is_kept),
        _yes(is_so=case.is_right),
        str(case.n_left),
    )


def _line(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def _yes(*, is_so: bool | None) -> str:
    return {None: "-", True: "yes", False: "**no**"}[is_so]


def main(log: str, page: str) -> None:
    """Write the table into the page."""
    path = Path(page)
    path.write_text(replaced(path.read_text(), f"{machine()}\n\n{table(read(Path(log)))}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
