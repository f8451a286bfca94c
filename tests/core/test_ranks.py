"""Rank lists are read in every form that a user types, and refused with the choices."""

from __future__ import annotations

import random

import pytest

from nbdist.core.ranks import (
    is_all,
    pack_ranks,
    parse_numbers,
    parse_ranks,
    rank_label,
    unpack_ranks,
)
from nbdist.errors import OptionError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", (0,)),
        ("0,2-3", (0, 2, 3)),
        ("[0,2-3]", (0, 2, 3)),
        (" [ 0 , 2 - 3 ] ", (0, 2, 3)),
        ("3,1,1-2", (1, 2, 3)),
        ("2-2", (2,)),
        ("all", (0, 1, 2, 3)),
        (" ALL ", (0, 1, 2, 3)),
        ("[all]", (0, 1, 2, 3)),
    ],
)
def test_forms(text: str, expected: tuple[int, ...]) -> None:
    """Every documented form gives ascending ranks, each once."""
    assert expected == parse_ranks(text, world_size=4)


@pytest.mark.parametrize(
    "text",
    ["", " ", "[]", ",", "0,", ",0", "0 1", "a", "0-", "-1", "0--1", "[0", "0]", "0;1", "1.5", "²",
     "0-999999999"],  # refused before it takes memory
)  # fmt: skip
def test_malformed(text: str) -> None:
    """A text of another form is quoted in the error, with the form to use."""
    with pytest.raises(OptionError) as caught:
        parse_ranks(text, world_size=4)

    assert str(caught.value) == f"{text!r} does not name ranks. Write them as 0, 0,2-3 or all."


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ("5", 4, "rank 5 does not exist: 4 ranks run, 0-3."),
        ("0,4", 4, "rank 4 does not exist: 4 ranks run, 0-3."),
        ("2-6,9", 4, "ranks 4-6,9 do not exist: 4 ranks run, 0-3."),
        ("1", 1, "rank 1 does not exist: 1 rank runs, 0."),
        ("2", 2, "rank 2 does not exist: 2 ranks run, 0-1."),
        ("0,3-1", 4, "3-1 in '0,3-1' runs backwards. Write 1-3."),
    ],
)
def test_missing_rank(text: str, world_size: int, message: str) -> None:
    """A rank that does not run is named beside those that do, a reversed range as it should be."""
    with pytest.raises(OptionError) as caught:
        parse_ranks(text, world_size)

    assert message == str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((), ""),
        ((2,), "2"),
        ((0, 1), "0-1"),
        ((0, 1, 2, 3), "0-3"),
        ((0, 2, 3), "0,2-3"),
        ((9, 11, 10, 1), "1,9-11"),
        ((1, 1), "1"),
    ],
)
def test_label(ranks: tuple[int, ...], expected: str) -> None:
    """Neighbours are joined into spans, in rank order, whatever order they come in."""
    assert expected == rank_label(ranks)


def test_label_is_read_back() -> None:
    """The label of any set of ranks parses to the same ranks."""
    generator = random.Random(0)
    for _ in range(200):
        world_size = generator.randint(1, 40)
        ranks = generator.sample(range(world_size), generator.randint(1, world_size))

        assert tuple(sorted(ranks)) == parse_ranks(rank_label(ranks), world_size)


def test_numbers_keep_order_and_repeats() -> None:
    """So that GPU lists can be ordered and checked; a malformed one is told as GPUs."""
    assert parse_numbers("3,0-1,3", "GPUs") == (3, 0, 1, 3)
    with pytest.raises(OptionError, match=r"^'x' does not name GPUs\."):
        parse_numbers("x", "GPUs")


def test_is_all() -> None:
    """Only the word itself, in any case and in brackets or not, means everything."""
    assert [text for text in ("all", "[All]", "0", "all,0", "") if is_all(text)] == ["all", "[All]"]


def test_packed_ranks_come_back_in_their_order() -> None:
    """Any order and any gaps come back the same; regular ones are short however many they are."""
    chance = random.Random(5)
    lists = [(), (3,), (5, 4, 3), (2, 2), (0, 1, 3, 5, 7, 6)]
    lists += [tuple(chance.sample(range(30), chance.randrange(12))) for _ in range(200)]

    assert [unpack_ranks(pack_ranks(ranks)) for ranks in lists] == lists
    assert len(pack_ranks(range(3, 8192, 8))) < 16
