"""Bandwidth where ranks share a GPU, and between GPUs of their own."""

from typing import Any

from nbdist.bandwidth.results import OPS, Bench
from nbdist.notebook.session import Session
from tests.gpu.places import on


@on("shared")
def test_ranks_that_share_a_gpu_are_said_to_measure_no_links(ranks: Session, measured: Any) -> None:
    """Every operation is right, send_recv by way of the host."""
    bench = ranks.bench(sizes="4K,1M", limit_s=20.0)
    again = ranks.run("x = torch.ones(1, device=device); dist.all_reduce(x); print(x.item())")
    measured("all_reduce of 1 MB, ms", milliseconds(bench))

    assert "copied from each GPU and back. Gloo: 2 ranks share 1 GPU" in bench.caveat
    assert bench.left_out == ()
    assert {row.op for row in bench.rows} == set(OPS)
    assert [row for row in bench.rows if row.wrong] == []
    assert {rank.text for rank in again.ranks} == {"2.0\n"}


@on("own", "all")
def test_nccl_measures_links(ranks: Session, measured: Any) -> None:
    """Every operation is right, and nothing is said against the numbers."""
    bench = ranks.bench(sizes="4K:64M", limit_s=20.0)
    measured("all_reduce of 64 MB, ms", milliseconds(bench))

    assert (bench.caveat, bench.left_out) == ("", ())
    assert {row.op for row in bench.rows} == set(OPS)
    assert [row for row in bench.rows if row.wrong] == []
    assert set(bench.model.fits) == set(OPS)


def milliseconds(bench: Bench) -> float:
    """Of the largest all_reduce."""
    rows = [row for row in bench.rows if row.op == "all_reduce"]
    return round(1e3 * max(rows, key=lambda row: row.size_bytes).time_s, 3)
