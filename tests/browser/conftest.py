"""A page of a browser, for all tests of a file."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.lab import browser_page

if TYPE_CHECKING:  # playwright is an optional extra
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def page() -> Iterator["Page"]:
    """A page of a fresh browser."""
    with browser_page(1100, 1000) as page:
        yield page
