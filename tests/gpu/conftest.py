"""Ranks for each test of this folder, and a line for each test in the results of `make gpu`."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nbdist.notebook.session import Session
from tests.gpu import results
from tests.gpu.places import PLACES, Holder
from tests.gpu.results import Case
from tests.support.ranks import temporary_folder

HERE = Path(__file__).parent
_HAS_FAILED: pytest.StashKey[bool] = pytest.StashKey()


@pytest.fixture(scope="session")
def _holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Holder]:
    holder = Holder()
    with temporary_folder(tmp_path_factory.mktemp("gpu") / "tmp"):
        yield holder
        holder.drop()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, _holder: Holder) -> Iterator[Session]:
    """The ranks of a place; after a test that fails new ones are started for the next."""
    session = _holder.get(request.param)
    if _holder.start_s is not None:
        request.node.user_properties.append(("ranks started in, s", _holder.start_s))
    yield session
    if request.node.stash.get(_HAS_FAILED, False):
        _holder.drop()


@pytest.fixture
def measured(record_property: Any) -> Any:
    """`measured(name, value)`: what the page says of the test beside how it ended."""
    return record_property


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of one place one after the other: its ranks are started once."""
    numbers = [number for number, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted((items[number] for number in numbers), key=_place_number)
    for number, item in zip(numbers, ordered, strict=True):
        items[number] = item


def _place_number(item: pytest.Item) -> int:
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    name = params.get("ranks", params.get("place"))
    return list(PLACES).index(name) if name else -1


def pytest_itemcollected(item: pytest.Item) -> None:
    _add(item, results.NOT_RUN, why="no time was left for it")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        _add(item, results.NOT_RUN, why="not selected")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Whatever ends this process now, the test was running."""
    _add_of(nodeid, results.RUNNING)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, Any, Any]:
    report = yield
    item.stash[_HAS_FAILED] = item.stash.get(_HAS_FAILED, False) or report.failed
    has_failed = item.stash[_HAS_FAILED]
    if report.skipped:
        _add(item, results.NOT_RUN, why=str(report.longrepr[2]).removeprefix("Skipped: "))
    elif report.failed or (report.when == "call" and not has_failed):
        _add(
            item,
            results.FAILED if has_failed else results.PASSED,
            seconds=round(report.duration, 2),
            measured=dict(report.user_properties),
            why=_reason(report) if has_failed else "",
        )
    return report


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)[-2000:]


def _add(item: pytest.Item, outcome: str, **more: Any) -> None:
    _add_of(item.nodeid, outcome, **more)


def _add_of(nodeid: str, outcome: str, **more: Any) -> None:
    path, part = os.environ.get(results.LOG), os.environ.get(results.PART, "")
    match = re.fullmatch(r".*::test_(\w+?)(?:\[(.*)\])?", nodeid)
    if not path or match is None:
        return
    name, parameters = match.groups(default="")
    words = parameters.split("-") if parameters else []
    place = next((word for word in words if word in PLACES), "")
    rest = " ".join(word for word in words if word != place)
    case = f"{name.replace('_', ' ')}{': ' if rest else ''}{rest}"
    results.add(Path(path), Case(part, case, outcome, place, **more))
