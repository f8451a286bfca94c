"""A cheap collection of garbage in pytest's process, where half a million objects lie."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """What was there before the module's tests is not looked at again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
