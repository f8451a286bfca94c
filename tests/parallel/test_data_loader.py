"""Batches are shared out as by Accelerate; a loop goes on at the next sample over a switch."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler

from nbdist.parallel.accelerator.batch_sampler import (
    BatchQueue,
    DataShard,
    SamplerSettings,
    ShardedBatchSampler,
    share_of,
)
from nbdist.strategy.choose import choose
from tests.support.torch_ranks import run_ranks


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


LOADERS = """
    import random
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
    from nbdist.strategy.choose import choose
    from nbdist.parallel.accelerator.accelerator import Accelerator
    from nbdist.parallel import registry

    def use(name, **options):
        registry.set_choice(choose(name, options, n))

    class Numbers(Dataset):
        def __len__(self):
            return 26
        def __getitem__(self, index):
            return torch.tensor([index])

    class Stream(IterableDataset):
        def __iter__(self):
            return (torch.tensor([index]) for index in range(26))

    class Own(Sampler):
        "Draws from a generator of Python's that nobody else can set."
        def __iter__(self):
            order = list(range(26))
            random.Random(3).shuffle(order)
            return iter(order)
        def __len__(self):
            return 26

    accelerator = Accelerator()
    kinds = {
        "plain": dict(dataset=Numbers()),
        "shuffled": dict(dataset=Numbers(), shuffle=True),
        "workers": dict(dataset=Numbers(), shuffle=True, num_workers=2),
        "persistent": dict(dataset=Numbers(), num_workers=1, persistent_workers=True),
        "sampler": dict(dataset=Numbers(), sampler=Own()),
        "stream": dict(dataset=Stream()),
    }

    def everyone(rows):
        "What all parts of the data gave, in the order of the samples, one list per step."
        every = [None] * n
        dist.all_gather_object(every, (accelerator.process_index, rows))
        return [row for _, row in sorted(every)]

    def numbers(batch):
        return batch.flatten().tolist()

    def order_of(loader):
        use("ddp")
        return [sum(step, []) for step in zip(*everyone([numbers(b) for b in loader]))]

    outcomes = {}
    for kind, arguments in kinds.items():
        use("ddp")
        torch.manual_seed(rank)  # ranks' own seeds do not matter
        loader = accelerator.prepare(DataLoader(batch_size=2, **arguments))
        same = id(loader)
        epoch = iter(loader)
        rows = [numbers(next(epoch)) for _ in range(2)]
        before = torch.get_rng_state()
        use("tp")
        tp = [numbers(next(epoch)) for _ in range(3)]
        use("ddp")
        later = [numbers(batch) for batch in epoch]
        drawn = torch.equal(before, torch.get_rng_state())
        first, second, third = everyone(rows), everyone(tp), everyone(later)
        samples = [x for step in zip(*first) for part in step for x in part]
        samples += [x for part in second[0] for x in part]
        samples += [x for step in zip(*third) for part in step for x in part]
        outcomes[kind] = dict(
            seen=samples, alike=all(part == second[0] for part in second),
            n_later=len(later), drawn=drawn, same=same == id(loader),
            length=7 if kind == "stream" else len(loader), again=len(list(loader)))
        del epoch
    # One order for all ranks, and another one in the next epoch.
    loader = accelerator.prepare(DataLoader(Numbers(), batch_size=2, shuffle=True))
    epochs = [order_of(loader) for _ in range(2)]
    flat = [[x for step in epoch for x in step] for epoch in epochs]
    state = loader.epoch_state()
    ahead = order_of(loader)
    loader.set_epoch_state(state)
    again = order_of(loader)
    skipped = accelerator.skip_first_batches(loader, 2)
    n_skipped = len(skipped), len(list(skipped))
    leftover = iter(loader)
    next(leftover)
    middle = loader.epoch_state()
    del leftover
    references = len(accelerator.gradient_state.dataloader_references)
    # Another loader goes on where one was, under the same strategy and under another.
    resumed = {}
    for kind, arguments in {**kinds, "own stream": dict(dataset=Stream())}.items():
        use("ddp")
        accelerator.dataloader_config.dispatch_batches = False if kind == "own stream" else None
        def fresh():
            return accelerator.prepare(DataLoader(batch_size=2, **arguments))
        loader = fresh()
        epoch = iter(loader)
        for _ in range(2):
            next(epoch)
        where = loader.position_state()
        rest = everyone([numbers(batch) for batch in epoch])
        at_end = loader.position_state()["position"]
        other = fresh()
        other.resume(where)
        resume_at = other.position_state()["position"]
        before = torch.get_rng_state()
        got = everyone([numbers(batch) for batch in other])
        drawn = torch.equal(before, torch.get_rng_state())
        length = len(list(other))
        use("tp")
        alone = fresh()
        alone.resume(where)
        alike = {x for batch in alone for x in numbers(batch)}
        whole = {x for part in rest for step in part for x in step}  # and two that fill it up
        resumed[kind] = dict(
            same=got == rest, kept=resume_at, at_end=at_end, length=length, drawn=drawn,
            alike=len(alike) == 18 and alike <= whole)
    accelerator.dataloader_config.dispatch_batches = None
    done(resumed=resumed, found=outcomes, epochs=flat, replay=ahead == again, n_skipped=n_skipped,
         references=references, mid=middle["iteration"])
