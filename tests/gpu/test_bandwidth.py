"""Bandwidth where ranks share a GPU, and between GPUs of their own."""

import pytest

from nbdist.bandwidth.results import OPS
from tests.support.ranks import started


@pytest.mark.gpu(1)
def test_ranks_that_share_a_gpu_are_said_to_measure_no_links() -> None:
    """Every operation is right, send_recv by way of the host."""
    with started(2, gpus="0") as session:
        found = session.bench(sizes="4K,1M", limit_s=20.0)
        again = session.run("x = torch.ones(1, device=device); dist.all_reduce(x); print(x.item())")

    assert "copied from each GPU and back. Gloo: 2 ranks share 1 GPU" in found.caveat
    assert found.left_out == ()
    assert {row.op for row in found.rows} == set(OPS)
    assert [row for row in found.rows if row.wrong] == []
    assert {rank.text for rank in again.ranks} == {"2.0\n"}


@pytest.mark.gpu(2)
def test_nccl_measures_links() -> None:
    """Every operation is right, and nothing is said against the numbers."""
    with started(2, gpus="0,1") as session:
        found = session.bench(sizes="4K:64M", limit_s=20.0)

    assert (found.caveat, found.left_out) == ("", ())
    assert {row.op for row in found.rows} == set(OPS)
    assert [row for row in found.rows if row.wrong] == []
    assert set(found.model.fits) == set(OPS)
