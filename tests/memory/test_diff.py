"""What grew between two snapshots, by hand and as a plain count says."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from nbdist.core.units import compared
from nbdist.memory.diff import NO_LINES, Amount, BlockKind, diff
from nbdist.memory.snapshot import (
    ACTIVATION,
    BEFORE,
    GRADIENT,
    PARAMETER,
    STAYS,
    UNKNOWN,
    AllocationFrame,
    RankMemory,
    Snapshot,
    empty,
)
from nbdist.memory.view.diff import growth_view
from tests.support.drawn_memory import Piece, rank_memory

LINE3, LINE9 = AllocationFrame("train.py", 3, "step"), AllocationFrame("train.py", 9, "train")
LINEAR = AllocationFrame("/x/site-packages/torch/nn/modules/linear.py", 134, "forward")
KB = 1000


@dataclass(frozen=True, slots=True)
class Has:
    address: int
    size: int
    stack: tuple[AllocationFrame, ...] = ()
    category: int = UNKNOWN
    name: str = ""
    end: int = STAYS


def memory(rank: int, *has: Has) -> RankMemory:
    stacks = list(dict.fromkeys(block.stack for block in has if block.stack))
    names = list(dict.fromkeys(block.name for block in has if block.name))
    pieces = [
        Piece(
            block.size, BEFORE, block.end, block.category, address=block.address,
            stack=stacks.index(block.stack) if block.stack else -1,
            name=names.index(block.name) if block.name else -1,
        )
        for block in has
    ]  # fmt: skip
    return rank_memory(rank, pieces, 10, stacks=tuple(stacks), names=tuple(names))


def snapshot(*ranks: RankMemory) -> Snapshot:
    return Snapshot(ranks)


def test_reused_address_is_a_new_block() -> None:
    """Of another size, or from another line; the same block again is not new."""
    before = snapshot(
        memory(0, Has(1, 10 * KB, (LINE3,)), Has(2, 20 * KB, (LINE3,)), Has(3, KB, (LINE3,)))
    )
    after = snapshot(
        memory(0, Has(1, 15 * KB, (LINE3,)), Has(2, 20 * KB, (LINE9,)), Has(3, KB, (LINE3,)))
    )
    growth = diff(before, after)

    (grown,) = growth.grown
    assert grown.kind == BlockKind((LINE9,), UNKNOWN, "")
    assert (grown.before, grown.after) == (Amount(), Amount(1, 20 * KB))
    (shrunk,) = growth.shrunk
    assert shrunk.kind.lines == (LINE3,)
    assert (shrunk.before, shrunk.after) == (Amount(3, 31 * KB), Amount(2, 16 * KB))
    assert growth.ranks == {0: (Amount(3, 31 * KB), Amount(3, 36 * KB))}


def test_what_is_freed_and_made_again_has_not_grown() -> None:
    """Gradients of each step are at other addresses, and are as large as before."""
    has = [Has(n, KB, (LINE9,), GRADIENT, f"layers.{n}.weight") for n in range(3)]
    moved = [replace(block, address=block.address + 100) for block in has]
    growth = diff(snapshot(memory(0, *has)), snapshot(memory(0, *moved)))

    assert (growth.grown, growth.shrunk) == ((), ())
    assert "nothing has grown" in growth_view(growth, "start").text


def test_lines_of_libraries_do_not_part_what_one_line_made() -> None:
    """The user's own lines are what counts; a stack without any is itself."""
    after = snapshot(
        memory(
            0,
            Has(1, KB, (LINEAR, LINE3, LINE9), ACTIVATION),
            Has(2, KB, (LINE3, LINE9), ACTIVATION),
            Has(3, KB, (LINEAR,), ACTIVATION),
            Has(9, 50 * KB, (LINE3,), ACTIVATION, end=5),
        )
    )
    growth = diff(snapshot(memory(0)), after)

    assert [(change.kind.lines, change.after) for change in growth.grown] == [
        ((LINE3, LINE9), Amount(2, 2 * KB)),
        ((LINEAR,), Amount(1, KB)),
    ]


def test_owners_without_lines_grow_by_name_and_size() -> None:
    """Places of one list are one name; what has no name is told apart by its size."""
    before = snapshot(memory(0, Has(1, 4, name="losses[0]"), Has(2, 8), Has(3, 8)))
    after = snapshot(
        memory(
            0, *(Has(10 + n, 4, name=f"losses[{n}]") for n in range(9)),
            Has(2, 8), Has(3, 8), Has(4, 16), Has(5, 40, name="cache['a'].keys[3]"),
        )
    )  # fmt: skip
    growth = diff(before, after)

    assert [
        (change.kind.name, change.kind.size_bytes, change.before, change.after)
        for change in growth.grown
    ] == [
        ("cache[...].keys[...]", 0, Amount(), Amount(1, 40)),
        ("losses[...]", 0, Amount(1, 4), Amount(9, 36)),
        ("", 16, Amount(), Amount(1, 16)),
    ]
    assert growth.notes == (NO_LINES,)


