"""Batches are shared out as by Accelerate; a loop goes on at the next sample over a switch."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
)  # fmt: skip

from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.accelerator.batch_sampler import (
    BatchQueue,
    DataShard,
    SamplerSettings,
    ShardedBatchSampler,
    share_of,
)
from nbdist.parallel.accelerator.loader_state import keep_loops
from nbdist.parallel.base.training_state import generators
from nbdist.strategy.choose import choose
from tests.programs.rank import everyone, n, rank
from tests.programs.training import use
from tests.support.torch_ranks import on_ranks


def local_batches(
    shard: ShardedBatchSampler,
    feed: BatchQueue[Any],
    share: DataShard,
    position: int = 0,
    n_steps: int | None = None,
) -> list[list[int]]:
    """What one rank gets."""
    return [
        list(batch)
        for batch in itertools.islice(shard._local_batches(feed, position, share), n_steps)
    ]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("is_even", [False, True])
@pytest.mark.parametrize("drops_last", [False, True])
def test_each_rank_gets_what_accelerate_gives_it(
    count: int, is_split: bool, is_even: bool, drops_last: bool
) -> None:
    """For all sizes up to 30 samples, Accelerate's own sampler being the reference."""
    for n_samples, size in itertools.product(range(31), [1, 2, 3, 5]):
        whole = size * count if is_split else size
        batches = BatchSampler(range(n_samples), whole, drops_last)
        config = DataLoaderConfiguration(split_batches=is_split, even_batches=is_even)
        shard = ShardedBatchSampler(batches, SamplerSettings(None, config))
        for index in range(count):
            theirs = BatchSamplerShard(
                batches, count, index, split_batches=is_split, even_batches=is_even
            )
            got = local_batches(shard, BatchQueue(batches, count), DataShard(count, index))

            assert got == list(theirs), (n_samples, size, index)


def test_one_rank_gets_the_batches_as_they_are() -> None:
    """The last one stays short, as without Accelerate."""
    batches = BatchSampler(range(7), 3, drop_last=False)
    shard = ShardedBatchSampler(batches, SamplerSettings(None))

    assert local_batches(shard, BatchQueue(batches, 1), DataShard(1, 0)) == list(batches)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2), (2, 4), (1, 3), (3, 2)])
def test_no_sample_is_lost_or_seen_twice_when_the_ranks_change(before: int, after: int) -> None:
    """After each number of steps, what comes then begins with the first sample not yet seen."""
    batches = BatchSampler(range(48), 2, drop_last=False)
    shard = ShardedBatchSampler(batches, SamplerSettings(None))
    for n_steps in range(24 // before + 1):
        handed_out = []
        for index in range(before):
            handed_out += local_batches(
                shard, BatchQueue(batches, 4), DataShard(before, index), 0, n_steps
            )
        position = n_steps * before
        for index in range(after):
            feed: BatchQueue[Any] = BatchQueue(batches, 4)
            feed.take(0, position + before)  # workers have drawn ahead
            feed.forget(position)
            handed_out += local_batches(shard, feed, DataShard(after, index), position)

        samples = sorted(itertools.chain.from_iterable(handed_out))
        # A last round that is not full takes the epoch's first samples.
        n_spare = len(samples) - 48
        assert n_spare == -(24 - position) % after * 2
        assert samples == sorted([*range(48), *range(n_spare)])


@pytest.mark.parametrize(
    ("name", "degrees", "world", "indices"),
    [
        ("ddp", {}, 4, [0, 1, 2, 3]),
        ("single", {}, 2, [0, 0]),
        ("tp", {}, 2, [0, 0]),
        ("tp", {"dp": 2}, 4, [0, 0, 1, 1]),
        ("pp", {"dp": 2}, 4, [0, 1, 0, 1]),
        ("fsdp", {"shard": "hybrid"}, 4, [0, 1, 2, 3]),
    ],
)
def test_ranks_that_share_a_copy_of_the_model_have_the_same_part(
    name: str, degrees: dict[str, object], world: int, indices: list[int]
) -> None:
    """By their place along the data-parallel axes."""
    choice = choose(name, degrees, world)
    shares = [share_of(choice, rank) for rank in range(world)]

    assert [share.index for share in shares] == indices
    assert {share.count for share in shares} == {max(indices) + 1}


class Numbers(Dataset):
    def __len__(self):
        return 26

    def __getitem__(self, index):
        return torch.tensor([index])


class Noisy(Numbers):
    def __getitem__(self, index):
        return index + torch.rand(1)


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor([index]) for index in range(26))


