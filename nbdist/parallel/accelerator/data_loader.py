"""Data loaders that go on at the very next sample when the strategy is switched.

What a rank has drawn and has not handed out yet is kept (`batch_sampler.BatchQueue`), so a loop
that has begun can share the rest out anew, whatever the sampler is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from accelerate.utils import send_to_device, synchronize_rng_states
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from nbdist.core.ranks import rank_label
from nbdist.errors import NbdistError, OptionError
from nbdist.parallel.accelerator.batch_sampler import (
    DataShard,
    SamplerSettings,
    ShardedBatchSampler,
    current_share,
)
from nbdist.parallel.accelerator.loader_state import Loop, Place, Position, note_batch
from nbdist.parallel.base.consensus import all_gather_object
from nbdist.parallel.base.tensors import digest
from nbdist.parallel.live import registry
from nbdist.parallel.sequence.split_sequence import tensors

# What torch's DataLoader is made of, beside the dataset and what draws indices.
_ARGUMENTS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class _End:
    """In a batch's place where none comes any more: a class, as a copy of it is itself."""


_END: Any = _End


class PreparedLoader(DataLoaderShard, Position):  # type: ignore[misc]  # untyped
    """A prepared DataLoader. It and the loops over it stay the same objects over a switch."""

    remainder: int

    def __init__(self, source: DataLoader[Any], settings: SamplerSettings, start: int = 0) -> None:
        """Prepare a loader of a dataset that is asked by index, or another one of this class.

        Each epoch leaves out the first `start` of all batches. `prepare` is collective.

        Raises:
            OptionError: It has no batches, or they do not divide as asked.
        """
        batches = _batches_of(source)
        generator = fix_order(batches, settings)
        shard = ShardedBatchSampler(batches, settings, start)
        shard.check(current_share())
        is_sampler = source.batch_sampler is None
        drawn = {"sampler": shard, "batch_size": None} if is_sampler else {"batch_sampler": shard}
        rng_types = [kind for kind in settings.rng_types if kind != "generator" or generator]
        super().__init__(
            source.dataset,
            device=settings.device,
            rng_types=rng_types or None,
            synchronized_generator=generator,
            use_stateful_dataloader=settings.config.use_stateful_dataloader,
            _drop_last=source.drop_last,
            _non_blocking=settings.config.non_blocking,
            iteration=getattr(source, "iteration", 0),
            **drawn,
            **arguments(source),
        )
        self._shard = shard
        self._settings = settings
        if registry.current().name == "single":
            self._take_over()  # once: later each rank goes on by itself, and alike

    def skip(self, n_batches: int) -> PreparedLoader:
        """The same without the first batches, as many as this rank has now in n_batches steps."""
        step = self._shard.step(current_share())
        return PreparedLoader(self, self._settings, self._shard.start + n_batches * step)

    def source(self) -> tuple[Any, Any]:
        """Return the dataset, and what draws indices for all ranks."""
        return self.dataset, self._shard.batch_sampler

    def check(self, share: DataShard) -> None:
        """Raises an OptionError if its batches do not divide so."""
        self._shard.check(share)

    def __iter__(self) -> Iterator[Any]:
        return Loop(self)

    def steps(self, place: Place) -> Iterator[Any]:
        """Yield batches as every loader; where a loop begins, ranks take rank 0's order first."""
        if not place.is_live and registry.data_choice().name != "single":
            self._take_over()
        yield from super().steps(place)

    def _batches(self, place: Place) -> Iterator[Any]:
        inner: Iterator[Any] | None = None
        while True:
            share = current_share()
            if inner is None or place.share != share:  # at first, and after a switch
                inner = None  # old workers end first
                inner = self._read_from(place, share)
            if place.ahead is _END:
                return
            batch = place.ahead
            if self.device is not None:
                batch = send_to_device(batch, self.device, non_blocking=self._non_blocking)
            self._update_state_dict()
            place.ahead = next(inner, _END)
            self.end_of_dataloader = place.ahead is _END
            if self.end_of_dataloader:
                self._update_state_dict()
            place.used += self._shard.step(share)
            place.feed.forget(place.used)
            yield batch

    def _read_from(self, place: Place, share: DataShard) -> Iterator[Any]:
        """An iterator of torch's over what this rank has to read from a place on."""
        is_first = place.feed is None
        if is_first:
            place.feed, place.used = self._shard.feed(), max(self._shard.start, place.used)
        if place.share == share:  # put back to where it was: one batch has been read
            return self._open(place, place.used + self._shard.step(share))
        with self._as_it_began(place) if is_first else nullcontext():
            inner = self._open(place, place.used, is_first=is_first)
            place.share, place.ahead = share, next(inner, _END)
        if is_first:
            _check_alike(place.ahead, share.index)
            note_batch(place.ahead)
        return inner

    def _open(self, place: Place, position: int, *, is_first: bool = False) -> Iterator[Any]:
        """An iterator of torch's over this rank's batches from a position on."""
        size: int | None = self._shard.batch_size
        if self.remainder >= 0 and size is not None:
            self.remainder = (len(self.dataset) - position * size) % self.total_batch_size
        # torch draws a seed for its workers; what comes after a switch is not to depend on it,
        # nor what comes after a load in the middle of an epoch: it was drawn before the save.
        is_drawn = not is_first or place.is_resumed
        same = torch.random.fork_rng(devices=[], enabled=is_drawn)
        loader, generator = self.base_dataloader, self.base_dataloader.generator
        if generator is not None and not is_first:
            loader.generator = generator.clone_state()  # the order may come from it, too
        try:
            with same, self._shard.continue_at(place.feed, position):
                return iter(loader)
        finally:
            loader.generator = generator

    def _take_over(self) -> None:
        """Draw as rank 0 does. Collective: every rank."""
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)


