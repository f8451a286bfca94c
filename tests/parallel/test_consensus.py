"""What all ranks tell one another before they go on together."""

import pickle
from typing import Any
from unittest import mock

import torch.distributed as dist

from nbdist.parallel.base import consensus
from tests.programs.rank import everyone, rank
from tests.support.torch_ranks import on_ranks


def gathered(sent: Any) -> tuple[int, int]:
    """By how many of either of torch's calls an object comes from all ranks, in order."""
    with (
        mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as one,
        mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as other,
    ):
        back = consensus.all_gather_object(sent)
    assert back == everyone(sent)
    return one.call_count, other.call_count


@on_ranks(3)
def test_objects_of_all_ranks_are_gathered_in_one_call_where_they_are_small() -> None:
    """In order; in two where one is longer; torch's own way where no backend takes host memory."""
    # The most whose pickle has room, and one byte more; bytes are a few bytes longer pickled.
    room = consensus._SLOT_BYTES
    full = b"x" * (room - len(pickle.dumps(b"x" * room)) + room)
    assert len(pickle.dumps(full)) == room
    for small in ({"of": rank, "array": [1.5, None, "text"]}, None, full):
        assert gathered(small) == (1, 0)
    for long_on_one in (full + b"x" if rank == 1 else b"", list(range(rank * 100_000))):
        assert gathered(long_on_one) == (2, 0)
    with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        assert gathered(rank) == (0, 1)
