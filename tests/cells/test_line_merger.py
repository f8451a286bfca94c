r"""Lines of several ranks are grouped by their number, in time, and none is lost."""

from __future__ import annotations

import random
import re
import time

import pytest

from nbdist.cells.line_merger import (
    BEHIND_S,
    Attachment,
    Bar,
    Line,
    LineMerger,
    labelled,
    overwritten,
)

ERASE_LINE = "\x1b[2K"


def shown(merger: LineMerger, now_s: float) -> str:
    """The text of the lines that are due; fails on anything else."""
    events = merger.due(now_s)
    assert all(isinstance(event, Line) for event in events), events
    return "".join(event.text for event in events if isinstance(event, Line))


def texts(events: list[Line | Bar | Attachment]) -> list[str]:
    """Every event as a short text, and every line of several that are shown at once."""
    found = []
    for event in events:
        if isinstance(event, Attachment):
            found.append(f"<{event.rank}:{event.payload}>")
        elif isinstance(event, Bar):
            found.append(f"bar {event.text}")
        else:
            found += single(event)
    return found


def single(lines: Line) -> list[str]:
    """The lines one by one; what goes on in a further line of its own is indented."""
    return re.split(r"(?<=\n)(?=\[)", lines.text)


def ended(merger: LineMerger, ranks: range, now_s: float = 0.0) -> str:
    """What is shown once all ranks have ended."""
    for rank in ranks:
        merger.end(rank, now_s)
    return shown(merger, now_s)


# Grouping


def test_equal_lines_are_shown_once_with_all_ranks() -> None:
    """A line that every rank prints alike is one line under all ranks."""
    merger = LineMerger("stdout", range(4))
    for rank in range(4):
        merger.feed(rank, "loss 2.31\n", 0)

    assert merger.due(0) == [Line("stdout", "[0-3] loss 2.31\n")]


def test_different_lines_are_shown_in_rank_order() -> None:
    """Whatever the order of arrival, line k of rank 0 stands before line k of rank 1."""
    merger = LineMerger("stdout", range(3))
    for rank in (2, 1, 0):
        merger.feed(rank, f"rank {rank}\n", 0)

    assert shown(merger, 0) == "[0] rank 0\n[1] rank 1\n[2] rank 2\n"


def test_partly_equal_lines_are_grouped_at_their_lowest_rank() -> None:
    """Ranks with the same text share a line, which stands where the lowest of them stands."""
    merger = LineMerger("stdout", range(4))
    for rank, text in enumerate("abab"):
        merger.feed(rank, f"{text}\n", 0)

    assert shown(merger, 0) == "[0,2] a\n[1,3] b\n"


def test_lines_wait_for_the_others() -> None:
    """Line k is not shown before every rank has written it, within the first second."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "a\nb\n", 0)
    before = shown(merger, 0.5)
    merger.feed(1, "a\n", 0.9)

    assert before == ""
    assert shown(merger, 0.9) == "[0-1] a\n"


def test_only_chosen_ranks_are_waited_for() -> None:
    """With ranks 1 and 3 chosen, labels and waiting know of no other rank."""
    merger = LineMerger("stdout", (3, 1))
    merger.feed(3, "x\n", 0)
    merger.feed(1, "x\n", 0)

    assert shown(merger, 0) == "[1,3] x\n"


def test_one_rank_is_never_delayed() -> None:
    """A rank that was chosen alone is shown line by line at once."""
    merger = LineMerger("stdout", [2])
    merger.feed(2, "a\nb", 0)

    assert shown(merger, 0) == "[2] a\n"
    assert merger.next_due_s() == BEHIND_S  # for the unfinished `b`


def test_a_rank_that_ends_early_is_not_waited_for() -> None:
    """Lines beyond the last one of an ended rank are shown at once."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "a\n", 0)
    merger.end(0, 0)
    merger.feed(1, "a\nb\nc\n", 0)

    assert shown(merger, 0) == "[0-1] a\n[1] b\n[1] c\n"


