"""%dist_save and %dist_load, typed in a real kernel with real ranks."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.front.test_strategy import _MODEL, _STEPS
from tests.support.kernel import Kernel

# Other tests may have left theirs.
_CLEAR = """%%distributed
import gc
for name, value in list(globals().items()):
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) and name[0] != "_":
        del globals()[name]
layers = value = None
_ = gc.collect()
"""
_WRONG = {
    "%dist_save": ("OptionError", "%dist_save: which folder?"),
    "%dist_load": ("OptionError", "%dist_load: which folder?"),
    "%dist_save one two": ("OptionError", "%dist_save takes one path, not one and two"),
    "%dist_save one --ranks 0": ("OptionError", "unrecognized arguments: --ranks"),
    "%dist_save a-file": ("CheckpointError", "is a file of 5 bytes, but a checkpoint is a folder"),
    "%dist_save a-folder": (
        "CheckpointError",
        "files that do not belong to a checkpoint (notes.txt)",
    ),
    "%dist_save a-file/below": ("CheckpointError", "cannot be written"),
    "%dist_load nowhere": ("CheckpointError", "the path does not exist"),
    "%dist_load a-file": ("CheckpointError", "No nbdist checkpoint found"),
    "%dist_load a-folder": ("CheckpointError", "it has no nbdist.json; it contains notes.txt"),
}

# Until nothing of the save beside training runs on rank 0 any more, which hears of the others.
_OVER = """%%rank[0]
from nbdist.checkpoint.rank import jobs
assert all(one.is_over.wait(20) for one in jobs._jobs.values())
"""


@pytest.fixture
def trained(kernel: Kernel) -> Iterator[Kernel]:
    """The shared kernel with a model that has made three steps under ddp; cleared afterwards."""
    for code in (_CLEAR, "%dist_strategy ddp", _MODEL, _STEPS):
        cell = kernel.run(code)
        assert cell.status == "ok", cell.visible
    yield kernel
    for code in ("%dist_strategy ddp", _CLEAR):
        assert kernel.run(code).status == "ok"


def test_it_is_saved_and_loaded_under_another_strategy(trained: Kernel) -> None:
    """Losses after a load are those after the save; what was done is told."""
    saved = trained.run("%dist_save one")
    after = trained.run(_STEPS)
    switched = trained.run("%dist_strategy fsdp")
    loaded = trained.run("%dist_load one")
    again = trained.run(_STEPS)
    told = trained.run(
        "import nbdist\nsaved = nbdist.session().save('one')\n"
        "loaded = nbdist.session().load('one', models_only=True)\n"
        "(saved.step, saved.files, loaded.models, loaded.optimizers)"
    )

    assert saved.status == "ok", saved.visible
    assert re.search(
        r"^one saved at step 3: \d.* in \d+\.\d s \(.*/s\), 5 files of 2 ranks\n"
        "read back and compared bit for bit",
        saved.visible,
    ), saved.visible
    assert switched.status == "ok", switched.visible
    assert loaded.status == "ok", loaded.visible
    assert "one loaded at step 3: model, optimizer\n" in loaded.visible
    assert "every file compared with its checksum; fsdp, dp 2, saved under ddp" in loaded.visible
    assert after.visible == again.visible
    assert told.visible.strip() == "(6, 5, ('model',), ())", told.visible


def test_it_is_saved_beside_training(trained: Kernel) -> None:
    """What was there when it began is saved; a second save, a load and the status wait for it."""
    first = trained.run("%dist_save beside --async")
    after = trained.run(_STEPS)
    status = trained.run("%dist_status")
    second = trained.run("%dist_save other")
    loaded = trained.run("%dist_load beside")
    again = trained.run(_STEPS)

    assert first.status == "ok", first.visible
    assert "is being saved: model, optimizer" in first.visible
    assert "training was paused for" in first.visible
    assert status.status == "ok", status.visible
    assert re.search(r"saving .*beside: |beside was saved at step 3", status.visible)
    assert second.status == "ok", second.visible
    assert "beside was saved at step 3\n" in second.visible
    assert "other saved at step 6" in second.visible
    assert loaded.status == "ok", loaded.visible
    assert after.visible == again.visible


def test_a_failure_beside_training_is_told(trained: Kernel, shared_folder: Path) -> None:
    """At the next cell, once; the checkpoint of before is whole."""
    code = """%%rank[1]
