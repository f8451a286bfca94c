"""The table of docs/reliability.md says what was measured, and has every fault of the matrix."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults import report
from tests.faults.table import FAULTS, QUEUED
from tests.support import tables
from tests.support.faults import Measured

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_CASES = [
    Measured("b", "hang", 4, 1.26, 3.0, True, True, 0),
    Measured("a", "death", 2, 0.31, None, True, False, 2),
    Measured("b", "hang", 2, 1.24, 2.96, True, True, 0),
    Measured("c", "hang", 2, None, 0.06, None, None, 0),
]


def test_measured_cases_become_rows(tmp_path: Path) -> None:
    """Classes stay together in the order of the run; what is not right stands out."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(asdict(case)) + "\n" for case in _CASES))

    assert report.table(report.read(log)).splitlines()[2:] == [
        "| b | 2 | 1.2 | 3.0 | yes | yes | 0 |",
        "| b | 4 | 1.3 | 3.0 | yes | yes | 0 |",
        "| c | 2 | - | 0.1 | - | - | 0 |",
        "| a | 2 | 0.3 | - | yes | **no** | 2 |",
    ]


def test_only_the_table_of_the_page_is_replaced(tmp_path: Path) -> None:
    """What stands around the two marks stays; a page without them is refused."""
    log, page = tmp_path / "log.jsonl", tmp_path / "page.md"
    log.write_text(json.dumps(asdict(_CASES[0])) + "\n")
    begin = tables.begin(report.COMMAND)
    page.write_text(f"before\n{begin}\nof earlier\n{tables.END}\nafter\n")
    report.main(str(log), str(page))
    text = page.read_text()

    assert text.startswith(f"before\n{begin}\n\nMeasured with torch ")
    assert text.endswith(f"| yes | yes | 0 |\n\n{tables.END}\nafter\n")
    assert "of earlier" not in text
    with pytest.raises(ValueError, match="no '<!-- table"):
        tables.replaced("nothing here", report.COMMAND, "new")


def test_the_page_has_every_fault_of_the_matrix() -> None:
    """Each fault in a cell has a row for 2 and one for 4 ranks, and no row has a no."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cases = {tuple(part.strip() for part in row.split("|")[1:3]) for row in rows}

    assert {(fault.name, str(n)) for fault in (*FAULTS, *QUEUED) for n in (2, 4)} - cases == set()
    assert not [row for row in rows if "**no**" in row]
