"""What takes long, told in its cell and on the panel while real ranks do it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel

_MODEL = """%%distributed
import pathlib, time
from nbdist.parallel.reshard import redistribute as way_module
way_net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
way_opt = torch.optim.AdamW(way_net.parameters())
way_net, way_opt = accelerator.prepare(way_net, way_opt)
way_gone = way_module._Progress.gone
def way_held(way, parcels):
    way_gone(way, parcels)
    while way._total and not pathlib.Path({go!r}).exists(): time.sleep(0.02)
way_module._Progress.gone = way_held
"""
_GONE = """%%distributed
way_module._Progress.gone = way_gone
del way_net, way_opt
import gc; gc.collect(); None"""


@pytest.fixture
def go(kernel: Kernel, shared_folder: Path) -> Iterator[Path]:
    """Ranks stop in the middle of a switch until this file is there."""
    path = shared_folder / "go"
    for code in ("%dist_strategy fsdp", _MODEL.format(go=str(path))):
        made = kernel.run(code)
        assert made.status == "ok", made.visible
    yield path
    path.touch()
    kernel.run("%dist_strategy ddp")
    kernel.run(_GONE)
    path.unlink()


def test_a_switch_says_how_far_it_is_and_its_result_takes_the_line(
    kernel: Kernel, go: Path
) -> None:  # fmt: skip
    """In the output of its cell, asked of ranks that do not come back from it."""
    cell = kernel.start("%dist_strategy ddp")
    waiting = kernel.wait_output(cell, "switch: moving")
    go.touch()
    done = kernel.finish(cell)

    assert re.search(r"switch: moving 0 B of \d+\.\d kB, 0%", waiting.visible)
    assert "fsdp, dp 2 -> ddp, dp 2" in done.visible
    assert "switch: moving" not in done.visible
    assert len(done.outputs) == 1


def test_the_panel_says_so_too_and_no_cell_has_a_line(kernel: Kernel, go: Path) -> None:
    """Between two cells it is the panel's own work."""
    kernel.run(
        "import threading, time, pathlib\n"
        "from nbdist.commands.panel import PANEL\n"
        "PANEL.show(); told = []\n"
        "def watch():\n"
        "    while not (told and told[-1]):\n"
        "        time.sleep(0.02)\n"
        "        told.append('moving' in PANEL.state().doing and PANEL.state().doing)\n"
        f"    pathlib.Path({str(go)!r}).touch()\n"
        "threading.Thread(target=watch).start()\n"
        "PANEL._widgets.strategy.value = 'ddp'; PANEL.press('apply')"
    )
    after = kernel.run("print(told[-1], [PANEL.state().doing], PANEL.job_queue.log[-1].text)")
    kernel.run("PANEL.close(); PANEL.job_queue._log.clear()")

    assert re.match(r"switch: moving 0 B of \d+\.\d kB, 0% \[''\]", after.text)
    assert "fsdp, dp 2 -> ddp, dp 2" in after.text


def test_a_recorded_cell_says_which_step_it_records(kernel: Kernel, shared_folder: Path) -> None:
    """While it runs; afterwards there is the recording alone."""
    step = shared_folder / "step"
    cell = kernel.start(
        "%%dist_profile --steps 3\nimport nbdist, pathlib, time\n"
        "for k in range(4):\n"
        "    nbdist.step()\n"
        f"    while k == 1 and not pathlib.Path({str(step)!r}).exists(): time.sleep(0.02)"
    )
    kernel.wait_output(cell, "trace: recording 2 of 4 steps, 50%")
    step.touch()
    done = kernel.finish(cell)
    step.unlink()

    assert done.text.rpartition("\r")[2].strip() == ""
    assert [line.startswith("trace of ranks 0-1") for line in done.plain] == [True]
