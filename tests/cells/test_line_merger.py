r"""Lines of several ranks are grouped by their number, in time, and none is lost."""

from __future__ import annotations

import random
import re

import pytest

import nbdist
from nbdist.cells.line_merger import (
    BEHIND_S,
    Attachment,
    Bar,
    Line,
    LineMerger,
    overwrite,
)
from nbdist.core import units

ERASE_LINE = "\x1b[2K"


def shown(merger: LineMerger, now_s: float) -> str:
    """The text of the lines that are due; fails on anything else."""
    events = merger.due(now_s)
    assert all(isinstance(event, Line) for event in events), events
    return "".join(event.text for event in events if isinstance(event, Line))


def texts(events: list[Line | Bar | Attachment]) -> list[str]:
    """Every event as a short text, and every line of several that are shown at once."""
    shown = []
    for event in events:
        if isinstance(event, Attachment):
            shown.append(f"<{event.rank}>")
        elif isinstance(event, Bar):
            shown.append(f"bar {event.text}")
        else:
            shown += single(event)
    return shown


def single(lines: Line) -> list[str]:
    """The lines one by one; what goes on in a further line of its own is indented."""
    return re.split(r"(?<=\n)(?=\[)", lines.text)


def ended(merger: LineMerger, ranks: range, now_s: float = 0.0) -> str:
    for rank in ranks:
        merger.end(rank, now_s)
    return shown(merger, now_s)


# Grouping


_WIDE = "naïve 🏖️ \u2028 \x0b \x85 \x1c 漢字"
_BLANKED = "\r 50%|#####     |\r100%|##########|\r{spaces}\rrank {rank} done\n"


@pytest.mark.parametrize(
    ("pieces", "expected", "hidden"),
    [
        # Equal lines once; others by rank, at the place of the lowest that has the text.
        ([(rank, "loss 2.31\n") for rank in range(4)], "[0-3] loss 2.31\n", set()),
        ([(rank, f"{rank}\n") for rank in (2, 1, 0)], "[0] 0\n[1] 1\n[2] 2\n", set()),
        ([(rank, f"{'abab'[rank]}\n") for rank in range(4)], "[0,2] a\n[1,3] b\n", set()),
        ([(3, "x\n"), (1, "x\n")], "[1,3] x\n", set()),
        (
            [(rank, f"{rank == 7}\nall\n") for rank in range(64)],
            "[0-6,8-63] False\n[7] True\n[0-63] all\n",
            set(),
        ),
        # What a line is: in pieces, with Windows' ends, empty, with spaces, wide and in colours.
        ([(0, "lo"), (0, "ss"), (0, " 2\n")], "[0] loss 2\n", set()),
        (
            [(0, "a\r\nb\r\n"), (1, "a\r"), (1, "\nc\r\n")],
            "[0-1] a\n[0] b\n[1] c\n",
            set(),
        ),
        ([(rank, f"\n\n{rank}\n") for rank in range(2)], "[0-1] \n[0-1] \n[0] 0\n[1] 1\n", set()),
        ([(0, "    x  \n\ty\n")], "[0]     x  \n[0] \ty\n", set()),
        ([(0, f"{_WIDE}\n"), (1, f"{_WIDE}\n")], f"[0-1] {_WIDE}\n", set()),
        ([(0, "\x1b[31mred\x1b[0m\n"), (1, "red\n")], "[0] \x1b[31mred\x1b[0m\n[1] red\n", set()),
        # A value of several lines is compared as one, in pieces too; open brackets alone are none.
        (
            [(0, "t([[1],\n   [2]])\nx\n"), (1, "t([[3],\n"), (1, "\n   [4]])\nx\n")],
            "[0] t([[1],\n       [2]])\n[1] t([[3],\n    \n       [4]])\n[0-1] x\n",
            set(),
        ),
        (
            [(rank, f"{{\n  'a': 1\n}}\n:(\n{rank}\n") for rank in range(2)],
            "[0-1] {\n        'a': 1\n      }\n[0-1] :(\n[0] 0\n[1] 1\n",
            set(),
        ),
        # Bars that have ended: one of several is shown, and no plain line is hidden by one.
        ([(rank, "\r10%\r100%\n") for rank in range(2)], "[0-1] 100%\n", set()),
        (
            [(rank, f"\r 50% {rank}.5it/s\r100% {rank}.5it/s\n") for rank in range(3)],
            "[0] 100% 0.5it/s\n",
            {1, 2},
        ),
        (
            [(0, "\r10%\r100%\n"), (1, "WARNING: loss is nan\n"), (2, "\r11%\r 99%\n")],
            "[0] 100%\n[1] WARNING: loss is nan\n",
            {2},
        ),
        # After tqdm's `leave=False` the next line is plain, without the bar's spaces.
        (
            [(rank, _BLANKED.format(spaces=" " * (16 + rank), rank=rank)) for rank in range(2)],
            "[0] rank 0 done\n[1] rank 1 done\n",
            set(),
        ),
    ],
)
def test_lines_that_all_have_written_are_shown_at_once(
    pieces: list[tuple[int, str]], expected: str, hidden: set[int]
) -> None:
    """Equal lines come once with their ranks, others in rank order, whatever arrives when."""
    merger = LineMerger("stderr", {rank for rank, _ in pieces})
    for rank, text in pieces:
        merger.feed(rank, text, 0)
    events = merger.due(0)

    assert "".join(event.text for event in events if isinstance(event, Line)) == expected
    assert {event.stream for event in events} == {"stderr"}
    assert merger.hidden_bar_ranks == hidden


