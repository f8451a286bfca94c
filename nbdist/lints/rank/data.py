"""Samples of a rank's DataLoaders: the same as other ranks', in the same order, by how many.

Private: `_BaseDataLoaderIter.__next__` is wrapped, as torch has no hook for the batches of a
loader. Of each loop the first few are looked at, later ones cost a comparison of two numbers.
A torch without the names that are read here is left alone, and these lints are silent.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, dataloader

from nbdist.core.host import usable_cores
from nbdist.lints.rank import optimizer_steps, watch

# Batches of each loop that are looked at, and what of them.
LOOKED = 4
MOST_TENSORS = 8
MOST_NUMBERS = 2048
_LEAVES = torch.Tensor | np.ndarray | str | int | float
# Loops of a cell that are kept: the last ones.
MOST_LOOPS = 8


@dataclass(slots=True)
class _Loop:
    """One loop over a loader.

    Attributes:
        drawn: What draws its indices, weakly: the same object in every epoch.
        dataset: Weakly, to find the loader's name.
        epoch: That its DistributedSampler stood at; None without one, or without shuffle.
        digests: Of its first batches.
        began: Steps of optimizers when each batch was asked for.
    """

    drawn: weakref.ref[Any]
    dataset: Any
    epoch: int | None
    digests: list[str] = field(default_factory=list)
    began: list[int] = field(default_factory=list)

    @property
    def is_training(self) -> bool:
        """Whether optimizers stepped between its batches."""
        return len(self.began) > 1 and self.began[-1] > self.began[0]


@dataclass(slots=True)
class _State:
    loops: list[_Loop] = field(default_factory=list)
    by_iterator: weakref.WeakKeyDictionary[Any, _Loop] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    workers: int = 0


_state = _State()


def install() -> None:
    """Look at batches from now on."""
    kind = getattr(dataloader, "_BaseDataLoaderIter", None)
    if kind is not None:
        watch.wrap(kind, "__next__", _watch_batches)


def begin() -> None:
    """Forget the loops of the cell before."""
    _state.loops.clear()
    _state.by_iterator.clear()
    _state.workers = 0


def end() -> None:
    """Note what this cell's loops have shown."""
    if _state.workers:
        watch.note(
            "workers", "DataLoader workers", workers=_state.workers, cores=usable_cores(),
            host=platform.node(),
        )  # fmt: skip
    noted: set[str] = set()
    before: dict[int, _Loop] = {}
    for loop in _state.loops:
        drawn = loop.drawn()
        if drawn is not None and loop.is_training:
            _note_loop(drawn, loop, before.get(id(drawn)), noted)
            before[id(drawn)] = loop


@watch.guarded("same-data, set-epoch")
def _note_loop(drawn: Any, loop: _Loop, older: _Loop | None, noted: set[str]) -> None:
    """Note one loop; `older` went over the same loader before, `noted` has names."""
    name = _name(loop, drawn)
    if name not in noted:
        noted.add(name)
        peers = optimizer_steps.peers()
        if len(peers) > 1 and loop.digests:
            watch.note("same-data", name, digests=loop.digests, peers=list(peers))
    if older is not None and loop.epoch is not None and older.epoch == loop.epoch:
        watch.note("set-epoch", name, epoch=loop.epoch)


def _watch_batches(original: Any) -> Any:
    def __next__(self: Any) -> Any:  # noqa: N807
        if self._num_yielded >= LOOKED:
            return original(self)
        loop = _loop_of(self)
        if loop is None:
            return original(self)
        loop.began.append(optimizer_steps.count())
        batch = original(self)
        _take(loop.drawn(), loop, batch)
        return batch

    return __next__


@watch.guarded("same-data")
def _take(_drawn: Any, loop: _Loop, batch: Any) -> None:
    loop.digests.append(digest(batch))


@watch.guarded("same-data, set-epoch, workers")
def _loop_of(iterator: Any) -> _Loop | None:
    """The loop that an iterator is in; a new one at its first batch."""
    if iterator._num_yielded:  # noqa: SLF001
        return _state.by_iterator.get(iterator)
    drawn = getattr(iterator, "_index_sampler", None)
    if drawn is None:
        return None
    sampler = getattr(drawn, "sampler", drawn)
    is_shuffled = isinstance(sampler, DistributedSampler) and sampler.shuffle
    dataset = getattr(iterator, "_dataset", None)
    loop = _Loop(weakref.ref(drawn), _weak(dataset), int(sampler.epoch) if is_shuffled else None)
    _state.by_iterator[iterator] = loop
    _state.loops.append(loop)
    del _state.loops[:-MOST_LOOPS]
    _state.workers = max(_state.workers, int(getattr(iterator, "_num_workers", 0)))
    return loop


def _weak(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:  # a list is a dataset too
        return lambda: None


def _name(loop: _Loop, drawn: Any) -> str:
    """The variable that holds the loader, or what its data are."""
    dataset = loop.dataset()
    kind = "data" if dataset is None else type(dataset).__name__

    def has_same_data(value: Any) -> bool:
        return issubclass(type(value), DataLoader) and value.dataset is dataset

    def draws_same(value: Any) -> bool:
        is_loader = issubclass(type(value), DataLoader)
        return is_loader and (value.batch_sampler is drawn or value.sampler is drawn)

    return watch.variable(draws_same, watch.variable(has_same_data, f"a DataLoader of {kind}"))


def digest(batch: Any) -> str:
    """A text that differs where the first numbers of a batch do."""
    total = hashlib.blake2b(digest_size=8)
    leaves = watch.leaves(batch, most=4 * MOST_TENSORS)
    tensors = (leaf for leaf in leaves if isinstance(leaf, _LEAVES))
    for leaf in itertools.islice(tensors, MOST_TENSORS):
        total.update(_bytes(leaf))
    return total.hexdigest()


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        if value.is_sparse or value.is_meta or value.is_quantized:
            return str(tuple(value.shape)).encode()
        flat = value.detach().reshape(-1)[:MOST_NUMBERS].cpu().contiguous()
        return str(tuple(value.shape)).encode() + flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.shape).encode() + repr(value.reshape(-1)[:64].tolist()).encode()
    return repr(value).encode()
