"""Copies of what is saved beside training: in memory that the next save finds again."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nbdist.checkpoint.rank import staging

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    staging.copies([])
    staging.give_back()


def test_copies_of_every_shape_and_type_stay_when_the_source_changes() -> None:
    """Without elements, without dims, not contiguous, of one byte and of sixteen."""
    wide = torch.arange(60.0).view(6, 10)
    boxes = [
        torch.zeros(0, 5),
        torch.tensor(7),
        torch.tensor([True, False, True]),
        wide.narrow(1, 3, 4),
        wide.t(),
        torch.randn(3, dtype=torch.float64),
        torch.randn(257, 3).to(torch.bfloat16),
        torch.randn(5, dtype=torch.complex128),
        torch.nn.Parameter(torch.randn(4)),
    ]
    wanted = [box.detach().clone() for box in boxes]

    copies = staging.copies(boxes)

    wide.zero_()
    for box, copy, was in zip(boxes, copies, wanted, strict=True):
        assert (copy.dtype, copy.shape) == (box.dtype, box.shape)
        assert copy.is_contiguous()
        assert not copy.requires_grad
        assert torch.equal(copy, was)


def test_the_next_save_finds_the_same_memory() -> None:
    """Also where a little less is saved; far less, or more, is put elsewhere."""
    boxes = [torch.full((MIB,), 3.0), torch.full((MIB,), 4.0)]
    first = staging.copies(boxes)[0].data_ptr()
    staging.give_back()
    again = staging.copies(boxes)
    assert [(copy.min().item(), copy.max().item()) for copy in again] == [(3, 3), (4, 4)]
    fewer = staging.copies([torch.full((MIB + 5,), 5.0)])

    assert (again[0].data_ptr(), fewer[0].data_ptr()) == (first, first)
    assert (fewer[0].min().item(), fewer[0].max().item()) == (5, 5)
    staging.copies([torch.ones(8 * MIB)])
    size_bytes = _memory_bytes()
    assert size_bytes >= 32 * MIB
    staging.copies([torch.ones(5)])
    assert _memory_bytes() < 4 * MIB


def test_what_has_changed_its_type_or_shape_since_is_copied_as_it_is_now() -> None:
    """As many boxes, of as many bytes."""
    staging.copies([torch.ones(6), torch.ones(2, 3)])
    boxes = [torch.arange(6, dtype=torch.int32), torch.arange(6.0).view(3, 2)]

    copies = staging.copies(boxes)

    assert [copy.dtype for copy in copies] == [torch.int32, torch.float32]
    assert all(torch.equal(copy, box) for copy, box in zip(copies, boxes, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes it as free")
def test_what_is_given_back_is_the_systems_if_it_needs_it() -> None:
    """The system counts it as free to take."""
    staging.copies([torch.ones(8 * MIB)])
    before = _lazy_free_mib()
    staging.give_back()

    assert _lazy_free_mib() - before >= 30


def _memory_bytes() -> int:
    memory = staging._buffer.memory
    assert memory is not None
    return memory.nbytes


def _lazy_free_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("LazyFree:")).split()[1]) / 1024
