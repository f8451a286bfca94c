"""What a rank notes when memory runs out: in this process, without a kernel."""

import asyncio
import gc
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbdist.memory.oom_message import HOST
from nbdist.memory.rank import oom_hook, saved_tensors
from nbdist.memory.rank.oom_report import _locals, _phase
from nbdist.rpc.rank import cell_hooks


def addresses(roots: list[torch.Tensor]) -> dict[int, str]:
    return {tensor.data_ptr(): name for tensor, name in saved_tensors.saved_by_graphs(roots)}


def test_saved_tensors_of_a_graph() -> None:
    """Of every operation, once, whatever hangs between it and the loss."""
    x = torch.randn(50, 50, requires_grad=True)
    hidden = x.exp()
    loss = (hidden * 2).tanh().sum()
    saved = addresses([loss])

    assert saved[hidden.data_ptr()] == "ExpBackward0"
    assert "TanhBackward0" in saved.values()
    assert addresses([x]) == {}


def test_saved_by_functions_of_the_users_own() -> None:
    """What save_for_backward took, of a graph that is still there; nothing of a freed one."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * 2 + 0 * x

    x = torch.randn(5, requires_grad=True)
    loss = Own.apply(x).exp().sum()
    assert x.data_ptr() in addresses([loss])
    loss.backward()
    assert addresses([loss]) == {}


def test_hooks_are_not_run() -> None:
    """A checkpoint would compute again, offload would copy: both need memory."""
    ran = []

    def unpack(packed: Any) -> Any:
        ran.append(packed)
        return packed

    x = torch.randn(5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack):
        loss = x.exp().sum()
    saved = addresses([loss])

    assert (saved, ran) == ({}, [])
    loss.backward()
    assert ran


class Kernel:
    """As ipykernel's: a cell is a function here."""

    def __init__(self) -> None:
        cell_hooks.install(self, [oom_hook.around_cell])

    def get_parent(self, _channel: str) -> dict[str, object]:
        return {}

    async def do_execute(self, cell: Any) -> dict[str, str]:
        try:
            cell()
        except Exception as error:  # noqa: BLE001  # as IPython shows it
            sys.last_value = error
            return {"status": "error"}
        return {"status": "ok"}

    def run(self, cell: Any) -> None:
        asyncio.run(self.do_execute(cell))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is handed on to be looked at."""
    calls: list[Any] = []

    def take(message: Any, error: BaseException, before: Any) -> Any:
        calls.append((message, error, before))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            dict(frame.f_locals)  # as what looks for the owners of memory
        return "shortage"

    monkeypatch.setattr("nbdist.memory.rank.oom_report.make_report", take)
    monkeypatch.setattr(oom_hook, "_state", oom_hook._State())
    yield calls
    vars(sys).pop("last_value", None)
    gc.collect()


def fails() -> None:
    torch.empty(10**15)


def fails_within() -> None:
    try:
        fails()
    except RuntimeError as error:
        raise ValueError("no batch") from error


def test_only_shortages_are_noted(noted: list[Any]) -> None:
    """The cell's own and those it came from; not a later cell's, nor an older one's."""
    kernel = Kernel()
    kernel.run(lambda: None)
    assert oom_hook.last() is None
    kernel.run(fails)
    assert oom_hook.last() == "shortage"
    assert (noted[0][0].memory, noted[0][0].asked_bytes) == (HOST, 4 * 10**15)
    kernel.run(lambda: 1 / 0)
    assert (oom_hook.last(), len(noted)) == (None, 1)
    kernel.run(fails_within)
    assert (oom_hook.last(), type(noted[1][1])) == ("shortage", RuntimeError)
    kernel.run(lambda: None)
    assert (oom_hook.last(), len(noted)) == (None, 2)


def test_the_next_cell_has_the_memory_of_the_one_that_failed(noted: list[Any]) -> None:
    """What its functions held goes; after any other error it stays, for whoever wants to look."""
    held: list[weakref.ref[torch.Tensor]] = []

    def hold_and(fail: Callable[[], object]) -> None:
        hidden = torch.ones(3)
        held.append(weakref.ref(hidden))
        fail()

    kernel = Kernel()
    kernel.run(lambda: hold_and(fails_within))
    assert held[0]() is not None
    kernel.run(lambda: None)
    assert held[0]() is None
    kernel.run(lambda: hold_and(lambda: 1 / 0))
    kernel.run(lambda: None)
    assert held[1]() is not None


def test_a_failure_to_look_leaves_the_cell_its_error(
    noted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply comes all the same."""

    def broken(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("nbdist.memory.rank.oom_report.make_report", broken)
    kernel = Kernel()
    assert asyncio.run(kernel.do_execute(fails)) == {"status": "error"}
    assert oom_hook.last() is None


def test_allocator_of_a_gpu_is_watched(noted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once CUDA is in use, once; what it says at the failure is what counts. Made up: no GPU."""
    attached: list[Any] = []
    state = SimpleNamespace(is_on=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state.is_on)
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_snapshot", lambda: {"segments": [1], "device_traces": [[2]]}
    )
    kernel = Kernel()
    kernel.run(lambda: None)
    assert attached == []
    state.is_on = True

    def fails_on_gpu() -> None:
        attached[0](0, 5, 6, 7)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    kernel.run(fails_on_gpu)
    kernel.run(fails)

    assert len(attached) == 1
    assert [before for _, _, before in noted] == [{"segments": [1], "device_traces": []}, None]
    # The allocator's own error goes on, whatever happens here.
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: 1 / 0)
    attached[0](0, 5, 6, 7)


def error_of(code: Any) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        code()
    return caught.value


class Fails(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty(10**15)


def test_phases_by_the_frames() -> None:
    """Forward, backward and an optimizer's step, each by torch's own files."""
    model = torch.nn.Linear(3, 3)
    model.register_forward_hook(lambda *_: torch.empty(10**15))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    optimizer.register_step_pre_hook(lambda *_: torch.empty(10**15) and None)
    loss = Fails.apply(torch.ones(2, requires_grad=True)).sum()

    assert _phase(error_of(lambda: model(torch.ones(3)))) == "forward"
    assert _phase(error_of(loss.backward)) == "backward"
    assert _phase(error_of(optimizer.step)) == "optimizer"
    assert _phase(error_of(fails)) == ""


def test_locals_of_frames_are_named() -> None:
    """By variable and function; lists too."""
    pointers = {}

    def train() -> None:
        batch = torch.ones(3)
        several = [torch.ones(4), torch.ones(5)]
        pointers.update(batch=batch.data_ptr(), last=several[1].data_ptr())
        fails()

    names = {address: name for (_, address), name in _locals(error_of(train))}
    assert names[pointers["batch"]] == "batch in train"
    assert names[pointers["last"]] == "several in train"
