"""The page of `remote` that weights are exported with: functions of the engines, by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nbdist.checkpoint.safetensors import Exported
from nbdist.rpc.kernel.functions import Caller

WEIGHTS = "nbdist.checkpoint.rank.export_weights"


def export_weights(call: Caller, engine: int, name: str, path: str) -> Future[Exported]:
    """Write a model's weights into one file. On every rank at once."""
    return call(engine, f"{WEIGHTS}:export_weights", name, path)


REMOTE_FUNCTIONS: dict[Callable[..., Future[Any]], str] = {
    export_weights: f"{WEIGHTS}:export_weights",
}
