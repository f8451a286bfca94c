"""Data loaders that rank 0 reads for all, and streams that each rank reads for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard
from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    concatenate,
    find_batch_size,
    get_data_structure,
    initialize_tensors,
    send_to_device,
)
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from nbdist.errors import NbdistError, OptionError
from nbdist.parallel.accelerator.batch_sampler import (
    BatchQueue,
    DataShard,
    SamplerSettings,
    current_share,
    refuse_uneven,
)
from nbdist.parallel.accelerator.data_loader import PreparedLoader, arguments, fix_order
from nbdist.parallel.accelerator.loader_state import Loop, Place, Position
from nbdist.parallel.live import registry


def prepare(
    source: DataLoader[Any], settings: SamplerSettings, *, is_dispatched: bool | None = None
) -> Any:
    """The loader that gives each rank its part. Collective under `single`, else alike on all.

    Dispatched, rank 0 reads and sends; where that is None, streams for a device are.

    Raises:
        OptionError: It cannot be shared out as asked.
    """
    is_stream = isinstance(source.dataset, IterableDataset)
    if is_dispatched is None:
        is_dispatched = is_stream and settings.device is not None
    if is_dispatched:
        if settings.device is None:
            raise OptionError(
                "dispatch_batches sends batches to the device: it cannot be combined with "
                "device_placement=False. Leave one of them out."
            )
        return DispatchedLoader(source, settings)
    return IterableShard(source, settings) if is_stream else PreparedLoader(source, settings)


class DispatchedLoader(DataLoaderDispatcher, Position):  # type: ignore[misc]  # untyped
    """Rank 0 reads one batch for each part of the data, and every rank cuts out its own.

    Every step is collective. What is cut follows the current strategy; nothing is lost at a
    switch, as only rank 0 has a position.
    """

    def __init__(self, source: DataLoader[Any], settings: SamplerSettings, start: int = 0) -> None:
        """Prepare any loader of tensors; each epoch leaves out the first `start` of all batches."""
        drawn: dict[str, Any] = {"batch_sampler": source.batch_sampler}
        if source.batch_sampler is None or isinstance(source.dataset, IterableDataset):
            drawn = {"batch_size": source.batch_size, "drop_last": source.drop_last}
        self.synchronized_generator = fix_order(drawn.get("batch_sampler"), settings)
        super().__init__(
            source.dataset,
            split_batches=settings.config.split_batches,
            use_stateful_dataloader=settings.config.use_stateful_dataloader,
            _drop_last=source.drop_last,
            _non_blocking=settings.config.non_blocking,
            slice_fn=settings.slice_fn,
            iteration=getattr(source, "iteration", 0),
            **drawn,
            **arguments(source),
        )
        self._settings = settings
        self._first = start

    @property
    def total_batch_size(self) -> int:
        """How many samples one step of all ranks has."""
        size: int = self.base_dataloader.batch_size
        return size if self.split_batches else size * current_share().count

    def skip(self, n_batches: int) -> DispatchedLoader:
        """The same without as many as this rank has now in n_batches steps."""
        step = self._step(current_share())
        return DispatchedLoader(self, self._settings, self._first + n_batches * step)

    def source(self) -> tuple[Any, Any]:
        """Return the dataset, and what draws indices of it."""
        is_stream = isinstance(self.dataset, IterableDataset)
        return self.dataset, None if is_stream else self.base_dataloader.batch_sampler

    def __len__(self) -> int:
        step = self._step(current_share())
        n_batches = len(self.base_dataloader) - self._first
        return n_batches // step if self._drop_last else -(-n_batches // step)

    def __iter__(self) -> Iterator[Any]:
        return Loop(self)

    def _batches(self, place: Place) -> Iterator[Any]:
        is_alone = registry.data_choice().name == "single"
        reads = is_alone or dist.get_rank() == 0
        if place.feed is None:
            place.used = max(self._first, place.used)
            with self._as_it_began(place):
                place.feed = BatchQueue(self._open(place, reads=reads), n_first=1)
                place.feed.take(place.used, 1)
        while True:
            share = current_share()
            whole, size, is_last = self._read(place, share) if reads else (None, 0, False)
            if not is_alone:
                whole, size, is_last = self._send(whole, size, is_last=is_last)
            if size == 0:
                return
            place.used += self._step(share)
            place.feed.forget(place.used)
            self.end_of_dataloader = is_last
            if is_last:
                self.remainder = size
            yield self._cut(send_to_device(whole, self._settings.device), share)

    def _open(self, place: Place, *, reads: bool) -> Iterator[Any]:
        """Open the stream that rank 0 reads; nothing elsewhere."""
        # torch's data pipes meet all ranks where an iterator is made.
        if not reads and not isinstance(self.dataset, IterDataPipe):
            return iter(())
        # torch draws a seed for workers; the epoch that goes on has drawn it before.
        with torch.random.fork_rng(devices=[], enabled=place.is_resumed):
            inner = iter(self.base_dataloader)
        return inner if reads else iter(())

    def _step(self, share: DataShard) -> int:
        return 1 if self.split_batches else share.count

    def _read(self, place: Place, share: DataShard) -> tuple[Any, int, bool]:
        """One round: all samples, filled up so that they divide; how many are real; the last?"""
        step = self._step(share)
        self._update_state_dict()
        feed: BatchQueue[Any] = place.feed
        batches, following = feed.take(place.used, step), feed.take(place.used + step, step)
        if not batches or (self._drop_last and len(batches) < step):
            return None, 0, True
        try:
            whole = concatenate(batches) if len(batches) > 1 else batches[0]
        except RuntimeError as error:
            raise NbdistError(
                f"The {step} batches of one step do not fit together, so rank 0 cannot send them "
                "as one. Pad them to one length in collate_fn, or use dispatch_batches=False."
            ) from error
        size = find_batch_size(whole)
        while find_batch_size(whole) % share.count:
            n_missing = -find_batch_size(whole) % share.count
            first = feed.first[0]
            n_first = find_batch_size(first)
            piece = self._slice(first, slice(0, min(n_missing, n_first)), DataShard(1, 0))
            whole = concatenate([whole, piece])
        is_last = not following or (self._drop_last and len(following) < step)
        return whole, size, is_last

    def _send(self, whole: Any, size: int, *, is_last: bool) -> tuple[Any, int, bool]:
        """Rank 0's round, on every rank. Collective."""
        header: list[Any] = [get_data_structure(whole) if size else None, size, is_last]
        broadcast_object_list(header)
        structure, size, is_last = header
        if size == 0:
            return None, 0, True
        if dist.get_rank() != 0:
            whole = initialize_tensors(structure)
        whole = broadcast(send_to_device(whole, self._settings.device), from_process=0)
        return whole, size, is_last

    def _cut(self, whole: Any, share: DataShard) -> Any:
        if share.count == 1:
            return whole
        length = find_batch_size(whole) // share.count
        return self._slice(whole, slice(length * share.index, length * (share.index + 1)), share)

    def _slice(self, whole: Any, part: slice, share: DataShard) -> Any:
        return self.slice_fn(whole, part, process_index=share.index, num_processes=share.count)