def test_different_numbers_of_lines() -> None:
    """Ranks that print 1, 2 and 3 lines are grouped as long as each has lines."""
    merger = LineMerger("stdout", range(3))
    for rank in range(3):
        merger.feed(rank, "x\n" * (rank + 1), 0)

    assert ended(merger, range(3)) == "[0-2] x\n[1-2] x\n[2] x\n"


def test_streams_are_named() -> None:
    """A merger of stderr says so in what it returns."""
    merger = LineMerger("stderr", [0])
    merger.feed(0, "w\n", 0)

    assert merger.due(0) == [Line("stderr", "[0] w\n")]


# Time


def test_only_rank_0_prints() -> None:
    """A rank that prints alone is waited with for a second once, then shown immediately."""
    merger = LineMerger("stdout", range(4))
    merger.feed(0, "1\n", 10.0)
    early = shown(merger, 10.999)
    due_s = merger.next_due_s()
    first = shown(merger, 11.0)
    merger.feed(0, "2\n", 11.5)

    assert early == ""
    assert due_s == 11.0
    assert first == "[0] 1\n"
    assert shown(merger, 11.5) == "[0] 2\n"
    assert merger.next_due_s() is None


def test_the_oldest_line_counts() -> None:
    """The second runs from the first rank that has the line, not from the last."""
    merger = LineMerger("stdout", range(3))
    merger.feed(2, "x\n", 0.0)
    merger.feed(1, "x\n", 0.9)

    assert merger.next_due_s() == 1.0
    assert shown(merger, 1.0) == "[1-2] x\n"


def test_a_rank_behind_is_shown_live_while_it_catches_up() -> None:
    """Late lines of a rank behind come under its own label as they arrive."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "a\nb\nc\n", 0)
    first = shown(merger, 1)
    merger.feed(1, "a\n", 5)
    late = shown(merger, 5)

    assert first == "[0] a\n[0] b\n[0] c\n"
    assert late == "[1] a\n"


def test_a_rank_that_caught_up_is_waited_for_again() -> None:
    """Once a late rank has written as much as the others, lines are grouped again."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "a\nb\n", 0)
    merger.due(1)
    merger.feed(1, "a\nb\n", 5)
    late = shown(merger, 5)
    merger.feed(0, "c\n", 6)
    waiting = shown(merger, 6.5)
    merger.feed(1, "c\n", 6.6)

    assert late == "[1] a\n[1] b\n"
    assert waiting == ""
    assert shown(merger, 6.6) == "[0-1] c\n"


def test_a_rank_that_almost_caught_up_is_not_waited_for() -> None:
    """One line short of the others is still behind."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "a\nb\n", 0)
    merger.due(1)
    merger.feed(1, "a\n", 5)
    merger.due(5)
    merger.feed(0, "c\n", 6)

    assert shown(merger, 6) == "[0] c\n"


def test_a_late_line_and_a_new_one_in_one_message() -> None:
    """A rank behind that catches up and goes on in one message shares the new line."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "a\n", 0)
    merger.due(1)
    merger.feed(1, "a\nb\n", 2)
    merger.feed(0, "b\n", 2.1)

    assert shown(merger, 2.1) == "[1] a\n[0-1] b\n"


def test_two_ranks_behind_by_different_amounts() -> None:
    """Each rank behind goes its own way; the leaders still wait for each other."""
    merger = LineMerger("stdout", range(3))
    merger.feed(0, "a\nb\n", 0)
    merger.feed(2, "a\n", 0)
    first = shown(merger, 1)
    merger.feed(1, "a\n", 2)
    second = shown(merger, 2)
    merger.feed(2, "b\n", 3)
    third = shown(merger, 3)
    merger.feed(0, "c\n", 4)

    assert (first, second, third) == ("[0,2] a\n[0] b\n", "[1] a\n", "[2] b\n")
    assert shown(merger, 4) == ""  # rank 2 has caught up and is waited for, rank 1 is not
    assert shown(merger, 5) == "[0] c\n"


