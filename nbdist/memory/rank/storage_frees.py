"""When memory that is older than a recording is freed: torch's profiler does not tell."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Iterable

import torch

from nbdist.memory.blocks import Event


class StorageFrees:
    """Notes when storages go. They are not kept alive by it."""

    def __init__(self) -> None:
        # By address: the reference, whose callback is called when the storage goes.
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._freed: list[tuple[int, int, int]] = []

    def watch(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """From now on. A storage goes with its last tensor, also one that only autograd holds."""
        for storage in storages:
            address = storage.data_ptr()
            if storage.device.type == "cpu" and address not in self._watched:
                gone = functools.partial(self._gone, address, storage.nbytes())
                self._watched[address] = weakref.ref(storage, gone)

    def leave(self) -> None:
        """Forget all storages: what goes from now on is not noted."""
        self._watched = {}

    def events(self) -> list[Event]:
        """Frees, by the host's clock."""
        return [Event(time_ns, address, -size) for time_ns, address, size in self._freed]

    def _gone(self, address: int, size_bytes: int, _reference: object) -> None:
        if self._watched.pop(address, None) is not None:
            self._freed.append((time.time_ns(), address, size_bytes))
