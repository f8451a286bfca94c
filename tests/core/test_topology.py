"""Ranks, devices and backends are planned rightly on made-up hosts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from nbdist.core.interface import choose_interface
from nbdist.core.topology import (
    EngineReport,
    Gpu,
    HostRanks,
    Topology,
    choose_backend,
    default_world_size,
    filter_visible,
    local_reports,
    plan,
    replan,
    select_gpus,
    store_addresses,
)
from nbdist.errors import OptionError, StartError


def gpus(host: str, n: int, kind: str = "GPU") -> tuple[Gpu, ...]:
    return tuple(Gpu(i, f"{kind}-{host}-{i}", "NVIDIA H200") for i in range(n))


def engine(engine_id: int, hostname: str = "node1", **facts: object) -> EngineReport:
    """Return the report of an engine with 16 cores and a torch that has CUDA."""
    report = EngineReport(engine_id, hostname, boot_id="b-" + hostname, cores=16, has_cuda=True)
    return replace(report, **facts)  # type: ignore[arg-type]


def hinted(layout: Sequence[tuple[int, str]]) -> list[EngineReport]:
    """Return one engine per (rank hint, hostname), engine ids in reversed order."""
    n = len(layout)
    return [
        engine(n - 1 - i, host, rank_hint=hint, size_hint=n, job_id="77")
        for i, (hint, host) in enumerate(layout)
    ]


def local(n: int, devices: tuple[Gpu, ...], cores: int = 8, **facts: Any) -> list[EngineReport]:
    reports = local_reports(n, hostname="box", gpus=devices, cores=cores)
    return [replace(report, **facts) for report in reports]


def each(topology: Topology, name: str) -> list[Any]:
    return [getattr(place, name) for place in topology.ranks]


def test_one_host_without_hints_is_ordered_by_engine_id() -> None:
    """Without hints the ranks of one host follow the engine ids, in whatever order they report."""
    topology = plan([engine(e) for e in (7, 2, 9, 4)])

    assert each(topology, "engine_id") == [2, 4, 7, 9]
    assert each(topology, "rank") == [0, 1, 2, 3]
    assert each(topology, "local_rank") == [0, 1, 2, 3]
    assert set(each(topology, "local_world_size")) == {4}
    assert (topology.n_hosts, topology.world_size, topology.is_launcher_order) == (1, 4, False)
    assert (topology.rank_of_engine(9), topology.engine_of_rank(3)) == (3, 9)
    with pytest.raises(KeyError):
        topology.rank_of_engine(3)
    with pytest.raises(KeyError):
        topology.engine_of_rank(-1)


def test_hints_in_order_are_the_ranks() -> None:
    """Slurm's ranks are kept when each host has a contiguous block, in any order of hosts."""
    layout = [(r, "node2" if r < 4 else "node1") for r in range(8)]
    topology = plan(hinted(layout))

    assert each(topology, "engine_id") == [7, 6, 5, 4, 3, 2, 1, 0]
    assert each(topology, "host") == ["node2"] * 4 + ["node1"] * 4
    assert each(topology, "node_rank") == [0] * 4 + [1] * 4
    assert each(topology, "local_rank") == [0, 1, 2, 3] * 2
    assert topology.n_hosts == 2
    assert topology.is_launcher_order


@pytest.mark.parametrize(
    "change",
    [
        {"rank_hint": None},
        {"rank_hint": 0},
        {"rank_hint": 9},
        {"size_hint": 8},
        {"job_id": "78"},  # hints of two jobs that together look whole are chance
    ],
)
def test_hints_that_disagree_are_not_used(change: dict[str, object]) -> None:
    """One missing, doubled or foreign hint makes the plan sort instead."""
    reports = hinted([(r, "node1") for r in range(4)])
    assert each(plan(reports), "engine_id") == [3, 2, 1, 0]
    reports[1] = replace(reports[1], **change)  # type: ignore[arg-type]
    topology = plan(reports)

    assert each(topology, "engine_id") == [0, 1, 2, 3]
    assert not topology.is_launcher_order


@pytest.mark.parametrize(("size", "is_believed"), [(6, False), (None, True)])
def test_size_hints(size: int | None, *, is_believed: bool) -> None:
    """A part of a larger job is sorted; a launcher that gives ranks without a size is believed."""
    reports = [replace(r, size_hint=size) for r in hinted([(r, "node1") for r in range(4)])]

    assert plan(reports).is_launcher_order is is_believed


