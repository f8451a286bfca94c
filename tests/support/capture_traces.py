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
from nbdist.notebook.session import Session
from nbdist.trace.trace import TraceOptions
from tests.support.captured import device_of

FOLDER = Path(__file__).resolve().parents[1] / "data" / "traces"
STRATEGIES = {"ddp": {}, "fsdp": {}, "tp": {}, "pp": {"microbatches": 2}}
# What is cut: names of file and host, and arrows between events, which nbdist does not read.
_CUTS = (
    (rb'"traceName": "[^"]*"', b'"traceName": ""'),
    (rb'"(host|host_name|hostname)": "[^"]*"', rb'"\1": "host"'),
    (rb',\s*\{\s*"ph": "[sf]"[^{}]*\}', b""),
)
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
x, target = torch.randn(8, 32).to(device), torch.randn(8, 4).to(device)
for _ in range(3):
    optimizer.zero_grad()
    accelerator.backward(model(x, target=target))
    optimizer.step()
"""


def capture(session: Session, folder: Path) -> None:
    """Record the cell and keep the ranks' own files, as small as they go."""
    session.profile(CELL, TraceOptions(steps=2))
    with tempfile.TemporaryDirectory() as made:
        for path in session.traces.save(Path(made)):
            if path.name.startswith("rank"):
                folder.mkdir(parents=True, exist_ok=True)
                text = gzip.decompress(path.read_bytes())
                for pattern, new in _CUTS:
                    text = re.sub(pattern, new, text)
                (folder / path.name).write_bytes(gzip.compress(text, 9, mtime=0))


def main() -> None:
    for path in FOLDER.iterdir():
        if device_of(path) == "cpu":  # `make gpu` has made the others
            shutil.rmtree(path)
    for strategy, options in STRATEGIES.items():
        session = nbdist.start(2, gpus="none", strategy=strategy, **options)
        try:
            capture(session, FOLDER / strategy)
        finally:
            NOTEBOOK.stop()


if __name__ == "__main__":
    main()