def test_a_late_group_needs_no_second_wait() -> None:
    """A queue that grew while a rank was waited for is shown as a whole after the second."""
    merger = LineMerger("stdout", range(2))
    for number in range(10):
        merger.feed(0, f"{number}\n", number / 10)

    assert shown(merger, 1.0) == "".join(f"[0] {number}\n" for number in range(10))


def test_next_due_is_never_in_the_past() -> None:
    """After `due(now)` nothing asks to be called at or before now, whatever came before."""
    generator = random.Random(1)
    pieces = ("a\n", "b\n", "part", "\r10%", "\r20%", "\r   \r", "\r", "\n", "x\ny\nz")
    for _ in range(200):
        merger = LineMerger("stdout", range(3))
        now_s, going = 0.0, [0, 1, 2]
        for _ in range(60):
            now_s += generator.choice((0, 0.1, 0.5, 1.0, 2.0))
            rank = generator.choice(going)
            kind = generator.random()
            if kind < 0.03 and len(going) > 1:
                going.remove(rank)
                merger.end(rank, now_s)
            elif kind < 0.1:
                merger.attach(rank, "figure", now_s)
            elif kind < 0.9:
                merger.feed(rank, generator.choice(pieces), now_s)
            merger.due(now_s)
            due_s = merger.next_due_s()

            assert due_s is None or now_s < due_s <= now_s + BEHIND_S


def test_due_at_the_time_that_was_named_shows_something() -> None:
    """Waking up when `next_due_s` says is never in vain: no wait turns into polling."""
    generator = random.Random(2)
    for _ in range(300):
        merger = LineMerger("stdout", range(3))
        now_s = 0.0
        for _ in range(20):
            now_s += generator.random()
            merger.feed(generator.randrange(3), generator.choice(("a\n", "b", "\r1", "\n")), now_s)
            merger.due(now_s)
        due_s = merger.next_due_s()

        assert due_s is None or merger.due(due_s)


# Patience


def test_patient_waits_for_ever() -> None:
    """When patient, a silent rank is waited for until it ends, however long."""
    merger = LineMerger("stdout", range(2), is_patient=True)
    merger.feed(0, "a\nb\n", 0)

    assert shown(merger, 1e9) == ""
    assert merger.next_due_s() is None
    assert ended(merger, range(2)) == "[0] a\n[0] b\n"


def test_patient_shows_no_bars() -> None:
    """Unfinished lines are shown when they are finished, and not before."""
    merger = LineMerger("stderr", range(2), is_patient=True)
    merger.feed(0, "\r10%", 0)
    merger.feed(1, "text", 0)

    assert merger.due(100) == []


ALPHABET = ("a", "b", " ", "\n", "\n", "\r", "\r", "é", "🏖", "\x1b[K", "  ", "ab\n", "\r\n")


def written(generator: random.Random) -> list[str]:
    """What one rank writes: text, and `figure` for a figure."""
    length = generator.randrange(30)
    return [
        "figure" if generator.random() < 0.08 else generator.choice(ALPHABET) for _ in range(length)
    ]


def played(
    messages: list[list[str]], generator: random.Random
) -> tuple[list[Line | Bar | Attachment], set[int]]:
    """The patient merge of what the ranks wrote, cut and interleaved by chance."""
    merger = LineMerger("stdout", range(len(messages)), is_patient=True)
    positions = [0] * len(messages)
    going = list(range(len(messages)))
    events: list[Line | Bar | Attachment] = []
    now_s = 0.0
    while going:
        rank = generator.choice(going)
        now_s += generator.random() * 3
        at = positions[rank]
        if at == len(messages[rank]):
            merger.end(rank, now_s)
            going.remove(rank)
        elif messages[rank][at] == "figure":
            merger.attach(rank, "figure", now_s)
            positions[rank] += 1
        else:
            piece = ""
            for _ in range(generator.randint(1, 6)):
                if at < len(messages[rank]) and messages[rank][at] != "figure":
                    piece += messages[rank][at]
                    at += 1
            merger.feed(rank, piece, now_s)
            positions[rank] = at
        if generator.random() < 0.6:
            events += merger.due(now_s)
    return events + merger.due(now_s), merger.hidden_bar_ranks


