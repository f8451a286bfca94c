"""%dist_save and %dist_load, typed in a real kernel with real ranks."""

import re
from pathlib import Path

from tests.front.test_strategy import _MODEL, _STEPS
from tests.support.kernel import Kernel


def test_a_checkpoint_is_saved_and_loaded(kernel: Kernel, shared_folder: Path) -> None:
    """Losses after a load are those that came after the save; the output says what was done."""
    for code in (_MODEL, _STEPS):
        assert kernel.run(code).status == "ok"
    saved = kernel.run("%dist_save one")
    after = kernel.run(_STEPS)
    loaded = kernel.run("%dist_load one")
    again = kernel.run(_STEPS)

    assert saved.status == "ok", saved.visible
    assert "saved at step 3" in saved.visible
    assert loaded.status == "ok", loaded.visible
    assert after.visible == again.visible
    print(saved.visible, loaded.visible)