@pytest.mark.parametrize(
    ("reports", "engines"),
    [
        # Hints that alternate between hosts are dropped for contiguous ranks.
        (hinted([(r, f"node{1 + r % 2}") for r in range(8)]), [1, 3, 5, 7, 0, 2, 4, 6]),
        # Two jobs that both count from 0 are merged, without a rank twice.
        ([engine(e, f"node{1 + e // 2}", rank_hint=e % 2, size_hint=2, job_id=str(e // 2))
          for e in (2, 3, 0, 1)], [0, 1, 2, 3]),
        # node2 comes before node10.
        ([engine(e, host) for e, host in enumerate(["node10", "node9", "a3", "node2"])],
         [2, 3, 1, 0]),
        # Within a host a local hint comes before the first visible device, that before the id.
        ([engine(0, local_hint=1, cuda_visible_devices="0"),
          engine(1, local_hint=0, cuda_visible_devices="1")], [1, 0]),
        ([engine(e, cuda_visible_devices=d) for e, d in enumerate(["10", "2,3", None])], [2, 1, 0]),
    ],
)  # fmt: skip
def test_without_hints_of_all_ranks_engines_are_sorted(
    reports: list[EngineReport], engines: list[int]
) -> None:
    """By host, then within the host."""
    topology = plan(reports)

    assert each(topology, "engine_id") == engines
    assert not topology.is_launcher_order


def test_containers_with_one_hostname_are_two_hosts() -> None:
    """The same hostname in two network namespaces, or from two boots, is two hosts."""
    namespaces = plan([engine(e, network_namespace=f"net:{e % 2}") for e in range(4)])
    boots = plan([engine(e, boot_id=f"boot{e % 2}") for e in range(4)])

    for topology in (namespaces, boots):
        assert topology.n_hosts == 2
        assert each(topology, "engine_id") == [0, 2, 1, 3]
        assert each(topology, "local_world_size") == [2, 2, 2, 2]


def test_uneven_hosts() -> None:
    """On 3 + 1 ranks the local sizes and threads differ by host."""
    topology = plan([engine(e, "b" if e == 0 else "a") for e in range(4)])

    assert each(topology, "engine_id") == [1, 2, 3, 0]
    assert each(topology, "local_world_size") == [3, 3, 3, 1]
    assert each(topology, "local_rank") == [0, 1, 2, 0]
    assert each(topology, "node_rank") == [0, 0, 0, 1]
    assert each(topology, "threads") == [5, 5, 5, 16]


def test_hosts_are_named_with_their_ranks() -> None:
    """In the order of the ranks; containers that share a hostname get a number."""
    uneven = plan([engine(e, "n2" if e == 3 else "n1") for e in range(4)])
    pods = plan([engine(0, "pod", network_namespace="a"), engine(1, "pod", network_namespace="b")])

    assert uneven.hosts == (HostRanks("n1", (0, 1, 2)), HostRanks("n2", (3,)))
    assert pods.hosts == (HostRanks("pod (0)", (0,)), HostRanks("pod (1)", (1,)))


def test_random_clusters() -> None:
    """Any reports in any order give ranks 0..n-1, contiguous per host, and one same plan."""
    generator = random.Random(7)
    for _ in range(300):
        reports = random_reports(generator)
        topology = plan(reports)
        generator.shuffle(reports)

        assert topology == plan(reports)
        assert each(topology, "rank") == list(range(len(reports)))
        assert sorted(each(topology, "engine_id")) == sorted(r.engine_id for r in reports)
        blocks = [(node, list(ps)) for node, ps in groupby(topology.ranks, lambda p: p.node_rank)]
        assert [node for node, _ in blocks] == list(range(topology.n_hosts))
        for _, places in blocks:
            assert [p.local_rank for p in places] == list(range(len(places)))
            assert {p.local_world_size for p in places} == {len(places)}
        assert len({p.device == "cpu" for p in topology.ranks}) == 1


def random_reports(generator: random.Random) -> list[EngineReport]:
    """Return engines with random ids on random hosts, at times with hints, at times with GPUs."""
    n = generator.randint(1, 12)
    ids = generator.sample(range(100), n)
    hints = generator.sample(range(n), n)
    names = [generator.choice(["n1", "n2", "n10"]) for _ in range(n)]
    if generator.random() < 0.3:
        names.sort()
        hints.sort()
    n_gpus = generator.choice([0, 1, 4])
    return [
        engine(
            ids[i],
            names[i],
            network_namespace=generator.choice(["net:1", "net:1", "net:2"]),
            gpus=gpus(names[i], n_gpus),
            rank_hint=hints[i] if generator.random() < 0.95 else None,
            local_hint=generator.choice([None, 0, 1]),
            size_hint=n,
        )
        for i in range(n)
    ]


def test_ranks_with_different_versions_of_torch_are_refused() -> None:
    """Wherever they come from, before they meet; the ranks are named with their hosts."""
    reports = [engine(e, f"n{e}", torch_version=f"2.1{3 + e}.0") for e in range(2)]
    with pytest.raises(StartError, match=r"2\.13\.0 on rank 0 \(n0\); 2\.14\.0 on rank 1 \(n1\)"):
        plan(reports)


CPU = {"has_cuda": False, "torch_version": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("reports", "devices", "why"),
    [
        (local(8, gpus("a", 8)), [f"cuda:{i}" for i in range(8)],
         "NCCL: each rank has its own GPU."),
        (local(2, gpus("a", 1)), ["cuda:0"] * 2,
         "Gloo: 2 ranks share 1 GPU, and NCCL takes one rank per GPU."),
        (local(4, gpus("a", 3)), ["cuda:0", "cuda:1", "cuda:2", "cuda:0"],  # they go round
         "Gloo: 4 ranks share 3 GPUs, and NCCL takes one rank per GPU."),
        # A process sees one slice.
        (local(2, gpus("a", 2, "MIG")), ["cuda:0", "cuda:0"],
         "Gloo: NCCL before 2.32 does not support MIG slices, and ranks run on them."),
        # A slice that ranks share is a slice.
        (local(2, gpus("a", 1, "MIG")), ["cuda:0"] * 2,
         "Gloo: NCCL before 2.32 does not support MIG slices, and ranks run on them."),
        (local(2, (), has_cuda=False), ["cpu"] * 2, "Gloo on the CPU: no rank sees a GPU."),
        # The build's fault, not missing GPUs.
        (local(2, gpus("a", 2), **CPU), ["cpu"] * 2,
         "Gloo on the CPU: PyTorch 2.13.0+cpu cannot use CUDA."),
        # One engine moves every rank to the CPU.
        ([engine(e, f"n{e}", gpus=gpus(f"n{e}", 1), **(CPU if e == 2 else {})) for e in range(3)],
         ["cpu"] * 3,
         "Gloo on the CPU: PyTorch 2.13.0+cpu of rank 2 (n2) cannot use CUDA."),
        ([engine(e, f"n{e // 2}", gpus=gpus("n0", 2) if e < 2 else ()) for e in range(4)],
         ["cpu"] * 4,
         "Gloo on the CPU: no GPU is visible to ranks 2-3 (n1), and ranks use GPUs all or none."),
        # Launchers that hide the other GPUs: told apart by uuid, also on two hosts.
        ([engine(e, gpus=(Gpu(0, f"GPU-{e}", "A100"),)) for e in range(4)], ["cuda:0"] * 4,
         "NCCL: each rank has its own GPU."),
        ([engine(e, f"n{e}", gpus=gpus(f"n{e}", 1)) for e in range(2)], ["cuda:0"] * 2,
         "NCCL: each rank has its own GPU."),
        # The lone rank of a second host takes that host's first GPU.
        ([engine(e, "b" if e == 3 else "a", gpus=gpus(f"{e // 3}", 4)) for e in range(4)],
         ["cuda:0", "cuda:1", "cuda:2", "cuda:0"], "NCCL: each rank has its own GPU."),
        # Two containers that see the same GPU share it, though they are two hosts.
        ([engine(e, gpus=gpus("a", 1), network_namespace=f"net:{e}") for e in range(2)],
         ["cuda:0"] * 2, "Gloo: 2 ranks share 1 GPU, and NCCL takes one rank per GPU."),
    ],
)  # fmt: skip
def test_devices_and_backend(reports: list[EngineReport], devices: list[str], why: str) -> None:
    """Own GPUs join by NCCL; all else by Gloo, with the reason, and without scaling numbers."""
    topology = plan(reports)

    assert each(topology, "device") == devices
    assert topology.why == why
    assert topology.backend == why.partition(":")[0].split()[0].lower()
    assert topology.is_scaling is (topology.backend == "nccl")
    assert all(bool(p.device_name and p.device_uuid) == (p.device != "cpu") for p in topology.ranks)


def test_the_device_counts_as_the_process_does() -> None:
    """With GPUs 6 and 7 chosen the ranks' devices are cuda:0 and cuda:1."""
    topology = plan(local(2, select_gpus(gpus("box", 8), "7,6")))

    assert each(topology, "device") == ["cuda:0", "cuda:1"]
    assert each(topology, "device_uuid") == ["GPU-box-7", "GPU-box-6"]
    assert each(topology, "device_name") == ["NVIDIA H200"] * 2
    assert each(topology, "engine_id") == [0, 1]
    assert topology.is_launcher_order


@pytest.mark.parametrize(
    ("backend", "uuids", "message"),
    [
        ("nccl", ["GPU-a", "GPU-b"] * 2,
         "NCCL takes one rank per GPU, and 4 ranks share 2 GPUs. Use --backend gloo, or -n 2."),
        ("nccl", [], ("NCCL needs a GPU for each rank, and no rank sees a GPU. "
                      "Use --backend gloo or --backend auto.")),
        ("nccl", ["MIG-a"], ("NCCL before 2.32 does not support MIG slices, and ranks run on "
                             "them. Use --backend gloo, or whole GPUs.")),
        *((name, [], f"There is no backend {name!r}. Choose one of auto, nccl, gloo.")
          for name in ("mpi", "")),
        ("NCCL", [], ("There is no backend 'NCCL'. Did you mean nccl? "
                      "Choose one of auto, nccl, gloo.")),
    ],
)  # fmt: skip
def test_backends_that_cannot_run_are_refused(backend: str, uuids: list[str], message: str) -> None:
    """With the numbers, the reason and the ways out."""
    with pytest.raises(OptionError) as caught:
        choose_backend(backend, uuids)

    assert str(caught.value) == message


def test_gloo_on_own_gpus() -> None:
    """Gloo on own GPUs is allowed, and the sentence says that it was asked for."""
    topology = plan(local(2, gpus("box", 2)), backend="gloo")

    assert topology.backend == "gloo"
    assert each(topology, "device") == ["cuda:0", "cuda:1"]
    assert topology.why.startswith("Gloo, as requested: each rank has its own GPU")
    assert topology.is_scaling


@pytest.mark.parametrize(
    ("backend", "uuids"),
    [("gloo", []), ("gloo", ["GPU-a"] * 2), ("gloo", ["MIG-a"]), ("nccl", ["GPU-a", "GPU-b"])],
)
def test_what_auto_takes_can_be_asked_for(backend: str, uuids: list[str]) -> None:
    """It changes nothing."""
    assert choose_backend(backend, uuids) == choose_backend("auto", uuids)


@pytest.mark.parametrize(
    ("n", "cores", "asked", "expected"),
    [(2, 16, None, 8), (3, 16, None, 5), (8, 2, None, 1), (2, 16, 3, 3), (1, 7, None, 7)],
)
def test_threads(n: int, cores: int, asked: int | None, expected: int) -> None:
    """A rank gets cores // ranks threads, at least 1, or what was asked for."""
    topology = plan(local(n, (), cores=cores), threads=asked)

    assert set(each(topology, "threads")) == {expected}


def test_no_threads() -> None:
    """Zero threads are refused."""
    with pytest.raises(OptionError, match=r"0 threads\. Use 1 or more\.$"):
        plan([engine(0)], threads=0)


def test_local_plan_is_the_plan_of_the_started_engines() -> None:
    """What the engines report after the start gives the places that were planned before it."""
    box = gpus("box", 4)
    before = plan(local(4, box))
    after = plan([
        engine(e, "box", gpus=box, cores=8, rank_hint=e, size_hint=4, pid=100 + e,
               network_namespace="net:1")
        for e in (2, 0, 3, 1)
    ])  # fmt: skip

    assert [replace(p, pid=0) for p in after.ranks] == list(before.ranks)
    assert [p.pid for p in after.ranks] == [100, 101, 102, 103]
    assert replace(after, ranks=()) == replace(before, ranks=())


@pytest.mark.parametrize("n", [0, -1])
def test_no_ranks(n: int) -> None:
    """Fewer than one rank is refused."""
    with pytest.raises(OptionError, match=rf"^-n {n} starts no rank\. Use 1 or more\.$"):
        local(n, ())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("all", [0, 1, 2, 3]),
        ("0,1", [0, 1]),
        ("3, 0", [3, 0]),
        ("[1-2]", [1, 2]),
        ("none", []),
        (" None ", []),
    ],
)
def test_select_gpus(spec: str | None, expected: list[int]) -> None:
    """GPUs are chosen by id, in the order typed; none at all means CPU ranks."""
    assert expected == [gpu.index for gpu in select_gpus(gpus("box", 4), spec)]


