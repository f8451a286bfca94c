"""Who waits for whom is found and said in one line, from made-up call logs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from nbdist.hang.diagnose import diagnose
from nbdist.hang.records import RankView, WaitFinding
from nbdist.hang.text import BlockingRank
from nbdist.hang.wait_graph import WaitGraph
from tests.support.call_logs import (
    NOW_S,
    REDUCE,
    RUN,
    WORLD,
    at,
    call,
    log,
    only_finding,
    reduce,
    snapshot,
    view,
)

HEAD = f"rank 0 waits in all_reduce(float32[3]) at line 7 of cell [12]: {REDUCE}; "
PAIR = {WORLD: (0, 1)}
WAITS = view(0, "running", reduce("waiting"))
OTHER_SHAPE = reduce(detail="float32[4]", place=at(2))
LARGE_SHAPE = reduce("waiting", detail="float32[1000000]", place=at(4))
FINISHED = "rank 1 finished without calling it"
IS_LATE = "rank 1 has not come to it yet (still running)"


@pytest.mark.parametrize(
    ("other", "text", "is_certain"),
    [
        # It has not come, with its state as the reason.
        (view(1, "finished"), FINISHED, True),
        (view(1, "raised", how="ValueError"), "rank 1 raised ValueError before it", True),
        (
            view(1, "ended", how="signal SIGKILL"),
            "rank 1 ended (signal SIGKILL) before it",
            True,
        ),
        (view(1, "absent"), "rank 1 does not run this cell", True),
        (view(1, "stopped"), "rank 1 is stopped (SIGSTOP)", False),
        (view(1, "busy"), "rank 1 still runs an earlier cell", False),
        (view(1, "running"), IS_LATE, False),
        (
            view(1, "running", snapshot=snapshot(at(9, "time.sleep(60)"), is_asleep=False)),
            "rank 1 has not come to it yet (still running: line 9 of cell [12]: time.sleep(60))",
            False,
        ),
        # It was in the call, but its part will never be there; one that goes on may try again.
        (
            view(1, "raised", reduce("raised"), how="RuntimeError"),
            "rank 1 raised RuntimeError in it",
            True,
        ),
        (view(1, "running", reduce("raised")), "rank 1 raised an error in it", False),
        # A much larger shape kills a rank; its log is read after its death.
        (
            view(1, "ended", LARGE_SHAPE, how="signal SIGABRT"),
            "rank 1 ended (signal SIGABRT) in all_reduce(float32[1000000]) at line 4",
            True,
        ),
        (
            view(1, "ended", reduce("waiting"), how="signal SIGKILL"),
            "rank 1 ended (signal SIGKILL) in it",
            True,
        ),
        (view(1, "finished", OTHER_SHAPE), "rank 1 called it with float32[4] at line 2", True),
        (view(1, "running", OTHER_SHAPE), "rank 1 called it with float32[4] at line 2", False),
        # Without a log, with one that is ahead of the reply, and with one that is behind it.
        (
            RankView(1, "finished"),
            "rank 1 may have called it or not: its calls cannot be read",
            False,
        ),
        # The host of one that is cut off: whatever it had called, the others wait in vain.
        (
            RankView(1, "ended", "node1 cannot be reached"),
            "rank 1 ended (node1 cannot be reached) before it or in it",
            True,
        ),
        (RankView(1, "running", "", log(1, groups=PAIR, state="finished")), FINISHED, True),
        (RankView(1, "finished", "", log(1, groups=PAIR, state="running")), IS_LATE, False),
    ],
)
def test_a_rank_that_does_not_do_its_part_is_told(
    other: RankView, text: str, *, is_certain: bool
) -> None:
    """And blamed where that is certain: not while it can still make the call."""
    blamed = (1,) if is_certain else ()

    assert only_finding(WAITS, other) == WaitFinding(HEAD + text, is_certain, (0,), blamed)


def test_short_waits_are_no_finding_alone_but_stand_beside_a_long_one() -> None:
    """Ranks that block some milliseconds later are in the same line."""
    early = view(0, "running", reduce("waiting", began_s=NOW_S - 1.0), world=3)
    late = view(1, "running", reduce("waiting", began_s=NOW_S - 0.01), world=3)
    gone = view(2, "finished", world=3)

    assert diagnose([late, gone], NOW_S) == ()
    assert only_finding(early, late, gone).text == (
        f"ranks 0-1 wait in all_reduce(float32[3]) at line 7 of cell [12]: {REDUCE}; "
        "rank 2 finished without calling it"
    )


def test_waits_that_are_all_short_are_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a training loop somebody waits at every moment; of 64 ranks each would need each."""
    asked: list[int] = []
    original = WaitGraph._needs

    def note(graph: WaitGraph, rank: int) -> Iterator[BlockingRank]:
        asked.append(rank)
        return original(graph, rank)

    monkeypatch.setattr(WaitGraph, "_needs", note)
    call = reduce("waiting", began_s=NOW_S - 0.5)
    waits = [view(rank, "running", call, world=64) for rank in range(63)]
    views = [*waits, view(63, "running", world=64)]

    assert diagnose(views, NOW_S) == ()
    assert asked == []
    assert [finding.waiting for finding in diagnose(views, NOW_S + 1)] == [tuple(range(63))]
    assert asked == [*range(63)]


