"""Each rule on memory that has what it looks for, and on memory that nearly has it."""

from dataclasses import replace

import numpy as np
import pytest

from nbdist.core.finding import Finding
from nbdist.memory.findings import RULES, findings
from nbdist.memory.peak import peaks
from nbdist.memory.snapshot import (
    ACTIVATION,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    STEPPING,
    TEMPORARY,
    UNKNOWN,
    AllocationFrame,
    OutOfMemory,
    Phase,
    RankMemory,
    Reserved,
    Snapshot,
)
from tests.support.drawn_memory import MB, Piece, rank_memory, training
from tests.support.findings import check_rules

LINE = AllocationFrame("cell 3", 12, "forward")


def rules_of(*ranks: RankMemory, strategy: str = "ddp, dp 2") -> dict[str, Finding]:
    snapshot = Snapshot(ranks, strategy)
    return {finding.rule: finding for finding in findings(snapshot, peaks(snapshot))}


def rank_with(rank: int = 0, **sizes_mb: float) -> RankMemory:
    of = {"a": ACTIVATION, "o": OPTIMIZER, "p": PARAMETER, "g": GRADIENT, "t": TEMPORARY}
    pieces = [
        Piece(round(size * MB), 5, 50, of[name], stack=0, operator=0)
        for name, size in sizes_mb.items()
    ]
    return rank_memory(rank, pieces, stacks=((LINE,),), names=("aten::mm",))


def device_with(unused_mb: float, limit_mb: float = 0) -> RankMemory:
    """A device whose allocator holds 100 MB at the peak."""
    reserved = Reserved(np.array([0]), np.array([100 * MB]))
    return replace(
        rank_with(p=100 - unused_mb),
        device="cuda",
        reserved=reserved,
        reserved_peak_bytes=100 * MB,
        limit_bytes=round(limit_mb * MB),
    )


def split(optimizer_mb: float, strategy: str = "ddp, dp 4") -> dict[str, Finding]:
    rest = (90 - optimizer_mb) / 3
    ranks = (rank_with(r, o=optimizer_mb, p=rest, g=rest, t=rest) for r in range(4))
    return rules_of(*ranks, strategy=strategy)


def steps(sizes_mb: list[float]) -> RankMemory:
    pieces = [Piece(20 * MB)]
    for number, size in enumerate(sizes_mb):
        if size:
            at = 100 * number + 50
            pieces.append(Piece(round(size * MB), at, category=UNKNOWN, stack=0, operator=0))
    ends = tuple(100 * (number + 1) for number in range(len(sizes_mb)))
    rank = rank_memory(0, pieces, duration_ns=ends[-1] + 1, step_ends_ns=ends)
    return replace(rank, stacks=((LINE,),), names=("aten::stack",))


def stepping(copies_mb: float, phase: str = STEPPING) -> RankMemory:
    rank = rank_with(p=100 - copies_mb, t=copies_mb)
    return replace(rank, phases=(Phase(phase, 1, 60),), step_ends_ns=(70,))


# Rule -> (memory that has it, memory that nearly has, what is found).
_CASES = {
    "little memory left": (
        rules_of(device_with(1, limit_mb=110)), rules_of(device_with(1, limit_mb=112)),
        "rank 0 needs 100.0 MB of 110.0 MB (91%)",
    ),
    "fragmentation": (
        rules_of(device_with(20.5)), rules_of(device_with(19.5)),
        "at its peak rank 0 holds 100.0 MB, of which 20.5 MB (20%) is unused",
    ),
    "activations": (
        rules_of(rank_with(a=51, p=49)), rules_of(rank_with(a=49, p=51)),
        "activations are 51% of the peak of rank 0 (51.0 MB of 100.0 MB)",
    ),
    "optimizer state on every rank": (
        split(31), split(29),
        ("optimizer state is 34% of the peak of rank 0 (31.0 MB); sharded over 4 ranks "
         "it would need 23.2 MB less, and parameters and gradients 29.5 MB less"),
    ),
    "one rank needs more": (
        rules_of(rank_with(0, p=20), rank_with(1, p=23.1), rank_with(2, p=20)),
        rules_of(rank_with(0, p=20), rank_with(1, p=22.9), rank_with(2, p=20)),
        "rank 1 needs 23.1 MB, the median rank 20.0 MB; it has 3.1 MB more of parameters",
    ),
    "more with every step": (
        rules_of(steps([5, 5, 0.7, 0.7, 0.7])), rules_of(steps([5, 5, 0.4, 0.4, 0.4])),
        ("each step leaves 700.0 kB more in use on rank 0 "
         "(30.7 MB after step 2, 32.1 MB after step 4)"),
    ),
    "copies in the optimizer's step": (
        rules_of(stepping(10.5)), rules_of(stepping(9.5)),
        ("the peak of rank 0 is in the optimizer's step, "
         "with 10.5 MB (10%) that are freed within it"),
    ),
}  # fmt: skip


