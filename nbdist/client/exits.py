"""How a process of the cluster ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one of the cluster's processes.

    Attributes:
        engine: The engine, or None for the controller.
        code: Its exit code, negative for a signal; None where it cannot be known.
    """

    engine: int | None
    code: int | None

    @property
    def how(self) -> str:
        """`exit code 1`, `signal SIGKILL`."""
        if self.code is None:
            return "unknown exit code"
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"signal {signal.Signals(-self.code).name}"
        except ValueError:
            return f"signal {-self.code}"
