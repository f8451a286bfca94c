"""Makes the snapshots in tests/data/memory: `python -m tests.support.capture_memory`.

Two ranks on the CPU, a tiny model, two steps under each strategy, as %%dist_memory records them,
and a leak. Only to be run again when the format of the files changes; tests say what has to be in
them.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import nbdist
from nbdist.memory import file as memory_file
from nbdist.memory.snapshot import AllocationFrame
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.session import Session
from tests.support.captured import device_of

FOLDER = Path(__file__).resolve().parents[1] / "data" / "memory"
STRATEGIES = {"ddp": {}, "fsdp": {}, "checkpoint": {"checkpoint": "full"}}
MODEL = """
import torch.nn as nn
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
model, optimizer = accelerator.prepare(model, optimizer)
x = torch.randn(128, 64).to(device)
kept = []

def train(steps, leaks=False):
    for _ in range(steps):
        loss = model(x)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if leaks:
            kept.append(torch.ones(1000, device=device))

train(3)  # DDP has made its buckets anew by then
"""
_BEFORE = re.compile(r"^.*?((?:site|dist)-packages|lib/python3\.\d+)/")


def capture(session: Session, folder: Path) -> None:
    """Record two steps, and two that leak, without what tells of this machine."""
    session.run(MODEL)
    for name, code in {"": "train(2)", "_leak": "train(2, leaks=True)"}.items():
        snapshot = session.record_memory(code)
        target = folder.with_name(f"{folder.name}{name}")
        target.mkdir(parents=True, exist_ok=True)
        for rank in snapshot.ranks:
            path = target / f"rank{rank.rank}.pickle.gz"
            stacks = tuple(tuple(map(_frame, stack)) for stack in rank.stacks)
            anonymous = replace(rank, host="host", stacks=stacks)
            memory_file.write(path, anonymous, snapshot.strategy, snapshot.notes)


def _frame(frame: AllocationFrame) -> AllocationFrame:
    return replace(frame, file=_BEFORE.sub(r"/python/\1/", frame.file))


def main() -> None:
    for path in FOLDER.iterdir():
        if device_of(path) == "cpu":  # `make gpu` has made the others
            shutil.rmtree(path)
    for name, options in STRATEGIES.items():
        strategy = "ddp" if name == "checkpoint" else name
        session = nbdist.start(2, gpus="none", strategy=strategy, **options)
        try:
            capture(session, FOLDER / name)
        finally:
            NOTEBOOK.stop()


if __name__ == "__main__":
    main()