"""


PLACES = (
    LOADERS[: LOADERS.index("    outcomes = {}")]
    + """
    from itertools import islice
    from torch.utils.data import RandomSampler
    from nbdist.parallel.accelerator.loader_state import keep_loops
    from nbdist.parallel.training_state import generators

    class Noisy(Numbers):
        def __getitem__(self, index):
            return index + torch.rand(1)

    order = torch.Generator().manual_seed(5)
    kinds |= {
        "own stream": dict(dataset=Stream()), "noisy": dict(dataset=Noisy(), shuffle=True),
        "generator": dict(dataset=Numbers(), shuffle=True, generator=order),
        "replacement": dict(dataset=Numbers(), sampler=RandomSampler(Numbers(), replacement=True)),
        "dispatched": dict(dataset=Numbers(), shuffle=True),
    }
    dispatched = {"own stream": False, "dispatched": True}
    found = {}
    for kind in os.environ["KINDS"].split(", "):
        arguments = kinds[kind]
        use("ddp")
        torch.manual_seed(rank)
        accelerator.dataloader_config.dispatch_batches = dispatched.get(kind)
        loader = accelerator.prepare(DataLoader(batch_size=2, **arguments))
        def drawn(loop, count=2):
            return [numbers(batch) for batch in islice(loop, count)]
        def left_early():
            return drawn(iter(loader))
        def twice(draw):
            return draw(), draw()
        def keep():
            "As a comparison does; and as a load puts back what a save has kept."
            puts = [generators().put_back, loader.keep_position(), *keep_loops()]
            return (lambda: [put() for put in puts]), generators(), loader.position_state()
        def load():
            random_numbers.put_back()
            loader.resume(where)
        # Ranks that share a copy draw noise of their own; a stream of each rank's own ends there.
        others = ["fsdp"] if kind in ("noisy", "own stream") else ["tp", "fsdp"]
        left_early()
        put_back, random_numbers, where = keep()
        found[kind] = outcome = dict(used_early=where["position"], early=[twice(left_early)])
        for name in others:
            put_back()
            use(name)
            left_early()
            use("ddp")
        for back in put_back, load:
            back()
            outcome["early"].append(twice(left_early))
        held = iter(loader)
        drawn(held)
        put_back, random_numbers, where = keep()
        outcome |= dict(used=where["position"], held=[drawn(held)])
        for name in others:
            put_back()
            use(name)
            drawn(held, 3)
            use("ddp")
        for count in 2, 9, 2:
            put_back()
            outcome["held"].append(drawn(held, count)[:2])
        if kind != "noisy":  # the batch that was read ahead draws its noise again
            load()
            outcome["held"].append(drawn(held))
        outcome["both"] = []
        for back in (put_back, load)[: 1 if kind == "noisy" else 2]:
            back()
            outcome["both"].append((left_early(), drawn(held, 3), left_early()))
        put_back()
        drawn(held, 9)
        outcome["next"] = [left_early()]
        put_back()
        drawn(held, 1)
        for name in others:
            use(name)
            drawn(held, 1)
        use("ddp")
        drawn(held, 9)
        outcome["next"].append(left_early())
        if kind != "noisy":
            del held, back, put_back
            load()
            outcome["held"].append(drawn(iter(loader)))
    done(found=found)
"""
)


@pytest.mark.parametrize(
    "kinds",
    [
        "shuffled, workers, noisy, own stream, dispatched",
        pytest.param(
            "plain, persistent, sampler, stream, generator, replacement", marks=pytest.mark.parity
        ),
    ],
)
def test_loops_are_put_back_where_they_were(tmp_path: Path, kinds: str) -> None:
    """By a comparison and by a load: a loop that was left early is over, one that is held is not.

    With workers, own samplers, generators, noise and streams; and under other strategies between.
    """
    for result in run_ranks(tmp_path, 2, PLACES, KINDS=kinds):
        for kind, outcome in result["found"].items():
            assert (outcome["used_early"], outcome["used"]) == (0, 4), kind
            assert outcome["early"] == [outcome["early"][0]] * 3, (kind, outcome)
            n_held = 4 if kind == "noisy" else 6
            assert outcome["held"] == [outcome["held"][0]] * n_held, (kind, outcome)
            assert outcome["next"][0] == outcome["next"][1], (kind, outcome)
            assert outcome["both"][0] == outcome["both"][-1], (kind, outcome)
        new_epochs = {"shuffled", "workers", "generator", "dispatched"}  # each time
        for kind in new_epochs & result["found"].keys():
            first, second = result["found"][kind]["early"][0]
            assert first != second


def test_live_loops_go_on_at_the_next_sample(tmp_path: Path) -> None:
    """ddp, tp, ddp in one epoch: with workers, shuffled, with own samplers, streams."""
    results = run_ranks(tmp_path, 2, LOADERS)

    for result in results:
        for kind, outcome in result["found"].items():
            assert sorted(outcome["seen"]) == list(range(26)), (kind, outcome)
            assert outcome["alike"], kind
            assert outcome["drawn"], kind
            assert outcome["same"], kind
            # 26 samples: 2 steps of 4, 3 of 2, and 3 of 4.
            assert outcome["n_later"] == 3, (kind, outcome)
            assert outcome["length"] == outcome["again"] == 7, kind
        for kind, outcome in result["resumed"].items():
            assert outcome == {
                "same": True, "kept": 4, "at_end": 0, "length": 7, "drawn": True, "alike": True,
            }, kind  # fmt: skip
        for epoch in result["epochs"]:  # the last step is filled up with the first samples
            assert sorted(epoch) == sorted([*range(26), *epoch[:2]])
        assert result["epochs"][0] != result["epochs"][1]
        assert result["replay"]
        assert result["n_skipped"] == [5, 5]
        assert result["references"] == 1
    assert results[0]["epochs"] == results[1]["epochs"]
