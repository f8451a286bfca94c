"""The tables of %dist_init and %dist_status tell where ranks run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.cluster.status import RankStatus, Status
from nbdist.cluster.view import start_view, status
from nbdist.core.topology import RankPlace, Topology
from nbdist.core.units import compared


def place(rank: int, device: str = "cpu", device_name: str = "", host: str = "box") -> RankPlace:
    return RankPlace(
        engine_id=rank + 10,
        rank=rank,
        local_rank=rank,
        local_world_size=2,
        node_rank=0,
        host=host,
        pid=4000 + rank,
        device=device,
        device_name=device_name,
        device_uuid="",
        threads=8,
    )


CPU = Topology((place(0), place(1)), "gloo", "Gloo on the CPU: why.", is_scaling=False, n_hosts=1)
GPU = Topology(
    (place(0, "cuda:0", "NVIDIA H200"), place(1, "cuda:0", "NVIDIA H200", "other")),
    "nccl",
    "NCCL: why.",
    is_scaling=True,
    n_hosts=2,
)
STATES = (
    RankStatus(0, "idle", {"resident": 512_300_000}),
    RankStatus(1, "busy", {"resident": 2_000_000_000}, busy_s=2.5),
)


def test_started() -> None:
    """%dist_init shows each rank's host, device, backend and threads, the reason and notes."""
    assert start_view(CPU, 2.13, notes=["a note"]).text == (
        "2 ranks on 1 host, ready in 2.1 s\n"
        "rank  host  device  backend  threads\n"
        "   0  box   cpu     gloo           8\n"
        "   1  box   cpu     gloo           8\n"
        "Gloo on the CPU: why.\n"
        "The ranks share one machine's CPU cores: timings here say nothing about scaling.\n"
        "a note"
    )


def test_gpus_by_name() -> None:
    """GPUs are shown with their names; ranks that each have one measure scaling."""
    text = start_view(GPU, 1.0).text

    assert "cuda:0 NVIDIA H200" in text
    assert text.startswith("2 ranks on 2 hosts, ready in 1.0 s\n")
    assert "nothing about scaling" not in text


def test_a_shared_gpu_is_told() -> None:
    """Ranks on one GPU are told as that, not as sharing cores."""
    shared = Topology(GPU.ranks, "gloo", "Gloo: why.", is_scaling=False, n_hosts=1)

    assert "The ranks share a GPU" in start_view(shared, 1.0).text


@pytest.mark.parametrize(
    ("ranks_of_host", "sentence"),
    [(2, "The ranks of a host share its CPU cores"), (1, "The ranks compute on CPUs")],
)
def test_cores_are_shared_on_each_host(ranks_of_host: int, sentence: str) -> None:
    """No machine is named where there are several."""
    places = tuple(
        replace(place(rank, host=f"n{rank // ranks_of_host}"), local_world_size=ranks_of_host)
        for rank in range(4)
    )
    cpus = Topology(places, "gloo", "why", is_scaling=False, n_hosts=4 // ranks_of_host)

    assert f"{sentence}: timings here say nothing about scaling" in start_view(cpus, 1.0).text


def test_one_rank_is_singular() -> None:
    """One rank on one host."""
    alone = Topology((place(0),), "gloo", "why", is_scaling=False, n_hosts=1)

    assert start_view(alone, 1.0).text.startswith("1 rank on 1 host, ready")


def test_status() -> None:
    """%dist_status shows what each rank does, since when, its memory, and where cells run."""
    assert status(CPU, Status(STATES), 63.0, "in the notebook").text == (
        "2 ranks on 1 host, gloo, up for 63.0 s\n"
        "rank  host   pid  device  state           memory\n"
        "   0  box   4000  cpu     idle            512.3 MB host\n"
        "   1  box   4001  cpu     busy for 2.5 s  2.0 GB host\n"
        "plain cells run in the notebook"
    )


def test_gpu_memory() -> None:
    """On a GPU what torch has allocated and reserved is shown beside the host's memory."""
    memory = {"resident": 1_000_000_000, "allocated": 3_000_000_000, "reserved": 4_000_000_000}
    states = [RankStatus(0, "idle", memory), RankStatus(1, "died", {})]
    rows = status(GPU, Status(tuple(states)), 1.0, "on ranks 0-1").text.splitlines()[2:4]

    assert rows[0].endswith("idle   1.0 GB host, 3.0 GB GPU (4.0 GB reserved)")
    assert rows[1].endswith("died   -")


def test_gpu_hours_count_each_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of ten minutes; a GPU that ranks share is one; stored outputs are of CPUs too."""
    states = Status(tuple(RankStatus(rank, "idle", {}) for rank in range(2)))
    shared = replace(GPU, ranks=tuple(replace(rank, device_uuid="GPU-1") for rank in GPU.ranks))

    assert "up for 600.0 s, 0.33 GPU-hours\n" in status(GPU, states, 600.0, "").text
    assert "up for 600.0 s, 0.17 GPU-hours\n" in status(shared, states, 600.0, "").text
    monkeypatch.setenv("NBDIST_TEST", "1")
    assert "GPU-hours" not in status(GPU, states, 600.0, "").text


def test_states_belong_to_ranks() -> None:
    """A state too few is our bug, not a shorter table."""
    with pytest.raises(ValueError, match="zip"):
        status(CPU, Status(STATES[:1]), 1.0, "in the notebook")


def test_stored_tables_are_equal_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NBDIST_TEST=1 devices, hosts, pids, times and memory compare as equal."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    ranks = tuple(place(n, f"cuda:{n}", "NVIDIA H200", "a-host-with-a-long-name") for n in range(2))
    other = Topology(ranks, "nccl", "NCCL: each has one.", is_scaling=True, n_hosts=1)
    memory = {"resident": 5 * 10**9, "allocated": 10**9, "reserved": 2 * 10**9}
    states = tuple(RankStatus(rank, "idle", memory) for rank in range(2))
    idle = tuple(RankStatus(rank, "idle", {"resident": 900}) for rank in range(2))

    pairs = [
        (start_view(CPU, 1.0), start_view(other, 20.0)),
        (
            status(CPU, Status(idle), 1.0, "x"),
            status(other, Status(states), 500.0, "x"),
        ),
    ]
    for view, view_there in pairs:
        assert compared(view.text) == compared(view_there.text)
        assert compared(view.html) == compared(view_there.html)
        assert "box" not in compared(view.text)
        assert "box" in view.text
