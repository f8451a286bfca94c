"""Makes the traces in tests/data/traces: `python -m tests.support.capture_traces`.

Two ranks on the CPU, a tiny model, two steps under each strategy, as %%dist_profile records them.
Only to be run again when the format of torch's files changes; tests say what has to be in them.
"""

import gzip
import re
import shutil
import tempfile
from pathlib import Path

import nbdist
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.trace.trace import TraceOptions

FOLDER = Path(__file__).resolve().parents[1] / "data" / "traces"
STRATEGIES = {"ddp": {}, "fsdp": {}, "tp": {}, "pp": {"microbatches": 2}}
CELL = """
import torch.nn as nn
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(32, 4)
    def forward(self, x, target=None):
        for block in self.blocks:
            x = block(x)
        return ((self.head(x) - target) ** 2).mean()

model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer = accelerator.prepare(model, optimizer)
x, target = torch.randn(8, 32), torch.randn(8, 4)
for _ in range(3):
    optimizer.zero_grad()
    accelerator.backward(model(x, target=target))
    optimizer.step()
"""


def capture(strategy: str, options: dict[str, object], folder: Path) -> None:
    """Record the cell under a strategy and keep the ranks' own files, as small as they go."""
    session = nbdist.start(2, gpus="none", strategy=strategy, **options)
    try:
        session.profile(CELL, TraceOptions(steps=2))
        with tempfile.TemporaryDirectory() as made:
            for path in session.traces.save(Path(made)):
                if path.name.startswith("rank"):
                    folder.mkdir(parents=True, exist_ok=True)
                    text = gzip.decompress(path.read_bytes())
                    text = re.sub(rb'"traceName": "[^"]*"', b'"traceName": ""', text)
                    (folder / path.name).write_bytes(gzip.compress(text, 9, mtime=0))
    finally:
        NOTEBOOK.stop()


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for strategy, options in STRATEGIES.items():
        capture(strategy, options, FOLDER / strategy)


if __name__ == "__main__":
    main()
