"""How a process of the cluster ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass

# What becomes of ranks whose controller has ended.
WITHOUT_CONTROLLER = (
    "The ranks go on and keep their variables, but what they print and reply now is lost. The "
    "next cell starts another controller."
)


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
