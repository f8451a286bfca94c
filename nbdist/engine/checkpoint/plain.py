"""What is no large tensor: groups, schedulers, scaler, loaders, own objects, random generators.

All of it is one file of torch.save's, which torch.load reads with `weights_only`: it can hold
numbers, texts, lists, dicts and tensors, and nothing that runs.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nbdist.engine.checkpoint.contents import entries_of
from nbdist.engine.checkpoint.found import Found
from nbdist.errors import CheckpointError

FILE = "states.pt"
_PLAIN = (
    bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, torch.Size,
)  # fmt: skip


def own_random() -> dict[str, Any]:
    """The states of this rank's random generators. Long lists of numbers are tensors."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  # the one that Accelerate seeds
    version, words, gauss = random.getstate()
    found = {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random(state: Mapping[str, Any]) -> None:
    """Put this rank's random generators back."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.random.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def states(found: Found, generators: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All plain states, as they are on this rank.

    Args:
        found: What is saved.
        generators: `own_random` of each rank.
    """
    return {
        "optimizers": {
            one.name: {
                "groups": one.groups(),
                "entries": entries_of(one),
            }
            for one in found.optimizers
        },
        "accelerators": [_accelerator(one) for one in found.accelerators],
        "random": list(generators),
    }


def as_bytes(value: Mapping[str, Any]) -> bytes:
    """The file: a copy of all states, so that they may change.

    Raises:
        CheckpointError: Something in it is no plain data; says where.
    """
    if wrong := _not_plain(value, ""):
        raise CheckpointError(
            f"{wrong} cannot be saved: a checkpoint holds numbers, texts, lists, dicts and tensors "
            "alone, so that loading one runs nothing. Let state_dict() give such values."
        )
    file = io.BytesIO()
    torch.save(dict(value), file)
    return file.getvalue()


def loads(data: bytes) -> dict[str, Any]:
    """What `as_bytes` gave; nothing in it is run.

    Raises:
        CheckpointError: It is something else.
    """
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{FILE} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{FILE} holds a {type(found).__name__}")
    return found


def read(folder: Path) -> dict[str, Any]:
    """The plain states of a checkpoint.

    Raises:
        CheckpointError: They are damaged.
    """
    try:
        return loads((folder / FILE).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{folder / FILE} cannot be read: {error.strerror}.") from error


def steps_made(found: Found) -> int:
    """The largest step number that an optimizer keeps; 0 without one."""
    steps = [
        int(entry["value"])
        for one in found.optimizers
        for entry in entries_of(one)
        if entry["key"] == "step" and entry["value"] is not None
    ]
    return max(steps, default=0)


def _accelerator(one: Any) -> dict[str, Any]:
    return {
        "step": one.step,
        "schedulers": [(_kind(s.scheduler), s.state_dict()) for s in one._schedulers],  # noqa: SLF001
        "scaler": None if one.scaler is None else one.scaler.state_dict(),
        "loaders": [
            loader.position_state() if hasattr(loader, "position_state") else None
            for loader in one._dataloaders  # noqa: SLF001
        ],
        "objects": [(_kind(o), o.state_dict()) for o in one._custom_objects],  # noqa: SLF001
    }


def _kind(one: object) -> str:
    return type(one).__name__


def _not_plain(value: Any, where: str) -> str:
    """Where the first thing is that is no plain data, with its class; empty without one."""
    if value is None or isinstance(
        value, bool | int | float | complex | str | bytes | torch.Tensor
    ):
        return ""
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return ""
    if isinstance(value, Mapping):
        inner = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, list | tuple | set):
        inner = [(str(at), one) for at, one in enumerate(value)]
    else:
        return f"{where} ({type(value).__module__}.{type(value).__qualname__})"
    found = (_not_plain(one, f"{where}.{name}" if where else name) for name, one in inner)
    return next((one for one in found if one), "")
