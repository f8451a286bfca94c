"""Which rank printed what in place of what."""

from __future__ import annotations

import pytest

from nbdist.testing.difference import MOST_CHARACTERS, MOST_LINES, difference


def printed(stored: str, now: str) -> list[str]:
    return difference({"stdout": [stored]}, {"stdout": [now]})


def test_equal_texts_have_none() -> None:
    """Whatever their kinds."""
    texts = {"stdout": ["[0-1] a\n"], "text/html": ["<b>"]}

    assert difference(texts, texts) == []


@pytest.mark.parametrize(
    ("stored", "now", "lines"),
    [
        (
            "[0-3] step 0\n[0-3] loss 3.31\n",
            "[0-3] step 0\n[0,2-3] loss 3.31\n[1] loss 3.32\n",
            ["rank 1 printed (line 2):", "  expected: loss 3.31", "  got:      loss 3.32"],
        ),
        (
            "[0-1] a\n[0-1] c\n",
            "[0-1] a\n[0-1] b\n[0-1] c\n",
            ["ranks 0-1 printed (line 2):", "  expected: nothing", "  got:      b"],
        ),
        (
            "[0] tensor([[1,\n     2]])\n[1] tensor([[1,\n     2]])\ndone\n",
            "[0-1] tensor([[1,\n       2]])\nover\n",
            ["the notebook printed (line 1):", "  expected: done", "  got:      over"],
        ),
        (
            "[0-1] a\n",
            "[0] a\n[1] a\n",
            [
                "each rank printed the same, in another order: the first line that differs is 1",
                "  expected: [0-1] a",
                "  got:      [0] a",
            ],
        ),
        (
            "[3-1] no ranks\n",
            "[3-1] NO ranks\n",
            [
                "the notebook printed (line 1):",
                "  expected: [3-1] no ranks",
                "  got:      [3-1] NO ranks",
            ],
        ),
    ],
)
def test_each_rank_has_its_own_lines(stored: str, now: str, lines: list[str]) -> None:
    """Merged lines belong to all ranks of their label, a value's further lines to the same."""
    assert printed(stored, now) == lines


def test_ranks_that_differ_alike_are_told_together() -> None:
    """And each other one by itself."""
    lines = printed("[0-7] 1\n", "[0,2-6] 1\n[1] 2\n[7] 2\n")

    assert [line for line in lines if ":" in line[-1]] == ["ranks 1,7 printed (line 1):"]


def test_long_outputs_are_cut_around_what_differs() -> None:
    """Of many lines the first, of a long line the part that is not the same."""
    long, many = (
        printed("x" * 900 + "A" + "y" * 900, "x" * 900 + "B" + "y" * 900),
        printed("", "".join(f"[0] line {n}\n" for n in range(30))),
    )

    apart = printed("".join("a\n=\n" for _ in range(7)), "".join("b\n=\n" for _ in range(7)))

    assert apart[-1] == "and 2 more in what the notebook printed"
    assert all("A" in line or "B" in line for line in long[1:])
    assert max(map(len, long)) < MOST_CHARACTERS + 30
    assert len(many) == 1 + 1 + MOST_LINES + 1
    assert many[-1].strip() == f"... and {30 - MOST_LINES} more lines"


def test_html_is_told_only_where_the_text_says_nothing() -> None:
    """The page has the same numbers, and is harder to read."""
    stored = {"text/plain": ["a"], "text/html": ["<b>a</b>"]}
    both = difference(stored, {"text/plain": ["b"], "text/html": ["<b>b</b>"]})
    page = difference(stored, {**stored, "text/html": ["<i>a</i>"]})

    assert [line for line in both if line.endswith(":")] == ["the notebook showed (line 1):"]
    assert page[0] == "the notebook showed as text/html (line 1):"


def test_an_error_and_a_number_of_outputs_differ_too() -> None:
    """An error that is another, and a display that came twice."""
    error = difference(
        {"ename": ["Deadlock"], "evalue": ["a"]}, {"ename": ["Timeout"], "evalue": ["a"]}
    )
    twice = difference({"text/plain": ["a\nb"]}, {"text/plain": ["a", "b"]})

    assert error[0] == "the notebook raised (line 1):"
    assert twice == ["the notebook showed the same, in 2 outputs in place of 1"]