@pytest.mark.parametrize(
    ("pieces", "expected", "as_compared"),
    [
        # A line at a time, and several that come at once.
        (["loss {} of 3\n"], "[0-1] loss 2.30, 2.31 of 3\n", "[0-1] loss # of 3\n"),
        (["a {}\n{} b\nc\n"], "[0-1] a 2.30, 2.31\n[0-1] 2.30, 2.31 b\n[0-1] c\n",
         "[0-1] a #\n[0-1] # b\n[0-1] c\n"),
        # What is claimed is compared: whether a value is there, and where.
        (["{} a\n", "a {}\n"], "[0] 2.30 a\n[1] a 2.31\n", "[0] # a\n[1] a #\n"),
        (["{}\n", "\n"], "[0] 2.30\n[1] \n", "[0] #\n[1] \n"),
    ],
)  # fmt: skip
def test_lines_that_differ_in_what_is_not_compared_are_one(
    monkeypatch: pytest.MonkeyPatch, pieces: list[str], expected: str, as_compared: str
) -> None:
    """With the value of each rank."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    merger = LineMerger("stdout", range(2), is_patient=True)
    for rank in range(2):
        value = nbdist.shown(f"2.3{rank}")
        merger.feed(rank, pieces[min(rank, len(pieces) - 1)].replace("{}", value), 0)
    text = ended(merger, range(2))

    assert units.visible(text) == expected
    assert units.compared(text) == as_compared


def test_a_value_of_several_lines_that_is_not_compared_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever number of lines it has, and in whatever pieces it comes."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    merger = LineMerger("stdout", range(2), is_patient=True)
    text = f"so:\n{nbdist.shown('def f():' + chr(10) + '    pass')}\n"
    for piece in (text[:12], text[12:], "end\n"):
        merger.feed(0, piece, 0)
    merger.feed(1, f"so:\n{nbdist.shown('x')}\nend\n", 0)
    text = ended(merger, range(2))

    assert units.compared(text) == "[0-1] so:\n[0-1] #\n[0-1] end\n"
    assert "def f():" in text


def test_a_rank_that_ends_early_is_not_waited_for() -> None:
    """Lines beyond the last one of an ended rank are shown at once."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "a\n", 0)
    merger.end(0, 0)
    merger.feed(1, "a\nb\nc\n", 0)

    assert shown(merger, 0) == "[0-1] a\n[1] b\n[1] c\n"


# Time