def test_nothing_is_found_when_all_have_come() -> None:
    """A long collective that everybody is in is no finding, nor is one that is over."""
    assert diagnose([WAITS, view(1, "running", reduce("waiting"))], NOW_S) == ()
    assert diagnose([WAITS, view(1, "running", reduce())], 1e9) == ()
    assert diagnose([view(0, "running"), view(1, "finished")], NOW_S) == ()


def test_another_op_at_the_same_number_is_told() -> None:
    """Wrong order; the other rank waits too and is told by what it called."""
    other = call("broadcast", "float32[3], src=0", line=3, state="waiting")
    finding = only_finding(WAITS, view(1, "running", other))

    assert finding.text == HEAD + "rank 1 called broadcast(float32[3], src=0) at line 3 instead"
    assert (finding.is_certain, finding.waiting, finding.blamed) == (True, (0, 1), (1,))


def test_the_first_number_that_differs_is_the_reason() -> None:
    """A broadcast's source goes on to the next call; the mistake was at the broadcast."""
    barrier = call("barrier", line=5, state="waiting", source="dist.barrier()")
    ahead = view(0, "running", call("broadcast", "float32[3], src=0", line=2), barrier)
    finding = only_finding(ahead, view(1, "running", reduce("waiting", place=at(3, REDUCE))))

    assert finding.is_certain
    assert finding.text == (
        f"rank 1 waits in all_reduce(float32[3]) at line 3 of cell [12]: {REDUCE}; "
        "rank 0 called broadcast(float32[3], src=0) at line 2 instead; "
        "rank 0 waits for rank 1 in barrier() at line 5 of cell [12]: dist.barrier()"
    )


def test_an_earlier_difference_that_both_have_passed_is_told() -> None:
    """Rather than that the other rank did not come, which is its consequence."""
    ahead = view(0, "running", call("broadcast", "f[3], src=0", line=2), reduce("waiting"))
    gone = view(1, "finished", call("reduce", "f[3], dst=0", line=3))

    assert only_finding(ahead, gone).text == HEAD + (
        "rank 1 called reduce(f[3], dst=0) at line 3 instead of broadcast(f[3], src=0) before"
    )


def test_shapes_may_differ_where_they_may() -> None:
    """An object has the size it has."""
    views = [
        view(r, "running", call("all_gather_object", f"dict{r}", state="waiting")) for r in (0, 1)
    ]

    assert diagnose(views, NOW_S) == ()


def test_only_members_are_blamed() -> None:
    """Ranks 2 and 3 have finished, but have no part in this group."""
    groups = {"1": (0, 1)}
    views = [
        view(0, "running", reduce("waiting", group="1"), world=4, groups=groups),
        *(view(rank, "finished", world=4, groups=groups) for rank in (1, 2, 3)),
    ]

    assert only_finding(*views) == WaitFinding(
        "rank 0 waits in all_reduce(float32[3]) of ranks 0-1 at line 7 of cell [12]: "
        f"{REDUCE}; rank 1 finished without calling it",
        is_certain=True,
        waiting=(0,),
        blamed=(1,),
    )


def test_calls_are_counted_in_their_group_alone() -> None:
    """Calls in another group make up for none in this."""
    groups = {"1": (0, 1)}
    ahead = [reduce(group="1")] * 3
    views = [
        view(0, "running", *ahead, reduce("waiting"), groups=groups),
        view(1, "finished", *ahead, groups=groups),
    ]

    assert only_finding(*views).text == HEAD + "rank 1 finished without calling it"


