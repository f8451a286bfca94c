"""Sizes, bandwidths and the fit_model model: against counted bytes and made-up times."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from nbdist.bandwidth.latency import Fit, fit
from nbdist.bandwidth.links import LINKS, around
from nbdist.bandwidth.results import (
    OPS,
    BandwidthRow,
    Bench,
    LinkModel,
    Timing,
    caveat,
    dumps,
    fit_model,
    loads,
    merge_timings,
    parse_ops,
    too_long,
    unfitting,
)
from nbdist.bandwidth.sizes import parse_sizes, size_text
from nbdist.core.units import compared
from nbdist.errors import OptionError
from tests.bandwidth.test_kernel import topology

KIB, MIB, GIB = 2**10, 2**20, 2**30


# Sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4M", [4 * MIB]),
        ("4m", [4 * MIB]),
        ("512", [512]),
        ("1K,1M", [KIB, MIB]),
        ("1M, 1K ,1M", [KIB, MIB]),
        ("1K:64K", [KIB, 4 * KIB, 16 * KIB, 64 * KIB]),
        ("1K:10K", [KIB, 4 * KIB, 10 * KIB]),
        ("1K:1K", [KIB]),
        ("1K:4K,1G", [KIB, 4 * KIB, GIB]),
        ("8:1K", [8, 32, 128, 512, KIB]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    """Sizes, lists and ranges, rising, each once; a range has both of its ends."""
    assert parse_sizes(text, 2) == tuple(sizes)


def test_sizes_are_whole_numbers_of_float32_for_each_rank() -> None:
    """What cannot be shared out evenly is rounded down; numbers may be given as such."""
    assert parse_sizes("1K", 3) == (1020,)
    assert parse_sizes([100, 50], 3) == (48, 96)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", "'0' is not a valid size"),
        ("0K", "'0K' is not a valid size"),
        ("", "'' is not a valid size"),
        ("5X", "'5X' is not a valid size"),
        ("1MB", "'1MB' is not a valid size"),
        ("-1K", "'-1K' is not a valid size"),
        ("1.5M", "'1.5M' is not a valid size"),
        ("\u0664K", "is not a valid size"),
        ("1K,,1M", "'' is not a valid size"),
        ("1K:", "'' in '1K:' is not a valid size"),
        (":1K", "'' in ':1K' is not a valid size"),
        ("1K:2K:4K", "'2K:4K' in '1K:2K:4K' is not a valid size"),
        ("1G:1K", "The sizes 1G:1K go down. Write 1K:1G."),
        ("4", "A size of 4 bytes is less than one float32 for each of 2 ranks. Use 8 or more."),
        ("1025G", "more than 1024G"),
        ("99999999999999", "is not a valid size"),
    ],
)
def test_what_is_no_size(text: str, expected: str) -> None:
    """The message quotes it and says how sizes are written."""
    with pytest.raises(OptionError) as caught:
        parse_sizes(text, 2)

    assert expected in str(caught.value)


def test_size_text() -> None:
    """The largest unit that says it exactly."""
    texts = [size_text(size) for size in (8, 1020, KIB, 1536, 64 * MIB, GIB, 1025 * GIB)]

    assert texts == ["8 B", "1020 B", "1 KiB", "1536 B", "64 MiB", "1 GiB", "1025 GiB"]


def test_ops() -> None:
    """All, or those that are named, each once."""
    assert parse_ops(None) == tuple(OPS)
    assert parse_ops("reduce, all_gather,reduce") == ("reduce", "all_gather")
    assert parse_ops(["broadcast"]) == ("broadcast",)
    with pytest.raises(
        OptionError, match=r"no operation 'allreduce'\. Did you mean all_reduce\? Choose one of"
    ):
        parse_ops("allreduce,reduce")
    with pytest.raises(OptionError, match="no operation ''"):
        parse_ops("")


# Bus bandwidth: what the busiest rank sends, counted step by step


def ring(n: int, steps: int, part: int) -> Counter[int]:
    """Bytes that each rank sends when each passes one part on in every step."""
    return Counter(dict.fromkeys(range(n), steps * part))


def reduce_scatter_ring(n: int, size: int) -> Counter[int]:
    """Each part goes around until the last rank has the sum; checked that it has."""
    sent: Counter[int] = Counter()
    has = [[{rank} for _ in range(n)] for rank in range(n)]  # whose values are in each part
    for step in range(n - 1):
        moved = [(rank, (rank - step) % n, set(has[rank][(rank - step) % n])) for rank in range(n)]
        for rank, part, values in moved:
            sent[rank] += size // n
            has[(rank + 1) % n][part] |= values

    assert all(has[rank][(rank + 1) % n] == set(range(n)) for rank in range(n))
    return sent


def chain(n: int, size: int) -> Counter[int]:
    """From rank to rank, piece by piece: all but the last send everything once."""
    return Counter(dict.fromkeys(range(n - 1), size))


BUSIEST: dict[str, Callable[[int, int], Counter[int]]] = {
    "all_reduce": lambda n, size: reduce_scatter_ring(n, size) + ring(n, n - 1, size // n),
    "all_gather": lambda n, size: ring(n, n - 1, size // n),
    "reduce_scatter": reduce_scatter_ring,
    "all_to_all": lambda n, size: ring(n, n - 1, size // n),  # each keeps one of its parts
    "broadcast": chain,
    "reduce": chain,
    "send_recv": lambda n, size: ring(n, 1, size),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_factor_counts_the_bytes_that_the_busiest_rank_sends(op: str, n: int) -> None:
    """So bus bandwidth is what one rank's link carries, whatever the number of ranks."""
    size = 840 * n
    sent = max(BUSIEST[op](n, size).values())

    assert OPS[op].factor(n) * size == pytest.approx(sent)


