"""A DataLoader loop that is interrupted leaves no worker and no wait behind."""

import re
import time

import pytest

from tests.support.kernel import Kernel

# The press can come as torch forks a worker, which torch itself then leaks: not for every run.
pytestmark = pytest.mark.faults

GONE_S = 2.0
_MADE = """%%distributed
import gc, psutil, time
from torch.utils.data import DataLoader
loader = DataLoader(range(10**6), batch_size=4, num_workers=2)
def workers():
    return len(psutil.Process().children()) - before
before = len(psutil.Process().children())
def train():
    for batch in loader:
        if int(batch[0]) == 0:
            print("go", flush=True)
"""


@pytest.mark.parametrize("loop", ["train()", "for b in loader:\n    print('go', flush=True)"])
def test_an_interrupted_loop_leaves_no_worker(kernel: Kernel, loop: str) -> None:
    """Two seconds later none is there, collecting takes no time, and the loader works again."""
    assert kernel.run(_MADE).status == "ok"
    handle = kernel.start(f"%%distributed\n{loop}")
    kernel.wait_output(handle, "go")
    kernel.interrupt()
    cell = kernel.finish(handle, 30)
    back_s = time.monotonic()
    left = kernel.run("%%distributed\nprint(workers(), 'workers')")
    seen_s = time.monotonic() - back_s
    took = kernel.run(
        "%%distributed\nt = time.monotonic()\ngc.collect()\nprint(time.monotonic() - t < 1)"
    )
    again = kernel.run("%%distributed\nprint(sum(len(b) for b, _ in zip(loader, range(5))))")

    cell.check_failure("KeyboardInterrupt")
    assert seen_s < GONE_S
    assert re.findall(r"(\d) workers", left.text) == ["0"], left.visible
    assert "[0-1] True" in took.text, took.visible
    assert "[0-1] 20" in again.text, again.visible
