"""The server for Prometheus: this host alone, with a token, and nothing left when it ends."""

import socket
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.errors import OptionError
from nbdist.monitor.kernel.metrics_server import Exporter
from nbdist.monitor.prometheus import CONTENT_TYPE


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Exporter]:
    served = Exporter(lambda: "up 1\n", 0, tmp_path)
    yield served
    served.close()


def fetched(url: str, bearer: str = "") -> tuple[int, str, str]:
    """(status, kind, body) of an answer, errors too."""
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_the_token_opens_it_in_a_header_or_in_the_address(exporter: Exporter) -> None:
    """Both ways give the same numbers."""
    expected = (200, CONTENT_TYPE, "up 1\n")

    assert fetched(exporter.url, exporter.token) == expected
    assert fetched(f"{exporter.url}?token={exporter.token}") == expected


@pytest.mark.parametrize("given", ["", "wrong", "\u00e9"])
def test_without_the_token_nothing_is_told(exporter: Exporter, given: str) -> None:
    """No token, another one, and one that is no ASCII are refused alike, for every path."""
    quoted = urllib.parse.quote(given)
    answers = [
        fetched(exporter.url),
        fetched(f"{exporter.url}?token={quoted}"),
        fetched(exporter.url.replace("metrics", "other")),
        fetched(exporter.url, exporter.token[:-1]),
    ]

    assert [status for status, *_ in answers] == [401] * 4
    assert all(exporter.token not in body and "up 1" not in body for *_, body in answers)


def test_other_paths_and_methods_have_nothing(exporter: Exporter) -> None:
    """There is one page, and nothing can be changed."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(exporter.url, data=b"x", timeout=5)
    refused.value.close()

    assert fetched(exporter.url.replace("metrics", "x"), exporter.token)[0] == 404
    assert refused.value.code == 501


def test_it_listens_on_the_loopback_interface_alone(exporter: Exporter) -> None:
    """The token lies in a file for the user alone, so that notebooks need not hold it."""
    listening = {
        connection.laddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == exporter.port
    }

    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert exporter.token_path.read_text() == exporter.token
    assert stat.S_IMODE(exporter.token_path.stat().st_mode) == 0o600


def test_a_port_in_use_is_told_with_the_choices(exporter: Exporter, tmp_path: Path) -> None:
    """And nothing is left of the attempt."""
    with pytest.raises(OptionError, match=rf"port {exporter.port} of 127.0.0.1 is in use.*or 0"):
        Exporter(str, exporter.port, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_numbers_that_cannot_be_made_are_an_error_of_the_answer(tmp_path: Path) -> None:
    """Whoever asks is told, and the next request is answered."""
    texts = iter(["1\n"])
    served = Exporter(lambda: next(texts), 0, tmp_path)
    first = fetched(served.url, served.token)
    second = fetched(served.url, served.token)
    served.close()

    assert first[0] == 200
    assert second[0] == 500
    assert "StopIteration" in second[2]


def test_nothing_is_left_when_it_is_closed(tmp_path: Path) -> None:
    """No thread, no port, no file; somebody who is connected and silent holds it up not at all."""
    served = Exporter(str, 0, tmp_path)
    with socket.create_connection(("127.0.0.1", served.port)):
        served.close()
        served.close()
        again = Exporter(lambda: "again\n", served.port, tmp_path)
        body = fetched(again.url, again.token)[2]
        again.close()

    assert body == "again\n"
    assert list(tmp_path.iterdir()) == []
    assert "nbdist-prometheus" not in [thread.name for thread in threading.enumerate()]
