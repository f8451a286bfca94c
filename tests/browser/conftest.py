"""A server for all tests, and a page of a browser for all tests of a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.lab import Lab, browser_page

if TYPE_CHECKING:  # playwright is an optional extra
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    environment = {"PYTHONPATH": str(ROOT), "NBDIST_TEST": ""}
    with Lab(tmp_path_factory.mktemp("lab"), environment) as lab:
        yield lab


@pytest.fixture(scope="module")
def lab(_server: Lab) -> Iterator[Lab]:
    """A server whose kernels can import what is made up; those of the tests of a file end."""
    yield _server
    _server.end_kernels()


@pytest.fixture(scope="module")
def page() -> Iterator["Page"]:
    """A page of a fresh browser."""
    with browser_page(1150, 1000) as page:
        yield page
