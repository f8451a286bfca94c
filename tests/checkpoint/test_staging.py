"""Copies of what is saved beside training: in memory that the next save finds again."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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


class _Cuda:
    """Stands for CUDA, of which no call is tried here: what it was asked, in order.

    Attributes:
        answer: Of cudaHostRegister.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.answer = 0
        self.calls: list[tuple[str, int]] = []
        gpu = torch.device("cuda:0")
        copy = torch.Tensor.copy_

        def copied(view: torch.Tensor, box: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
            self.calls.append(("copy", int(non_blocking)))
            return copy(view, box)

        monkeypatch.setattr(staging, "_gpus", lambda boxes: {gpu} if boxes else set())
        monkeypatch.setattr(staging, "_register", self._register)
        monkeypatch.setattr(staging, "_unregister", lambda at: self.calls.append(("unpin", at)))
        monkeypatch.setattr(staging, "_wait", lambda device: self.calls.append(("wait", 0)))
        monkeypatch.setattr(
            staging.madvise, "advise", lambda at, _, advice: self.calls.append(("advice", advice))
        )
        monkeypatch.setattr(torch.Tensor, "copy_", copied)

    def _register(self, address: int, size_bytes: int) -> int:
        memory = staging._buffer.memory
        assert memory is not None
        assert (address, size_bytes) == (memory.data_ptr(), memory.nbytes)
        self.calls.append(("pin", address))
        return self.answer

    def take(self) -> list[tuple[str, int]]:
        """What was asked since the last time, without advice on new memory."""
        calls, self.calls = self.calls, []
        return [call for call in calls if call not in (("advice", 14), ("advice", 23))]


def test_copies_from_a_gpu_go_into_pinned_memory_and_are_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is pinned once, not given back, and no longer pinned before other memory is taken."""
    with monkeypatch.context() as patch:
        cuda = _Cuda(patch)
        boxes = [torch.full((MIB,), 3.0), torch.full((MIB,), 4.0)]
        copies = staging.copies(boxes)
        memory = staging._buffer.memory
        assert memory is not None
        at = memory.data_ptr()

        assert cuda.take() == [("pin", at), ("copy", 1), ("copy", 1), ("wait", 0)]
        assert all(torch.equal(copy, box) for copy, box in zip(copies, boxes, strict=True))
        staging.give_back()
        staging.copies(boxes)
        assert cuda.take() == [("copy", 1), ("copy", 1), ("wait", 0)]
        staging.copies([torch.ones(16 * MIB)])
        assert [name for name, _ in cuda.calls if name != "advice"] == [
            "unpin", "pin", "copy", "wait",
        ]  # fmt: skip
        assert cuda.take()[0] == ("unpin", at)
        staging.copies([])
        assert [name for name, _ in cuda.take()] == ["unpin"]


def test_memory_that_cannot_be_pinned_is_told_and_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies are right, and it is given back as on a CPU."""
    with monkeypatch.context() as patch:
        cuda = _Cuda(patch)
        cuda.answer = 2
        with pytest.warns(
            UserWarning, match=r"could not be pinned \(cudaHostRegister answered 2\)"
        ):
            [copy] = staging.copies([torch.arange(5.0)])

        assert copy.tolist() == [0, 1, 2, 3, 4]
        staging.give_back()
        assert [name for name, _ in cuda.take()] == ["pin", "copy", "wait", "advice"]


def test_a_refusal_to_pin_is_no_error_of_the_users_next_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA keeps it until a kernel is launched: one of ours takes it, right after the refusal."""
    launched: list[str] = []

    def launch(_size: int, *, device: str) -> None:
        launched.append(device)
        raise torch.AcceleratorError("CUDA error: out of memory")

    answers = iter([2, 0])
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: next(answers))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "ones", launch)

    assert (staging._register(0, MIB), launched) == (2, ["cuda"])
    assert (staging._register(0, MIB), launched) == (0, ["cuda"])


def _memory_bytes() -> int:
    memory = staging._buffer.memory
    assert memory is not None
    return memory.nbytes


def _lazy_free_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("LazyFree:")).split()[1]) / 1024