class _Parts(IterableDatasetShard):  # type: ignore[misc]  # untyped
    """A stream's samples that are one rank's. A single one is given all, and no more."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset) if self.num_processes == 1 else super().__iter__()


class IterableShard(DataLoaderShard, Position):  # type: ignore[misc]  # untyped
    """A stream that each rank reads as a whole and picks its samples from.

    The next epoch follows a switch; a loop that has begun cannot, as a stream has no position.
    """

    def __init__(
        self, source: DataLoader[Any], settings: SamplerSettings, n_skipped: int = 0
    ) -> None:
        """Prepare a loader of a stream; each epoch leaves out so many of its own batches."""
        stream: Any = source.dataset
        if isinstance(stream, _Parts):
            stream = stream.dataset
        share = current_share()
        size = source.batch_size or 1
        if settings.config.split_batches:
            refuse_uneven(size, share)
        parts = _Parts(
            stream,
            batch_size=size,
            drop_last=source.drop_last,
            num_processes=share.count,
            process_index=share.index,
            split_batches=settings.config.split_batches,
        )
        generator: torch.Generator | None = getattr(stream, "generator", None)
        super().__init__(
            parts,
            device=settings.device,
            rng_types=list(settings.rng_types) if generator is not None else None,
            synchronized_generator=generator,
            skip_batches=n_skipped,
            use_stateful_dataloader=settings.config.use_stateful_dataloader,
            _drop_last=source.drop_last,
            _non_blocking=settings.config.non_blocking,
            iteration=getattr(source, "iteration", 0),
            batch_size=size // share.count if settings.config.split_batches else size,
            drop_last=source.drop_last,
            **arguments(source),
        )
        self._settings = settings
        self._opened = share

    def skip(self, n_batches: int) -> IterableShard:
        """The same without its first batches."""
        return IterableShard(self, self._settings, self.skip_batches + n_batches)

    def __iter__(self) -> Iterator[Any]:
        return Loop(self)

    def source(self) -> tuple[Any, Any]:
        """The stream as the user gave it."""
        return self.dataset.dataset, None

    def steps(self, place: Place) -> Iterator[Any]:
        """Yield batches as every loader does; earlier ones are read once more, and left out."""
        share = current_share()
        if self._settings.config.split_batches and share != self._opened:
            raise OptionError(
                f"This loader cuts batches for {self._opened.count} ranks, and now {share.count} "
                "see different data. Prepare it again."
            )
        self.dataset.num_processes, self.dataset.process_index = share.count, share.index
        step = 1 if self._settings.config.split_batches else share.count
        self._enter(place)
        n_used = place.used // step  # another number of ranks may repeat a part of a round
        generator = self._generator()
        if n_used and generator is not None and place.order is not None:
            generator.set_state(place.order.cpu())  # what is read once more is drawn as it was
        drawn = torch.random.get_rng_state()
        try:
            for number, batch in enumerate(super().__iter__()):
                if number < n_used:
                    continue
                if 0 < n_used == number:
                    torch.random.set_rng_state(drawn)  # what was read once more has drawn before
                place.used = (number + 1) * step
                if current_share() != share:
                    raise NbdistError(
                        "The strategy changed in the middle of a stream that each rank reads for "
                        "itself. A stream has no position to continue from: restart the loop, or "
                        "let rank 0 read it (dispatch_batches=True, the default for streams)."
                    )
                yield batch
        finally:
            place.is_live = False
