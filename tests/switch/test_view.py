"""What %dist_strategy prints: the current strategy with all rows, and what a switch did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.strategy.choose import choose, default_choice
from nbdist.strategy.table import ROWS
from nbdist.switch.report import RankSwitchReport, merge_reports
from nbdist.switch.view import current, switch_result

DDP, FSDP = default_choice(2), choose("fsdp", {"bf16": True}, 2)


MOVED = RankSwitchReport(DDP, FSDP, ("model",), ("model",), (), (), (), 6_700_000, 0.14)


def test_current_shows_degrees_options_and_the_effective_batch() -> None:
    """The head has what counts now; samples are counted once along tp."""
    view = current(choose("fsdp", {"tp": 2, "bf16": True, "accumulate": 4}, 4))
    head = view.text.splitlines()[:2]

    assert head == [
        "strategy: fsdp x tp, dp 2 x tp 2, --bf16 --accumulate 4",
        (
            "effective batch: 2 x the loader's batch x 4 accumulated (data-parallel degree 2 on 4 "
            "ranks)"
        ),
    ]


def test_current_marks_its_rows_in_the_table_of_all() -> None:
    """Every row stands in the table with its bytes on these ranks."""
    lines = current(choose("fsdp", {"tp": 2}, 4)).text.splitlines()
    table = {line[1:].split()[0]: line for line in lines if line[:3] in {"   ", ">  "}}

    assert [name for name in table if name in ROWS] == list(ROWS)
    assert [name for name, line in table.items() if line.startswith(">")] == ["fsdp", "tp"]
    assert table["zero1"].split()[1:5] == ["optimizer,", "batch", "10.0", "9.0"]
    assert table["fsdp"].split()[2:6] == ["model,", "batch", "4.0", "9.0"]
    assert "B: bytes per parameter on 4 ranks. Held between steps: 16 (fp32: " in lines[-2]


def test_rows_that_these_ranks_cannot_form_have_no_numbers() -> None:
    """On one rank there is no tp."""
    lines = current(default_choice(1)).text.splitlines()
    row = next(line for line in lines if line.startswith("   tp "))

    assert row.split()[1:4] == ["-", "-", "-"]
    assert "(data-parallel degree 1 on 1 rank)" in lines[1]


def test_a_switch_tells_what_changed_and_what_is_still_the_old() -> None:
    """Strategy, time, bytes, rebound names, lists and stale references each have a line."""
    done = replace(
        MOVED,
        lists=("decayed",),
        stale=("closure step in cell [4]: model", "best = model"),
        notes=("The loader goes on at batch 12.",),
    )

    assert switch_result(done).text == (
        "ddp, dp 2 -> fsdp, dp 2, --bf16 in 0.1 s, 6.7 MB moved between ranks\n"
        "Models: model\n"
        "Rebound variables: model\n"
        "Updated lists of parameters: decayed\n"
        "The loader goes on at batch 12.\n"
        "These still hold the old model or its parameters. Assign them again:\n"
        "  closure step in cell [4]: model\n"
        "  best = model"
    )


def test_a_switch_without_a_model_has_one_line() -> None:
    """To the same strategy nothing was done; to another one it is set for models to come."""
    assert switch_result(RankSwitchReport(DDP, DDP)).text == (
        "The strategy is already ddp, dp 2. Nothing was changed."
    )
    assert switch_result(RankSwitchReport(DDP, FSDP)).text == (
        "fsdp, dp 2, --bf16 from now on (before: ddp, dp 2). No model is prepared yet."
    )


def test_html_is_escaped() -> None:
    """A name from the user's code cannot become markup."""
    view = switch_result(replace(MOVED, stale=("<b>x</b>",)))

    assert "&lt;b&gt;x&lt;/b&gt;" in view.html
    assert "<b>" not in view.html


def test_times_and_bytes_are_placeholders_where_outputs_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What differs from run to run does not fail a notebook."""
    monkeypatch.setenv("NBDIST_TEST", "1")

    assert "in # s, # moved" in switch_result(MOVED).text


def test_ranks_records_become_one() -> None:
    """Bytes are those of all, the slowest counts, what is not on all ranks has its ranks."""
    first = replace(MOVED, stale=("best = model",), elapsed_s=0.1)
    other = replace(MOVED, notes=("late",), elapsed_s=0.3)
    both = merge_reports([first, other])

    assert both.models == ("model",)
    assert both.stale == ("[0] best = model",)
    assert both.notes == ("[1] late",)
    assert (both.moved_bytes, both.elapsed_s) == (6_700_000, 0.3)
