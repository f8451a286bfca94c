"""What is measured in the time, what is left out, what is kept; failures leave ranks usable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nbdist.bandwidth import kernel as bandwidth_kernel
from nbdist.bandwidth.kernel import Bandwidth, load, next_cost_s, save, shares
from nbdist.bandwidth.results import LEAST_RUNS, OPS, Bench, Timing
from nbdist.bandwidth.sizes import DEFAULT_SIZES, parse_sizes
from nbdist.core.topology import Gpu, Topology, local_reports, plan
from nbdist.errors import Interrupted, NbdistError, OptionError, RankGone
from nbdist.notebook.session import Session

MIB = 2**20
LATENCY_S, BYTES_PER_S = 1e-3, 1e9


def topology(n: int = 2, gpus: int = 0, backend: str = "auto") -> Topology:
    cards = tuple(Gpu(i, f"GPU-{i}", "H200") for i in range(gpus))
    return plan(local_reports(n, hostname="a", gpus=cards, cores=8), backend)


class FakeSession:
    """Ranks whose runs take as long as latency and bandwidth say, on a clock of their own."""

    def __init__(self, topology: Topology, **free: int):
        self.topology = topology
        self.now_s = 1000.0
        self.done: list[str] = []
        self.asked: list[tuple[str, int]] = []
        self.ranks = tuple(range(topology.world_size))
        self.check_death = lambda _ranks: self.done.append("looked")
        self.recover_if_needed = lambda: self.done.append("recovered")
        self.settle = lambda: self.done.append("settled")
        self.problem: Callable[[str, int], Any] = lambda _op, _size: ""
        self._free = free or {"host": 10**12}

    def call_all(
        self, function: Callable[..., Any], *args: Any, deadline_s: float, **options: Any
    ) -> list[Any]:
        n = self.topology.world_size
        if function is bandwidth_kernel.begin_measuring:
            return [self._free] * n
        assert function is bandwidth_kernel.measure
        assert options == {"is_collective": True, "patience_s": bandwidth_kernel.PATIENCE_S}
        op, size, limit_s = args
        self.asked.append((op, size))
        problem = self.problem(op, size)
        if isinstance(problem, BaseException):
            raise problem
        if problem:
            return [Timing(problem=problem)] * n
        run_s = LATENCY_S + OPS[op].factor(n) * size / BYTES_PER_S
        runs = max(LEAST_RUNS, min(100, int(limit_s / run_s)))
        took_s = (runs + 1) * run_s
        assert took_s < deadline_s
        self.now_s += took_s
        slow = [Timing((run_s,) * runs, run_s), Timing((run_s / 2,) * runs, run_s / 2)]
        return (slow * n)[:n]


@pytest.fixture
def new_bandwidth(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Bandwidth, FakeSession]]:
    def make(*args: Any, **options: Any) -> tuple[Bandwidth, FakeSession]:
        session = FakeSession(*args, **options)
        clock = SimpleNamespace(monotonic=lambda: session.now_s)
        monkeypatch.setattr(bandwidth_kernel, "time", clock)
        return Bandwidth(cast(Session, session)), session

    return make


NewBandwidth = Callable[..., tuple[Bandwidth, FakeSession]]


def test_everything_is_measured_where_there_is_time(new_bandwidth: NewBandwidth) -> None:
    """All operations at all sizes of the backend; the model is that of the ranks."""
    bandwidth, session = new_bandwidth(topology())
    with pytest.raises(OptionError, match=r"Nothing has been measured yet\. Run %dist_bench"):
        _ = bandwidth.model
    bench = bandwidth.measure(limit_s=1000.0)

    sizes = parse_sizes(DEFAULT_SIZES["gloo"], 2)
    assert session.asked == [(op, size) for op in OPS for size in sizes]
    assert bench.left_out == ()
    assert bandwidth.last is bench
    assert session.done == ["recovered"]
    for op in OPS:
        fit = bandwidth.model.fits[op]
        assert fit.alpha_s == pytest.approx(LATENCY_S, rel=0.01)
        assert fit.beta_s == pytest.approx(1 / BYTES_PER_S, rel=0.01)


def test_with_nccl_sizes_go_to_a_gigabyte(new_bandwidth: NewBandwidth) -> None:
    """What is measured is one thing; why it says nothing of links is empty there."""
    bandwidth, session = new_bandwidth(topology(2, gpus=2), host=1, device=10**11)
    bench = bandwidth.measure("all_reduce", limit_s=1000.0)

    assert session.asked[-1] == ("all_reduce", 2**30)
    assert (bench.caveat, bench.device, bench.backend) == ("", "H200", "nccl")


@pytest.mark.parametrize("limit_s", [0.3, 2.0, 10.0])
def test_it_keeps_to_its_time(new_bandwidth: NewBandwidth, limit_s: float) -> None:
    """Large sizes are left out, and told; the smallest of each operation never is."""
    bandwidth, session = new_bandwidth(topology())
    began_s = session.now_s
    bench = bandwidth.measure(sizes="1K:1G", limit_s=limit_s)

    assert session.now_s - began_s < limit_s * 1.3
    assert {row.op for row in bench.rows} == set(OPS)
    assert bench.left_out != ()
    for sentence in bench.left_out:
        assert "longer than its share of the time; allow more with --seconds" in sentence


def test_what_memory_does_not_hold_is_left_out(new_bandwidth: NewBandwidth) -> None:
    """All-to-all has two tensors, all-reduce one; ranks of a host share its memory."""
    bandwidth, session = new_bandwidth(topology(), host=5 * MIB)
    bench = bandwidth.measure("all_reduce,all_to_all", "1M,2M", limit_s=100.0)

    assert session.asked == [("all_reduce", MIB)]
    assert [sentence.partition(":")[0] for sentence in bench.left_out] == [
        "all_reduce 2 MiB",
        "all_to_all from 1 MiB up",
    ]


def test_an_operation_that_the_backend_lacks_is_left_out(new_bandwidth: NewBandwidth) -> None:
    """It is asked for once, and the others go on."""
    bandwidth, session = new_bandwidth(topology())
    session.problem = lambda op, _size: "the backend lacks it" if op == "reduce" else ""
    bench = bandwidth.measure("reduce,broadcast", "1K,4K", limit_s=100.0)

    assert [row.op for row in bench.rows] == ["broadcast", "broadcast"]
    assert bench.left_out == ("reduce: the backend lacks it",)
    assert len(session.asked) == 3


@pytest.mark.parametrize(
    ("n", "asked", "expected"),
    [
        (2, {"ops": "nothing"}, "no operation 'nothing'"),
        (2, {"sizes": "1G:1K"}, "go down"),
        (1, {}, r"Only 1 rank runs, .*%dist_init -n 2"),
    ],
)
def test_a_mistake_asks_no_rank(
    new_bandwidth: NewBandwidth, n: int, asked: dict[str, str], expected: str
) -> None:
    """It is an OptionError before anything is measured."""
    bandwidth, session = new_bandwidth(topology(n))
    with pytest.raises(OptionError, match=expected):
        bandwidth.measure(**asked)

    assert (session.asked, bandwidth.last) == ([], None)


@pytest.mark.parametrize("error", [RankGone("rank 1 has ended"), NbdistError("rank 0: lost")])
def test_after_a_failure_the_ranks_are_brought_back(
    new_bandwidth: NewBandwidth, error: NbdistError
) -> None:
    """What failed is told as it is, and what was measured before is kept."""
    bandwidth, session = new_bandwidth(topology())
    before = bandwidth.measure("broadcast", "1K", limit_s=1.0)
    session.problem = lambda _op, size: error if size > 1024 else ""
    with pytest.raises(type(error)) as caught:
        bandwidth.measure("broadcast", "1K,4K", limit_s=1.0)

    assert caught.value is error
    assert session.done[-2:] == ["settled", "looked"]
    assert bandwidth.last is before


def test_an_interrupt_says_where(new_bandwidth: NewBandwidth) -> None:
    """Between two calls or within one."""
    bandwidth, session = new_bandwidth(topology())
    session.problem = lambda op, _size: Interrupted("late") if op == "broadcast" else ""
    with pytest.raises(Interrupted, match="interrupted at broadcast of 1 KiB; its results"):
        bandwidth.measure("reduce,broadcast", "1K,4K", limit_s=1.0)
    assert session.done[-1] == "settled"

    def press(_text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="interrupted at reduce of 1 KiB"):
        bandwidth.measure("reduce", "1K", 1.0, press)
    assert session.done.count("settled") == 2


def test_the_cost_of_the_next_size() -> None:
    """On the line through the last two, never more than in proportion; unknown from one alone."""
    assert next_cost_s([], 10) == 0
    assert next_cost_s([(10, 1.0)], 1000) == 0
    assert next_cost_s([(0, 5.0), (10, 1.0), (20, 1.5)], 40) == pytest.approx(2.5)
    assert next_cost_s([(10, 1.0), (20, 11.0)], 40) == pytest.approx(22.0)
    assert next_cost_s([(10, 3.0), (20, 1.0)], 40) == pytest.approx(1.0)


def test_shares_of_memory() -> None:
    """Half of what is free, by the ranks that are on the same host, or GPU."""
    shared = topology(2, gpus=1)
    two_gpus = topology(2, gpus=2)

    assert shares(topology(4), [{"host": 80}] * 4) == [10.0] * 4
    assert shares(shared, [{"host": 1000, "device": 80}] * 2) == [20.0] * 2
    assert shares(shared, [{"host": 40, "device": 80}] * 2) == [10.0] * 2
    assert shares(two_gpus, [{"host": 1, "device": 80}] * 2) == [40.0] * 2


def test_a_file(tmp_path: Path, new_bandwidth: NewBandwidth) -> None:
    """It is written, read, and replaced by another measurement; nothing else is."""
    bandwidth, _ = new_bandwidth(topology())
    first = bandwidth.measure("broadcast", "1K,4M", limit_s=10.0)
    path = tmp_path / "links.json"
    save(first, path)
    second = replace(first, rows=first.rows[:1])
    save(second, path)
    other, _ = new_bandwidth(topology())
    other.load(path)
    foreign = tmp_path / "train.py"
    foreign.write_text("print(1)\n")
    binary = tmp_path / "weights"
    binary.write_bytes(b"\xff\xfe\xff")
    for wrong, message in (
        (foreign, r"train.py exists and was not .*not a complete measurement"),
        (binary, r"exists and was not replaced. .*it is not text"),
        (tmp_path, r"exists and was not replaced"),
        (tmp_path / "nowhere" / "a.json", r"There is no folder .*nowhere to save a.json in"),
    ):
        with pytest.raises(OptionError, match=message):
            save(first, wrong)
    with pytest.raises(OptionError, match=r"no.json cannot be read \(No such file"):
        load(tmp_path / "no.json")

    assert isinstance(other.last, Bench)
    assert other.last == second
    assert foreign.read_text() == "print(1)\n"
