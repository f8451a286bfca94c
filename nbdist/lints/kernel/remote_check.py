"""The page of `remote` that checks are made with: functions of the engines, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from nbdist.lints.replicas import Difference, ModelLook
from nbdist.rpc.kernel.functions import Caller

CHECKUP = "nbdist.lints.rank.replicas"
EVERY = "nbdist.lints.rank.check_every"
TRACE = "nbdist.lints.rank.trace_nan"


def look(call: Caller, engine: int) -> Future[tuple[ModelLook, ...]]:
    """The rank's models: digests, and what is not finite."""
    return call(engine, f"{CHECKUP}:look")


def spread(call: Caller, engine: int, wanted: Sequence[Difference]) -> Future[list[float]]:
    """How far tensors are apart between ranks. On every rank at once, with the same list."""
    return call(engine, f"{CHECKUP}:spread", tuple(wanted))


def set_every(call: Caller, engine: int, every: int) -> Future[None]:
    """Let the rank look before each so manieth step; 0 ends it."""
    return call(engine, f"{EVERY}:set_every", every)


def trace_nan(call: Caller, engine: int) -> Future[None]:
    """Let the rank find the first module of its next cell whose output is not finite."""
    return call(engine, f"{TRACE}:trace_nan")


REMOTE_FUNCTIONS: dict[Callable[..., Future[Any]], str] = {
    look: f"{CHECKUP}:look",
    set_every: f"{EVERY}:set_every",
    spread: f"{CHECKUP}:spread",
    trace_nan: f"{TRACE}:trace_nan",
}
