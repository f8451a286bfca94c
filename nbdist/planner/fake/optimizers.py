"""The memory of an optimizer for so many parameters: run once on fake ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.optim import Optimizer

from nbdist.planner.fake.process_group import CannotRun
from nbdist.planner.fake.storage_counter import StorageCounter
from nbdist.planner.workload import OPTIMIZERS, Workload
from nbdist.strategy.choice import Strategy

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]

# Words of planner.workload.OPTIMIZERS that torch has. foreach: fake DTensors are counted as if they
# were whole, and lists by the table; here parameters are this rank's own, plain ones.
_MADE: Mapping[str, Callable[[Any], Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
}


def stepped_bytes(
    stepped: Shapes,
    live: tuple[type[Optimizer], dict[str, Any]] | None,
    load: Workload,
    choice: Strategy,
) -> tuple[float, float]:
    """Bytes of state, and of what a step makes besides, of what this rank steps.

    `live` is class and defaults of the user's own optimizer, which counts before that of the load.

    Raises:
        CannotRun: The user's own optimizer, of a kind that no table has, looks at values.
    """
    numbers = sum(torch.Size(shape).numel() for shape, _ in stepped)
    row = OPTIMIZERS[load.optimizer]
    lists = numbers * row.step_bytes if load.has_gpu and not choice.options.is_fused else 0
    # Muon takes matrices alone, and the rest is another optimizer's.
    is_muon = live is not None and issubclass(live[0], torch.optim.Muon)
    if (live is None and load.optimizer not in _MADE) or is_muon:
        return numbers * row.state_bytes, lists
    if not stepped:
        return 0.0, 0.0
    try:
        state, needs = _run(stepped, live, load)
    except DataDependentOutputException as error:
        if live is not None and load.optimizer != live[0].__name__.lower():
            raise CannotRun(f"{live[0].__name__} looks at values while it steps") from error
        return numbers * row.state_bytes, lists
    if choice.options.is_fused or (live is not None and live[1].get("fused")):
        return state, 0.0
    # On a GPU torch's own go over whole lists, in the order of the table.
    is_torchs = live is None or live[0].__module__.startswith("torch.optim")
    return state, lists if load.has_gpu and is_torchs else needs


def _run(
    stepped: Shapes, live: tuple[type[Optimizer], dict[str, Any]] | None, load: Workload
) -> tuple[float, float]:
    counter = StorageCounter()
    with FakeTensorMode(), counter:
        parameters = [torch.nn.Parameter(torch.empty(shape, dtype=kind)) for shape, kind in stepped]
        kind, defaults = live or (_MADE[load.optimizer], {})
        optimizer = kind(parameters, **defaults)
        for group in optimizer.param_groups:
            if "foreach" in group:
                group.update(foreach=False)
            if group.get("fused"):
                group.update(fused=False)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        before = counter.live_bytes
        counter.begin()
        optimizer.step()
        state = sum(
            value.untyped_storage().nbytes()
            for entry in optimizer.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        )
        return state, counter.peak_bytes - before
