"""Shells that tests of the engine make here must not be found by later tests."""

import os
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell


@pytest.fixture(scope="module", autouse=True)
def _shell_of_this_module_alone() -> Iterator[None]:
    """IPython's shell is one per process, and ipykernel's changes the environment (colours)."""
    before = dict(os.environ)
    yield
    if InteractiveShell.initialized():
        type(InteractiveShell.instance()).clear_instance()
    os.environ.clear()
    os.environ.update(before)
