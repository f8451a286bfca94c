"""A mesh on hosts: what lies within one, what crosses, and which degrees stay within one."""

import pytest

from nbdist.core.topology import HostRanks
from nbdist.errors import OptionError
from nbdist.strategy import hosts
from nbdist.strategy.choice import Degrees
from nbdist.strategy.choose import choose


def on(*sizes: int) -> tuple[HostRanks, ...]:
    """Hosts n1, n2, ... with so many ranks, which follow each other."""
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(
        HostRanks(f"n{number + 1}", tuple(range(first, first + size)))
        for number, (first, size) in enumerate(zip(firsts, sizes, strict=True))
    )


@pytest.mark.parametrize(
    ("sizes", "name", "settings", "mesh"),
    [
        # A name alone spans all ranks of one host; on several tp and cp stay within a host.
        ((8,), "tp", {}, Degrees(tp=8)),
        ((4, 4), "tp", {}, Degrees(dp_shard=2, tp=4)),
        ((4, 4), "tp", {"pp": 2}, Degrees(pp=2, tp=4)),
        ((4, 4), "tp", {"pp": 4}, Degrees(pp=4, tp=2)),
        ((6, 2), "tp", {}, Degrees(dp_shard=4, tp=2)),
        ((4, 4), "cp", {}, Degrees(dp_replicate=2, cp=4)),
        ((2, 2, 2), "ulysses", {}, Degrees(dp_replicate=3, cp=2)),
        # What is typed counts, and so do hosts that have nothing in common.
        ((4, 4), "tp", {"tp": 8}, Degrees(tp=8)),
        ((4, 4), "tp", {"dp": 1}, Degrees(tp=8)),
        ((3, 1), "tp", {}, Degrees(tp=4)),
        ((1, 1), "tp", {}, Degrees(tp=2)),
        ((4, 4), "pp", {}, Degrees(pp=8)),
        ((4, 4), "fsdp", {}, Degrees(dp_shard=8)),
        # A copy on each host, whatever the smallest number of copies is.
        ((2, 2, 2, 2), "fsdp", {"shard": "hybrid"}, Degrees(dp_replicate=4, dp_shard=2)),
        ((4, 4), "fsdp1", {"shard": "hybrid"}, Degrees(dp_replicate=2, dp_shard=4)),
        (
            (4, 4, 4, 4), "fsdp", {"shard": "hybrid", "tp": 2},
            Degrees(dp_replicate=4, dp_shard=2, tp=2),
        ),
        (
            (2, 2, 2, 2), "fsdp", {"shard": "hybrid", "replicas": 2},
            Degrees(dp_replicate=2, dp_shard=4),
        ),
    ],
)  # fmt: skip
def test_degrees_that_are_not_typed_stay_within_hosts(
    sizes: tuple[int, ...], name: str, settings: dict[str, object], mesh: Degrees
) -> None:
    """On one host, and where the hosts are not known, nothing is different."""
    choice = choose(name, settings, sum(sizes), ranks_on=on(*sizes))

    assert choice.degrees == mesh
    assert choice.degrees.product == sum(sizes)


@pytest.mark.parametrize(
    ("sizes", "settings", "pieces"),
    [
        ((3, 1), {}, ("3 ranks on n1, 1 rank on n2", "--shard full", "--replicas")),
        ((1, 1, 1, 1), {}, ("each has 1 rank", "nothing is left to split")),
        ((2, 2), {"tp": 2}, ("tp 2 takes all 2 ranks of one", "nothing is left to split")),
        ((6, 6), {"tp": 4}, ("tp 4 does not divide the 6 ranks of one",)),
    ],
)
def test_hybrid_sharding_by_hosts_is_refused_with_numbers(
    sizes: tuple[int, ...], settings: dict[str, object], pieces: tuple[str, ...]
) -> None:
    """Where no copy fits each host; with --replicas it is the user's choice."""
    with pytest.raises(OptionError) as caught:
        choose("fsdp", {"shard": "hybrid", **settings}, sum(sizes), ranks_on=on(*sizes))

    assert [piece for piece in pieces if piece not in str(caught.value)] == []


