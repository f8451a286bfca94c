"""What tests of recordings in pytest's own process share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """What was there before is not looked at again and again: half a million objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
