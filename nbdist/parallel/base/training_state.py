"""Values that training changes on this rank, copied and put back in place. No rank is met.

Each `keep_...` copies one part and returns a function that puts it back; `put_back_after` calls
several of these when a block ends. Copies are on the host and of this rank's own part: they cost
no memory of a GPU, and fit as long as everything lies as it did.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from nbdist.errors import NbdistError
from nbdist.parallel.base.tensors import local_of

PutBack = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of a rank's random generators.

    Attributes:
        python, numpy: As `random` and `numpy.random` give them. Accelerate seeds the latter.
        torch: Likewise, as an array: a tensor takes a millisecond to send.
        cuda: Of its GPU, if it has been used.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: NDArray[np.uint8]
    cuda: NDArray[np.uint8] | None

    def put_back(self) -> None:
        """Let this rank's generators go on from these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.random.set_rng_state(torch.from_numpy(self.torch))
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.from_numpy(self.cuda))


def generators() -> Generators:
    """The states of this rank's random generators as they are now."""
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return Generators(
        random.getstate(),
        np.random.get_state(),  # type: ignore[arg-type]  # noqa: NPY002
        torch.random.get_rng_state().numpy(),
        torch.cuda.get_rng_state().numpy() if has_gpu else None,
    )


_KEEP_GENERATOR: dict[type, Callable[[Any], PutBack]] = {
    torch.Generator: lambda drawn: functools.partial(drawn.set_state, drawn.get_state()),
    random.Random: lambda drawn: functools.partial(drawn.setstate, drawn.getstate()),
    np.random.RandomState: lambda drawn: functools.partial(drawn.set_state, drawn.get_state()),
    np.random.Generator: lambda drawn: functools.partial(
        setattr, drawn.bit_generator, "state", drawn.bit_generator.state
    ),
}


def keep_generators(objects: Iterable[object]) -> list[PutBack]:
    """The states of the random generators among these objects; the others are left alone."""
    return [_KEEP_GENERATOR[type(obj)](obj) for obj in objects if type(obj) in _KEEP_GENERATOR]


@contextlib.contextmanager
def put_back_after(*put_backs: PutBack) -> Iterator[None]:
    """Put all of this back when the block ends, in order, however it ends."""
    try:
        yield
    finally:
        for put_back in put_backs:
            put_back()


def same_random() -> contextlib.AbstractContextManager[None]:
    """Leave Python's, numpy's and torch's generators as they were before."""
    return put_back_after(generators().put_back)


def keep_modes(model: torch.nn.Module) -> PutBack:
    """Keep whether each module trains."""
    return _keep_attribute(model.modules(), "training")


def keep_gradients(model: torch.nn.Module) -> PutBack:
    """The gradient of each parameter: the tensor itself, no copy of it."""
    return _keep_attribute(model.parameters(), "grad")


def _keep_attribute(objects: Iterable[object], name: str) -> PutBack:
    values = [(obj, getattr(obj, name)) for obj in objects]

    def put_back() -> None:
        for obj, value in values:
            setattr(obj, name, value)

    return put_back


def keep_values(what: str, find: Callable[[], Mapping[Any, torch.Tensor]]) -> PutBack:
    """Keep this rank's part of each tensor, by name.

    Args:
        what: Whose they are, for the error.
        find: Returns them by name, now and when they are put back: they may be other tensors then.
    """
    values = {name: _copy_to_host(value) for name, value in find().items()}
    return lambda: _copy_into(find(), values, what)


def keep_optimizer(optimizer: Optimizer) -> PutBack:
    """The settings of each of its groups, and the state of each parameter in it."""
    settings = [
        {key: _copy_to_host(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    states = [
        [
            {key: _copy_to_host(value) for key, value in optimizer.state[parameter].items()}
            if parameter in optimizer.state
            else None
            for parameter in group["params"]
        ]
        for group in optimizer.param_groups
    ]

    def put_back() -> None:
        _take_out(optimizer, [len(of_group) for of_group in states])
        for group, saved, saved_states in zip(
            optimizer.param_groups, settings, states, strict=True
        ):
            for key, value in saved.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = copy.deepcopy(value)
            for parameter, state in zip(group["params"], saved_states, strict=True):
                _put_state_back(optimizer, parameter, state)

    return put_back


def _take_out(optimizer: Optimizer, counts: list[int]) -> None:
    """Forget the groups, and the parameters of groups, that have come since there were so many."""
    added = optimizer.param_groups[len(counts) :]
    del optimizer.param_groups[len(counts) :]
    parameters = [parameter for group in added for parameter in group["params"]]
    for group, count in zip(optimizer.param_groups, counts, strict=True):
        parameters += group["params"][count:]
        del group["params"][count:]
    for parameter in parameters:
        optimizer.state.pop(parameter, None)


def _put_state_back(
    optimizer: Optimizer, parameter: torch.Tensor, state: Mapping[str, Any] | None
) -> None:
    if state is None:
        optimizer.state.pop(parameter, None)
        return
    current = optimizer.state[parameter]
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    local = {key: local_of(current[key]) for key in tensors if key in current}
    _copy_into(local, tensors, type(optimizer).__name__)
    current.update({k: copy.deepcopy(value) for k, value in state.items() if k not in tensors})


def keep_accelerator(accelerator: Any) -> list[PutBack]:
    """The schedulers, scaler, loaders' positions and steps of one; nothing of another object."""
    if not hasattr(accelerator, "_schedulers"):
        return []

    def scale(state: Any) -> None:  # a switch may have made another scaler
        accelerator.scaler.load_state_dict(state)

    schedulers, loaders = accelerator._schedulers, accelerator._dataloaders  # noqa: SLF001  # as saving does
    return [
        *(_load_later(each.load_state_dict, each.state_dict()) for each in schedulers),
        *(
            []
            if accelerator.scaler is None
            else [_load_later(scale, accelerator.scaler.state_dict())]
        ),
        *(each.keep_position() for each in loaders if hasattr(each, "keep_position")),
        _load_later(lambda steps: setattr(accelerator, "step", steps), accelerator.step),
    ]


def _load_later(load: Callable[[Any], object], state: Any) -> PutBack:
    state = copy.deepcopy(state)
    return lambda: load(copy.deepcopy(state))


def _copy_to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return local_of(value).to("cpu", copy=True)
    return copy.deepcopy(value)


def _copy_into(
    there: Mapping[Any, torch.Tensor], values: Mapping[Any, torch.Tensor], what: str
) -> None:
    with torch.no_grad():
        for name, value in values.items():
            if name not in there or there[name].shape != value.shape:
                raise NbdistError(
                    f"{name} of {what} is laid out differently than before the comparison, so its "
                    "values were not restored. Run %dist_reset to start afresh."
                )
            there[name].copy_(value)
