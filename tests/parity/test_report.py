"""The tables of docs/parity.md say what was compared, and have every strategy and switch."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.parity import report
from tests.parity.case import Measured
from tests.parity.cases import LONG, SAVED, SWITCHED, WALKS
from tests.support import tables

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
_FOUND = [
    Measured("row", "tp", "plain", 4, 4.7e-7, 1.2e-8, 0.0, 2e-6),
    Measured("row", "ddp --hook fp16", "plain", 2, 2.4e-5, None, 3.0e-5, 3e-5),
    Measured("row", "tp", "gpt2", 2, 3e-6, 1.2e-8, 6e-8, 2e-6),
    Measured("switch", "ddp", "plain", 2, 2.4e-7, None, 1e-7, 2e-6, "fsdp"),
    Measured("checkpoint", "fsdp", "plain", 4, 3e-6, None, 1e-7, 2e-6, "tp", 1),
]


def test_comparisons_become_rows() -> None:
    """Strategies stay together in the order of their table; what is too far off stands out."""
    assert report.rows_table(_FOUND).splitlines()[2:] == [
        "| `ddp` | `--hook fp16` | 2 | plain | 2.4e-5 | - | 3.0e-5 | 3.0e-5 |",
        "| `tp` |  | 2 | gpt2 | **3.0e-6** | 1.2e-8 | 6.0e-8 | 2.0e-6 |",
        "| `tp` |  | 4 | plain | 4.7e-7 | 1.2e-8 | 0 | 2.0e-6 |",
    ]
    switches = report.switch_table(_FOUND, 2).splitlines()
    assert switches[0].startswith("| 2 ranks: from, to | `ddp` | `fsdp` |")
    assert switches[2].startswith("| `ddp` | - | 2.4e-7 | - |")
    loaded = report.checkpoint_table(_FOUND).splitlines()
    at = loaded[0].split(" | ").index("4: `tp`")
    assert loaded[3].startswith("| 1: `fsdp` | - |")
    assert loaded[3].split(" | ")[at] == "**3.0e-6**"


def test_the_page_gets_its_tables(tmp_path: Path) -> None:
    """What stands around the marks stays; what could not be compared is named."""
    log, page = tmp_path / "log.jsonl", tmp_path / "page.md"
    log.write_text("".join(json.dumps(asdict(measured)) + "\n" for measured in _FOUND))
    page.write_text(f"before\n{tables.begin(report.COMMAND)}\n{tables.END}\nafter\n")
    tables.fill(str(log), str(page), report.COMMAND, Measured, report.text)
    made = page.read_text()

    assert made.startswith("before\n")
    assert made.endswith(f"{tables.END}\nafter\n")
    assert "Not compared, as it is not installed: deepspeed." in made


@pytest.mark.parity
def test_the_page_has_every_case() -> None:
    """Each comparison of `make parity` has a line, each switch a number; none is too far off."""
    lines = [
        [part.strip().strip("`") for part in line.split("|")[1:-1]]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    seen = {(" ".join(filter(None, line[:2])), line[3], line[2]) for line in lines}
    cases = [(case, n) for (n, _), part in LONG.items() for case in part]

    assert {(case.typed, case.model, str(n)) for case, n in cases} - seen == set()
    for n, model in WALKS:
        names, corner = SWITCHED[n], f"{n} ranks{'' if model == 'plain' else f', {model}'}: "
        at = next(i for i, line in enumerate(lines) if line[0].startswith(corner))
        rows = {line[0]: line[1:] for line in lines[at + 2 : at + 2 + len(names)]}
        for before, after in itertools.permutations(names, 2):
            assert rows[before][names.index(after)] != "-", (n, before, after)
    everybody = [f"{n}: `{name}`" for n, names in SAVED.items() for name in names]
    head = next(i for i, line in enumerate(lines) if line[0].startswith("saved by"))
    lines_of = {line[0]: line[1:] for line in lines[head + 2 : head + 2 + len(everybody)]}
    assert all("-" not in lines_of[name.strip("`")] for name in everybody)
    assert "**" not in PAGE.read_text().partition(tables.begin(report.COMMAND))[2]
