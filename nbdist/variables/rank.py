"""A rank's side of %dist_push and %dist_pull."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbdist.rpc.rank import namespace
from nbdist.variables import pack, unpack
from nbdist.variables.names import close_to
from nbdist.variables.pack import PackedValue

PART = "DTensors arrive as each rank's local part; --whole gathers them"

# What has been received and is not bound yet, by the push it belongs to: at most one.
_received: dict[str, dict[str, Any]] = {}


def missing_names(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Map each name that this rank lacks to close names that it has."""
    variables = namespace.everything()
    user_names = namespace.names()
    return {name: close_to(name, user_names) for name in names if name not in variables}


def send(names: Sequence[str], folders: Sequence[str], keeps: bool, is_whole: bool) -> PackedValue:
    """Send this rank's values of variables.

    A large one may lie in one of the folders on its way, the best first. Without `keeps` the value
    is not wanted: this rank only helps to gather. `is_whole` gathers DTensors; then it is
    collective: every rank, with the same structure.

    Raises:
        TransferError: If it cannot be pickled, or there is no room for it.
    """
    variables = namespace.everything()
    parts = []

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        with torch.no_grad():
            if is_whole:
                return tensor.full_tensor()
            parts.append(tensor)
            return tensor.to_local()

    packed = pack.pack(
        {name: variables[name] for name in names},
        torch,
        plain=plain,
        keeps_memory=keeps,
        finds_culprit=not is_whole,
    )
    if not keeps:
        return PackedValue((), (), b"", "")
    return pack.send(packed, folders, [PART] if parts else [])


def receive(token: str, parcel: PackedValue) -> None:
    """Unpack the values of a push; `bind` gives them their names once all ranks have them.

    Raises:
        TransferError: If that fails; no variable has changed.
    """
    _received.clear()
    _received[token] = unpack.unpack(parcel, torch)


def bind(token: str, named: Sequence[str]) -> None:
    """Give the user's code what was received; what only came along not under a name that it has."""
    received, variables = _received.pop(token), namespace.everything()
    namespace.push({n: v for n, v in received.items() if n in named or n not in variables})


def drop(token: str) -> None:
    """Forget what was received, because another rank failed."""
    _received.pop(token, None)
