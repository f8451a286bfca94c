"""A notebook's kernel in a process of its own, its cells timed as a front end sees them."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jupyter_client.manager import KernelManager

DEADLINE_S = 300.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Ran:
    """A cell that has ended.

    Attributes:
        elapsed_s: From sending it to its reply and the last of its output.
        text: What it has printed and displayed, as plain text.
    """

    elapsed_s: float
    text: str


class Notebook:
    """A kernel. A context manager: it ends the kernel; ranks are ended by a cell before that."""

    def __init__(self, folder: Path, **env: str) -> None:
        """Start it and wait until it answers.

        Args:
            folder: Where it runs, and where its settings are; an empty one.
            env: More variables of its environment.
        """
        settings = {
            name: str(folder / name.lower()) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR")
        }
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(
            cwd=str(folder),
            env=os.environ | settings | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | env,
            extra_arguments=["--HistoryManager.hist_file=:memory:"],
        )
        self._client: Any = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel()

    @property
    def pid(self) -> int:
        """The kernel's process."""
        pid: int = self._manager.provisioner.pid  # type: ignore[union-attr]
        return pid

    def run(self, code: str) -> Ran:
        """Run a cell to its end.

        Raises:
            RuntimeError: If it fails; the message has what it has shown.
            TimeoutError: If it has not ended after DEADLINE_S.
        """
        texts: list[str] = []
        began_s = time.perf_counter()
        reply = self._client.execute_interactive(
            code, timeout=DEADLINE_S, output_hook=lambda message: texts.append(_text(message))
        )
        elapsed_s = time.perf_counter() - began_s
        shown = _COLOURS.sub("", "".join(texts))
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{code}\n{shown[-3000:]}")
        return Ran(elapsed_s, shown)

    def begin(self, code: str) -> None:
        """Send a cell and do not wait for it."""
        self._client.execute(code)


def _text(message: Any) -> str:
    content = message["content"]
    if message["msg_type"] == "stream":
        return str(content["text"])
    if message["msg_type"] == "error":
        return "\n".join(content["traceback"])
    return str(content.get("data", {}).get("text/plain", ""))
