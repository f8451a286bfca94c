"""Memory that runs out on real ranks: told first, explained below the error, shown afterwards."""

import re

from tests.front.test_memory_growth import told
from tests.support.kernel import Kernel

_WAITS = """%%distributed
short_kept = torch.ones(250_000)
if rank == 1:
    torch.empty(10**15)
dist.all_reduce(torch.ones(1))
"""
# A model of 5 blocks whose activations are known: the first input and each tanh's output are kept,
# of 4 x 1000 x 256 numbers each.
_MODEL = """%%distributed
class ShortBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(256, 256, bias=False)
    def forward(self, x):
        return torch.tanh(self.linear(x))
short_model = accelerator.prepare(torch.nn.Sequential(*[ShortBlock() for _ in range(5)]))
short_optimizer = torch.optim.Adam(short_model.parameters(), 1e-3)
short_model(torch.ones(2, 256)).sum().backward()
short_optimizer.step()
"""
_FAILS = """%%rank 1
import resource, psutil
short_limits = resource.getrlimit(resource.RLIMIT_AS)
def short_loss(hidden):
    return torch.empty(2_000_000_000) + hidden.sum()
def short_train():
    batch = torch.ones(4, 1000, 256)
    hidden = short_model.module(batch)
    return short_loss(hidden)
short_most = psutil.Process().memory_info().vms + 10**9
resource.setrlimit(resource.RLIMIT_AS, (short_most, short_limits[1]))
short_train()
"""
_RESTORED = "%%rank 1\nresource.setrlimit(resource.RLIMIT_AS, short_limits)"
_RECORDED = """%%dist_memory
for n in range(3):
    short_part = torch.ones(1000, 1000)
torch.empty(10**15)
"""
PARAMETERS = 5 * 256 * 256 * 4
ACTIVATIONS = 6 * 4 * 1000 * 256 * 4


def failed(kernel: Kernel, code: str) -> str:
    cell = kernel.run(code)

    assert cell.status == "error", cell.visible
    return str(cell.visible)


def test_rank_that_waits_is_not_the_cause(impatient: Kernel) -> None:
    """One rank runs out of memory, the other waits for it: the first is told first, and alone."""
    kernel = impatient
    text = failed(kernel, _WAITS)
    summary = next(line for line in text.splitlines() if line.startswith("DistributedError"))

    assert summary.startswith("DistributedError: rank 1 raised RuntimeError")
    assert "you tried to allocate 4000000000000000 bytes" in summary
    below = text[text.index(summary) :].splitlines()[1:]
    below = [line for line in below if line]
    assert below[0].startswith("rank 1 ran out of the host's memory: 4000000.0 GB requested; ")
    assert any(line.startswith("this tensor alone is larger") for line in below)
    assert any("short_kept 1.0 MB" in line for line in below)
    assert any(re.match(r"  half the batch +- ", line) for line in below)
    # What failed is what it was, and the ranks go on.
    assert "RuntimeError" in text
    assert "on 2" in told(kernel, "%%distributed\nprint('on', dist.get_world_size())")
    shown = told(kernel, "%dist_memory")
    assert "rank 1" in shown
    assert "rank 0" not in shown
    assert "short_kept" in shown


def test_what_held_it_and_what_would_help(kernel: Kernel) -> None:
    """In the middle of a forward: numbers of this model on this rank, by arithmetic."""
    told(kernel, _MODEL)
    try:
        text = failed(kernel, _FAILS)
    finally:
        told(kernel, _RESTORED)
    lines = text.splitlines()

    head = next(line for line in lines if line.startswith("rank 1 ran out of the host's memory"))
    assert "8.0 GB requested" in head
    held = next(line for line in lines if line.startswith("in use by tensors"))
    assert f"parameters {PARAMETERS / 1e6:.1f} MB" in held
    assert f"optimizer state {2 * PARAMETERS / 1e6:.1f} MB" in held
    assert f"activations {ACTIVATIONS / 1e6:.1f} MB" in held
    largest = next(line for line in lines if line.startswith("largest: "))
    # The frames' own, and four outputs in between that no Python name holds.
    assert "batch in short_train 4.1 MB" in largest
    assert "hidden in short_loss 4.1 MB" in largest
    assert "kept for TanhBackward0 16.4 MB in 4 blocks" in largest
    rungs = {
        match[1]: match[0]
        for line in lines
        if (match := re.match(r"  (\S.*?)  +-(?: ?[\d.]+ \w+)?  .*", line))
    }
    assert list(rungs)[:4] == [
        "half the batch", "half the batch with --accumulate 2", "--bf16", "--checkpoint full",
    ]  # fmt: skip
    assert f"-{ACTIVATIONS / 2e6:.1f} MB" in rungs["half the batch"]
    # Every state is halved on two ranks under fsdp, less two of five blocks that are gathered.
    states = PARAMETERS * (1 + 1 + 2)
    fsdp = next(line for line in lines if line.startswith("  %dist_strategy fsdp"))
    assert f"-{(states / 2 - PARAMETERS * 2 / 5) / 1e6:.1f} MB" in fsdp
    assert "not enough" in fsdp
    assert "--offload" not in text


def test_other_failures_have_no_such_block(kernel: Kernel) -> None:
    """Nothing is asked, nothing is shown."""
    text = failed(kernel, "%%distributed\nraise ValueError('out of patience')")

    assert "ran out of" not in text


def test_recorded_cell_keeps_its_recording(kernel: Kernel) -> None:
    """It says more than what was left at the failure: a history up to it, with the same block."""
    text = failed(kernel, _RECORDED)

    first = re.search(r"^rank ([01]) ran out of the host's memory", text, re.MULTILINE)[1]
    assert f"\nrank {1 - int(first)} ran out of memory too" in text
    assert told(kernel, "%dist_memory --keep short_recorded").startswith("kept as")
    lasting = kernel.run(
        "import nbdist\n[one.duration_ns > 0 for one in nbdist.session().memory().ranks]"
    )
    assert lasting.plain == ["[True, True]"]