def test_independent_causes_are_findings_of_their_own() -> None:
    """Two halves of the world, one rank missing in each; one half is only late."""
    groups = {"1": (0, 1), "2": (2, 3)}
    views = [
        view(0, "running", reduce("waiting", group="1"), world=4, groups=groups),
        view(1, "finished", world=4, groups=groups),
        view(2, "running", reduce("waiting", group="2"), world=4, groups=groups),
        view(3, "running", world=4, groups=groups),
    ]
    first, second = diagnose(views, NOW_S)

    assert (first.is_certain, first.waiting, first.blamed) == (True, (0,), (1,))
    assert (second.is_certain, second.waiting, second.blamed) == (False, (2,), ())


def chain(last: str) -> list[RankView]:
    """Rank 0 waits for rank 1, which waits in another group for rank 2."""
    groups = {"1": (0, 1), "2": (1, 2)}
    barrier = call("barrier", group="2", line=9, state="waiting")
    return [
        view(0, "running", reduce("waiting", group="1"), world=3, groups=groups),
        view(1, "running", barrier, world=3, groups=groups),
        view(2, last, world=3, groups=groups, how="ValueError" if last == "raised" else ""),
    ]


def test_who_waits_in_consequence_is_in_the_same_line() -> None:
    """The rank at the end of the chain alone is blamed."""
    assert only_finding(*chain("raised")) == WaitFinding(
        "rank 1 waits in barrier() of ranks 1-2 at line 9 of cell [12]; "
        "rank 2 raised ValueError before it; "
        "rank 0 waits for rank 1 in all_reduce(float32[3]) of ranks 0-1 at line 7 of cell [12]: "
        f"{REDUCE}",
        is_certain=True,
        waiting=(0, 1),
        blamed=(2,),
    )


def test_a_chain_that_ends_in_a_rank_that_computes_is_not_certain() -> None:
    """Rank 0 needs rank 1, which needs rank 2, which may still come."""
    finding = only_finding(*chain("running"))

    assert not finding.is_certain
    assert finding.blamed == ()


def test_one_rank_that_computes_makes_it_uncertain_though_another_is_gone() -> None:
    """Both are told."""
    finding = only_finding(
        view(0, "running", reduce("waiting"), world=3),
        view(1, "finished", world=3),
        view(2, "running", world=3),
    )

    assert not finding.is_certain
    assert finding.text == HEAD + (
        "rank 1 finished without calling it; rank 2 has not come to it yet (still running)"
    )


def test_ranks_in_a_circle_wait_for_each_other() -> None:
    """Two groups, entered in another order by each rank."""
    groups = {"1": (0, 1), "2": (0, 1)}
    finding = only_finding(
        view(0, "running", reduce("waiting", group="1"), groups=groups),
        view(1, "running", call("barrier", group="2", line=3, state="waiting"), groups=groups),
    )

    assert finding == WaitFinding(
        HEAD + "rank 1 waits in barrier() at line 3 of cell [12]; they wait for each other",
        is_certain=True,
        waiting=(0, 1),
        blamed=(0, 1),
    )


def test_the_same_call_in_two_groups_is_told_with_the_groups() -> None:
    """By their descriptions, or torch's names; where only the members differ those say it."""
    groups = {"1": (0, 1), "2": (0, 1)}
    views = [
        view(rank, "running", reduce("waiting", group=group), groups=groups)
        for rank, group in enumerate(groups)
    ]
    place = f"at line 7 of cell [12]: {REDUCE}"

    assert only_finding(*views).text == (
        f"rank 0 waits in all_reduce(float32[3]) in group 1 {place}; "
        f"rank 1 waits in all_reduce(float32[3]) in group 2 {place}; they wait for each other"
    )
    log = views[0].log
    assert log is not None
    tp = {**log.groups, "1": replace(log.groups["1"], description="tp")}
    described = replace(views[0], log=replace(log, groups=tp))
    assert "rank 0 waits in all_reduce(float32[3]) in group tp at" in (
        only_finding(described, views[1]).text
    )


def test_lines_that_differ_are_each_named() -> None:
    """The same call from an if and its else."""
    views = [
        view(0, "running", reduce("waiting"), world=3),
        view(1, "running", reduce("waiting", place=at(9, "other()")), world=3),
        view(2, "finished", world=3),
    ]

    assert only_finding(*views).text == HEAD + (
        "rank 1 waits in all_reduce(float32[3]) at line 9 of cell [12]: other(); "
        "rank 2 finished without calling it"
    )


