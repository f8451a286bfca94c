"""Each rule on a small trace that has what it looks for, and on one that nearly has it."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.core.finding import Finding
from nbdist.trace.breakdown import breakdown
from nbdist.trace.findings import RULES, findings
from nbdist.trace.kernel.recordings import read_folder
from nbdist.trace.straggler import share_cpus
from nbdist.trace.trace import COMMUNICATION, COMPUTE, COPY, DATA, HOST, MARK, Trace
from tests.support.findings import check_rules
from tests.support.traces import MS, Did, rank_trace, trace

_BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
_REAL = Path(__file__).resolve().parents[1] / "data" / "traces"


def findings_by_rule(trace: Trace) -> dict[str, Finding]:
    return {each.rule: each for each in findings(trace, breakdown(trace))}


def both(did: Iterable[Did], steps: Iterable[float] = (0, 100), strategy: str = "ddp") -> Trace:
    each = list(did)
    return trace(*(rank_trace(r, each, list(steps)) for r in (0, 1)), strategy=strategy)


def gpu(did: Iterable[Did], end: float = 100) -> Trace:
    return trace(rank_trace(0, did, [0, end], device="cuda"))


def busy(start: float, end: float, name: str = "gemm") -> Did:
    return Did(COMPUTE, start, end, name, lane=1)


def copies(count: int) -> Trace:
    """A step of 100 ms on a GPU with so many reads of a value, each after a wait of 5 ms."""
    did = [busy(0, 50)]
    for number in range(count):
        at = 50 + 10 * number
        did += [
            Did(HOST, at, at + 6, "aten::item"),
            Did(COPY, at + 5, at + 5.5, "Memcpy DtoH (Device -> Pageable)", lane=1),
            busy(at + 6, at + 10),
        ]
    return gpu(did)


def casts(share: float) -> Trace:
    """80 ms of compute, of which so much is copies from one type to another."""
    return both([busy(0, 80 * (1 - share)), busy(80 * (1 - share), 80, "aten::_to_copy")])


def late(*by: float, n_cpus: int = 2) -> Trace:
    """Rank 1 computes so much longer before the one all-reduce of each step of 100 ms."""
    did: list[list[Did]] = [[], []]
    for step, longer in enumerate(by):
        at = 100 * step
        for rank, more in enumerate((max(0, -longer), max(0, longer))):
            arrived, ended = at + 50 + more, at + 55 + abs(longer)
            did[rank] += [
                Did(COMPUTE, at, arrived),
                Did(COMMUNICATION, arrived, ended, "all-reduce", 1, 8),
                Did(COMPUTE, ended, at + 100),
            ]
    steps = [100 * step for step in range(len(by) + 1)]
    ranks = (rank_trace(rank, did[rank], steps) for rank in (0, 1))
    return trace(*(replace(rank, cpus=tuple(range(n_cpus))) for rank in ranks))


def communication(length: float, strategy: str = "ddp") -> Trace:
    """An all-reduce that nothing goes on under; the rest computes."""
    did = [
        Did(COMPUTE, 0, 100 - length, _BACKWARD),
        Did(COMMUNICATION, 100 - length, 100, "all-reduce", 1, 8),
    ]
    return both(did, strategy=strategy)


def data(length: float) -> Trace:
    loads = Did(DATA, 0, length, "enumerate(DataLoader)#_SingleProcess.__next__")
    return both([loads, Did(COMPUTE, length, 100)])


def gap(length: float) -> Trace:
    return both([Did(COMPUTE, length, 100)])


def small_kernels(length_us: float, pause_us: float) -> Trace:
    period = (length_us + pause_us) / 1000
    starts = [k * period for k in range(200)]
    return gpu((busy(at, at + length_us / 1000) for at in starts), 200 * period)


_EP = "ddp x ep, dp 2 (experts over ep 2)"


def exchange(length: float, strategy: str = _EP, most: int = 128) -> Trace:
    """Tokens travel for so long, `most` bytes of two times 64 to rank 1; the rest computes."""
    ranks = []
    for rank, size in ((0, 64), (1, most)):
        tokens = Did(COMMUNICATION, 100 - length, 100, "all-to-all", 1, size)
        ranks.append(rank_trace(rank, [Did(COMPUTE, 0, 100 - length), tokens], (0, 100)))
    return trace(*ranks, strategy=strategy)


# Rule -> (a trace that has it, one that nearly has, what is found).
_CASES = {
    "device-to-host copies": (
        copies(3), copies(2), "3 copies from the GPU to the host per step on rank 0",
    ),
    "dtype copies": (
        casts(0.12), casts(0.08),
        "dtype conversions take 12% of the compute time of rank 0 (1 per step)",
    ),
    "data": (data(12), data(8), "rank 0 waits 12.0 ms per step for data (12%)"),
    "nothing runs": (gap(12), gap(8), "rank 0 is idle for 12.0 ms in a row in each step (12%)"),
    "much communication": (
        communication(55), communication(45),
        ("collectives that compute does not overlap, mostly all-reduce, take 55% of a step on "
        "rank 0"),
    ),
    "expert exchange": (
        exchange(12), exchange(8),
        ("sending tokens to experts and back (all-to-all) takes 12% of a step on rank 0 beside "
        "compute; rank 1 gets 2.0 times as many as it sends"),
    ),
    "one late rank": (
        late(6, 6, 6), late(4, 4, 4),
        ("the other ranks wait for rank 1 in 3 of 3 steps (spread 0.0 ms): without it a step would "
        "be 6% faster; it computes 6.0 ms longer than the others"),
    ),
    "many small kernels": (
        small_kernels(6, 4), small_kernels(12, 4),
        ("100% of 200 kernels per step on rank 0 are shorter than 10 us, and its GPU is idle for "
        "40% of the time"),
    ),
    "buckets that do not overlap": (
        communication(12), communication(8),
        "0% of gradient communication on rank 0 overlaps the backward pass (calls per step: 1)",
    ),
}  # fmt: skip


def test_every_rule_has_its_case() -> None:
    """Every rule says why and what to do, and stands in docs/traces.md."""
    check_rules(RULES, _CASES, "traces")


@pytest.mark.parametrize("rule", sorted(_CASES))
def test_a_rule_finds_what_it_looks_for(rule: str) -> None:
    """Where it is over its threshold, with a place to look at inside the steps; not just below."""
    has, has_not, expected = _CASES[rule]

    assert rule not in findings_by_rule(has_not)
    finding = findings_by_rule(has)[rule]
    assert finding.found == expected
    assert 0 < finding.share <= 1
    assert set(finding.ranks) <= {0, 1}
    assert all(0 <= spot.start_ns < spot.end_ns <= 100 * MS for spot in finding.spots)
    assert finding.spots or rule == "one late rank"


def test_the_largest_finding_is_first() -> None:
    """By its share of a step."""
    result = findings(communication(60), breakdown(communication(60)))

    assert [finding.share for finding in result] == sorted(
        (finding.share for finding in result), reverse=True
    )
    assert len(result) == 2


def test_a_rank_that_waits_for_a_late_one_does_not_communicate_much() -> None:
    """60 ms of waiting are the late rank's, not the link's."""
    rules = findings_by_rule(late(45, 45, 45))

    assert "one late rank" in rules
    assert "much communication" not in rules
    assert "buckets that do not overlap" not in rules


@pytest.mark.parametrize(
    ("recorded", "doubt"),
    [
        (late(20, 22, 18), ""),
        (late(20, 20, 20, -20, 20, 20), ""),  # one step in between
        (late(40, -40, 40, -39), "others cost at least half as much"),
        (late(40, 5, 20), "chance: last in 3 of 3 steps (spread 35.0 ms)"),
        (late(30, 30), "chance: fewer than 3 steps"),
        (late(20, 20, 20, n_cpus=1), "chance, as the ranks share cores"),
    ],
)
def test_a_late_rank_is_told_where_it_is_no_chance(recorded: Trace, doubt: str) -> None:
    """The same one in most steps, by more than they differ, and not for want of a core."""
    slowest = breakdown(recorded).slowest

    assert slowest is not None
    assert slowest.rank == 1
    assert slowest.doubt.endswith(doubt)
    assert ("one late rank" in findings_by_rule(recorded)) == (not doubt) == (not slowest.doubt)


def test_ranks_that_are_bound_to_cpus_share_them_or_not() -> None:
    """Two on a CPU each, then both on the same one of two; of another host they are others."""
    ranks = late(20, 20, 20).ranks

    def bound(*cpus: tuple[int, ...], hosts: str = "aa") -> bool:
        each = zip(ranks, cpus, hosts, strict=True)
        return share_cpus([replace(rank, cpus=c, host=host) for rank, c, host in each])

    assert not bound((0,), (1,))
    assert bound((1,), (1,))
    assert not bound((1,), (1,), hosts="ab")
    assert not bound((), ())


@pytest.mark.parametrize("strategy", ["tp, tp 2", "ddp x pp, dp 2 x pp 2", "cp, cp 2"])
def test_activations_are_no_buckets(strategy: str) -> None:
    """What the next operator needs cannot go on under others."""
    assert "buckets that do not overlap" not in findings_by_rule(communication(30, strategy))


def test_collectives_without_a_backward_are_no_buckets() -> None:
    """The user's own, which carry no gradients."""
    did = [Did(COMPUTE, 0, 70), Did(COMMUNICATION, 70, 100, "all-reduce", 1, 8)]

    assert "buckets that do not overlap" not in findings_by_rule(both(did))


