"""What torchrun's scripts take for granted, where only the arguments of the call matter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from nbdist.engine import default_group


@pytest.mark.parametrize(("device", "expected"), [("cuda:0", [0]), ("cuda:3", [3]), ("cpu", None)])
def test_a_barrier_is_on_the_ranks_own_device(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: list[int] | None
) -> None:
    """Whether the script writes LOCAL_RANK, which is 1, or Accelerate does; rank 1 shares GPU 0."""
    calls: list[Any] = []

    def barrier(
        group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None
    ) -> None:
        calls.append((group, async_op, device_ids, timeout))

    here = SimpleNamespace(place=SimpleNamespace(device=device))
    monkeypatch.setattr(default_group, "this_rank", lambda: here)
    monkeypatch.setattr(dist, "barrier", default_group._on_own_gpu(barrier))
    dist.barrier(device_ids=[1])
    dist.barrier("pair", True, [1], "soon")
    dist.barrier()
    state: Any = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, local_process_index=1)
    state.wait_for_everyone = lambda: PartialState.wait_for_everyone(state)
    state.wait_for_everyone()
    list(PartialState._goes_first(state, True))

    default = (None, False, None, None)
    own_gpu = (None, False, expected, None)
    assert calls == [own_gpu, ("pair", True, expected, "soon"), default, own_gpu, own_gpu]


@pytest.mark.parametrize(
    ("devices", "given", "expected"),
    [
        (["cuda:0", "cuda:0"], [1], [torch.device("cuda:0")]),
        (["cuda:2"], [torch.device("cuda:2")], [torch.device("cuda:2")]),
        (["cuda:0", "cuda:1"], None, None),
        (["cuda:0", "cuda:1"], [1], [1]),  # torch refuses these two
        (["cpu"], [1], [1]),
    ],
)
def test_ddp_is_on_the_gpu_of_its_module(devices: list[str], given: Any, expected: Any) -> None:
    """As Accelerate's `prepare` calls it on rank 1, which shares GPU 0."""
    calls: list[Any] = []

    def construct(self: Any, module: Any, device_ids: Any = None, *_: Any, **kwargs: Any) -> None:
        calls.append((device_ids, kwargs))

    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    module = SimpleNamespace(parameters=lambda: iter(parameters))
    init = default_group._on_modules_gpu(construct)
    init(None, module, device_ids=given, output_device=1, static_graph=True)

    assert calls == [(expected, {"static_graph": True})]