def by_lines_and_ranks(
    events: list[Line | Bar | Attachment], rank: int
) -> list[Line | Bar | Attachment]:
    """Lines, and the figures of one rank; two ranks' figures have no order of their own."""
    return [
        one
        for event in events
        if not isinstance(event, Attachment) or event.rank == rank
        for one in (
            [Line(event.stream, text) for text in single(event)]
            if isinstance(event, Line)
            else [event]
        )
    ]


@pytest.mark.parametrize("seed", range(60))
def test_patient_result_depends_on_what_was_written_alone(seed: int) -> None:
    """Any cutting into messages and any interleaving of the ranks give the same lines."""
    generator = random.Random(seed)
    messages = [written(generator) for _ in range(generator.randint(2, 4))]
    first, first_hidden = played(messages, generator)
    for _ in range(15):
        events, hidden = played(messages, generator)

        assert hidden == first_hidden
        for rank in range(len(messages)):
            assert by_lines_and_ranks(events, rank) == by_lines_and_ranks(first, rank)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_patient", [True, False])
def test_no_line_is_lost_or_made_up(seed: int, *, is_patient: bool) -> None:
    """Each rank's own lines come back in order from the merged ones, at any timing."""
    generator = random.Random(seed)
    count = generator.randint(2, 4)
    wanted = {
        rank: [generator.choice(("x", "y", "", "  z")) for _ in range(generator.randrange(40))]
        for rank in range(count)
    }
    merger = LineMerger("stdout", range(count), is_patient=is_patient)
    left = {rank: "\n".join([*lines, ""]) for rank, lines in wanted.items()}
    got: dict[int, list[str]] = {rank: [] for rank in wanted}
    now_s = 0.0
    going = list(wanted)
    while going:
        rank = generator.choice(going)
        cut = generator.randint(1, 10)
        merger.feed(rank, left[rank][:cut], now_s)
        left[rank] = left[rank][cut:]
        if not left[rank]:
            merger.end(rank, now_s)
            going.remove(rank)
        now_s += generator.choice((0, 0.01, 0.6))
        for event in merger.due(now_s):
            for line in single(event) if isinstance(event, Line) else ():
                label, _, text = line.removesuffix("\n").removeprefix("[").partition("] ")
                for span in label.split(","):
                    first, _, last = span.partition("-")
                    for one in range(int(first), int(last or first) + 1):
                        got[one].append(text)

    assert got == wanted


# What a line is


def test_a_line_in_pieces() -> None:
    """A line that comes in three messages is one line."""
    merger = LineMerger("stdout", [0])
    for piece in ("lo", "ss", " 2\n"):
        merger.feed(0, piece, 0)

    assert shown(merger, 0) == "[0] loss 2\n"


def test_an_unfinished_line_at_the_end_is_a_line() -> None:
    """What a rank wrote last without a newline is shown as a line when the rank ends."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "done", 0)
    merger.feed(1, "done\n", 0)

    assert ended(merger, range(2)) == "[0-1] done\n"


def test_windows_line_ends() -> None:
    r"""`\r\n` ends a line as `\n` does, even when it is cut in two, and makes no bar of it."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "a\r\nb\r\n", 0)
    merger.feed(1, "a\r", 0)
    merger.feed(1, "\nc\r\n", 0)

    assert shown(merger, 0) == "[0-1] a\n[0] b\n[1] c\n"
    assert merger.hidden_bar_ranks == set()


def test_empty_lines_count() -> None:
    """Empty lines are lines: they are shown, and those after them stay aligned."""
    merger = LineMerger("stdout", range(2))
    for rank in range(2):
        merger.feed(rank, f"\n\n{rank}\n", 0)

    assert shown(merger, 0) == "[0-1] \n[0-1] \n[0] 0\n[1] 1\n"