class Own(Sampler):
    """Draws from a generator of Python's that nobody else can set."""

    def __iter__(self):
        order = list(range(26))
        random.Random(3).shuffle(order)
        return iter(order)

    def __len__(self):
        return 26


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"dataset": Numbers()},
    "shuffled": {"dataset": Numbers(), "shuffle": True},
    "workers": {"dataset": Numbers(), "shuffle": True, "num_workers": 2},
    "persistent": {"dataset": Numbers(), "num_workers": 1, "persistent_workers": True},
    "sampler": {"dataset": Numbers(), "sampler": Own()},
    "stream": {"dataset": Stream()},
    "own stream": {"dataset": Stream()},
    "noisy": {"dataset": Noisy(), "shuffle": True},
    "generator": {"dataset": Numbers(), "shuffle": True},
    "replacement": {"dataset": Numbers()},
    "dispatched": {"dataset": Numbers(), "shuffle": True},
}
DISPATCHED = {"own stream": False, "dispatched": True}


def prepared(accelerator: Accelerator, kind: str) -> Any:
    """A loader under ddp, whose generators are its own."""
    use("ddp")
    accelerator.dataloader_config.dispatch_batches = DISPATCHED.get(kind)
    more: dict[str, Any] = {}
    if kind == "generator":
        more["generator"] = torch.Generator().manual_seed(5)
    if kind == "replacement":
        more["sampler"] = RandomSampler(Numbers(), replacement=True)
    return accelerator.prepare(DataLoader(batch_size=2, **KINDS[kind], **more))


def numbers(batch: torch.Tensor) -> list[int]:
    return batch.flatten().tolist()


def of_all_parts(accelerator: Accelerator, rows: list[list[int]]) -> list[list[list[int]]]:
    """What all parts of the data gave, in the order of the samples, one list per step."""
    return [row for _, row in sorted(everyone((accelerator.process_index, rows)))]


def flat(parts: list[list[list[int]]]) -> list[int]:
    return [x for step in zip(*parts, strict=True) for part in step for x in part]


def goes_on_over_a_switch(accelerator: Accelerator, kind: str) -> None:
    torch.manual_seed(rank)  # ranks' own seeds do not matter
    loader = prepared(accelerator, kind)
    same, epoch = id(loader), iter(loader)
    first = of_all_parts(accelerator, [numbers(next(epoch)) for _ in range(2)])
    before = torch.get_rng_state()
    use("tp")
    second = of_all_parts(accelerator, [numbers(next(epoch)) for _ in range(3)])
    use("ddp")
    later = [numbers(batch) for batch in epoch]
    assert torch.equal(before, torch.get_rng_state())
    assert len(later) == 3  # 26 samples: 2 steps of 4, 3 of 2, and 3 of 4
    assert all(part == second[0] for part in second)
    samples = flat(first) + flat(second[:1]) + flat(of_all_parts(accelerator, later))
    assert sorted(samples) == list(range(26)), kind
    assert same == id(loader)
    assert len(list(loader)) == 7
    assert kind == "stream" or len(loader) == 7


def another_loader_goes_on(accelerator: Accelerator, kind: str) -> None:
    """Where one was, under the same strategy and under another."""
    loader = prepared(accelerator, kind)
    epoch = iter(loader)
    for _ in range(2):
        next(epoch)
    where = loader.position_state()
    rest = of_all_parts(accelerator, [numbers(batch) for batch in epoch])
    assert loader.position_state()["position"] == 0
    other = prepared(accelerator, kind)
    other.resume(where)
    assert other.position_state()["position"] == 4
    before = torch.get_rng_state()
    assert of_all_parts(accelerator, [numbers(batch) for batch in other]) == rest, kind
    assert torch.equal(before, torch.get_rng_state())
    assert len(list(other)) == 7
    alone = prepared(accelerator, kind)
    use("tp")
    alone.resume(where)
    alike = {x for batch in alone for x in numbers(batch)}
    assert len(alike) == 18
    assert alike <= {*flat(rest)}  # and two that fill it up


@on_ranks(2)
def test_live_loops_go_on_at_the_next_sample() -> None:
    """ddp, tp, ddp in one epoch: with workers, shuffled, with own samplers, streams."""
    accelerator = Accelerator()
    kinds = ("plain", "shuffled", "workers", "persistent", "sampler", "stream")
    for kind in kinds:
        goes_on_over_a_switch(accelerator, kind)
    one_order_for_all_ranks(accelerator)
    for kind in (*kinds, "own stream"):
        another_loader_goes_on(accelerator, kind)