def arguments(source: DataLoader[Any]) -> dict[str, Any]:
    """Arguments that a DataLoader was made with, without its dataset and its samplers."""
    return {name: getattr(source, name) for name in _ARGUMENTS if hasattr(source, name)}


def _check_alike(batch: Any, index: int) -> None:
    """Compare a batch with those of the ranks that share a model's copy with this one.

    Collective under tp, pp and cp: every rank. Nothing is done elsewhere: there no two ranks see
    the same data, or each rank is by itself. Ranks that share a copy have one index.

    Raises:
        NbdistError: They differ, on all ranks: a model's parts would each compute with
            different data, and nothing else would tell.
    """
    choice = registry.data_choice()
    if choice.name == "single" or choice.degrees.dp == choice.degrees.product:
        return
    digests = all_gather_object((index, digest(tensors(batch))))
    for part in {shard for shard, _ in digests}:
        ranks = [rank for rank, (shard, _) in enumerate(digests) if shard == part]
        if len({digests[rank][1] for rank in ranks}) > 1:
            raise NbdistError(
                f"Ranks {rank_label(ranks)} share one copy of the model and got different batches: "
                "the dataset, its transforms or its sampler draw random numbers that are not the "
                "same on these ranks. Let rank 0 read for all, with Accelerator(dataloader_config="
                "DataLoaderConfiguration(dispatch_batches=True)), or seed the ranks alike "
                "(%dist_init --seed 0)."
            )


def _batches_of(source: DataLoader[Any]) -> Any:
    if isinstance(source, PreparedLoader):
        return source._shard.batch_sampler  # noqa: SLF001
    if source.batch_sampler is not None:
        return source.batch_sampler
    if isinstance(source.sampler, BatchSampler):
        return source.sampler
    raise OptionError(
        "A DataLoader with batch_size=None has no batches that ranks could share. Give it a "
        "batch_size, or a BatchSampler as its sampler."
    )


def fix_order(batches: Any, settings: SamplerSettings) -> torch.Generator | None:
    """Let the random order come from a generator that can be set and made equal; return that.

    Accelerate does the same. Otherwise each rank would draw from its own torch's generator.
    """
    sampler: Any = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler) and settings.config.use_seedable_sampler:
        if not isinstance(sampler, SeedableRandomSampler):
            batches.sampler = SeedableRandomSampler(
                data_source=sampler.data_source,
                replacement=sampler.replacement,
                num_samples=sampler.num_samples,
                generator=sampler.generator,
                data_seed=settings.config.data_seed,
            )
        return None
    if not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    generator: torch.Generator = sampler.generator
    return generator
