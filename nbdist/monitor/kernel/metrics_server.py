"""Serves samples to Prometheus, to this host alone and to whoever has the token."""

from __future__ import annotations

import errno
import hmac
import http.server
import secrets
import socketserver
import threading
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from nbdist.errors import OptionError
from nbdist.monitor.prometheus import CONTENT_TYPE

LOOPBACK = "127.0.0.1"
TOKEN_FILE = "prometheus.token"  # noqa: S105  # its name
# Somebody who connects and says nothing is let go after this long.
SILENT_S = 5.0
END_S = 2.0
_BEARER = "Bearer "


class Exporter:
    """A server of `/metrics` in threads of the kernel, until it is closed.

    Attributes:
        port: Where it listens, on 127.0.0.1.
        token: What a request has to bring.
        token_path: The file that holds it, for the user alone.
    """

    def __init__(self, text: Callable[[], str], port: int, run_dir: Path):
        """Open the port (0: any that is free), write the token to its file in the run's folder.

        `text` gives what is served: called for each request from now on, in the request's thread.

        Raises:
            OptionError: If the port cannot be had.
        """
        self.token = secrets.token_urlsafe(24)
        self._server = _listening(port, text, self.token)
        self.port = int(self._server.server_address[1])
        self.token_path = run_dir / TOKEN_FILE
        try:
            self.token_path.touch(0o600)
            self.token_path.write_text(self.token, encoding="utf-8")
        except BaseException:
            self._server.server_close()
            raise
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="nbdist-prometheus",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the numbers, for this host alone."""
        return f"http://{LOOPBACK}:{self.port}/metrics"

    def close(self) -> None:
        """Listen no more. Twice is harmless."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self._thread.join(END_S)
        self.token_path.unlink(missing_ok=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = SILENT_S
    server_version = "nbdist"
    sys_version = ""
    server: _Server

    def do_GET(self) -> None:
        """Answer with the numbers, to those who have the token."""
        url = urllib.parse.urlsplit(self.path)
        # In constant time: how long it takes says nothing of how much of it was right.
        if not hmac.compare_digest(self._token_of(url.query), self.server.token.encode()):
            self._answer(HTTPStatus.UNAUTHORIZED, "this request needs the token\n")
        elif url.path not in {"/", "/metrics"}:
            self._answer(HTTPStatus.NOT_FOUND, "only /metrics is served\n")
        else:
            try:
                status, body = HTTPStatus.OK, self.server.text()
            except Exception as error:  # noqa: BLE001  # for whoever has asked, not the notebook
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                body = f"{type(error).__name__}: {error}\n"
            self._answer(status, body)

    def _token_of(self, query: str) -> bytes:
        header = self.headers.get("Authorization", "")
        if header.startswith(_BEARER):
            return header.removeprefix(_BEARER).strip().encode("utf-8", "replace")
        tokens = urllib.parse.parse_qs(query).get("token", [""])
        return tokens[0].encode("utf-8", "replace")

    def _answer(self, status: HTTPStatus, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Bearer realm="nbdist"')
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # http.server's name
        """Nothing: it would be written into the notebook's cells."""


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, text: Callable[[], str], token: str):
        self.text = text
        self.token = token
        super().__init__((LOOPBACK, port), _Handler)

    def handle_error(self, *_: Any) -> None:
        """Nothing: somebody has hung up, which concerns no cell of the notebook."""


def _listening(port: int, text: Callable[[], str], token: str) -> _Server:
    try:
        return _Server(port, text, token)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} of {LOOPBACK} is in use"
        elif error.errno == errno.EACCES:
            why = f"port {port} is reserved for the system's own services"
        else:
            why = f"port {port} of {LOOPBACK} cannot be opened ({error.strerror})"
        raise OptionError(
            f"{why}. Choose another one from 1024 to 65535, or 0 for any that is free."
        ) from error
