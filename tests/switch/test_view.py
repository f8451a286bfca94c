"""What %dist_strategy prints: the current strategy with all rows, and what a switch did."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from matplotlib.image import imread

from nbdist.core.units import compared
from nbdist.strategy.choose import choose, default_choice
from nbdist.strategy.expert_tokens import ExpertTokens
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


def test_experts_are_told_and_drawn_by_their_share_of_the_tokens() -> None:
    """Ranks 0 and 1 have two experts of each layer; ranks 2 and 3 are their copies."""
    counted = {
        rank: {"share": rank % 2, "layers": {"a": tokens, "b": [10, 10]}}
        for rank, tokens in enumerate([[30, 10], [0, 0], [50, 10], [0, 0]])
    }
    tokens = ExpertTokens.of(counted)
    view = current(choose("ep", {"ep": 2}, 4), {"Mixture": tokens})

    assert view.text.splitlines()[2] == (
        "experts of Mixture in the last cell: 180 tokens; rank 2 computed 1.8 times the mean, and "
        "expert 0 of a got 80% (evenly 25%)"
    )
    assert tokens.shares == ((0, 2), (1, 3))
    assert tokens.layers["a"] == {0: 80, 1: 20, 2: 0, 3: 0}
    assert tokens.layers["b"] == {0: 20, 1: 20, 2: 20, 3: 20}
    picture = imread(io.BytesIO(view.png))
    # Layer a is far from even in two of four places, b is white: red and blue are above.
    colours = picture[..., 0] - picture[..., 2]
    rows = (
        range(len(colours) // 4, len(colours) // 3),
        range(len(colours) // 2, len(colours) * 3 // 5),
    )
    upper, lower = (colours[row.start : row.stop, : -len(colours)] for row in rows)
    assert upper.max() > 0.2
    assert upper.min() < -0.2
    assert abs(lower).max() < 0.1
    assert "nbdist-figure" in view.html


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

    assert "in # s, # moved" in compared(switch_result(MOVED).text)


def test_ranks_records_become_one() -> None:
    """Bytes are those of all, the slowest counts, what is not on all ranks has its ranks."""
    first = replace(MOVED, stale=("best = model",), elapsed_s=0.1)
    other = replace(MOVED, notes=("late",), elapsed_s=0.3)
    both = merge_reports([first, other])

    assert both.models == ("model",)
    assert both.stale == ("[0] best = model",)
    assert both.notes == ("[1] late",)
    assert (both.moved_bytes, both.elapsed_s) == (6_700_000, 0.3)
