"""Who counts as a process: ranks that see different data, once for each copy of the model."""

import torch
from accelerate.utils import DataLoaderConfiguration
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nbdist.parallel.accelerator.accelerator import Accelerator
from tests.programs.rank import everyone, n, rank, refusal
from tests.programs.training import make, use
from tests.support.torch_ranks import on_ranks


def ranks_see_each_other(accelerator: Accelerator, count: int, part: int) -> None:
    """As `count` processes, of which this one is number `part`."""
    assert (accelerator.num_processes, accelerator.is_main_process) == (count, rank == 0)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10)), batch_size=2))
    assert (len(loader), loader.total_batch_size) == ({2: 3, 1: 5}[count], 2 * count)
    batches = [numbers for (numbers,) in loader]
    assert batches[0].tolist() == [[0, 1], [2, 3]][part]
    gathered, objects = [], []
    for (numbers,) in loader:
        gathered += accelerator.gather_for_metrics(numbers).tolist()
        objects += accelerator.gather_for_metrics([str(x) for x in numbers.tolist()])
    assert gathered == [int(x) for x in objects] == list(range(10))

    first, firsts = batches[0][0].float(), [0.0, 2.0][:count]
    assert accelerator.gather(first).tolist() == firsts
    assert accelerator.gather({"a": first[None]})["a"].tolist() == firsts
    assert accelerator.reduce(first).item() == sum(firsts)
    assert accelerator.reduce(first, "mean").item() == sum(firsts) / count
    assert accelerator.reduce(first, "max").item() == max(firsts)
    assert first.item() == firsts[part]
    assert accelerator.pad_across_processes(torch.ones(1 + part)).shape[0] == count
    is_shared = count > 1
    with accelerator.split_between_processes(list("abcde")) as letters:
        assert letters == ((["a", "b", "c"], ["d", "e"])[part] if is_shared else list("abcde"))
    with accelerator.split_between_processes({"a": list("abc")}, apply_padding=True) as more:
        assert more["a"] == ((["a", "b"], ["c", "c"])[part] if is_shared else list("abc"))
    if rank == n - 1:
        accelerator.set_trigger()
    assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]


def schedulers_step(accelerator: Accelerator, count: int) -> None:
    """As often as all processes together, but for those that go by what they are given."""
    _, optimizer, scheduler = make(0)
    cycle = OneCycleLR(optimizer, 1e-2, total_steps=5)
    plateau = ReduceLROnPlateau(optimizer, patience=1)
    # The optimizer is prepared last: schedulers find theirs all the same.
    a, b, c = accelerator.prepare(scheduler, cycle, plateau)
    optimizer = accelerator.prepare(optimizer)
    by_itself = Accelerator(step_scheduler_with_optimizer=False)
    separate = by_itself.prepare(StepLR(optimizer.optimizer, 1))
    for _ in range(3):
        optimizer.step()
        a.step()
        b.step()
        c.step(1.0)
        separate.step()
    assert (scheduler.last_epoch, cycle.last_epoch) == (3 * count, min(3 * count, 5))
    assert plateau.last_epoch == separate.scheduler.last_epoch == 3
    assert a.optimizers == [optimizer]


@on_ranks(2)
def test_ranks_that_see_different_data_count() -> None:
    """num_processes, gather, reduce, loaders, splits and schedulers under ddp, pp and single."""
    accelerator = Accelerator()
    for name in ("ddp", "fsdp", "pp", "tp", "single"):
        use(name)
        for weak_list in (accelerator._dataloaders, accelerator._optimizers):
            weak_list.clear()
        count, part = (2, rank) if name in ("ddp", "fsdp") else (1, 0)
        ranks_see_each_other(accelerator, count, part)
        schedulers_step(accelerator, count)


class Noisy(Dataset):
    """Draws its own random numbers."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(2)


@on_ranks(2)
def test_different_batches_within_one_copy_of_the_model_are_refused() -> None:
    """With the way out, which works; where ranks see different data anyway nothing is asked."""
    torch.manual_seed(rank)
    accelerator = Accelerator()
    use("pp")
    loader = accelerator.prepare(DataLoader(Noisy(), batch_size=2))
    text = refusal(lambda: next(iter(loader)))
    assert "Ranks 0-1 share one copy of the model and got different batches" in text
    assert "dispatch_batches=True" in text
    sent = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    rows = [batch.tolist() for batch in sent.prepare(DataLoader(Noisy(), batch_size=2))]
    assert everyone((text, rows)) == [(text, rows)] * 2
    use("ddp")
    assert len(list(accelerator.prepare(DataLoader(Noisy(), batch_size=2)))) == 2
    split = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    refused = refusal(lambda: split.prepare(DataLoader(Noisy(), batch_size=3)))
    assert "each batch of 3 into 2 equal pieces" in refused
