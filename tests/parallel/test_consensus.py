"""What all ranks tell one another before they go on together."""

from pathlib import Path

from tests.support.torch_ranks import run_ranks

GATHER = """
    import contextlib
    from unittest import mock
    from nbdist.parallel import consensus
    from nbdist.parallel.consensus import all_gather_object

    # The most whose pickle has room, and one byte more; bytes are a few bytes longer pickled.
    room = consensus._SLOT_BYTES
    full = b"x" * (room - len(pickle.dumps(b"x" * room)) + room)
    assert len(pickle.dumps(full)) == room
    OWN = {
        "small": {"of": rank, "array": [1.5, None, "text"]},
        "nothing": None,
        "as much as there is room for": full,
        "a byte more": full + b"x" if rank == 1 else b"",
        "long on one": list(range(rank * 100_000)),
    }
    counted = {}
    back = {}
    real = {name: getattr(dist, name) for name in ("all_gather", "all_gather_object")}

    def counting(name):
        def call(*args, **kwargs):
            counted.setdefault(what, []).append(name)
            return real[name](*args, **kwargs)
        return call

    with contextlib.ExitStack() as stack:
        for name in real:
            stack.enter_context(mock.patch.object(dist, name, counting(name)))
        for what, sent in OWN.items():
            back[what] = all_gather_object(sent)
        what = "no host backend"
        stack.enter_context(mock.patch.object(dist, "get_backend_config", lambda: "cuda:nccl"))
        back[what] = all_gather_object(rank)
    dist.all_gather_object(wanted := [None] * n, OWN)
    is_same = [back[what] == [of_rank[what] for of_rank in wanted] for what in OWN]
    done(is_same=is_same, counted=counted, last=back["no host backend"])
"""


def test_objects_of_all_ranks_are_gathered_in_one_call_where_they_are_small(tmp_path: Path) -> None:
    """In order; in two where one is longer; torch's own way where no backend takes host memory."""
    results = run_ranks(tmp_path / "run", 3, GATHER)

    for result in results:
        assert result["is_same"] == [True] * 5
        assert result["counted"] == {
            "small": ["all_gather"],
            "nothing": ["all_gather"],
            "as much as there is room for": ["all_gather"],
            "a byte more": ["all_gather"] * 2,
            "long on one": ["all_gather"] * 2,
            "no host backend": ["all_gather_object"],
        }
        assert result["last"] == [0, 1, 2]
