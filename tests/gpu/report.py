"""Turns what `make gpu` has found into the table of docs/gpu.md, and keeps what it has captured.

python -m tests.gpu.report FOLDER... [--docs]

Each folder has what one command left. The page is written into the first of them; with `--docs`
into docs/gpu.md too, and captured files into tests/data. Results of CPU ranks are refused there.
"""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.gpu import results
from tests.gpu.places import PLACES
from tests.gpu.results import FAILED, NOT_RUN, PASSED, TIMED_OUT, Case
from tests.support import tables

COMMAND = "make gpu"
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu.md"
DATA = ROOT / "tests" / "data"
CAPTURES = "captures.tar.gz"
CPU_PAGE = "**On CPU ranks.** This shows that the tests themselves work, and nothing about GPUs."
_HEAD = ("part", "what", "on", "outcome", "s", "measured")
_WHY_CHARACTERS = 200


def machine_of(cases: Sequence[Case]) -> dict[str, str]:
    """What the probe `machine` found out; empty where it has not run."""
    return next((dict(case.measured) for case in cases if case.name == "machine"), {})


def text(cases: Sequence[Case]) -> str:
    """Where it was run, how many have passed, what has not, a row for each, what was not run."""
    run = [case for case in cases if case.outcome != NOT_RUN]
    missing = [case for case in cases if case.outcome == NOT_RUN]
    facts = machine_of(cases)
    lines = [CPU_PAGE, ""] if any(case.on == "cpu" for case in cases) else []
    lines += [f"- {name}: {value}" for name, value in facts.items() if value]
    counts = ", ".join(
        f"{sum(case.outcome == word for case in cases)} {word}"
        for word in (PASSED, FAILED, TIMED_OUT, NOT_RUN)
    )
    lines += ["", f"{counts}."]
    wrong = [case for case in run if case.outcome != PASSED]
    if wrong:
        lines += [
            "",
            "What went wrong:",
            "",
            *(f"- {_title(case)}: {_short(case)}" for case in wrong),
        ]
    lines += ["", tables.table(_HEAD, map(_row, run))]
    if missing:
        lines += ["", "Not run:", "", *_missing(missing)]
    return "\n".join(lines)


def _title(case: Case) -> str:
    return " ".join(
        filter(None, (case.part, "/", case.name, f"({_place(case)})" if case.on else ""))
    )


def _short(case: Case) -> str:
    first = " ".join(case.why.split())
    return _plain(first[:_WHY_CHARACTERS] + ("..." if len(first) > _WHY_CHARACTERS else ""))


def _plain(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;")


def _row(case: Case) -> tuple[str, ...]:
    outcome = case.outcome if case.outcome == PASSED else f"**{case.outcome}**"
    # Of the machine all stands above.
    measured = {} if case.name == "machine" else case.measured
    numbers = "; ".join(f"{name} {value}" for name, value in measured.items())
    return case.part, case.name, _place(case), outcome, f"{case.seconds:.1f}", _plain(numbers)


def _missing(cases: Sequence[Case]) -> list[str]:
    """For each reason, and each part and place, what it kept from running."""
    by_reason: dict[str, dict[tuple[str, str], list[str]]] = {}
    for case in cases:
        names = by_reason.setdefault(case.why, {}).setdefault((case.part, _place(case)), [])
        names.append(case.name.partition(":")[0])
    lines = []
    for why, groups in by_reason.items():
        lines.append(f"- {why}:")
        lines += [
            f"  - {part}{f', {place}' if place else ''}: {', '.join(dict.fromkeys(names))}"
            for (part, place), names in groups.items()
        ]
    return lines


def _place(case: Case) -> str:
    return PLACES[case.on].says if case.on else ""


def keep(folders: Sequence[Path], page: Path, data: Path) -> None:
    """Fill the page from the folders' results and unpack what they have captured into `data`.

    Raises:
        ValueError: If they are of CPU ranks, or of no machine, or the page has no marks; nothing is
            written.
    """
    cases = results.read([folder / results.FILE for folder in folders])
    if not machine_of(cases).get("gpus"):
        raise ValueError(
            f"{folders[0]} has results of CPU ranks, or none of the part `machine`: they do not "
            f"go into {page}."
        )
    new = tables.replaced(page.read_text(), COMMAND, text(cases))
    for folder in folders:
        if (folder / CAPTURES).exists():
            with tarfile.open(folder / CAPTURES) as archive:
                # Python before 3.11.4 has no filters.
                safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                archive.extractall(data, **safe)  # type: ignore[arg-type]
    page.write_text(new)


def main(words: Sequence[str]) -> None:
    folders = [Path(word) for word in words if word != "--docs"]
    cases = results.read([folder / results.FILE for folder in folders])
    (folders[0] / "gpu.md").write_text(f"# On GPUs\n\n{text(cases)}\n")
    captured = os.environ.get(results.DATA)
    if captured and any(Path(captured).iterdir()):
        with tarfile.open(folders[0] / CAPTURES, "w:gz") as archive:
            for path in sorted(Path(captured).iterdir()):
                archive.add(path, path.name)
    if "--docs" in words:
        try:
            keep(folders, PAGE, DATA)
        except ValueError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