def test_hybrid_sharding_with_a_number_of_copies_takes_uneven_hosts() -> None:
    """Then copies lie on whatever hosts their ranks are on."""
    choice = choose("fsdp", {"shard": "hybrid", "replicas": 2}, 4, ranks_on=on(3, 1))
    shards = hosts.places(choice, on(3, 1))[1]

    assert (shards.axis, shards.crossing, shards.hosts) == ("dp_shard", ((2, 3),), ("n1", "n2"))


def test_a_rank_that_came_back_elsewhere_is_no_neighbour() -> None:
    """Hosts may be even, and yet have no groups of ranks that follow each other."""
    mixed = (HostRanks("n1", (0, 1, 2, 5)), HostRanks("n2", (3, 4, 6, 7)))

    assert hosts.within(mixed) == 1
    assert choose("tp", {}, 8, ranks_on=mixed).degrees == Degrees(tp=8)
    with pytest.raises(OptionError, match="do not follow each other"):
        choose("fsdp", {"shard": "hybrid"}, 8, ranks_on=mixed)


def test_axes_are_placed_with_their_groups() -> None:
    """Outermost first; a group crosses where its ranks are on several hosts."""
    replicas, shards, tp = hosts.places(
        choose("fsdp", {"shard": "hybrid", "tp": 2}, 8, ranks_on=on(4, 4)), on(4, 4)
    )

    assert (tp.axis, tp.degree, tp.crossing, tp.hosts) == ("tp", 2, (), ())
    assert tp.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert (shards.axis, shards.groups, shards.crossing) == (
        "dp_shard", ((0, 2), (1, 3), (4, 6), (5, 7)), (),
    )  # fmt: skip
    assert (replicas.axis, replicas.crossing) == ("dp_replicate", replicas.groups)
    assert replicas.hosts == ("n1", "n2")
    assert hosts.places(choose("single", {}, 4), on(2, 2)) == ()


@pytest.mark.parametrize(
    ("sizes", "name", "settings", "pieces"),
    [
        (
            (4, 4), "tp", {"tp": 8},
            ("tp crosses hosts n1 and n2: ranks 0-7 share each layer", "--tp 2 or 4 stays"),
        ),
        ((3, 3), "fsdp", {"tp": 2}, ("ranks 2-3 share each layer", "--tp 3 stays")),
        (
            (3, 1), "fsdp", {"tp": 2},
            ("ranks 2-3", "no degree does, for there are 3 ranks on n1, 1 rank on n2"),
        ),
        ((1, 1), "cp", {}, ("cp crosses hosts n1 and n2: ranks 0-1 share each sequence",)),
        (
            (3, 3, 3, 3, 3, 3, 3, 3), "fsdp", {"tp": 2},
            ("n2, n3 and 5 more hosts: ranks 2-3, 8-9, 14-15 and 1 more group share",),
        ),
        ((4, 4), "fsdp", {}, ("between n1 and n2", "--shard hybrid", "2 copies of the model")),
    ],
)  # fmt: skip
def test_what_crosses_and_need_not_is_said(
    sizes: tuple[int, ...], name: str, settings: dict[str, object], pieces: tuple[str, ...]
) -> None:
    """Which axis, which hosts and ranks, and what to choose in its place."""
    choice = choose(name, settings, sum(sizes), ranks_on=on(*sizes))
    (sentence,) = hosts.notes(choice, on(*sizes))

    assert [piece for piece in pieces if piece not in sentence] == []


@pytest.mark.parametrize(
    ("sizes", "name", "settings"),
    [
        ((8,), "tp", {}),
        ((4, 4), "ddp", {}),  # there is nothing else to choose
        ((4, 4), "tp", {}),
        ((4, 4), "pp", {}),
        ((4, 4), "fsdp", {"shard": "hybrid"}),
        ((3, 1), "fsdp", {}),
        ((1, 1), "fsdp", {}),
        ((4, 4), "single", {}),
    ],
)
def test_nothing_is_said_where_there_is_no_better_mesh(
    sizes: tuple[int, ...], name: str, settings: dict[str, object]
) -> None:
    """Something always crosses hosts; that is no news."""
    assert hosts.notes(choose(name, settings, sum(sizes), ranks_on=on(*sizes)), on(*sizes)) == ()
