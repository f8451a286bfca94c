"""Turns the measured cases of `make faults` into the table of docs/reliability.md.

python -m tests.faults.report build/faults.jsonl docs/reliability.md
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.support import tables
from tests.support.faults import Measured

COMMAND = "make faults"
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
    return tables.table(_HEAD, map(_row, ordered))


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


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def _yes(*, is_so: bool | None) -> str:
    return {None: "-", True: "yes", False: "**no**"}[is_so]


def main(log: str, page: str) -> None:
    path = Path(page)
    new = f"{tables.machine(*_PACKAGES)}\n\n{table(read(Path(log)))}"
    path.write_text(tables.replaced(path.read_text(), COMMAND, new))


if __name__ == "__main__":
    main(*sys.argv[1:])