@pytest.mark.parametrize("world", [2, 4, 64])
def test_many_ranks_are_one_sentence(world: int) -> None:
    """All but the last wait, for the same reason."""
    views = [view(r, "running", reduce("waiting"), world=world) for r in range(world - 1)]
    finding = only_finding(*views, view(world - 1, "finished", world=world))
    who = "rank 0 waits" if world == 2 else f"ranks 0-{world - 2} wait"

    assert finding.text == (
        f"{who} in all_reduce(float32[3]) at line 7 of cell [12]: {REDUCE}; "
        f"rank {world - 1} finished without calling it"
    )
    assert finding.waiting == tuple(range(world - 1))


@pytest.mark.parametrize("odd", [0, 63])
def test_the_one_that_differs_is_told_not_the_others(odd: int) -> None:
    """Of 64 ranks one called something else."""
    other = call("broadcast", "float32[3], src=0", line=3, state="waiting")
    finding = only_finding(
        *(view(r, "running", other if r == odd else reduce("waiting"), world=64) for r in range(64))
    )
    many = "0-62" if odd else "1-63"

    assert finding.text == (
        f"ranks {many} wait in all_reduce(float32[3]) at line 7 of cell [12]: {REDUCE}; "
        f"rank {odd} called broadcast(float32[3], src=0) at line 3 instead"
    )
    assert finding.blamed == (odd,)


def test_a_line_about_64_ranks_stays_readable() -> None:
    """A ring of recvs; and 63 ranks that are late, each on a line of its own."""
    recvs = (
        call("recv", f"f[3], src={p % 64}", peer=p % 64, state="waiting") for p in range(-1, 63)
    )
    ring = [view(r, "running", recv, world=64) for r, recv in enumerate(recvs)]
    late = [
        view(r, "running", world=64, snapshot=snapshot(at(r), is_asleep=False))
        for r in range(1, 64)
    ]

    shapes = (reduce("waiting", detail=f"float32[{r}]") for r in range(64))
    unlike = [view(r, "running", shape, world=64) for r, shape in enumerate(shapes)]

    assert only_finding(*unlike).text.endswith("; ranks 1-63 called it with other arguments")
    assert only_finding(*ring).text == (
        "ranks 0-63 wait in recv at line 7 of cell [12]; they wait for each other"
    )
    assert only_finding(view(0, "running", reduce("waiting"), world=64), *late).text == HEAD + (
        "ranks 1-63 have not come to it yet (still running)"
    )


def test_many_lines_and_a_long_source_are_cut() -> None:
    """Four lines are told, the rest is counted; a source has 80 characters."""
    long = "x" * 200
    views = [
        view(r, "running", reduce("waiting", place=at(r + 1, long)), world=64) for r in range(63)
    ]
    finding = only_finding(*views, view(63, "finished", world=64))

    assert "ranks 4-62 wait too; rank 63 finished" in finding.text
    assert len(finding.text) < 600


def test_the_box_of_another_cell_counts_as_nothing() -> None:
    """A rank that has not begun the cell does not wait, whatever its log last held."""
    stale = log(0, reduce("waiting"), groups=PAIR, run=RUN - 1, state="raised")
    views = [RankView(0, "running", "", stale), view(1, "finished")]

    assert diagnose(views, NOW_S) == ()


def test_counts_from_before_a_recovery_are_not_compared() -> None:
    """A dead rank's log keeps its old count; it is not in step with the new groups."""
    dead = log(1, reduce(), reduce(), groups=PAIR, generation=0)
    alive = log(0, reduce("waiting"), groups=PAIR, generation=1)
    views = [RankView(0, "running", "", alive), RankView(1, "ended", "exit code 3", dead)]

    assert only_finding(*views).text == HEAD + "rank 1 ended (exit code 3) before it"


def test_an_asynchronous_call_counts_and_so_does_its_wait() -> None:
    """A wait for call 1 while call 2 has been issued; the other rank issued both and left."""
    first, second = reduce("waiting"), reduce("issued")
    both = view(1, "finished", reduce("issued"), reduce("issued"))

    assert diagnose([view(0, "running", first, second), both], NOW_S) == ()
    assert only_finding(view(0, "running", first, second), view(1, "finished")).text == HEAD + (
        "rank 1 finished without calling it"
    )
