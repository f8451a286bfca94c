"""What a person reads after a recovery, and how lists of groups of several ranks become one."""

from nbdist.hang.recovery import GroupSpec, RecoveryResult, merge_groups, notes


def recovered(
    *,
    checksums: dict[str, str] | None = None,
    gradients: dict[str, int] | None = None,
    skipped: dict[str, tuple[int, ...]] | None = None,
) -> RecoveryResult:
    return RecoveryResult(skipped or {}, gradients or {}, checksums or {})


def group_spec(
    name: str, *ranks: int, count: int = 2, is_member: bool = True, is_open: bool = True
) -> GroupSpec:
    return GroupSpec(name, ranks, "gloo", 60.0, "", "", count, is_member, is_open)


def test_nothing_is_said_when_all_is_equal() -> None:
    """Equal parameters, no gradients, no group left out."""
    same = recovered(checksums={"model": "aa/bb", "big": "sharded"}, gradients={"model": 0})

    assert notes({0: same, 1: same}) == ()


def test_a_step_apart_is_said_with_what_to_do() -> None:
    """Ranks with equal parameters stand together."""
    results = {rank: recovered(checksums={"model": text}) for rank, text in enumerate("abb")}

    [line] = notes(results)
    assert line == (
        "model: the parameters of rank 0 and ranks 1-2 differ (one has stepped, the other has "
        "not): %dist_sync_model makes them equal"
    )


def test_buffers_may_differ() -> None:
    """Running means of a batch norm differ between ranks in a sound run."""
    results = {
        0: recovered(checksums={"model": "a/x"}),
        1: recovered(checksums={"model": "a/y"}),
    }

    assert notes(results) == ()


def test_a_model_on_one_rank_alone_is_no_difference() -> None:
    """There is nothing to compare it with."""
    assert notes({0: recovered(checksums={"model": "a/x"}), 1: recovered()}) == ()


def test_cleared_gradients_are_named_once() -> None:
    """One line for all models and ranks; models without any are left out."""
    results = {
        0: recovered(gradients={"model": 2, "other": 0}),
        1: recovered(gradients={"model": 4, "third": 1}),
    }

    assert notes(results) == ("gradients of model, third were cleared: they may be incomplete",)


def test_a_group_with_a_dead_member_names_the_restart() -> None:
    """Only ranks that did not answer are asked back."""
    broken = {"0": (0, 1, 2, 3), "4": (1, 3)}
    results = {0: recovered(skipped={"0": (0, 1, 2, 3)}), 3: recovered(skipped=broken)}

    [line] = notes(results)
    assert line == (
        "the groups of all ranks and of ranks 1,3 stay broken until ranks 1-2 are back: "
        "%dist_restart 1-2"
    )


def test_groups_are_told_by_their_ranks() -> None:
    """torch's names say nothing; the same ranks once, of many groups how many more."""
    many = {str(n): (n, 9) for n in range(6)}
    result = recovered(skipped={"0": (0, 1), "1": (1, 0)})

    assert notes({0: result}) == (
        "the group of all ranks stays broken until rank 1 is back: %dist_restart 1",
    )
    [line] = notes({rank: recovered(skipped=many) for rank in range(9)})
    assert line == (
        "the groups of ranks 0,9, of ranks 1,9, of ranks 2,9, of ranks 3,9 and 2 more stay broken "
        "until rank 9 is back: %dist_restart 9"
    )


def test_a_whole_group_that_was_not_recovered_has_a_line_of_its_own() -> None:
    """Nothing is promised of it."""
    results = {rank: recovered(skipped={"7": (0, 1)}) for rank in range(3)}

    assert notes(results) == ("the group of ranks 0-1 could not be recovered",)


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