_MISSING = "GPU 1 does not exist. These do: 0 (NVIDIA H200), 2 (NVIDIA T4). Use --gpus none for "


@pytest.mark.parametrize(
    ("spec", "available", "message"),
    [
        ("1", (0, 2), _MISSING + "ranks on the CPU."),
        ("0-2", (0, 2), _MISSING + "ranks on the CPU."),  # even within a range
        ("0", (), "GPU 0 does not exist. This machine has no GPU. Use --gpus none"),
        ("2,0,2", (0, 2), "GPU 2 occurs 2 times in --gpus 2,0,2. Name each GPU once; with a "),
        ("cuda:0", (0, 2), "'cuda:0' does not name GPUs"),
    ],
)
def test_gpus_that_cannot_be_chosen(spec: str, available: tuple[int, ...], message: str) -> None:
    """What does not exist, stands twice or has another form is told with what works."""
    names = {0: "NVIDIA H200", 2: "NVIDIA T4"}
    with pytest.raises(OptionError) as caught:
        select_gpus(tuple(Gpu(i, f"GPU-{i}", names[i]) for i in available), spec)

    assert str(caught.value).startswith(message)


# GPU 0 is cut up.
_CUT_UP = (
    Gpu(0, "MIG-3333-aa", "NVIDIA H100 MIG 1g.10gb"),
    Gpu(0, "MIG-4444-bb", "NVIDIA H100 MIG 1g.10gb"),
    Gpu(1, "GPU-2222-cc", "NVIDIA H100"),
)
_OLDER = "MIG-GPU-8932f937-d72c/1/0"


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, ["MIG-3333-aa", "MIG-4444-bb", "GPU-2222-cc"]),
        ("", []),
        ("-1", []),
        ("1", ["GPU-2222-cc"]),
        ("1,0", ["GPU-2222-cc", "MIG-3333-aa", "MIG-4444-bb"]),
        (" 0 , 1 ", ["MIG-3333-aa", "MIG-4444-bb", "GPU-2222-cc"]),
        ("1,7,0", ["GPU-2222-cc"]),
        ("GPU-2222,MIG-4444", ["GPU-2222-cc", "MIG-4444-bb"]),
        ("MIG-4444-bb", ["MIG-4444-bb"]),
        ("MIG-5555-dd,1", []),
        (f"{_OLDER},1", [_OLDER, "GPU-2222-cc"]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_chooses(variable: str | None, uuids: list[str]) -> None:
    """Numbers and UUIDs are kept in their order, up to the first that does not exist."""
    assert [gpu.uuid for gpu in filter_visible(_CUT_UP, variable)] == uuids


def test_a_slice_is_believed_where_the_driver_lists_none() -> None:
    """nvidia-smi lists the GPU alone; CUDA knows better."""
    whole = (Gpu(0, "GPU-2222-cc", "NVIDIA H100"),)
    (chosen,) = filter_visible(whole, "MIG-5555-dd")

    assert (chosen.uuid, chosen.is_slice) == ("MIG-5555-dd", True)
    assert not whole[0].is_slice
    # A value that another machine's start has left.
    assert filter_visible((), f"MIG-5555-dd,{_OLDER}") == filter_visible((), _OLDER) == ()


def test_ranks_on_slices_see_one_each() -> None:
    """`--gpus` takes all slices of a GPU; ranks go round."""
    chosen = select_gpus(_CUT_UP, "0")
    topology = plan(local(3, chosen))

    assert chosen == _CUT_UP[:2]
    assert each(topology, "device") == ["cuda:0"] * 3
    assert each(topology, "device_uuid") == ["MIG-3333-aa", "MIG-4444-bb", "MIG-3333-aa"]
    with pytest.raises(OptionError, match=r"These do: 0 \(NVIDIA H100 MIG 1g.10gb\), 1 \("):
        select_gpus(_CUT_UP, "2")


def two_hosts(n: int = 4, n_gpus: int = 0, backend: str = "auto") -> Topology:
    """Return n ranks on hosts a and b, half each, with engine ids that are not the ranks."""
    reports = [
        engine(n - 1 - r, host, rank_hint=r, pid=100 + r, gpus=gpus(host, n_gpus))
        for r in range(n)
        for host in ["a" if r < n // 2 else "b"]
    ]
    return plan(reports, backend)


def again(rank: int, host: str, **facts: object) -> dict[int, EngineReport]:
    return {rank: engine(3 - rank, host, pid=900 + rank, **facts)}


def places(topology: Topology) -> list[tuple[str, int, int, int]]:
    return [(p.host, p.node_rank, p.local_rank, p.local_world_size) for p in topology.ranks]


def test_a_rank_that_is_back_on_its_host_has_its_place() -> None:
    """Only its process is another one, also where its host was booted or made anew."""
    before = two_hosts()
    for facts in ({}, {"boot_id": "other"}):
        both = again(2, "b", **facts) | again(3, "b", **facts)
        assert places(replan(before, both)) == places(before)
    after = replan(before, again(2, "b", cores=99))

    assert each(after, "pid") == [100, 101, 902, 103]
    assert [replace(p, pid=0) for p in after.ranks] == [replace(p, pid=0) for p in before.ranks]
    assert replace(after, ranks=before.ranks) == before


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        # All of b on a: one host is left.
        (again(2, "a") | again(3, "a"), [("a", 0, r, 4) for r in range(4)]),
        # All of a on b: the only host is the first.
        (again(0, "b") | again(1, "b"), [("b", 0, r, 4) for r in (2, 3, 0, 1)]),
        # One on the other host, where its former local rank is taken.
        (again(1, "b"), [("a", 0, 0, 1), ("b", 1, 2, 3), ("b", 1, 0, 3), ("b", 1, 1, 3)]),
        # A spare host in the place of b, and one beside both.
        (again(2, "c") | again(3, "c"),
         [("a", 0, 0, 2), ("a", 0, 1, 2), ("c", 1, 0, 2), ("c", 1, 1, 2)]),
        (again(1, "c"), [("a", 0, 0, 1), ("c", 2, 0, 1), ("b", 1, 0, 2), ("b", 1, 1, 2)]),
        # One moves to b while another is back there, which keeps its local rank.
        (again(1, "b") | again(3, "b"),
         [("a", 0, 0, 1), ("b", 1, 2, 3), ("b", 1, 0, 3), ("b", 1, 1, 3)]),
        # Every rank is new.
        (again(0, "c") | again(1, "d") | again(2, "c") | again(3, "d"),
         [("c", 0, 0, 2), ("d", 1, 0, 2), ("c", 0, 1, 2), ("d", 1, 1, 2)]),
    ],
)  # fmt: skip
def test_a_rank_on_another_host_takes_what_is_free_there(
    reports: dict[int, EngineReport], expected: list[tuple[str, int, int, int]]
) -> None:
    """The smallest local rank; sizes of both hosts follow, and hosts are numbered without a gap."""
    before = two_hosts()
    after = replan(before, reports)

    assert places(after) == expected
    assert after.n_hosts == len({host for host, *_ in expected})
    assert [after.engine_of_rank(r) for r in range(4)] == [3, 2, 1, 0]
    for place in after.ranks:  # 16 cores on each host; who stays keeps its threads
        if place.host != before.ranks[place.rank].host:
            assert place.threads == 16 // place.local_world_size