def one_order_for_all_ranks(accelerator: Accelerator) -> None:
    """And another one in the next epoch."""

    def order_of(loader: Any) -> list[int]:
        return flat(of_all_parts(accelerator, [numbers(batch) for batch in loader]))

    loader = prepared(accelerator, "shuffled")
    epochs = [order_of(loader) for _ in range(2)]
    assert everyone(epochs) == [epochs] * n
    for epoch in epochs:  # the last step is filled up with the first samples
        assert sorted(epoch) == sorted([*range(26), *epoch[:2]])
    assert epochs[0] != epochs[1]
    state = loader.epoch_state()
    ahead = order_of(loader)
    loader.set_epoch_state(state)
    assert order_of(loader) == ahead
    skipped = accelerator.skip_first_batches(loader, 2)
    assert len(skipped) == len(list(skipped)) == 5
    leftover = iter(loader)
    next(leftover)
    del leftover
    assert len(accelerator.gradient_state.dataloader_references) == 1


class Kept:
    """A loader's place, as a comparison keeps it, and as a save does."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.random_numbers = loader, generators()
        self.where = loader.position_state()
        self._puts = [generators().put_back, loader.keep_position(), *keep_loops()]

    def put_back(self) -> None:
        for put in self._puts:
            put()

    def load(self) -> None:
        self.random_numbers.put_back()
        self.loader.resume(self.where)


def drawn(loop: Iterator[torch.Tensor], count: int = 2) -> list[list[int]]:
    return [numbers(batch) for batch in itertools.islice(loop, count)]


def left_early(loader: Any) -> list[list[int]]:
    return drawn(iter(loader))


def twice(loader: Any) -> tuple[list[list[int]], list[list[int]]]:
    return left_early(loader), left_early(loader)


def others_of(kind: str) -> list[str]:
    """Ranks that share a copy draw noise of their own; a stream of each rank's own ends there."""
    return ["fsdp"] if kind in ("noisy", "own stream") else ["tp", "fsdp"]


def a_loop_that_was_left_is_over(kind: str, loader: Any) -> None:
    left_early(loader)
    kept = Kept(loader)
    assert kept.where["position"] == 0
    early = twice(loader)
    for name in others_of(kind):
        kept.put_back()
        use(name)
        left_early(loader)
        use("ddp")
    for back in (kept.put_back, kept.load):
        back()
        assert twice(loader) == early, kind
    if kind in ("shuffled", "workers", "generator", "dispatched"):  # a new epoch each time
        assert early[0] != early[1]


def goes_on_beside_others(kind: str, loader: Any, held: Iterator[torch.Tensor], kept: Kept) -> None:
    both = []
    for back in (kept.put_back, kept.load)[: 1 + (kind != "noisy")]:
        back()
        both.append((left_early(loader), drawn(held, 3), left_early(loader)))
    assert both[0] == both[-1], kind
    kept.put_back()
    drawn(held, 9)
    following = left_early(loader)
    kept.put_back()
    drawn(held, 1)
    for name in others_of(kind):
        use(name)
        drawn(held, 1)
    use("ddp")
    drawn(held, 9)
    assert left_early(loader) == following, kind


def a_loop_that_is_held_is_not(kind: str, loader: Any) -> None:
    held = iter(loader)
    drawn(held)
    kept = Kept(loader)
    assert kept.where["position"] == 4
    wanted = drawn(held)
    for name in others_of(kind):
        kept.put_back()
        use(name)
        drawn(held, 3)
        use("ddp")
    for count in 2, 9, 2:
        kept.put_back()
        assert drawn(held, count)[:2] == wanted, kind
    loads = kind != "noisy"  # the batch that was read ahead draws its noise again
    if loads:
        kept.load()
        assert drawn(held) == wanted, kind
    goes_on_beside_others(kind, loader, held, kept)
    if loads:
        where, random_numbers = kept.where, kept.random_numbers
        del held, kept
        random_numbers.put_back()
        loader.resume(where)
        assert drawn(iter(loader)) == wanted, kind


@pytest.mark.parametrize(
    "kinds",
    [
        "shuffled, workers, noisy, own stream, dispatched",
        pytest.param(
            "plain, persistent, sampler, stream, generator, replacement", marks=pytest.mark.parity
        ),
    ],
)
@on_ranks(2)
def test_loops_are_put_back_where_they_were(kinds: str) -> None:
    """By a comparison and by a load: a loop that was left early is over, one that is held is not.

    With workers, own samplers, generators, noise and streams; and under other strategies between.
    """
    accelerator = Accelerator()
    for kind in kinds.split(", "):
        torch.manual_seed(rank)
        loader = prepared(accelerator, kind)
        a_loop_that_was_left_is_over(kind, loader)
        a_loop_that_is_held_is_not(kind, loader)