def test_every_rule_has_its_case() -> None:
    """Every rule says why and what to do, and stands in docs/memory.md."""
    check_rules(RULES, _CASES, "memory")


@pytest.mark.parametrize("rule", sorted(_CASES))
def test_a_rule_finds_what_it_looks_for(rule: str) -> None:
    """Just over its threshold, and not just below; its numbers are those of the tables."""
    has, has_not, expected = _CASES[rule]

    assert rule not in has_not
    assert has[rule].found == expected
    assert 0 < has[rule].share <= 1


def test_lines_to_look_at_are_those_that_allocated_it() -> None:
    """With bytes and how many blocks."""
    assert _CASES["activations"][0]["activations"].places == (
        "cell 3:12 forward (51.0 MB, 1 block)",
    )
    assert _CASES["more with every step"][0]["more with every step"].places == (
        "cell 3:12 forward (1.4 MB, 2 blocks)",
    )


def test_operators_of_one_line_are_one_place() -> None:
    """The three largest lines are told."""
    pieces = [
        Piece((10 + at) * MB, 5, 50, ACTIVATION, stack=at // 2, operator=at % 2) for at in range(8)
    ]
    lines = tuple((replace(LINE, line=line),) for line in range(4))
    rank = rank_memory(0, pieces, stacks=lines, names=("aten::mm", "aten::add"))

    assert rules_of(rank)["activations"].places == (
        "cell 3:3 forward (33.0 MB, 2 blocks)",
        "cell 3:2 forward (29.0 MB, 2 blocks)",
        "cell 3:1 forward (25.0 MB, 2 blocks)",
    )


def test_the_optimizers_state_is_not_told_where_it_is_split() -> None:
    """Or where there is one rank."""
    for strategy in ("fsdp, dp 4", "zero1", "deepspeed, dp 4", "fsdp, dp 2, tp 2"):
        assert "optimizer state on every rank" not in split(60, strategy)
    assert "optimizer state on every rank" in split(60)
    assert "optimizer state on every rank" not in rules_of(rank_with(o=60, p=30))


def test_copies_of_another_phase_are_not_the_optimizers() -> None:
    """The same bytes in backward."""
    assert not rules_of(stepping(40, phase="backward"))


def test_memory_that_falls_once_is_no_leak() -> None:
    """A buffer that is filled and emptied grows for a while."""
    growing = steps([5, 5, 2, 2, 2, 2])
    freed = growing.blocks.end_ns.copy()
    freed[-3] = 450

    assert "more with every step" in rules_of(growing)
    assert "more with every step" not in rules_of(
        replace(growing, blocks=replace(growing.blocks, end_ns=freed))
    )


def test_three_ends_of_steps_have_to_grow() -> None:
    """The first two are not counted: the optimizer makes its state then."""
    assert "more with every step" not in rules_of(steps([5, 5, 9, 9]))
    assert "more with every step" in rules_of(steps([5, 5, 9, 9, 9]))


def test_a_failed_allocation_comes_first() -> None:
    """With what was asked for and what was free."""
    rank = replace(rank_with(a=51, p=49), failures=(OutOfMemory(40, 2 * 10**9, 5 * MB),))
    snapshot = Snapshot((rank,))
    first = findings(snapshot, peaks(snapshot))[0]

    assert first.rule == "little memory left"
    assert (
        first.found == "1 allocation failed on rank 0; the last requested 2.0 GB with 5.0 MB free"
    )


def test_tiny_programs_are_left_in_peace() -> None:
    """Below a megabyte no remedy is worth it."""
    assert not rules_of(rank_with(0, a=0.9, p=0.1), rank_with(1, a=0.3, o=0.3))


def test_a_training_is_judged_by_the_rank_where_it_is_worst() -> None:
    """A leak is found with its line on all ranks; the largest comes first."""
    snapshot = training(steps=6, leak_bytes=5 * MB)
    every = findings(snapshot, peaks(snapshot))
    leak = next(finding for finding in every if finding.rule == "more with every step")

    assert leak.ranks == (0, 1)
    assert leak.places == (
        "cell 3:27 forward via nn/modules/linear.py:134 forward (15.0 MB, 3 blocks)",
    )
    assert [finding.share for finding in every] == sorted(
        (finding.share for finding in every), reverse=True
    )
