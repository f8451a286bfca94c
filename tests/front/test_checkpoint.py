"""%dist_save and %dist_load, typed in a real kernel with real ranks."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.front.test_strategy import _MODEL, _STEPS
from tests.support.kernel import Kernel

_CLEAR = """%%distributed
import gc
for name, value in list(globals().items()):
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) and name[0] != "_":
        del globals()[name]
layers = value = None
gc.collect();
"""
_WRONG = {
    "%dist_save": ("OptionError", "%dist_save: which folder?"),
    "%dist_load": ("OptionError", "%dist_load: which folder?"),
    "%dist_save one two": ("OptionError", "%dist_save takes one path, not one and two"),
    "%dist_save one --ranks 0": ("OptionError", "unrecognized arguments: --ranks"),
    "%dist_save a-file": ("CheckpointError", "is a file of 5 bytes, but a checkpoint is a folder"),
    "%dist_save a-file/below": ("CheckpointError", "cannot be written"),
    "%dist_load nowhere": ("CheckpointError", "the path does not exist"),
    "%dist_load a-file": ("CheckpointError", "No nbdist checkpoint found"),
}

# Until nothing of the save beside training runs on rank 0 any more, which hears of the others.
_OVER = """%%rank[0]
from nbdist.checkpoint.rank import jobs
assert all(one.is_over.wait(20) for one in jobs._jobs.values())
"""


def ok(kernel: Kernel, code: str) -> str:
    """What a cell shows that must not fail."""
    cell = kernel.run(code)
    assert cell.status == "ok", cell.visible
    return cell.visible


@pytest.fixture
def trained(kernel: Kernel) -> Iterator[Kernel]:
    """The shared kernel with a model that has made three steps under ddp; cleared afterwards."""
    for code in (_CLEAR, "%dist_strategy ddp", _MODEL, _STEPS):
        ok(kernel, code)
    yield kernel
    for code in ("%dist_strategy ddp", _CLEAR):
        ok(kernel, code)


def test_it_is_saved_and_loaded_under_another_strategy(trained: Kernel) -> None:
    """Losses after a load are those after the save; what was done is told."""
    saved = ok(trained, "%dist_save one")
    after = ok(trained, _STEPS)
    ok(trained, "%dist_strategy fsdp")
    loaded = ok(trained, "%dist_load one")
    again = ok(trained, _STEPS)
    numbers = ok(
        trained,
        "import nbdist\nsaved = nbdist.session().save('one')\n"
        "loaded = nbdist.session().load('one', models_only=True)\n"
        "(saved.step, saved.files, loaded.models, loaded.optimizers)",
    )

    assert re.search(
        r"^one saved at step 3: \d.* in \d+\.\d s \(.*/s\), 5 files of 2 ranks\n"
        "read back and compared bit for bit",
        saved,
    ), saved
    assert "one loaded at step 3: model, optimizer\n" in loaded
    assert "every file compared with its checksum; fsdp, dp 2, saved under ddp" in loaded
    assert after == again
    assert numbers.strip() == "(6, 5, ('model',), ())"


def test_a_failure_beside_training_is_told(trained: Kernel, shared_folder: Path) -> None:
    """At the next cell, once; the checkpoint of before is whole."""
    code = """%%rank[1]
from nbdist.checkpoint.rank import write as writing
is_equal = writing._is_equal
writing._is_equal = lambda data, wanted: False
"""
    ok(trained, "%dist_save kept")
    ok(trained, code)
    ok(trained, "%dist_save kept --async")
    ended = ok(trained, _OVER) + trained.run("%dist_status").visible
    back = ok(trained, "%%rank[1]\nwriting._is_equal = is_equal")
    loaded = ok(trained, "%dist_load kept")

    failure = "kept was not saved: rank 1: "
    assert ended.count(failure) == 1, ended
    assert "What was at that path is unchanged." in ended
    assert failure not in back
    assert "kept loaded at step 3" in loaded
    assert [path.name for path in shared_folder.iterdir() if "nbdist-" in path.name] == []


def test_without_a_prepared_model_there_is_nothing_to_save(kernel: Kernel) -> None:
    """An ordinary error says how to prepare one."""
    ok(kernel, _CLEAR)
    cell = kernel.run("%dist_save empty")
    cell.check_failure("CheckpointError", "No model is prepared on the ranks")


def test_a_wrong_use_is_an_ordinary_error(trained: Kernel, shared_folder: Path) -> None:
    """A mistake fails the cell with what is wrong."""
    (shared_folder / "a-file").write_text("hello")
    for code, (kind, message) in _WRONG.items():
        trained.run(code).check_failure(kind, re.escape(message))
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
    """The status tells how far it is; another save and a load wait for it, and have its step."""
    ok(trained, _HELD)
    begun = ok(trained, "%dist_save beside --async")
    after = ok(trained, _STEPS)
    ok(trained, "%%rank[1]\nassert waiting.wait(20)")
    status = ok(trained, "%dist_status")
    ok(trained, "%dist_strategy fsdp")
    ok(trained, "%%rank[1]\nthreading.Timer(0.5, released.set).start(); writing._compare = compare")
    second = ok(trained, "%dist_save other")
    ok(trained, "%dist_load beside")
    again = ok(trained, _STEPS)

    assert "is being saved: model, optimizer" in begun
    assert "training was paused for" in begun
    assert "beside: " in status
    assert "rank 1 comparing" in status
    assert "beside was saved at step 3\n" in second
    assert "other saved at step 6" in second
    assert after == again


def test_a_rank_that_is_replaced_breaks_its_save_off(fresh: Kernel, shared_folder: Path) -> None:
    """Told at the next cell; the checkpoint before is whole, and a stop waits for the next one."""
    for code in (_MODEL, _STEPS, "%dist_save kept", _HELD, "%dist_save kept --async"):
        ok(fresh, code)
    ok(fresh, "%%rank[1]\nassert waiting.wait(20)")
    ok(fresh, "%dist_restart 1")
    ended = ok(fresh, _OVER) + fresh.run("%dist_status").visible
    for code in (_MODEL, "%dist_load kept", "%dist_save later --async"):
        ok(fresh, code)
    stopped = ok(fresh, "%dist_shutdown")

    assert len(re.findall("kept was not saved: .*rank 1", ended)) == 1, ended
    assert "later was saved at step 3\nranks 0-1 stopped" in stopped
    assert (shared_folder / "later" / "nbdist.json").exists()
    assert [path.name for path in shared_folder.iterdir() if "nbdist-" in path.name] == []