def test_collectives_under_the_backward_are_fine() -> None:
    """A bucket that goes on while the backward does."""
    did = [Did(COMPUTE, 0, 100, _BACKWARD), Did(COMMUNICATION, 60, 95, "all-reduce", 1, 8)]

    assert findings_by_rule(both(did)) == {}


def test_an_exchange_is_of_experts_under_ep_alone() -> None:
    """Not ulysses' all-to-all; where tokens go evenly no rank is named."""
    even = findings_by_rule(exchange(30, most=80))["expert exchange"]

    assert even.found.endswith("takes 30% of a step on rank 0 beside compute")
    assert "expert exchange" not in findings_by_rule(exchange(30, "ulysses, cp 2"))


def test_what_an_optimizer_copies_is_not_the_users() -> None:
    """Its counts of steps are tensors."""
    did = [Did(COMPUTE, 0, 60, "aten::mm"), Did(MARK, 60, 100, "Optimizer.step#AdamW.step")]
    did += [Did(COMPUTE, 60 + k, 61 + k, "aten::_to_copy") for k in range(40)]

    assert "dtype copies" not in findings_by_rule(both(did))


def test_a_step_in_which_nothing_runs_for_long_is_told() -> None:
    """Where no DataLoader is used."""
    did = [Did(COMPUTE, at, at + 80) for at in (20, 120)]

    finding = findings_by_rule(both(did, (0, 100, 200)))["nothing runs"]

    assert {(spot.start_ns, spot.end_ns) for spot in finding.spots} == {
        (0, 20 * MS), (100 * MS, 120 * MS),
    }  # fmt: skip


def test_little_or_nothing_gives_no_findings() -> None:
    """No rank, no event, one rank, no step."""
    assert findings_by_rule(trace()) == {}
    assert findings_by_rule(trace(rank_trace(0, []))) == {}
    assert findings_by_rule(trace(rank_trace(0, [Did(COMPUTE, 0, 5)]))) == {}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "pp"])
def test_real_traces_give_findings_of_the_table(strategy: str) -> None:
    """Two ranks with a tiny model that share two cores communicate or idle most of the time."""
    trace = read_folder(_REAL / strategy)

    result = findings_by_rule(trace)

    assert result
    assert set(result) <= {rule.name for rule in RULES}
    assert "device-to-host copies" not in result
    assert "many small kernels" not in result
    for each in result.values():
        for spot in each.spots:
            assert spot.rank in each.ranks