@pytest.mark.parametrize(
    ("n_ranks", "steps"),
    [
        # A rank alone is never waited for.
        (1, [(0.0, {0: "a\nb"}, ["[0] a\n"])]),
        # One that prints alone is waited with for a second once, then shown immediately.
        (
            4,
            [
                (10.0, {0: "1\n"}, []),
                (10.999, {}, []),
                (11.0, {}, ["[0] 1\n"]),
                (11.5, {0: "2\n"}, ["[0] 2\n"]),
            ],
        ),
        # The second runs from the first rank that has the line, not from the last.
        (3, [(0.0, {2: "x\n"}, []), (0.9, {1: "x\n"}, []), (1.0, {}, ["[1-2] x\n"])]),
        # Line k waits for every rank, within the first second.
        (2, [(0.5, {0: "a\nb\n"}, []), (0.9, {1: "a\n"}, ["[0-1] a\n"])]),
        # A queue that grew while a rank was waited for is shown as a whole after the second.
        (2, [(0.0, {0: "a\n"}, []), (0.9, {0: "b\n"}, []), (1.0, {}, ["[0] a\n", "[0] b\n"])]),
        # Late lines of a rank behind come under its own label as they arrive.
        (
            2,
            [
                (0.0, {0: "a\nb\nc\n"}, []),
                (1.0, {}, ["[0] a\n", "[0] b\n", "[0] c\n"]),
                (5.0, {1: "a\n"}, ["[1] a\n"]),
                (6.0, {0: "d\n"}, ["[0] d\n"]),  # rank 1 is still behind
            ],
        ),
        # Once it has written as much as the others it is waited for again.
        (
            2,
            [
                (0.0, {0: "a\nb\n"}, []),
                (1.0, {}, ["[0] a\n", "[0] b\n"]),
                (5.0, {1: "a\nb\n"}, ["[1] a\n", "[1] b\n"]),
                (6.0, {0: "c\n"}, []),
                (6.6, {1: "c\n"}, ["[0-1] c\n"]),
            ],
        ),
        # One that catches up and goes on in one message shares the new line.
        (
            2,
            [
                (0.0, {0: "a\n"}, []),
                (1.0, {}, ["[0] a\n"]),
                (2.1, {1: "a\nb\n", 0: "b\n"}, ["[1] a\n", "[0-1] b\n"]),
            ],
        ),
        # Each rank behind goes its own way; the leaders still wait for each other.
        (
            3,
            [
                (0.0, {0: "a\nb\n", 2: "a\n"}, []),
                (1.0, {}, ["[0,2] a\n", "[0] b\n"]),
                (2.0, {1: "a\n"}, ["[1] a\n"]),
                (3.0, {2: "b\n"}, ["[2] b\n"]),
                (4.0, {0: "c\n"}, []),  # rank 2 has caught up and is waited for, rank 1 is not
                (5.0, {}, ["[0] c\n"]),
            ],
        ),
        # A bar is shown at once, that of the lowest rank, with where the others are.
        (
            2,
            [
                (0.0, {1: "\r10%"}, ["bar [1] 10%"]),
                (0.0, {0: "\r20%"}, ["bar [0] 20% (rank 1: 10%)"]),
                (0.0, {1: "\r30%"}, ["bar [0] 20% (rank 1: 30%)"]),
                (0.0, {}, []),
            ],
        ),
        # When its line ends there is no bar any more, and it is said.
        (
            1,
            [
                (0.0, {0: "\r 50%"}, ["bar [0]  50%"]),
                (0.0, {0: "\r100%\n"}, ["[0] 100%\n", "bar "]),
            ],
        ),
        # Dots that are printed one by one are shown as they come after the first second.
        (1, [(0.0, {0: "."}, []), (1.0, {}, ["bar [0] ."]), (2.0, {0: "."}, ["bar [0] .."])]),
        # So is a line whose bracket is open; without an indented line after it, it was whole.
        (
            2,
            [
                (0.0, {0: "a (\n", 1: "a (\n"}, []),
                (1.0, {}, ["bar [0] a ("]),
                (2.0, {0: "b\n", 1: "  c)\n"}, ["[0] a (\n", "[1] a (\n      c)\n", "bar "]),
                (3.0, {}, ["[0] b\n"]),
            ],
        ),
        # That second is the unfinished line's own, not one of an earlier line.
        (
            1,
            [
                (0.0, {0: "a"}, []),
                (5.0, {0: "\na"}, ["[0] a\n"]),
                (5.9, {}, []),
                (6.0, {}, ["bar [0] a"]),
            ],
        ),
        # A figure has its place among the lines, for which it waits; without any it does not.
        (
            2,
            [(0.0, {0: "a\n<fig>b\n", 1: "a\n<fig>b\n"}, ["[0-1] a\n", "<0>", "<1>", "[0-1] b\n"])],
        ),
        (2, [(0.5, {0: "a\n<fig>"}, []), (1.5, {}, ["[0] a\n", "<0>"])]),
        (2, [(0.0, {0: "<fig>"}, ["<0>"])]),
        # It ends a line that was not finished.
        (1, [(0.0, {0: "here: <fig>and there\n"}, ["[0] here: \n", "<0>", "[0] and there\n"])]),
    ],
)
def test_what_is_due_in_time(
    n_ranks: int, steps: list[tuple[float, dict[int, str], list[str]]]
) -> None:
    """At each step ranks write, with `<fig>` for a figure; then what is due is taken."""
    merger = LineMerger("stdout", range(n_ranks))
    for now_s, texts_of_ranks, due in steps:
        for rank, text in texts_of_ranks.items():
            before, figure, after = text.partition("<fig>")
            merger.feed(rank, before, now_s)
            if figure:
                merger.attach(rank, "fig", now_s)
                merger.feed(rank, after, now_s)

        assert texts(merger.due(now_s)) == due


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


ALPHABET = ("a", "b", " ", "\n", "\n", "\r", "\r", "é", "🏖", "\x1b[K", "  ", "ab\n", "\r\n", "([",
            "\n )", "}")  # fmt: skip


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
        case
        for event in events
        if not isinstance(event, Attachment) or event.rank == rank
        for case in (
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
                    for number in range(int(first), int(last or first) + 1):
                        got[number].append(text)

    assert got == wanted


# What a line is


def test_an_unfinished_line_at_the_end_is_a_line() -> None:
    """What a rank wrote last without a newline is shown as a line when the rank ends."""
    merger = LineMerger("stdout", range(2))
    merger.feed(0, "done", 0)
    merger.feed(1, "done\n", 0)

    assert ended(merger, range(2)) == "[0-1] done\n"


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
    assert overwrite(text) == expected


# Bars


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


# Size


def test_many_lines_of_a_rank_that_waits() -> None:
    """100,000 lines that wait for a silent rank are shown when it ends."""
    merger = LineMerger("stdout", range(2), is_patient=True)
    for start in range(0, 100_000, 100):
        merger.feed(0, "".join(f"{k}\n" for k in range(start, start + 100)), 0)
        merger.due(0)

    assert ended(merger, range(2)).splitlines() == [f"[0] {k}" for k in range(100_000)]
