"""A real notebook kernel under test, driven as a notebook front end drives it."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.channels import ZMQSocketChannel
from jupyter_client.manager import KernelManager

from tests.support.cells import Cell, Handle, Notebook

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 15.0
_POLL_S = 0.2  # how often a wait looks whether the kernel still lives
_LOG_TAIL = 2000


class KernelDiedError(Exception):
    """The kernel ended while somebody waited for it; the message has its log."""


class Kernel:
    """An ipykernel in its own process, driven as a notebook front end drives it.

    Nothing here sleeps: each wait is for messages, has a deadline, and past it raises with the
    outputs so far. Messages are read only while a method waits.
    """

    def __init__(self, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self._cwd = cwd
        self._env = notebook_env(env)
        self._notebook = Notebook()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by shutdown
        self._manager = KernelManager(kernel_name="python3")
        self._client: BlockingKernelClient | None = None

    def __enter__(self) -> Self:
        try:
            self._manager.start_kernel(
                cwd=str(self._cwd or Path.cwd()),
                env=self._env,
                stdout=self._log,
                stderr=self._log,
                # A history file shared by many kernels can be locked, which IPython prints; and
                # Jedi reads sources for seconds, where all that is completed here is live.
                extra_arguments=[
                    "--HistoryManager.hist_file=:memory:",
                    "--IPCompleter.use_jedi=False",
                ],
            )
            self._connect()
        except BaseException:
            self.shutdown(now=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def pid(self) -> int:
        pid = getattr(self._manager.provisioner, "pid", None)
        assert isinstance(pid, int), "the kernel has not been started"
        return pid

    @property
    def log(self) -> str:
        """What the process wrote past the notebook, to its own stdout and stderr."""
        if self._log.closed:
            return ""
        # pread: a seek would also move where the kernel, which shares the file, writes next
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")

    def is_alive(self) -> bool:
        return bool(self._manager.is_alive())

    def run(self, code: str, timeout_s: float = 60.0, **history: bool) -> Cell:
        """Run one cell to its end, whatever that end is; `history` as of `start`.

        Raises:
            TimeoutError: If it has not ended after `timeout_s`; it still runs then.
            KernelDiedError: If the kernel died under it.
        """
        return self.finish(self.start(code, **history), timeout_s)

    def run_all(self, codes: Iterable[str], timeout_s: float = 60.0) -> list[Cell]:
        """Send all cells at once, as Run All does, and collect each; `timeout_s` is for all.

        A cell's seconds count from that common start.
        """
        deadline = time.monotonic() + timeout_s
        handles = [self.start(code) for code in codes]
        return [self.finish(handle, deadline - time.monotonic()) for handle in handles]

    def start(self, code: str, *, silent: bool = False, store_history: bool = True) -> Handle:
        """Send a cell and return at once; queued behind what already runs."""
        sent_s = time.monotonic()
        msg_id = self._connected().execute(
            code, silent=silent, store_history=store_history, allow_stdin=False, stop_on_error=True
        )
        handle = Handle(msg_id)
        self._notebook.sent(handle, sent_s)
        return handle

    def finish(self, handle: Handle, timeout_s: float = 60.0) -> Cell:
        """Wait for a cell's reply and the end of its output. Raises as `run`."""
        self._wait(handle, lambda: self._notebook.is_done(handle), timeout_s, "the end")
        return self._notebook.cell(handle)

    def wait_output(self, handle: Handle, text: str, timeout_s: float = 30.0) -> Cell:
        """Wait until `text` stands in a cell's outputs, ended or not. Raises as `run`."""

        shown = self._notebook.visible
        self._wait(handle, lambda: text in shown(handle), timeout_s, f"the output {text!r}")
        return self._notebook.cell(handle)

    def so_far(self, handle: Handle) -> Cell:
        """The cell as it stands, with late outputs and display updates that came after its end."""
        while self._receive(0):
            pass
        return self._notebook.cell(handle)

    def complete(
        self, code: str, cursor: int | None = None, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        """The kernel's reply to Tab at a place of a cell, its end without one. While it is idle."""
        reply = self._connected().complete(code, cursor, reply=True, timeout=timeout_s)
        return dict(reply["content"])

    def inspect(
        self, code: str, cursor: int | None = None, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        """Its reply to Shift-Tab. While it is idle."""
        reply = self._connected().inspect(code, cursor, reply=True, timeout=timeout_s)
        return dict(reply["content"])

    def interrupt(self) -> None:
        """Interrupt as the stop button does: SIGINT to the kernel's process group."""
        self._manager.interrupt_kernel()

    def restart(self, *, now: bool = False) -> None:
        """Restart and wait until the new process answers; `now` kills the old one unasked."""
        self._disconnect()
        self._manager.restart_kernel(now=now)
        self._connect()

    def shutdown(self, *, now: bool = False) -> None:
        """Stop the kernel, harmless when it has ended; `now` kills its process group unasked."""
        self._disconnect()
        if self._manager.has_kernel and self._manager.is_alive():
            self._manager.shutdown_kernel(now=now)
        elif self._manager.has_kernel:
            self._manager.cleanup_resources()
        self._log.close()

    def kill(self) -> None:
        """SIGKILL the kernel's own process, and nothing else, and wait for its end."""
        process = getattr(self._manager.provisioner, "process", None)
        assert process is not None, "the kernel has not been started"
        process.kill()
        process.wait(_END_TIMEOUT_S)

    def _connect(self) -> None:
        self._client = self._manager.blocking_client()
        self._client.start_channels(stdin=False, hb=False)
        try:
            self._client.wait_for_ready(timeout=_START_TIMEOUT_S)
        except RuntimeError as error:
            raise KernelDiedError(f"{error}. Its log:\n{self.log[-_LOG_TAIL:]}") from error

    def _connected(self) -> BlockingKernelClient:
        assert self._client is not None, "the kernel is not running"
        return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
            self._client = None

    def _wait(
        self, handle: Handle, is_over: Callable[[], bool], timeout_s: float, waiting_for: str
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_over():
            was_alive = self.is_alive()  # before the last look, so nothing it sent is missed
            remaining_s = deadline - time.monotonic()
            has_news = self._receive(max(0.0, min(_POLL_S, remaining_s)))
            if not has_news and not was_alive:
                raise KernelDiedError(self._report(handle, f"died before {waiting_for}"))
            if remaining_s <= 0:  # also in the middle of endless output
                raise TimeoutError(self._report(handle, f"did not reach {waiting_for} in time"))

    def _receive(self, timeout_s: float) -> bool:
        """Take what has arrived, waiting up to `timeout_s` for the first message."""
        channels = self._channels()
        poller = zmq.Poller()
        for socket in channels:
            poller.register(socket, zmq.POLLIN)
        ready = poller.poll(int(timeout_s * 1000))
        for socket, _ in ready:
            self._notebook.receive(channels[socket].get_msg(timeout=0))
        return bool(ready)

    def _channels(self) -> dict[Any, ZMQSocketChannel]:
        client = self._connected()
        return {channel.socket: channel for channel in (client.iopub_channel, client.shell_channel)}

    def _report(self, handle: Handle, what: str) -> str:
        cell = self._notebook.cell(handle)
        return (
            f"The cell {what} (status {cell.status} after {cell.seconds:.1f} s). "
            f"Outputs so far:\n{cell.visible or '(none)'}\n"
            f"Kernel log:\n{self.log[-_LOG_TAIL:] or '(empty)'}"
        )


# Behind %load_ext with NBDIST_PRELOAD=1: ranks are forked with all imports from then on.
IMPORTED = """
import time as _time
from nbdist.cluster.kernel import rank_server as _server
_end_s = _time.monotonic() + 60
while not (_server.is_ready() or _server.why_not()) and _time.monotonic() < _end_s:
    _time.sleep(0.02)
assert _server.is_ready() or _server.why_not(), "after 60 s the imports for ranks were not done"
"""


def notebook_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a kernel or server under test: this one's, one thread, and `extra`.

    NBDIST_PRELOAD=0: what no cell uses need not be imported, in hundreds of processes.
    PYTEST_* is left out: with PYTEST_CURRENT_TEST set, ipykernel does not capture the output of C
    code and child processes (ipykernel/iostream.py), so a test would see another kernel.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return inherited | {"OMP_NUM_THREADS": "1", "NBDIST_PRELOAD": "0"} | dict(extra or {})


def run_python(
    *words: str, cwd: Path | None = None, timeout_s: float = 100, **env: str
) -> subprocess.CompletedProcess[str]:
    """Another Python with these arguments, which imports this nbdist wherever it runs."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd, env=notebook_env({"PYTHONPATH": str(_ROOT), **env}), timeout=timeout_s,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