def test_bandwidths() -> None:
    """8 ranks, 1 GB in 10 ms: 100 GB/s, on the bus 1.75 times as much."""
    row = BandwidthRow("all_reduce", 10**9, 0.01, 20)

    assert row.algbw == pytest.approx(100e9)
    assert row.busbw(8) == pytest.approx(175e9)
    assert BandwidthRow("broadcast", 10**9, 0.01, 20).busbw(8) == pytest.approx(100e9)


def test_a_run_ends_with_its_slowest_rank() -> None:
    """The median over runs of the largest time in each; wrong ranks are named."""
    timings = [Timing((1.0, 2.0, 9.0)), Timing((3.0, 1.0, 4.0), is_right=False)]

    assert merge_timings("reduce", 64, timings) == BandwidthRow("reduce", 64, 3.0, 3, wrong=(1,))


# The model


def times(alpha_s: float, beta_s: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of 1K:1G, and times with 2 % of noise; one in six disturbed, up to tenfold."""
    random = np.random.default_rng(seed)
    wire = np.array([KIB * 4**k for k in range(11) for _ in range(3)], float)
    t = (alpha_s + beta_s * wire) * np.exp(random.normal(0, 0.02, len(wire)))
    disturbed = random.choice(len(t), 5, replace=False)
    t[disturbed] *= random.uniform(2, 10, 5)
    return wire, t


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("alpha_s", "gb_per_s"), [(8e-6, 380.0), (200e-6, 3.0), (50e-6, 1.25)])
def test_known_latency_and_bandwidth_are_found(alpha_s: float, gb_per_s: float, seed: int) -> None:
    """Within 5 %, although sizes cover six orders of magnitude and some times are far off."""
    found_fit = fit(*times(alpha_s, 1 / (gb_per_s * 1e9), seed))

    assert found_fit.alpha_s == pytest.approx(alpha_s, rel=0.05)
    assert 1e-9 / found_fit.beta_s == pytest.approx(gb_per_s, rel=0.05)
    assert found_fit.error < 0.05
    assert found_fit.sizes == 33


def test_neither_latency_nor_time_per_byte_is_negative() -> None:
    """Times that fall with the size, or have no latency, are no reason for nonsense."""
    falling = fit([1e3, 1e6], [2e-3, 1e-3])
    proportional = fit([1e6, 2e6, 3e6], [1e-3, 2.1e-3, 3.3e-3])

    assert falling.beta_s == 0
    assert 1e-3 <= falling.alpha_s <= 2e-3
    assert proportional.alpha_s == 0
    assert proportional.beta_s == pytest.approx(1.05e-9, rel=0.05)


def test_the_model_says_times_for_other_sizes_and_ranks() -> None:
    """Exact times come back exactly; the bytes on the wire follow the number of ranks."""
    alpha_s, beta_s, n = 20e-6, 1e-9, 4
    rows = [
        BandwidthRow(op, size, alpha_s + beta_s * OPS[op].factor(n) * size, 9)
        for op in ("all_reduce", "broadcast")
        for size in (KIB, MIB, GIB)
    ]
    model = fit_model(rows, n)

    assert model.seconds("all_reduce", 10**8) == pytest.approx(20e-6 + 0.15)
    assert model.seconds("all_reduce", 10**8, 2) == pytest.approx(20e-6 + 0.1)
    assert model.seconds("broadcast", 0) == pytest.approx(20e-6)
    assert model.seconds("broadcast", 10**8, 1) == 0
    with pytest.raises(
        OptionError, match=r"'reduce' has no bandwidth model .*: all_reduce, broadcast"
    ):
        model.seconds("reduce", 1)


def test_there_is_no_model_without_two_sizes_or_growth() -> None:
    """One size, or only small ones: the bandwidth is not known."""
    single_row = [BandwidthRow("all_reduce", KIB, 1e-4, 9)]
    flat = [BandwidthRow("broadcast", KIB, 1e-4, 9), BandwidthRow("broadcast", 4 * KIB, 0.9e-4, 9)]

    assert fit_model([*single_row, *flat], 2) == LinkModel({}, 2)
    with pytest.raises(OptionError, match=r"\(these have one: none\)"):
        fit_model(single_row, 2).seconds("all_reduce", 1)


# Links


def test_links_of_the_data_sheets() -> None:
    """One direction: half of what data sheets of NVLink and PCIe say of both, Gb/s over 8."""
    gb = {link.name: link.bytes_per_s / 1e9 for link in LINKS}

    assert (gb["NVLink 3"], gb["NVLink 4"], gb["NVLink 5"]) == (600 / 2, 900 / 2, 1800 / 2)
    for name, both in (("PCIe 4 x16", 64), ("PCIe 5 x16", 128), ("PCIe 6 x16", 256)):
        assert gb[name] == pytest.approx(both / 2, rel=0.08)
        assert gb[name] < both / 2  # encoding takes a part
    assert (gb["InfiniBand HDR"], gb["InfiniBand NDR"]) == (200 / 8, 400 / 8)
    assert [gb[f"{n} Gb Ethernet"] for n in (100, 25, 10)] == [12.5, 3.125, 1.25]
    assert len(gb) == len(LINKS)


def test_links_around_a_speed() -> None:
    """The next below and above; none beyond the ends."""

    def names(gb_per_s: float) -> list[str | None]:
        return [link and link.name for link in around(gb_per_s * 1e9)]

    assert names(361) == ["NVLink 3", "NVLink 4"]
    assert names(12.5) == ["100 Gb Ethernet", "PCIe 3 x16"]
    assert names(0.01) == [None, "1 Gb Ethernet"]
    assert names(2000) == ["NVLink 5", None]


# What is said


def test_what_is_no_speed_of_links_says_so() -> None:
    """CPUs, a shared GPU and Gloo on GPUs of one's own; NCCL on such is the only measurement."""
    assert caveat(topology(2, gpus=2)) == ""
    assert caveat(topology(2)) == (
        "These are not speeds of links between GPUs: messages go through the memory of one host. "
        "Gloo on the CPU: no rank sees a GPU."
    )
    assert "copied from each GPU and back. Gloo: 2 ranks share 1 GPU" in caveat(topology(2, gpus=1))
    assert "not speeds of links" in caveat(topology(2, 2, "gloo"))


def test_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers, and what to do."""
    assert unfitting("all_to_all", [GIB, 4 * GIB], 2, [5e9, 1e9]) == (
        "all_to_all from 1 GiB up: rank 1 would need 2.1 GB and may take 1.0 GB (half of the "
        "free memory, shared among the ranks there)"
    )
    assert too_long("reduce", [GIB], 3.14) == (
        "reduce 1 GiB: about 3.1 s, longer than its share of the time; allow more with --seconds"
    )
    monkeypatch.setenv("NBDIST_TEST", "1")
    assert compared(too_long("reduce", [GIB], 3.14)).startswith("reduce 1 GiB: about # s")


# Files

BENCH = Bench(
    2, 1, "gloo", "CPU", "no links",
    (
        BandwidthRow("all_reduce", KIB, 1e-4, 9),
        BandwidthRow("all_reduce", MIB, 1e-3, 9, wrong=(1,)),
    ),
    ("reduce 1 GiB: too long",),
)  # fmt: skip


def test_a_measurement_comes_back_from_its_file() -> None:
    """All of it, with the same model."""
    again = loads(dumps(BENCH))

    assert again == BENCH
    assert isinstance(again.model.fits["all_reduce"], Fit)


def _changed(**new: object) -> str:
    return json.dumps({**json.loads(dumps(BENCH)), **new})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        dumps(BENCH)[:200],
        _changed(format="nbdist bench 2"),
        _changed(extra=1),
        _changed(rows=[{"op": "all_reduce"}]),
        _changed(rows=3),
        _changed(world_size=1),
        _changed(world_size="two"),
        _changed(rows=[{"op": "nothing", "size_bytes": 1, "time_s": 1, "runs": 1, "wrong": []}]),
        _changed(rows=[{"op": "reduce", "size_bytes": 1, "time_s": 0, "runs": 1, "wrong": []}]),
        _changed(rows=[{"op": "reduce", "size_bytes": 1, "time_s": "x", "runs": 1, "wrong": []}]),
    ],
)
def test_a_torn_or_foreign_file_is_refused(text: str) -> None:
    """Not with a traceback of its parser, but as what it is."""
    with pytest.raises(
        OptionError, match="This is not a complete measurement written by %dist_bench --save"
    ):
        loads(text)