def test_indentation_and_trailing_spaces_are_kept() -> None:
    """White space around a line's text is the user's."""
    merger = LineMerger("stdout", [0])
    merger.feed(0, "    x  \n\ty\n", 0)

    assert shown(merger, 0) == "[0]     x  \n[0] \ty\n"


def test_unicode_line_separators_do_not_cut_lines() -> None:
    r"""Only `\n` ends a line; other separators and wide characters stay in it."""
    text = "naïve 🏖️ \u2028 \x0b \x85 \x1c 漢字"
    merger = LineMerger("stdout", range(2))
    for rank in range(2):
        merger.feed(rank, text + "\n", 0)

    assert shown(merger, 0) == f"[0-1] {text}\n"


def test_colours_are_kept() -> None:
    """ANSI colours pass through, and tell lines apart."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "\x1b[31mred\x1b[0m\n", 0)
    merger.feed(1, "red\n", 0)

    assert shown(merger, 0) == "[0] \x1b[31mred\x1b[0m\n[1] red\n"


def test_blocks_are_compared_as_one() -> None:
    """A result of several lines is one line k, indented under its label."""
    merger = LineMerger("stdout", range(3))
    for rank in range(3):
        merger.block(rank, "tensor([[1],\n        [2]])" if rank < 2 else "None", 0)

    assert shown(merger, 0) == "[0-1] tensor([[1],\n              [2]])\n[2] None\n"


def test_a_block_ends_an_unfinished_line() -> None:
    """What was printed without a newline before a result stands before it."""
    merger = LineMerger("stdout", [0])
    merger.feed(0, "x = ", 0)
    merger.block(0, "42\n", 0)

    assert shown(merger, 0) == "[0] x = \n[0] 42\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("10%\r20%", "20%"),
        ("long text\rshort", "shorttext"),  # a terminal leaves the rest as well
        ("text\r", "text"),
        ("\r\r\rx", "x"),
        ("12345\rab\rc", "cb345"),
        ("long text\r\x1b[Kshort", "short"),
        ("long text\r\x1b[2Kshort", "short"),
        ("long text\rshort\x1b[K", "short"),
        ("long text\rshort\x1b[0K", "short"),
    ],
)
def test_overwritten(text: str, expected: str) -> None:
    """Carriage returns overwrite as in a terminal, and erase codes erase."""
    assert overwritten(text) == expected


def test_labelled_indents_further_lines() -> None:
    """All lines of a text begin in the same column."""
    assert labelled((0, 1, 3), "a\nb") == "[0-1,3] a\n        b"


# Bars


def test_a_bar_is_shown_at_once_from_the_lowest_rank() -> None:
    """The bar of the lowest rank that has one is shown, with where the others are."""
    merger = LineMerger("stderr", range(2))
    merger.feed(1, "\r10%", 0)
    alone = merger.due(0)
    merger.feed(0, "\r20%", 0)
    lowest = merger.due(0)
    merger.feed(1, "\r30%", 0)

    assert alone == [Bar("stderr", "[1] 10%")]
    assert lowest == [Bar("stderr", "[0] 20% (rank 1: 10%)")]
    assert merger.due(0) == [Bar("stderr", "[0] 20% (rank 1: 30%)")]
    assert merger.due(0) == []


def test_the_final_bars_are_one_line() -> None:
    """Of bars that end with different rates the lowest rank's is shown; the others are counted."""
    merger = LineMerger("stderr", range(3))
    for rank in range(3):
        for percent in range(0, 101, 50):
            merger.feed(rank, f"\r{percent:3}% {rank}.5it/s", 0)
        merger.feed(rank, "\n", 0)

    assert texts(merger.due(0)) == ["[0] 100% 0.5it/s\n"]
    assert merger.hidden_bar_ranks == {1, 2}


