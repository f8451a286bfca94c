"""Data loaders that go on at the very next sample when the strategy is switched.

What a rank has drawn and has not handed out yet is kept (`batch_sampler.BatchQueue`), so a loop
that has begun can share the rest out anew, whatever the sampler is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from accelerate.utils import send_to_device, synchronize_rng_states
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from nbdist.core.ranks import rank_label
from nbdist.errors import NbdistError, OptionError
from nbdist.parallel import registry
from nbdist.parallel.accelerator.batch_sampler import (
    BatchQueue,
    DataShard,
    SamplerSettings,
    ShardedBatchSampler,
    current_share,
)
from nbdist.parallel.accelerator.loader_state import Position, note_batch
from nbdist.parallel.consensus import all_gather_object
from nbdist.parallel.cp.split_sequence import tensors
from nbdist.parallel.tensors import digest

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
_END: Any = object()


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
        generator = _fix_order(batches, settings)
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
        self._order: torch.Tensor | None = None
        if registry.current().name == "single":
            self._take_over()  # once: later each rank goes on by itself, and alike

    def skip(self, n_batches: int) -> PreparedLoader:
        """The same without the first batches, as many as this rank has now in n_batches steps."""
        step = self._shard.step(current_share())
        return PreparedLoader(self, self._settings, self._shard.start + n_batches * step)

    def check(self, share: DataShard) -> None:
        """Raises an OptionError if its batches do not divide so."""
        self._shard.check(share)

    def epoch_state(self) -> dict[str, Any]:
        """Which epoch this is and how its order began, also in the middle of one."""
        generator = self.synchronized_generator
        if generator is None:
            return super().epoch_state()
        order = generator.get_state() if self._order is None else self._order
        return {**super().epoch_state(), "order": order}

    def set_epoch_state(self, state: dict[str, Any]) -> None:
        """Let the next loop be the epoch in which `state` was taken, from its beginning."""
        super().set_epoch_state(state)
        if self.synchronized_generator is not None and "order" in state:
            self.synchronized_generator.set_state(state["order"].cpu())
        self._order = None

    def __iter__(self) -> Iterator[Any]:
        if registry.current().name != "single":
            self._take_over()
        if self.synchronized_generator is not None:
            self._order = self.synchronized_generator.get_state()
        yield from self._loop()
        self._order = None

    def _batches(self) -> Iterator[Any]:
        shard, feed = self._shard, self._shard.feed()
        position, is_resumed = self._find_start(shard.start)
        share: DataShard | None = None
        inner: Iterator[Any] | None = None
        batch = _END
        while True:
            if share != (now := current_share()):  # at first, and after a switch
                is_first, share, inner = share is None, now, None  # old workers end first
                inner = self._open(feed, position, draws=is_first and not is_resumed)
                batch = next(inner, _END)
                if is_first:
                    _check_alike(batch, share.index)
                    note_batch(batch)
            assert inner is not None
            if batch is _END:
                return
            if self.device is not None:
                batch = send_to_device(batch, self.device, non_blocking=self._non_blocking)
            self._update_state_dict()
            following = next(inner, _END)
            self.end_of_dataloader = following is _END
            if self.end_of_dataloader:
                self._update_state_dict()
            position += shard.step(share)
            self._used = position
            feed.forget(position)
            yield batch
            batch = following

    def _open(
        self, feed: BatchQueue[Sequence[int]], position: int, *, draws: bool
    ) -> Iterator[Any]:
        """An iterator of torch's over this rank's batches from a position on."""
        size: int | None = self._shard.batch_size
        if self.remainder >= 0 and size is not None:
            self.remainder = (len(self.dataset) - position * size) % self.total_batch_size
        # torch draws a seed for its workers; what comes after a switch is not to depend on it,
        # nor what comes after a load in the middle of an epoch: it was drawn before the save.
        same = torch.random.fork_rng(devices=[], enabled=not draws)
        with same, self._shard.continue_at(feed, position):
            return iter(self.base_dataloader)

    def _take_over(self) -> None:
        """Draw as rank 0 does. Collective: every rank."""
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)


def arguments(source: DataLoader[Any]) -> dict[str, Any]:
    """What a DataLoader was made with, without its dataset and its samplers."""
    return {name: getattr(source, name) for name in _ARGUMENTS if hasattr(source, name)}


def _check_alike(batch: Any, index: int) -> None:
    """Compare a batch with those of the ranks that share a model's copy with this one.

    Collective under tp, pp and cp: every rank. Nothing is done elsewhere: there no two ranks see
    the same data, or each rank is by itself. Ranks that share a copy have one index.

    Raises:
        NbdistError: They differ, on all ranks: a model's parts would each compute with
            different data, and nothing else would tell.
    """
    choice = registry.current()
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


def _fix_order(batches: Any, settings: SamplerSettings) -> torch.Generator | None:
    """Let the random order come from a generator that ranks can make equal; return that.

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
