"""Who gets which batches: what each data-parallel rank takes of the order that all draw alike.

Every rank draws the order of all batches, in its main process, and takes those that are its own:
one of each round of `DataShard.count` batches, or one piece of each batch.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler

from nbdist.errors import OptionError
from nbdist.parallel.live import registry
from nbdist.strategy.choice import Strategy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataShard:
    """A share of the data: number `index` of `count`. Several ranks may have the same."""

    count: int
    index: int


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """The settings of an Accelerator for its loaders.

    Attributes:
        device: Where batches go; None leaves them where they are.
        config: Accelerate's, as it was when a loader was prepared.
        rng_types: What all ranks take over from rank 0 at the start of an epoch.
        slice_fn: How a dispatched batch is cut; Accelerate's way where None.
    """

    device: torch.device | None
    config: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    rng_types: tuple[str, ...] = ()
    slice_fn: Callable[..., Any] | None = None


def share_of(choice: Strategy, rank: int) -> DataShard:
    """Which part of the data a rank sees: its place along dp_replicate and dp_shard alone."""
    degrees = choice.degrees
    place = degrees.coordinate(rank)
    return DataShard(degrees.dp, place.dp_replicate * degrees.dp_shard + place.dp_shard)


def current_share() -> DataShard:
    """Return this rank's share of the data under the current strategy. No rank is met."""
    return share_of(registry.data_choice(), dist.get_rank())


def refuse_uneven(size: int | None, share: DataShard) -> None:
    """Raises an OptionError if a batch of this size cannot be cut into so many equal pieces."""
    if size is None or size % share.count:
        raise OptionError(
            f"split_batches cannot cut each batch of {size} into {share.count} equal pieces. Use a "
            f"batch_size that {share.count} divides, or leave split_batches out."
        )


class BatchQueue(Generic[T]):
    """The batches of one epoch, in order, kept from the first on that was not handed out."""

    def __init__(self, batches: Iterable[T], n_first: int) -> None:
        """Take the batches of one epoch, of which so many first ones stay; `take` draws them."""
        self.first: list[T] = []
        self._source = iter(batches)
        self._pending: deque[T] = deque()
        self._start = 0  # the number of the first one kept
        self._n_first = n_first

    def copy(self) -> Self:
        """Another one of the same batches; what one draws is not missing in the other."""
        self._source, source = itertools.tee(self._source)
        twin = copy.copy(self)
        vars(twin).update(first=list(self.first), _pending=deque(self._pending), _source=source)
        return twin

    def take(self, start: int, count: int) -> list[T]:
        """Batches number start to start + count - 1; fewer, or none, at the end."""
        missing = start + count - self._start - len(self._pending)
        for batch in itertools.islice(self._source, max(0, missing)):
            if len(self.first) < self._n_first:
                self.first.append(batch)
            self._pending.append(batch)
        skip = start - self._start
        return list(itertools.islice(self._pending, skip, skip + count))

    def forget(self, start: int) -> None:
        """Drop the batches before this number; they are not asked for again."""
        while self._pending and self._start < start:
            self._pending.popleft()
            self._start += 1


class ShardedBatchSampler(BatchSampler):
    """Batches of indices for this rank, as Accelerate's BatchSamplerShard draws them.

    The part of each rank follows the current strategy. If only one rank reads data, its last
    batch is short, as without Accelerate.
    """

    def __init__(self, batches: Any, settings: SamplerSettings, start: int = 0) -> None:
        """Share out all batches but the first `start` of each epoch."""
        self.batch_sampler = batches
        self.split_batches = settings.config.split_batches
        self.even_batches = settings.config.even_batches
        self._size: int | None = getattr(batches, "batch_size", None)
        self.batch_size = self._size  # type: ignore[assignment]  # Accelerate asks for it
        self.drop_last = getattr(batches, "drop_last", False)
        self.start = start
        self._opening: tuple[BatchQueue[Sequence[int]], int] | None = None

    @property
    def num_processes(self) -> int:
        """How many ranks see different data now. Accelerate asks for it under this name."""
        return current_share().count

    def set_epoch(self, epoch: int) -> None:
        """Tell a batch sampler that has epochs of its own."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def step(self, share: DataShard) -> int:
        """How many of all batches one step of all ranks uses."""
        return 1 if self.split_batches else share.count

    @contextmanager
    def continue_at(self, feed: BatchQueue[Sequence[int]], position: int) -> Iterator[None]:
        """Iterators that are made in here go on with this feed, at this number of all batches."""
        self._opening = (feed, position)
        try:
            yield
        finally:
            self._opening = None

    def feed(self) -> BatchQueue[Sequence[int]]:
        """The batches of a new epoch, of all ranks together."""
        # As many as the widest round that fills up its gaps can ask for.
        return BatchQueue(self.batch_sampler, n_first=dist.get_world_size())

    def check(self, share: DataShard) -> None:
        """Raises an OptionError if a batch does not divide into the pieces asked for."""
        if self.split_batches:
            refuse_uneven(self._size, share)

    def __len__(self) -> int:
        share = current_share()
        n_batches = len(self.batch_sampler) - self.start
        if self.split_batches:
            return n_batches
        n_full, n_left = divmod(n_batches, share.count)
        if not n_left or self.drop_last:
            return n_full
        return n_full + (self.even_batches or share.index < n_left)

    def __iter__(self) -> Iterator[list[int]]:
        # No generator: what is opened counts now. torch asks twice where it has workers.
        feed, position = self._opening or (self.feed(), self.start)
        share = current_share()
        self.check(share)
        return self._local_batches(feed, position, share)

    def _local_batches(
        self, feed: BatchQueue[Sequence[int]], position: int, share: DataShard
    ) -> Iterator[list[int]]:
        step = self.step(share)
        while batches := feed.take(position, step):
            indices = self._pick(batches, feed.first, share)
            if indices is None:
                return
            yield indices
            position += step

    def _pick(
        self, batches: list[Sequence[int]], first: list[Sequence[int]], share: DataShard
    ) -> Any:
        """Pick this rank's batch of one round; None where the rank ends before."""
        if share.count == 1:
            return batches[0]
        is_full = self._size is None or len(batches[-1]) == self._size
        is_whole = is_full and len(batches) == self.step(share)
        if not is_whole and self.drop_last:
            return None
        if not is_whole and self.even_batches:
            batches = self._fill(batches, first, share)
        if self.split_batches:
            assert self._size is not None
            length = self._size // share.count
            return batches[0][length * share.index : length * (share.index + 1)] or None
        return batches[share.index] if share.index < len(batches) else None

    def _fill(
        self, batches: list[Sequence[int]], first: list[Sequence[int]], share: DataShard
    ) -> list[Sequence[int]]:
        """A last round, filled up with samples of the first one, again and again."""
        step = self.step(share)
        size = self._size
        if size is None:
            return [*batches, *itertools.islice(itertools.cycle(first[:step]), step - len(batches))]
        spare = itertools.cycle(itertools.chain.from_iterable(first[:step]))
        padded = [*batches, *([()] * (step - len(batches)))]
        return [[*batch, *itertools.islice(spare, size - len(batch))] for batch in padded]