def test_only_the_hosts_of_the_group_are_admitted() -> None:
    """A host that is new is; of one host alone the loopback is, which no filter may drop."""

    def on(*hosts: str) -> dict[int, EngineReport]:
        addresses = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
        return {
            rank: engine(3 - rank, host, addresses=(("eth0", addresses[host]),))
            for rank, host in enumerate(hosts)
        }

    two, alone = plan([*on("a", "a", "b", "b").values()]), plan([*on("c", "c", "c", "c").values()])
    one_moved = replan(two, {3: on("a", "a", "b", "c")[3]})

    assert (two.addresses, alone.addresses) == (("10.0.0.1", "10.0.0.2"), ())
    assert one_moved.addresses == ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert replan(two, {r: e for r, e in on("a", "a", "a", "a").items() if r > 1}).addresses
    assert replan(two, on("c", "c", "c", "c")).addresses == ()
    assert replan(alone, on("a", "a", "b", "b")).addresses == two.addresses


def test_hosts_of_one_name_are_told_apart() -> None:
    """A namespace beside another one with its hostname is another host."""
    before = plan([engine(e, "h", network_namespace=f"net:{e // 2}") for e in range(4)])
    moved = replan(before, {3: engine(3, "h", network_namespace="net:0")})
    back = replan(before, {3: engine(3, "h", network_namespace="net:1")})

    assert each(moved, "node_rank") == [0, 0, 1, 0]
    assert places(back) == places(before)


