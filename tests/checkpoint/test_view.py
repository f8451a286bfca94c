"""What %dist_save and %dist_load print, also where outputs are stored."""

from pathlib import Path

import pytest

from nbdist.checkpoint import view as checkpoint_view
from nbdist.checkpoint.results import Loaded, Saved, SaveStarted
from nbdist.core.units import compared
from nbdist.strategy.choose import choose

FSDP, DDP = choose("fsdp", {}, 4), choose("ddp", {}, 2)
SAVED = Saved(str(Path.cwd() / "one"), 1_500_000_000, 7, 300, 100, FSDP, 3.2, ("a note",))


def test_a_saved_checkpoint_is_told_with_its_size_and_rate() -> None:
    """From the notebook's folder on; what an earlier save came to stands above."""
    assert checkpoint_view.saved_view(SAVED, ["two was saved at step 90"]).text == (
        "two was saved at step 90\n"
        "one saved at step 100: 1.5 GB in 3.2 s (468.8 MB/s), 7 files of 4 ranks\n"
        "read back and compared bit for bit; it loads on any number of ranks, under any strategy\n"
        "a note"
    )


def test_numbers_of_a_machine_are_left_out_where_outputs_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps, files and ranks stay: they are equal everywhere."""
    monkeypatch.setenv("NBDIST_TEST", "1")

    assert compared(checkpoint_view.saved_view(SAVED).text).splitlines()[0] == (
        "one saved at step 100: # in # s (#/s), 7 files of 4 ranks"
    )


def test_a_save_beside_training_says_how_long_that_stood_still() -> None:
    """And where to look."""
    begun = SaveStarted("/far/one", ("model",), ("optimizer",), 12_000_000, (), 0.25)

    assert checkpoint_view.saved_view(begun).text == (
        "/far/one is being saved: model, optimizer\n"
        "12.0 MB copied to memory, training was paused for 250.0 ms\n"
        "%dist_status shows its progress"
    )


def test_a_load_says_under_what_it_was_saved() -> None:
    """Where that is another strategy than the one that counts now."""
    done = Loaded("/far/one", ("model",), (), 5, FSDP, DDP, 4, 2_000_000, ("a note",), 2.0)
    lines = checkpoint_view.loaded_view(done).text.splitlines()

    assert lines[0] == "/far/one loaded at step 5: model"
    assert lines[1] == (
        "2.0 MB read in 2.0 s (1.0 MB/s), every file compared with its checksum; "
        "ddp, dp 2, saved under fsdp, dp 4"
    )
    assert lines[2] == "a note"
