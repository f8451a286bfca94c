"""Counts the memory that fake tensors would take: each storage once, while it lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass(slots=True)
class _Storage:
    """A storage that is alive, and the bytes counted for it.

    Attributes:
        ref: Calls back when it is freed.
        size_bytes: Now.
        is_gathered: It was resized: FSDP gives what it has gathered back so, and nothing else does.
    """

    ref: weakref.ref[torch.UntypedStorage]
    size_bytes: int
    is_gathered: bool = False


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what ops make while it is entered. Enter it inside of a FakeTensorMode.

    torch's own trackers (torch.distributed._tools) count views of one storage and what ends
    between two ops otherwise; here a storage counts from the op that returns it until it is freed.

    Attributes:
        live_bytes: Now.
        peak_bytes: The most since `begin`.
        gathered_bytes: Of it now, that which FSDP has gathered.
        gathered_peak_bytes: The most of that since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.gathered_bytes = self.gathered_peak_bytes = 0
        self._storages: dict[int, _Storage] = {}

    def begin(self) -> None:
        """Peaks count from now on."""
        self.peak_bytes, self.gathered_peak_bytes = self.live_bytes, self.gathered_bytes

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.is_meta:
                continue
            storage = local.untyped_storage()
            key = id(storage)  # torch keeps one Python object for a storage as long as it lives
            if key not in self._storages:
                counted = _Storage(weakref.ref(storage, self._gone(key)), 0)
                self._storages[key] = counted
                self._add(counted, storage.nbytes())
        return result

    def resized(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Take over a storage's new size."""
        counted = self._storages.get(id(storage))
        if counted is None:
            return
        if not counted.is_gathered:
            counted.is_gathered = True
            self.gathered_bytes += counted.size_bytes
        self._add(counted, size_bytes - counted.size_bytes)

    def _gone(self, key: int) -> Callable[[object], None]:
        def forget(_ref: object) -> None:
            counted = self._storages.pop(key)
            self._add(counted, -counted.size_bytes)

        return forget

    def _add(self, counted: _Storage, more_bytes: int) -> None:
        counted.size_bytes += more_bytes
        self.live_bytes += more_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if counted.is_gathered:
            self.gathered_bytes += more_bytes
            self.gathered_peak_bytes = max(self.gathered_peak_bytes, self.gathered_bytes)


@contextmanager
def resizes_seen(counter: StorageCounter) -> Iterator[None]:
    """Let a counter know when a storage's size changes: no op says so.

    Replaces torch.UntypedStorage.resize_ for this process, which runs nothing of the user's.
    """
    before = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        result = before(storage, size_bytes)
        counter.resized(storage, size_bytes)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]
