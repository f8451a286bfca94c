"""State beside large tensors: groups, schedulers, scaler, loaders, own objects, generators.

All of it is one file of torch.save's, which torch.load reads with `weights_only`: it can hold
numbers, texts, lists, dicts and tensors, and nothing that runs.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nbdist.checkpoint.rank.live_objects import LiveObjects
from nbdist.checkpoint.rank.tensors import entries_of
from nbdist.errors import CheckpointError
from nbdist.parallel.base.training_state import Generators

FILE = "states.pt"
# What is never changed, so that a copy is the same object.
_SINGLE = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
)


def set_random(state: Mapping[str, Any]) -> None:
    """Put this rank's random generators back."""
    version, words, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    Generators(
        (version, tuple(words.tolist()), gauss),
        (kind, keys.numpy().astype(np.uint32), *rest),
        state["torch"].numpy(),
        state["cuda"].numpy() if "cuda" in state else None,
    ).put_back()


def states(live: LiveObjects) -> dict[str, Any]:
    """All plain states but random generators', as they are here; copies, so that they may change.

    Raises:
        CheckpointError: Something in it is no plain data; says where.
    """
    return {
        "optimizers": {
            optimizer.name: {
                "groups": copy_plain(optimizer.groups(), f"optimizers.{optimizer.name}.groups"),
                "entries": entries_of(optimizer),
            }
            for optimizer in live.optimizers
        },
        "accelerators": [
            copy_plain(_accelerator(accelerator), f"accelerators.{at}")
            for at, accelerator in enumerate(live.accelerators)
        ],
    }


def copy_plain(value: Any, where: str) -> Any:
    """A copy of plain data; where it stands is for messages.

    Raises:
        CheckpointError: Something in it is no plain data; says where.
    """

    def inner(key: object, item: Any) -> Any:
        return item if type(item) in _SINGLE else copy_plain(item, f"{where}.{key}")

    kind = type(value)
    if kind is dict:
        return {key: inner(key, item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind([inner(at, item) for at, item in enumerate(value)])
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping | list | tuple | set):  # of a class of its own
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            inner(key, item)
    elif kind not in _SINGLE and not isinstance(value, int | float | complex | str | bytes):
        place = f"{where} ({kind.__module__}.{kind.__qualname__})"
        raise CheckpointError(
            f"{place} cannot be saved: a checkpoint holds only numbers, strings, lists, dicts "
            "and tensors, so that loading it runs no code. Have state_dict() return such values."
        )
    return copy.deepcopy(value)


def as_bytes(states: Mapping[str, Any], generators: Sequence[Generators]) -> bytes:
    """The file, of what `states` gave, and the generators of each rank."""
    file = io.BytesIO()
    torch.save(
        {**states, "random": [_saved(rank_generators) for rank_generators in generators]}, file
    )
    return file.getvalue()


def _saved(generators: Generators) -> dict[str, Any]:
    """Turn generators into what the file has: long lists of numbers are tensors."""
    version, words, gauss = generators.python
    kind, keys, *rest = generators.numpy
    state = {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.from_numpy(generators.torch),
    }
    return (
        state if generators.cuda is None else {**state, "cuda": torch.from_numpy(generators.cuda)}
    )


def loads(data: bytes) -> dict[str, Any]:
    """Read the state that `as_bytes` gave; nothing in it is run.

    Raises:
        CheckpointError: It is something else.
    """
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{FILE} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{FILE} holds a {type(loaded).__name__}")
    return loaded


def read(folder: Path) -> dict[str, Any]:
    """The plain states of a checkpoint.

    Raises:
        CheckpointError: They are damaged.
    """
    try:
        return loads((folder / FILE).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{folder / FILE} cannot be read: {error.strerror}.") from error


def steps_made(states: Mapping[str, Any]) -> int:
    """The largest step number that an optimizer keeps, of what `states` gave; 0 without one."""
    steps = [
        int(entry["value"])
        for optimizer in states["optimizers"].values()
        for entry in optimizer["entries"]
        if entry["key"] == "step" and entry["value"] is not None
    ]
    return max(steps, default=0)


def _accelerator(accelerator: Any) -> dict[str, Any]:
    return {
        "step": accelerator.step,
        "schedulers": [(_kind(s.scheduler), s.state_dict()) for s in accelerator._schedulers],  # noqa: SLF001
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "loaders": [
            loader.position_state() if hasattr(loader, "position_state") else None
            for loader in accelerator._dataloaders  # noqa: SLF001
        ],
        "objects": [
            (_kind(stateful), stateful.state_dict())
            for stateful in accelerator._custom_objects  # noqa: SLF001
        ],
    }


def _kind(value: object) -> str:
    return type(value).__name__
