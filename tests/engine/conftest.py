"""What tests of the engine leave in this process must not be found by later tests."""

import os
import sys
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell


@pytest.fixture(scope="module", autouse=True)
def _shell_of_this_module_alone() -> Iterator[None]:
    """IPython's shell is one per process, and ipykernel's changes the environment (colours)."""
    before = dict(os.environ)
    if "nbdist.engine.meeting" in sys.modules:  # an abort without its recovery refuses all calls
        sys.modules["nbdist.engine.meeting"].forget_meetings()
    yield
    if InteractiveShell.initialized():
        type(InteractiveShell.instance()).clear_instance()
    os.environ.clear()
    os.environ.update(before)
