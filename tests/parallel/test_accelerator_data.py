"""Who counts as a process: ranks that see different data, once for each copy of the model."""

import json
from pathlib import Path

from tests.support.torch_ranks import run_ranks
from tests.support.training import MODEL

VALUES = """
    from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

    accelerator = Accelerator()

    def values():
        "What ranks see of each other."
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10)), batch_size=2))
        gathered, objects, local = [], [], []
        for (numbers,) in loader:
            local.append(numbers.tolist())
            gathered.append(accelerator.gather_for_metrics(numbers).tolist())
            objects.append(accelerator.gather_for_metrics([str(x) for x in numbers.tolist()]))
        first = torch.tensor(float(local[0][0]))
        ragged = torch.ones(1 + int(first) // 2)
        with accelerator.split_between_processes(list("abcde")) as letters:
            letters = list(letters)
        with accelerator.split_between_processes({"a": list("abc")}, apply_padding=True) as more:
            more = more["a"]
        if rank == n - 1:
            accelerator.set_trigger()
        return dict(
            count=accelerator.num_processes, main=accelerator.is_main_process,
            seen=[x for step in gathered for x in step],
            objects=[int(x) for step in objects for x in step],
            first=local[0], length=len(loader), total=loader.total_batch_size,
            scalar=accelerator.gather(first).tolist(),
            nested={k: v.tolist() for k, v in accelerator.gather({"a": first[None]}).items()},
            sum=accelerator.reduce(first).item(), mean=accelerator.reduce(first, "mean").item(),
            max=accelerator.reduce(first, "max").item(), kept=first.item(),
            padded=accelerator.pad_across_processes(ragged).shape[0],
            letters=letters, more=more,
            triggers=[accelerator.check_trigger(), accelerator.check_trigger()],
        )

    def steps():
        "How often each scheduler has stepped after three steps of the optimizer."
        net, optimizer, scheduler = make(0)
        cycle = OneCycleLR(optimizer, 1e-2, total_steps=5)
        plateau = ReduceLROnPlateau(optimizer, patience=1)
        # The optimizer is prepared last: schedulers find theirs all the same.
        a, b, c = accelerator.prepare(scheduler, cycle, plateau)
        optimizer = accelerator.prepare(optimizer)
        separate = Accelerator(step_scheduler_with_optimizer=False).prepare(
            torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
        for _ in range(3):
            optimizer.step()
            a.step()
            b.step()
            c.step(1.0)
            separate.step()
        return dict(plain=scheduler.last_epoch, cycle=cycle.last_epoch, plateau=plateau.last_epoch,
                    own=separate.scheduler.last_epoch, matched=a.optimizers == [optimizer])

    outcomes = {}
    for name, options in json.loads(os.environ["ROWS"]):
        use(name, **options)
        for weak_list in (accelerator._dataloaders, accelerator._optimizers):
            weak_list.clear()
        outcomes[f"{name} {options}"] = {**values(), **steps()}
    done(found=outcomes)
"""


def test_ranks_that_see_different_data_count(tmp_path: Path) -> None:
    """num_processes, gather, reduce, loaders, splits and schedulers under ddp, pp and single."""
    rows = [("ddp", {}), ("fsdp", {}), ("pp", {}), ("tp", {}), ("single", {})]
    results = run_ranks(tmp_path, 2, MODEL + VALUES, ROWS=json.dumps(rows))

    for rank, result in enumerate(results):
        for row, outcome in result["found"].items():
            is_shared = row in ("ddp {}", "fsdp {}")
            count, part = (2, rank) if is_shared else (1, 0)
            firsts = [0.0, 2.0][:count]
            expected = {
                "count": count,
                "main": rank == 0,
                "seen": list(range(10)),
                "objects": list(range(10)),
                "first": [[0, 1], [2, 3]][part],
                "length": 3 if is_shared else 5,
                "total": 2 * count,
                "scalar": firsts,
                "nested": {"a": firsts},
                "sum": sum(firsts),
                "mean": sum(firsts) / count,
                "max": max(firsts),
                "kept": firsts[part],
                "padded": count,
                "letters": (["a", "b", "c"], ["d", "e"])[part] if is_shared else list("abcde"),
                "more": (["a", "b"], ["c", "c"])[part] if is_shared else list("abc"),
                "triggers": [True, False],
                "plain": 3 * count,
                "cycle": min(3 * count, 5),
                "plateau": 3,
                "own": 3,
                "matched": True,
            }

            assert outcome == expected, row


ALIKE = """
    class Noisy(torch.utils.data.Dataset):
        "Draws its own random numbers."
        def __len__(self):
            return 8
        def __getitem__(self, index):
            return torch.rand(2)

    torch.manual_seed(rank)
    accelerator = Accelerator()
    use("pp")
    loader = accelerator.prepare(DataLoader(Noisy(), batch_size=2))
    text = refusal(lambda: next(iter(loader)))
    sent = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    rows = [batch.tolist() for batch in sent.prepare(DataLoader(Noisy(), batch_size=2))]
    use("ddp")
    free = len(list(accelerator.prepare(DataLoader(Noisy(), batch_size=2))))
    split = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    refused = refusal(lambda: split.prepare(DataLoader(Noisy(), batch_size=3)))
    done(text=text, rows=rows, free=free, refused=refused)
"""


def test_different_batches_within_one_copy_of_the_model_are_refused(tmp_path: Path) -> None:
    """With the way out, which works; where ranks see different data anyway nothing is asked."""
    results = run_ranks(tmp_path, 2, MODEL + ALIKE)

    assert results[0]["text"] == results[1]["text"]
    assert "Ranks 0-1 share one copy of the model and got different batches" in results[0]["text"]
    assert "dispatch_batches=True" in results[0]["text"]
    assert results[0]["rows"] == results[1]["rows"]
    assert [result["free"] for result in results] == [2, 2]
    assert "each batch of 3 into 2 equal pieces" in results[0]["refused"]
