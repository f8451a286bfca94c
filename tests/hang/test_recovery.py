"""What a person reads after a recovery, and how lists of groups of several ranks become one."""

import pytest

from nbdist.core.ranks import rank_label
from nbdist.hang.recovery import GroupSpec, RecoveryResult, merge_groups, notes


def recovered(
    *,
    checksums: dict[str, str] | None = None,
    gradients: dict[str, int] | None = None,
    skipped: dict[str, tuple[int, ...]] | None = None,
    closed: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (),
) -> RecoveryResult:
    return RecoveryResult(skipped or {}, gradients or {}, checksums or {}, closed)


EQUAL = recovered(checksums={"model": "aa/bb", "big": "sharded"}, gradients={"model": 0})
ALL_OF_FOUR = {"0": (0, 1, 2, 3)}
MANY = recovered(skipped={str(n): (n, 9) for n in range(6)})


@pytest.mark.parametrize(
    ("results", "line"),
    [
        ({0: EQUAL, 1: EQUAL}, ""),
        # Running means of a batch norm, behind the /, differ between ranks in a sound run.
        ({r: recovered(checksums={"model": f"a/{'xy'[r]}"}) for r in (0, 1)}, ""),
        # A model on one rank alone: there is nothing to compare it with.
        ({0: recovered(checksums={"model": "a/x"}), 1: recovered()}, ""),
        (
            {rank: recovered(checksums={"model": text}) for rank, text in enumerate("abb")},
            (
                "model: the parameters of rank 0 and ranks 1-2 differ (one has stepped, the other "
                "has not): %dist_sync_model makes them equal"
            ),
        ),
        # One line for all models and ranks; models without any gradients are left out.
        (
            {
                0: recovered(gradients={"model": 2, "other": 0}),
                1: recovered(gradients={"model": 4, "third": 1}),
            },
            "gradients of model, third were cleared: they may be incomplete",
        ),
        # Only ranks that did not answer are asked back.
        (
            {0: recovered(skipped=ALL_OF_FOUR), 3: recovered(skipped={**ALL_OF_FOUR, "4": (1, 3)})},
            (
                "the groups of all ranks and of ranks 1,3 stay broken until ranks 1-2 are back: "
                "%dist_restart 1-2"
            ),
        ),
        # torch's names of groups say nothing; the same ranks once, of many how many more.
        (
            {0: recovered(skipped={"0": (0, 1), "1": (1, 0)})},
            "the group of all ranks stays broken until rank 1 is back: %dist_restart 1",
        ),
        (
            dict.fromkeys(range(9), MANY),
            (
                "the groups of ranks 0,9, of ranks 1,9, of ranks 2,9, of ranks 3,9 and 2 more stay "
                "broken until rank 9 is back: %dist_restart 9"
            ),
        ),
        # A group that a member has closed: who, and who has to; two groups alike are one line.
        (
            {0: recovered(), 1: recovered(closed=(((0, 1), (0,)),) * 2)},
            (
                "a group of ranks 0-1 stays broken: rank 0 has destroyed it or not made it, and "
                "rank 1 still has it. Destroy it there too (dist.destroy_process_group), then make "
                "a new one on all ranks"
            ),
        ),
        # Of a whole group that was not recovered nothing is promised.
        (
            {rank: recovered(skipped={"7": (0, 1)}) for rank in range(3)},
            "the group of ranks 0-1 could not be recovered",
        ),
    ],
)
def test_a_recovery_is_told_in_a_line_or_not_at_all(
    results: dict[int, RecoveryResult], line: str
) -> None:
    """What differs or is lost, with what to do; ranks that are alike stand together."""
    assert notes(results, lambda ranks: f"%dist_restart {rank_label(ranks)}") == (
        (line,) if line else ()
    )


def group_spec(
    name: str, *ranks: int, count: int = 2, is_member: bool = True, is_open: bool = True
) -> GroupSpec:
    return GroupSpec(name, ranks, "gloo", 60.0, "", "", count, is_member, is_open)


def test_lists_of_several_ranks_become_one_in_order() -> None:
    """A group that only some know stands between those that were made before and after it."""
    lists = [
        [group_spec("1", 0, 1), group_spec("4", 0, 1, 2)],
        [
            group_spec("1", 0, 1, is_member=False),
            group_spec("local", 2, 3),
            group_spec("4", 0, 1, 2),
        ],
        [group_spec("1", 0, 1), group_spec("5", 1)],
    ]

    assert [group.name for group in merge_groups(lists)] == ["1", "5", "local", "4"]


def test_a_members_word_counts() -> None:
    """Only a member knows that a group was destroyed."""
    outside = group_spec("1", 0, 1, is_member=False)
    inside = group_spec("1", 0, 1, is_open=False)

    assert merge_groups([[outside], [inside]]) == (inside,)
    assert merge_groups([[inside], [outside]]) == (inside,)
    elsewhere = group_spec("1", 0, 1)
    assert merge_groups([[elsewhere], [inside]]) == (inside,)
    assert merge_groups([[inside], [elsewhere]]) == (inside,)
