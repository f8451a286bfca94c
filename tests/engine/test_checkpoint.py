"""A checkpoint that any number of ranks has saved is loaded by any other, under any strategy."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.torch_ranks import TorchRanks
from tests.support.training import MODEL

pytestmark = pytest.mark.engine
CLOSE = 2e-6

PARTS = """
    from nbdist.engine.checkpoint import jobs, load as loading, save as saving
    folder = os.environ["FOLDER"]
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))

    class Counter:
        def __init__(self):
            self.n = 0
        def state_dict(self):
            return {"n": self.n}
        def load_state_dict(self, state):
            self.n = state["n"]

    class Tied(Net):
        "The head is the embedding, and a buffer is not saved."
        def __init__(self):
            super().__init__()
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.ones(2) * 3)
            self.register_buffer("spare", torch.ones(2), persistent=False)

    def made(seed, kind):
        torch.manual_seed(seed)
        net = kind()
        optimizer = torch.optim.AdamW(groups(net), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(data, batch_size=BATCH, shuffle=True, generator=generator)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        return (*accelerator.prepare(net, optimizer, scheduler, loader), counter)

    def run(parts, batches):
        model, optimizer, scheduler, _, counter = parts
        losses = []
        for x, y in batches:
            loss = model(x, labels=y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.n += 1
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses

    def save(path, is_async=False):
        "Saves, and waits on all ranks until rank 0 has put it in its place."
        begun = saving.begin(path, path, is_async)
        told = jobs.wait(path)
        dist.barrier()
        assert told.state == "done", told
        return begun, told

    def load(path, **given):
        return loading.load(path, **given)

    def first(name, given, kind):
        "Three steps, a checkpoint, and three more, with the random numbers that come after it."
        use(name, **given)
        parts = made(0, kind)
        loop = iter(parts[3])
        run(parts, (next(loop) for _ in range(3)))
        save(f"{folder}/{name}{kind.__name__}")
        drawn = torch.rand(3).tolist()
        return run(parts, loop), drawn

    def second(name, given, kind, source):
        "Other weights, then the checkpoint, and the three steps that came after it."
        use(name, **given)
        parts = made(rank + 5, kind)
        ids = [id(group) for group in parts[1].optimizer.param_groups]
        parameters = [id(p) for p in parts[0].parameters()]
        loaded = load(f"{folder}/{source}{kind.__name__}")
        drawn = torch.rand(3).tolist()
        assert ids == [id(group) for group in parts[1].optimizer.param_groups]
        assert parameters == [id(p) for p in parts[0].parameters()]
        assert parts[4].n == 3
        return run(parts, parts[3]), drawn, loaded.notes

    def pairs():
        found = {}
        for name, given, kind in json.loads(os.environ["SAVED"]):
            found[f"{name}{kind}"] = tried(first, name, given, globals()[kind])
        return found
"""
TWO = """
    saved, loaded = pairs(), {}
    for name, given, kind, source in json.loads(os.environ["LOADED"]):
        found = tried(second, name, given, globals()[kind], source)
        loaded[f"{name}{kind} {source}{kind}"] = found
    done(saved=saved, loaded=loaded)
"""


def check(saved: dict[str, Any], loaded: dict[str, Any], *, is_same_size: bool) -> None:
    """What was loaded goes on as what was saved did: losses, data, rates, random numbers."""
    for row, found in loaded.items():
        assert not isinstance(found, str), f"{row}\n{found}"
        source = saved[row.split()[1]]
        assert not isinstance(source, str), source
        losses, drawn, notes = found
        assert losses == pytest.approx(source[0], abs=CLOSE), row
        if is_same_size:
            assert drawn == source[1], row
            assert notes == []
        else:
            assert notes[0].startswith("random generators are as they were: 2 ranks have saved")


def test_a_checkpoint_goes_on_under_another_strategy(tmp_path: Path) -> None:
    """Weights, moments, groups, rate, position in the data, own objects, generators; tied ones."""
    saved = [("fsdp", {}, "Net"), ("pp", {}, "Tied"), ("zero1", {}, "Net")]
    loaded = [
        ("ddp", {}, "Net", "fsdp"),
        ("zero1", {}, "Net", "fsdp"),
        ("pp", {}, "Net", "fsdp"),
        ("fsdp", {}, "Tied", "pp"),
        ("tp", {}, "Net", "zero1"),
        ("fsdp", {}, "Net", "zero1"),
    ]
    env = {"FOLDER": str(tmp_path / "states")}
    asked = {"SAVED": json.dumps(saved), "LOADED": json.dumps(loaded)}
    with TorchRanks(tmp_path / "run", 2, MODEL + PARTS + TWO, **env, **asked) as ranks:
        for one in ranks.results():
            check(one["saved"], one["loaded"], is_same_size=True)