def test_a_rank_takes_its_gpu_again_or_one_by_its_local_rank() -> None:
    """Its own by the driver's name, wherever it stands in the list; on another host a free one."""
    before = two_hosts(n_gpus=4)
    swapped = replan(before, again(2, "b", gpus=gpus("b", 4)[::-1]))
    moved = replan(before, again(2, "a", gpus=gpus("a", 4)))

    assert (swapped.ranks[2].device, swapped.ranks[2].device_uuid) == ("cuda:3", "GPU-b-0")
    assert (moved.ranks[2].device, moved.ranks[2].device_uuid) == ("cuda:2", "GPU-a-2")
    assert before.backend == moved.backend == "nccl"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "rank 2 came back on a, where it cannot use a GPU"),
        ({"gpus": gpus("a", 2), "has_cuda": False}, "cannot use a GPU"),
        ({"gpus": gpus("a", 2)}, "ranks 0,2 would share a GPU of a, and NCCL"),
    ],
)
def test_a_host_that_does_not_fit_is_refused(facts: dict[str, object], words: str) -> None:
    """Ranks use GPUs all or none, and NCCL takes one rank per GPU; Gloo lets them share."""
    with pytest.raises(StartError, match=words):
        replan(two_hosts(n_gpus=2), again(2, "a", **facts))
    shared = replan(two_hosts(n_gpus=2, backend="gloo"), again(2, "a", gpus=gpus("a", 2)))

    assert shared.ranks[2].device_uuid == "GPU-a-0"