def test_ranks_are_merged_and_told() -> None:
    """Sums over ranks, and which of them; a rank that is in one snapshot alone is not compared."""
    at = (LINE3,)
    before = snapshot(memory(0, Has(1, KB, at)), memory(1, Has(1, KB, at)), memory(2))
    after = snapshot(
        memory(0, Has(1, KB, at), Has(2, 4 * KB, at)),
        memory(1, Has(1, KB, at)),
        memory(3, Has(1, 99 * KB, at)),
    )
    growth = diff(before, after)

    (grown,) = growth.grown
    assert (grown.before, grown.after) == (Amount(2, 2 * KB), Amount(3, 6 * KB))
    assert grown.ranks == {0: 4 * KB}
    assert growth.notes == (
        "rank 2 is only in the first snapshot, and not compared.",
        "rank 3 is only in the second snapshot, and not compared.",
    )


def test_block_of_an_older_recording_keeps_its_lines() -> None:
    """A CPU's second recording knows no stack of it; it is the same block, not another one."""
    before = snapshot(memory(0, Has(1, KB, (LINE3,), ACTIVATION), Has(2, KB)))
    after = snapshot(
        memory(0, Has(1, KB, name="losses[0]"), Has(2, KB), Has(3, KB, (LINE3,), ACTIVATION))
    )
    growth = diff(before, after)

    assert growth.shrunk == ()
    (grown,) = growth.grown
    assert (grown.kind.lines, grown.kind.name) == ((LINE3,), "")
    assert (grown.before, grown.after) == (Amount(), Amount(1, KB))


def test_rank_that_gave_nothing_is_not_compared() -> None:
    """All that it has in the other snapshot would seem to have grown."""
    there = memory(1, Has(1, KB, (LINE3,)))
    growth = diff(snapshot(memory(0), empty(1, "one", "It ended.")), snapshot(memory(0), there))

    assert (growth.grown, list(growth.ranks)) == ((), [0])
    assert growth.notes == (
        "rank 1 has nothing in the first snapshot: It ended.",
        "rank 1 is only in the second snapshot, and not compared.",
    )


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_as_a_plain_count_says(seed: int) -> None:
    """Over random snapshots: totals, new blocks, and what grew less what shrank."""
    chance = random.Random(seed)

    def some(rank: int) -> tuple[RankMemory, list[Has]]:
        has = [
            Has(
                chance.randrange(30), chance.choice([64, 128]),
                chance.choice([(), (LINE3,), (LINE9,), (LINEAR, LINE9)]),
                chance.choice([UNKNOWN, PARAMETER]), chance.choice(["", "a", "b[1]", "b[2]"]),
                chance.choice([STAYS, STAYS, 5]),
            )
            for _ in range(chance.randrange(40))
        ]  # fmt: skip
        return memory(rank, *has), [block for block in has if block.end == STAYS]

    first, second = some(0), some(0)
    growth = diff(snapshot(first[0]), snapshot(second[0]))

    sizes = [sum(block.size for block in has) for _, has in (first, second)]
    changed = sum(change.grown_bytes for change in (*growth.grown, *growth.shrunk))
    assert changed == sizes[1] - sizes[0]
    orders = [change.grown_bytes for change in growth.grown]
    assert orders == sorted(orders, reverse=True)


def test_table(monkeypatch: Any) -> None:
    """Every number with its line, name and ranks; the rest in sum."""
    after = [Has(n, KB * (n + 1), (AllocationFrame("train.py", n + 1, "step"),)) for n in range(25)]
    after.append(Has(99, 10**6, (LINE9,), ACTIVATION, "losses[3]"))
    growth = diff(
        snapshot(memory(0, Has(500, 3 * KB, name="old")), memory(1)),
        snapshot(memory(0, *after), memory(1)),
    )
    view = growth_view(growth, "start")
    lines = view.text.splitlines()

    assert lines[0] == "rank 0 since start: +1.3 MB, from 3.0 kB to 1.3 MB in use"
    assert lines[1] == "rank 1 since start: +0 B, from 0 B to 0 B in use"
    assert lines[3].split() == [
        "+1.0", "MB", "0", "B", "1.0", "MB", "0", "->", "1", "activations", "losses[...]",
        "train.py:9", "train", "0",
    ]  # fmt: skip
    assert lines[-2:] == ["6 more have grown: +21.0 kB", "shrunk or gone: -3.0 kB (unknown)"]
    assert "<table" in view.html
    assert "losses[...]" in view.html
    monkeypatch.setenv("NBDIST_TEST", "1")
    assert "MB" not in compared(growth_view(growth, "start").text)
