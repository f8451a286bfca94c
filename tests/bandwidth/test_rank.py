"""Measuring on two real ranks: results are checked, wrong ones found, nothing stays."""

from pathlib import Path

from nbdist.bandwidth.results import LEAST_RUNS, OPS
from tests.support.torch_ranks import TorchRanks

MEASURING = """
    import gc
    from unittest import mock
    from nbdist.bandwidth.results import OPS
    from nbdist.bandwidth import rank as bandwidth_rank

    torch.set_default_dtype(torch.float64)  # a user's own choice changes nothing
    measure, sizes = bandwidth_rank.measure, (8 * n, 3 * n * 2**20 + 4 * n)
    measured = {op: [measure(op, size, 0.05) for size in sizes] for op in OPS}
    torch.set_default_dtype(torch.float32)
    short, long = measure("all_reduce", 4096, 0.0), measure("all_reduce", 4096, 3600.0)

    def spoiled(name, spoil, op):
        "Whether a result is found right after a backend's function was tampered with."
        real = getattr(dist, name)
        def call(*args, **kwargs):
            done = real(*args, **kwargs)
            if args[0].numel() > 1:  # single numbers are how the ranks agree
                spoil(args[0])
            return done
        with mock.patch.object(dist, name, call):
            return measure(op, 4096 * n, 0.0).is_right

    def one_off(x):
        x[-1] += rank  # on rank 1 alone
    def swapped(x):
        x.copy_(x.view(n, -1).flip(0).reshape(-1))
    found = [spoiled("all_reduce", one_off, "all_reduce"),
             spoiled("all_gather_into_tensor", swapped, "all_gather"),
             spoiled("all_to_all_single", swapped, "all_to_all"),
             spoiled("reduce_scatter_tensor", one_off, "reduce_scatter"),
             spoiled("broadcast", one_off, "broadcast")]

    def raising(error):
        with mock.patch.object(dist, "all_gather_into_tensor", side_effect=error):
            try:
                return measure("all_gather", 4096, 0.0).problem
            except Exception as raised:
                return f"raised {raised}"

    lacking = [raising(RuntimeError("Backend gloo does not support alltoall\\nat line 3")),
               raising(NotImplementedError("")),
               raising(RuntimeError("Connection closed by peer"))]

    # Rank 1 alone has no memory: both say so, and go on.
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory") if rank == 1 else None
    with mock.patch.object(torch, "empty", side_effect=error, wraps=torch.empty):
        full = measure("all_reduce", 4096, 0.0).problem

    kept = sum(x.nbytes for x in gc.get_objects() if isinstance(x, torch.Tensor))
    free = bandwidth_rank.begin()
    done(measured={op: [[list(one.times_s), one.beside_s, one.is_right, one.problem] for one in its]
                   for op, its in measured.items()},
         runs=[len(short.times_s), len(long.times_s)], found=found, lacking=lacking, full=full,
         kept=kept, free=free, dynamo="torch._dynamo" in sys.modules, total=total())
"""


def test_measuring_on_two_ranks(tmp_path: Path) -> None:
    """Every operation is right at both sizes; a wrong value and a swapped part are found."""
    with TorchRanks(tmp_path, 2, MEASURING) as ranks:
        first, second = ranks.results()

    assert set(first["measured"]) == set(OPS)
    for result in (first, second):
        for op, its in result["measured"].items():
            for times_s, beside_s, is_right, problem in its:
                assert (is_right, problem) == (True, ""), op
                assert len(times_s) >= LEAST_RUNS
                assert beside_s > 0
                assert all(time_s > 0 for time_s in times_s)
        assert result["runs"][0] == LEAST_RUNS
        assert result["runs"][1] > LEAST_RUNS
        lacking = "the backend does not support this operation here"
        assert result["lacking"] == [
            f"{lacking} (Backend gloo does not support alltoall)",
            f"{lacking} ()",
            "raised Connection closed by peer",
        ]
        assert result["full"] == "a rank has not enough memory for the tensors"
        assert result["kept"] < 2**20
        assert result["free"]["host"] > 0
        assert "device" not in result["free"]
        assert result["dynamo"]
        assert result["total"] == 3.0
    # All runs have the same number on both, or they would not have met.
    assert [[len(record[0]) for record in its] for its in first["measured"].values()] == [
        [len(record[0]) for record in its] for its in second["measured"].values()
    ]
    assert first["found"] == [True, False, False, True, True]
    assert second["found"] == [False, False, False, False, False]