def test_equal_bars_are_not_hidden() -> None:
    """Ranks whose bars end alike share the line, and nothing is counted as hidden."""
    merger = LineMerger("stderr", range(2))
    for rank in range(2):
        merger.feed(rank, "\r10%\r100%\n", 0)

    assert shown(merger, 0) == "[0-1] 100%\n"
    assert merger.hidden_bar_ranks == set()


def test_a_bar_hides_no_plain_line() -> None:
    """Where rank 0 has a bar and rank 1 a warning as line k, both are shown."""
    merger = LineMerger("stderr", range(3))
    merger.feed(0, "\r10%\r100%\n", 0)
    merger.feed(1, "WARNING: loss is nan\n", 0)
    merger.feed(2, "\r11%\r 99%\n", 0)

    assert shown(merger, 0) == "[0] 100%\n[1] WARNING: loss is nan\n"
    assert merger.hidden_bar_ranks == {2}


def test_lines_after_a_bar_that_was_blanked_out_are_plain() -> None:
    r"""After tqdm's `leave=False` each rank's own lines are shown, without the bar's spaces."""
    merger = LineMerger("stderr", range(2))
    for rank in range(2):
        merger.feed(rank, "\r 50%|#####     |\r100%|##########|", 0)
        merger.feed(rank, "\r" + " " * (16 + rank) + "\r", 0)
        merger.feed(rank, f"rank {rank} done\n", 0)

    assert texts(merger.due(0)) == ["[0] rank 0 done\n", "[1] rank 1 done\n"]
    assert merger.hidden_bar_ranks == set()


@pytest.mark.parametrize("blank", ["\r        \r", "\r" + ERASE_LINE, "\r" + ERASE_LINE + "\r"])
def test_a_bar_that_was_blanked_out_leaves_nothing(blank: str) -> None:
    """A bar that removed itself is neither a bar nor a line any more."""
    merger = LineMerger("stderr", range(2))
    merger.feed(0, "\r 100%", 0)
    first = merger.due(0)
    merger.feed(0, blank, 0)
    second = merger.due(0)

    assert first == [Bar("stderr", "[0]  100%")]
    assert second == [Bar("stderr", "")]
    assert merger.next_due_s() is None
    assert ended(merger, range(2)) == ""


def test_a_bar_goes_on_where_it_was() -> None:
    """Text after a return overwrites from the start, however it is cut into messages."""
    whole, cut = LineMerger("stderr", [0]), LineMerger("stderr", [0])
    whole.feed(0, "abcdef\rxyz\n", 0)
    for piece in ("abcdef", "\r", "x", "y", "z", "\n"):
        cut.feed(0, piece, 0)

    assert [event for event in cut.due(0) if isinstance(event, Line)] == whole.due(0)


def test_a_million_redraws_take_no_memory() -> None:
    """Of a bar's redraws only what can still be seen is kept."""
    merger = LineMerger("stderr", [0])
    for number in range(20_000):
        merger.feed(0, f"\r{number:6} of 20000", 0)

    assert len(merger._ranks[0].partial) < 100
    assert merger.due(0) == [Bar("stderr", "[0]  19999 of 20000")]


def test_a_bar_is_withdrawn_when_its_line_ends() -> None:
    """After the last redraw became a line there is no bar any more, and it is said."""
    merger = LineMerger("stderr", [0])
    merger.feed(0, "\r 50%", 0)
    merger.due(0)
    merger.feed(0, "\r100%\n", 0)

    assert merger.due(0) == [Line("stderr", "[0] 100%\n"), Bar("stderr", "")]


def test_a_prompt_is_shown_after_a_second() -> None:
    """Text without a newline is shown as it is once it has stood for a second."""
    merger = LineMerger("stdout", range(2))
    merger.feed(1, "computing ...", 3.0)
    early = merger.due(3.9)
    due_s = merger.next_due_s()

    assert early == []
    assert due_s == 4.0
    assert merger.due(4.0) == [Bar("stdout", "[1] computing ...")]
    assert merger.next_due_s() is None


