"""The peak of each rank: against sums made by hand, by line and by owner."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from nbdist.memory.call_site import frame_text, innermost_library, innermost_own, is_own
from nbdist.memory.peak import Bytes, peaks, sites, when, worst
from nbdist.memory.snapshot import (
    ACTIVATION,
    BACKWARD,
    BEFORE,
    CATEGORIES,
    OPTIMIZER,
    PARAMETER,
    STEPPING,
    AllocationFrame,
    Phase,
    Reserved,
    Segment,
    Snapshot,
)
from nbdist.memory.timeline import is_in_use
from tests.support.drawn_memory import Piece, random_blocks, rank_memory, training

OWN = AllocationFrame("cell 2", 7, "forward")
OUTER = AllocationFrame("/srv/me/train.py", 90, "main")
LIBRARY = AllocationFrame(
    "/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward"
)


@pytest.mark.parametrize("seed", range(4))
def test_parts_are_as_counted_by_hand(seed: int) -> None:
    """Of each category, exact and guessed, at the peak and at the end."""
    columns = random_blocks(200, seed)
    rank = replace(rank_memory(3, [], 10_000, stacks=((OWN,), (), (LIBRARY,))), blocks=columns)
    (peak,) = peaks(Snapshot((rank,)))
    for parts, moment in ((peak.parts, peak.time_ns), (peak.at_end, 10_000)):
        sums: Counter[tuple[int, bool]] = Counter()
        for at in np.flatnonzero(is_in_use(columns, moment)):
            what = int(columns.category[at]), bool(columns.is_exact[at])
            sums[what] += int(columns.size_bytes[at])
        assert parts == tuple(
            Bytes(sums[at, True], sums[at, False]) for at in range(len(CATEGORIES))
        )
    assert peak.size_bytes == sum(part.total for part in peak.parts)
    assert peak.guessed_bytes == sum(part.guessed for part in peak.parts)
    assert sum(site.size_bytes for site in peak.sites) <= peak.size_bytes
    assert sum(site.size_bytes for site in sites(rank, is_in_use(columns, peak.time_ns), 999)) == (
        peak.size_bytes
    )


def test_blocks_of_one_line_are_one_site() -> None:
    """The user's innermost line counts, and the library's; another category is another site."""
    rank = rank_memory(
        0,
        [
            Piece(10, 1, category=ACTIVATION, is_exact=False, stack=0, operator=0),
            Piece(20, 2, category=ACTIVATION, is_exact=False, stack=1, operator=0),
            Piece(5, 3, category=ACTIVATION, is_exact=True, stack=0, operator=0),
            Piece(1000, BEFORE),
        ],
        stacks=((LIBRARY, OWN, OUTER), (LIBRARY, OWN)),
        names=("aten::mm",),
    )
    (peak,) = peaks(Snapshot((rank,)))

    rows = [(s.size_bytes, s.count, s.is_exact, s.operator, s.line, s.via) for s in peak.sites]
    assert rows == [
        (1000, 1, True, "", None, None),
        (30, 2, False, "aten::mm", OWN, LIBRARY),
        (5, 1, True, "aten::mm", OWN, LIBRARY),
    ]


def test_owners_that_differ_in_a_number_are_one() -> None:
    """Of the same category alone; a name of its own stays whole."""
    names = ("h.0.w", "h.1.w", "h.1.b", "10.20.w", "11.3.w", "h.3.w: exp_avg", "h.3.w: step")
    names += ("h.7.w: exp_avg", "wte: exp_avg", "wte: step", "x: max")
    rank = rank_memory(
        0,
        [
            *(Piece(10 * 2**at, name=at) for at in range(5)),
            *(Piece(5, category=OPTIMIZER, name=name) for name in (5, 6, 7)),
            *(Piece(3, category=OPTIMIZER, name=name) for name in (8, 9)),
            Piece(1, category=OPTIMIZER, name=10),
            Piece(9000, category=ACTIVATION),
        ],
        names=names,
    )
    (peak,) = peaks(Snapshot((rank,)))

    assert [(o.name, o.category, o.count, o.size_bytes) for o in peak.owners] == [
        ("*.*.w", PARAMETER, 2, 240),
        ("h.1.b", PARAMETER, 1, 40),
        ("h.*.w", PARAMETER, 2, 30),
        ("h.*.w", OPTIMIZER, 3, 15),
        ("wte", OPTIMIZER, 2, 6),
        ("x: max", OPTIMIZER, 1, 1),
    ]


def test_when_the_peak_is() -> None:
    """Phase and step; after the last step there is none, nor in a snapshot of one moment."""
    phases = (Phase(BACKWARD, 20, 30), Phase(STEPPING, 50, 60))

    def at(ns: int, **more: object) -> str:
        rank = rank_memory(0, [Piece(5, ns, ns + 1)], phases=phases, step_ends_ns=(40, 80), **more)
        return when(peaks(Snapshot((rank,)))[0])

    assert at(5) == "forward of step 0"
    assert at(25) == "backward of step 0"
    assert at(40) == "forward of step 1"
    assert at(55) == "optimizer of step 1"
    assert at(85) == "forward"
    assert at(25, duration_ns=0) == ""


def test_what_the_allocator_holds() -> None:
    """At the peak, at most and at the end; the headroom is to what is needed of the device."""
    rank = rank_memory(
        0,
        [Piece(60, 10, 20)],
        reserved=Reserved(np.array([0, 5, 50]), np.array([10, 80, 90])),
        segments=(Segment(0, 50, 20, 0, "large"), Segment(100, 40, 40, 0, "small")),
        allocator_peak_bytes=64,
        reserved_peak_bytes=95,
        limit_bytes=200,
    )
    (peak,) = peaks(Snapshot((rank,)))

    assert (peak.reserved_bytes, peak.reserved_peak_bytes, peak.reserved_end_bytes) == (80, 95, 90)
    assert (peak.unused_bytes, peak.headroom_bytes) == (20, 105)
    assert (peak.segment_bytes, peak.free_bytes, peak.largest_free_bytes) == (90, 30, 30)


def test_a_device_whose_history_is_smaller_than_its_own_count_needs_the_latter() -> None:
    """What was there before the history counts too."""
    rank = rank_memory(0, [Piece(60, 10, 20)], allocator_peak_bytes=500, limit_bytes=600)

    assert peaks(Snapshot((rank,)))[0].headroom_bytes == 100


def test_ranks_without_blocks_have_no_peak() -> None:
    """And the first of equals needs most."""
    snapshot = Snapshot((rank_memory(0, []), *training(ranks=2).ranks[1:], rank_memory(2, [])))
    found_peaks = peaks(snapshot)

    assert [peak.rank for peak in found_peaks] == [1]
    assert worst(found_peaks) is found_peaks[0]
    assert worst(()) is None


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("cell 3", True),
        ("/srv/me/train.py", True),
        ("train.py", True),
        ("/tmp/ipykernel_5/12.py", True),
        ("/venv/lib/python3.12/site-packages/transformers/models/gpt2.py", False),
        ("/usr/lib/python3/dist-packages/x.py", False),
        ("/usr/lib/python3.11/contextlib.py", False),
        ("/src/torch/nn/modules/linear.py", False),
        ("/src/nbdist/hang/rank/recorder.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<string>", False),
    ],
)
def test_whose_a_line_is(file: str, *, is_users: bool) -> None:
    """The user's is what no package installed."""
    assert is_own(AllocationFrame(file, 1, "f")) is is_users


def test_how_lines_are_written() -> None:
    """Short, with the line where it is known."""
    assert frame_text(OUTER) == "train.py:90 main"
    assert frame_text(OWN) == "cell 2:7 forward"
    assert frame_text(LIBRARY) == "nn/modules/linear.py:134 forward"
    assert frame_text(AllocationFrame("C:\\me\\a.py", 3, "f")) == "a.py:3 f"
    assert frame_text(AllocationFrame("a.py", 3, "f", is_line_known=False)) == "a.py f"
    assert frame_text(None) == "-"
    assert innermost_own((LIBRARY, OWN, OUTER)) == OWN
    assert innermost_own((LIBRARY,)) is None
    assert innermost_library((OWN, LIBRARY)) is None
    assert innermost_library(()) is None
