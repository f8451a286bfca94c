"""The page of `remote` for how far ranks are: what their control threads answer, by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nbdist.core.progress import Progress
from nbdist.rpc.kernel.functions import Caller


def progress(ask: Caller, engine: int) -> Future[Progress | None]:
    """How far the rank is in what takes long; None where it does nothing of the kind."""
    return ask(engine, "progress")


CONTROL_FUNCTIONS: dict[Callable[..., Future[Any]], str] = {progress: progress.__name__}