@pytest.mark.parametrize(("n_gpus", "expected"), [(0, 2), (1, 1), (8, 8)])
def test_default_world_size(n_gpus: int, expected: int) -> None:
    """Without -n there is one rank per GPU, or two on the CPU."""
    assert expected == default_world_size(gpus("box", n_gpus))


def lan(engine_id: int, hostname: str, ip: str, toward: str = "") -> EngineReport:
    """Return an engine on a host with loopback, docker, bridges and one network."""
    inner = (("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), ("virbr0", "192.168.122.1"))
    addresses = (*inner, ("br-1f", "172.18.0.1"), ("eth0", ip), ("ib0", "10.9.0.1"))
    return engine(engine_id, hostname, addresses=addresses, toward_controller=toward)


V6 = (("eth0", "fe80::1%eth0"), ("eth0", "2001:db8::1"), ("lo", "::1"))


@pytest.mark.parametrize(
    ("reports", "addresses"),
    [
        # The ranks of one host meet on loopback, whatever other networks it has.
        ([lan(e, "node1", "10.0.0.1", "10.0.0.1") for e in range(2)], ("127.0.0.1",)),
        # Rank 0's address toward the controller leads; inner networks are left out.
        ([lan(1, "node1", "10.0.0.1", "10.9.0.1"), lan(0, "node2", "10.0.0.2")],
         ("10.9.0.1", "10.0.0.1")),
        # A loopback address toward the controller is of no use to other hosts.
        ([lan(0, "node1", "10.0.0.1", "127.0.0.1"), lan(1, "node2", "10.0.0.2")],
         ("10.0.0.1", "10.9.0.1")),
        # It is rank 0's, whichever report comes first.
        ([lan(1, "node1", "10.0.0.1"), lan(0, "node2", "10.0.0.2")], ("10.0.0.1", "10.9.0.1")),
        ([lan(0, "node2", "10.0.0.2"), lan(1, "node1", "10.0.0.1")], ("10.0.0.1", "10.9.0.1")),
        # Addresses that need an interface name to be reached are no candidates.
        ([engine(0, "node1", addresses=V6), engine(1, "node2")], ("2001:db8::1",)),
    ],
)  # fmt: skip
def test_where_ranks_meet(reports: list[EngineReport], addresses: tuple[str, ...]) -> None:
    """At rank 0's addresses that other hosts can reach, the likeliest first."""
    assert store_addresses(plan(reports), reports) == addresses


def test_the_addresses_of_several_hosts() -> None:
    """All of IPv4 that lead out, once each, from where ranks may connect; none on one host."""
    reports = [lan(0, "node1", "10.0.0.1", "10.7.0.1"), lan(1, "node2", "10.0.0.2", "127.0.0.1")]
    six = engine(2, "node3", addresses=V6)

    assert plan([*reports, six]).addresses == ("10.0.0.1", "10.0.0.2", "10.7.0.1", "10.9.0.1")
    assert plan(reports[:1]).addresses == ()
    pretended = [replace(r, boot_id="b", network_namespace="net:[4]") for r in reports]
    assert plan(pretended).n_hosts == 2
    assert plan(pretended).addresses == ()


def test_rank_0_without_an_address() -> None:
    """A rank 0 that only has loopback cannot be met, and its addresses are listed."""
    reports = [engine(0, "node1", addresses=(("lo", "127.0.0.1"),)), engine(1, "node2")]
    with pytest.raises(StartError, match=r"^Rank 0 on node1 .* its addresses: lo 127\.0\.0\.1\."):
        store_addresses(plan(reports), reports)


_INTERFACES = {"lo": True, "docker0": True, "eth0": True, "eth1": False, "eth2": True}
_ADDRESSES = (
    ("docker0", "172.17.0.1"), ("eth0", "10.0.0.5"), ("eth2", "10.1.0.5"), ("lo", "127.0.0.1"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("own_address", "store", "environ", "gloo", "nccl", "why"),
    [
        ("10.1.0.5", "10.1.0.9", {}, "eth2", "=eth2", "the way to rank 0's store at 10.1.0.9 goes"),
        ("127.0.0.1", "", {}, "lo", "=lo", "all ranks are on one host"),
        # What a user has set counts, of each by itself; an empty value is none.
        (
            "10.0.0.5", "10.0.0.9", {"GLOO_SOCKET_IFNAME": "eth2"}, "eth2", "=eth0",
            "GLOO_SOCKET_IFNAME of the environment names it",
        ),
        (
            "10.0.0.5", "10.0.0.9", {"NCCL_SOCKET_IFNAME": "^docker"}, "eth0", "^docker",
            "NCCL_SOCKET_IFNAME of the environment names it",
        ),
        (
            "", "10.9.0.9", {"GLOO_SOCKET_IFNAME": "eth0,eth2", "NCCL_SOCKET_IFNAME": "eth"},
            "eth0,eth2", "eth", "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME of the environment name",
        ),
        ("10.0.0.5", "10.0.0.9", {"GLOO_SOCKET_IFNAME": ""}, "eth0", "=eth0", "the way to"),
    ],
)  # fmt: skip
def test_an_interface_is_chosen_by_the_way_to_rank_0(
    own_address: str, store: str, environ: dict[str, str], gloo: str, nccl: str, why: str
) -> None:
    """And the reason is recorded, for the picture of hosts and links."""
    choice = choose_interface("n1", _INTERFACES, _ADDRESSES, own_address, store, environ)

    address = dict(_ADDRESSES)[gloo.split(",", maxsplit=1)[0]]
    assert (choice.gloo, choice.nccl, choice.address) == (gloo, nccl, address)
    assert choice.why.startswith(why)


@pytest.mark.parametrize(
    ("address", "store", "environ", "message"),
    [
        (
            "",
            "10.9.0.9",
            {},
            "leads to rank 0's store at 10.9.0.9; those with addresses: docker0",
        ),
        ("127.0.0.1", "", {"GLOO_SOCKET_IFNAME": "eth7"}, "eth7 does not exist on n1; those"),
        ("10.0.0.5", "10.0.0.9", {"GLOO_SOCKET_IFNAME": "eth0,eth1"}, "the interface eth1 is down"),
    ],
)
def test_an_interface_that_cannot_work_is_refused(
    address: str, store: str, environ: dict[str, str], message: str
) -> None:
    """Gloo would wait for ever, or say no more than that it found no address."""
    with pytest.raises(StartError, match=message):
        choose_interface("n1", _INTERFACES, _ADDRESSES, address, store, environ)