def test_a_prompt_that_grows_is_followed() -> None:
    """Dots that are printed one by one are shown as they come after the first second."""
    merger = LineMerger("stdout", [0])
    merger.feed(0, ".", 0)
    merger.due(1)
    merger.feed(0, ".", 2)

    assert merger.due(2) == [Bar("stdout", "[0] ..")]


def test_a_new_prompt_begins_its_own_second() -> None:
    """The second runs from the unfinished line's own beginning, not from an earlier one's."""
    merger = LineMerger("stdout", [0])
    merger.feed(0, "a", 0)
    merger.feed(0, "\na", 5)
    merger.due(5)

    assert merger.next_due_s() == 6


# Attachments


def test_a_figure_keeps_its_place_among_lines() -> None:
    """A figure comes after the lines before it and before the lines after it."""
    merger = LineMerger("stdout", range(2))
    for rank in range(2):
        merger.feed(rank, "before\n", 0)
        merger.attach(rank, "fig", 0)
        merger.feed(rank, "after\n", 0)

    assert texts(merger.due(0)) == ["[0-1] before\n", "<0:fig>", "<1:fig>", "[0-1] after\n"]


def test_a_figure_waits_for_its_lines() -> None:
    """A figure is not shown before the lines above it, which wait for other ranks."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "before\n", 0)
    merger.attach(0, "fig", 0)

    assert merger.due(0.5) == []
    assert texts(merger.due(1)) == ["[0] before\n", "<0:fig>"]


def test_a_figure_before_any_line_is_shown_at_once() -> None:
    """A figure that has no lines above it waits for nobody."""
    merger = LineMerger("stdout", range(2))
    merger.attach(0, "fig", 0)

    assert texts(merger.due(0)) == ["<0:fig>"]


def test_a_figure_ends_an_unfinished_line() -> None:
    """Text without a newline before a figure stands before it, not after."""
    merger = LineMerger("stdout", [0])
    merger.feed(0, "here: ", 0)
    merger.attach(0, "fig", 0)
    merger.feed(0, "and there\n", 0)

    assert texts(merger.due(0)) == ["[0] here: \n", "<0:fig>", "[0] and there\n"]


def test_an_update_leaves_an_unfinished_line_alone() -> None:
    """What changes a display elsewhere does not cut the line that is being written."""
    merger = LineMerger("stdout", [0])
    merger.feed(0, "1 ", 0)
    merger.attach(0, "update", 0, ends_line=False)
    merger.feed(0, "2\n", 0)

    assert texts(merger.due(0)) == ["<0:update>", "[0] 1 2\n"]


# Size


@pytest.mark.parametrize("is_patient", [True, False])
def test_many_lines(*, is_patient: bool) -> None:
    """100,000 lines of each of two ranks, half of them alike, pass in seconds, none lost."""
    merger = LineMerger("stdout", range(2), is_patient=is_patient)
    began_s = time.monotonic()
    lines = []
    for start in range(0, 100_000, 1000):
        for rank in range(2):
            text = "".join(
                f"line {k} of {rank if k % 2 else 'all'}\n" for k in range(start, start + 1000)
            )
            merger.feed(rank, text, 0)
        lines += texts(merger.due(0))
    elapsed_s = time.monotonic() - began_s

    assert len(lines) == 150_000
    assert lines[:3] == ["[0-1] line 0 of all\n", "[0] line 1 of 0\n", "[1] line 1 of 1\n"]
    assert lines[-1] == "[1] line 99999 of 1\n"
    assert elapsed_s < 10


def test_many_lines_of_a_rank_that_waits() -> None:
    """100,000 lines that wait for a silent rank are shown when it ends."""
    merger = LineMerger("stdout", range(2), is_patient=True)
    for start in range(0, 100_000, 100):
        merger.feed(0, "".join(f"{k}\n" for k in range(start, start + 100)), 0)
        merger.due(0)

    assert ended(merger, range(2)).splitlines() == [f"[0] {k}" for k in range(100_000)]