from nbdist.checkpoint.rank import write as writing
is_equal = writing._is_equal
writing._is_equal = lambda data, wanted: False
"""
    assert trained.run("%dist_save kept").status == "ok"
    assert trained.run(code).status == "ok"
    begun = trained.run("%dist_save kept --async")
    over = trained.run(_OVER)
    ended = over.visible + trained.run("%dist_status").visible
    back = trained.run("%%rank[1]\nwriting._is_equal = is_equal")
    loaded = trained.run("%dist_load kept")

    assert (begun.status, over.status) == ("ok", "ok"), begun.visible + over.visible
    told = "kept was not saved: rank 1: "
    assert ended.count(told) == 1, ended
    assert "What was at that path is unchanged." in ended
    assert told not in back.visible
    assert loaded.status == "ok", loaded.visible
    assert "kept loaded at step 3" in loaded.visible
    left = [one.name for one in shared_folder.iterdir() if "nbdist-" in one.name]
    assert left == []


def test_without_a_prepared_model_there_is_nothing_to_save(kernel: Kernel) -> None:
    """An ordinary error says how to prepare one."""
    assert kernel.run(_CLEAR).status == "ok"
    cell = kernel.run("%dist_save empty")

    assert cell.error is not None
    assert cell.error.ename == "CheckpointError"
    assert "No model is prepared on the ranks" in cell.error.evalue


def test_a_wrong_use_is_an_ordinary_error(trained: Kernel, shared_folder: Path) -> None:
    """A mistake fails the cell with what is wrong."""
    (shared_folder / "a-file").write_text("hello")
    (shared_folder / "a-folder").mkdir(exist_ok=True)
    (shared_folder / "a-folder" / "notes.txt").write_text("hello")
    for code, (kind, told) in _WRONG.items():
        cell = trained.run(code)

        assert cell.error is not None, (code, cell.visible)
        assert cell.error.ename == kind, code
        assert told in cell.error.evalue, code
        assert (shared_folder / "a-file").read_text() == "hello", code


_HELD = """%%rank[1]
import threading
from nbdist.checkpoint.rank import write as writing
compare, released, waiting = writing._compare, threading.Event(), threading.Event()
def held(*given):
    waiting.set()
    released.wait(60)
    return compare(*given)
writing._compare = held
"""


def test_a_save_goes_on_beside_cells_and_a_switch(trained: Kernel) -> None:
    """The status tells how far it is; a load waits for it, and has what was there at first."""
    trained.run(_HELD)
    begun = trained.run("%dist_save beside --async")
    after = trained.run(_STEPS)
    trained.run("%%rank[1]\nassert waiting.wait(20)")
    status = trained.run("%dist_status")
    switched = trained.run("%dist_strategy fsdp")
    trained.run("%%rank[1]\nthreading.Timer(0.5, released.set).start(); writing._compare = compare")
    loaded = trained.run("%dist_load beside")
    again = trained.run(_STEPS)

    assert begun.status == "ok", begun.visible
    assert "beside: " in status.visible, status.visible
    assert "rank 1 comparing" in status.visible
    assert switched.status == "ok", switched.visible
    assert loaded.status == "ok", loaded.visible
    assert "beside was saved at step 3" in loaded.visible
    assert after.visible == again.visible


def test_a_rank_that_is_replaced_breaks_its_save_off(own_kernel: Kernel, tmp_path: Path) -> None:
    """Told at the next cell; the checkpoint before is whole, and a stop waits for the next one."""
    for code in (_MODEL, _STEPS, "%dist_save kept", _HELD, "%dist_save kept --async"):
        assert own_kernel.run(code).status == "ok"
    assert own_kernel.run("%%rank[1]\nassert waiting.wait(20)").status == "ok"
    restarted = own_kernel.run("%dist_restart 1")
    over = own_kernel.run(_OVER)
    told = over.visible + own_kernel.run("%dist_status").visible
    made = own_kernel.run(_MODEL)
    loaded = own_kernel.run("%dist_load kept")
    later = own_kernel.run("%dist_save later --async")
    stopped = own_kernel.run("%dist_shutdown")

    assert restarted.status == "ok", restarted.visible
    assert over.status == "ok", over.visible
    assert len(re.findall("kept was not saved: .*rank 1", told)) == 1, told
    assert made.status == "ok", made.visible
    assert loaded.status == "ok", loaded.visible
    assert later.status == "ok", later.visible
    assert stopped.status == "ok", stopped.visible
    assert "later was saved at step 3\nranks 0-1 stopped" in stopped.visible
    assert (tmp_path / "later" / "nbdist.json").exists()
    assert [one.name for one in tmp_path.iterdir() if "nbdist-" in one.name] == []
