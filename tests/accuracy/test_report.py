"""The table of docs/accuracy.md says what was measured, and has every case."""

from pathlib import Path

from tests.accuracy import report
from tests.accuracy.case import LONG, SHORT, Result

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
_FOUND = [
    Result("fsdp --bf16", "llama", 4, 8, 128, 200e6, 201e6, 180e6, True),
    Result("single", "mlp", 2, 4, 128, 100e6, 100e6, None, True),
    Result("pp", "gpt2", 2, 4, 128, 50e6, None, 51e6, False),
]


def test_results_become_rows() -> None:
    """By ranks; errors with their sign; what nobody predicted is a dash."""
    assert report.text(_FOUND).splitlines()[-3:] == [
        "| mlp | `single` | 2 | 4 x 128 | exact | 100.00 | +0.0 % | - |",
        "| gpt2 | `pp` | 2 | 4 x 128 | **off** | 50.00 | - | +2.0 % |",
        "| llama | `fsdp --bf16` | 4 | 8 x 128 | exact | 200.00 | +0.5 % | -10.0 % |",
    ]


def test_the_summary_counts_what_there_is() -> None:
    assert report.summary(_FOUND).splitlines() == [
        "- A run: 2 peaks, median error 0.2 %, worst 0.5 % (llama, `fsdp --bf16`).",
        "- Formulas: 2 peaks, median error 6.0 %, worst 10.0 % (llama, `fsdp --bf16`).",
        "- Parameters, gradients and optimizer state: 2 of 3 exact, to the byte.",
    ]


def test_the_page_has_every_case() -> None:
    """Each with its number, all states exact, at least 24 of them."""
    lines = [
        [part.strip().strip("`") for part in line.split("|")[1:-1]]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    seen = {tuple(line[:4]): line for line in lines if len(line) == 8}
    wanted = {(c.model, c.typed, str(c.n), f"{c.batch} x {c.sequence}") for c in SHORT + LONG}

    assert len(wanted) >= 24
    assert wanted - seen.keys() == set()
    assert {seen[key][4] for key in wanted} == {"exact"}
