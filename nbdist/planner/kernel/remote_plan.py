"""The page of `remote` that plans are made with: functions of the engines, by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nbdist.planner.check import Measured
from nbdist.planner.live_model import LiveModel
from nbdist.rpc.kernel.functions import Caller

CHECKED = "nbdist.planner.rank.check_step"
DESCRIBED = "nbdist.planner.rank.describe_model"
SKETCHED = "nbdist.planner.rank.describe_prepared"


def describe_model(call: Caller, engine: int, name: str, inputs: str) -> Future[LiveModel]:
    """What a variable on the rank is as a model."""
    return call(engine, f"{DESCRIBED}:describe_model", name, inputs)


def check_step(
    call: Caller, engine: int, name: str, inputs: str, batch: int, sequence: int
) -> Future[Measured]:
    """Measure a step of a model's variable, and put everything back. On every rank at once."""
    return call(engine, f"{CHECKED}:check_step", name, inputs, batch, sequence)


def sketch_models(call: Caller, engine: int) -> Future[tuple[LiveModel, ...]]:
    """What the prepared models of one rank are, whole, in the order of `prepared_sizes`."""
    return call(engine, f"{SKETCHED}:sketches")


REMOTE_FUNCTIONS: dict[Callable[..., Future[Any]], str] = {
    check_step: f"{CHECKED}:check_step",
    describe_model: f"{DESCRIBED}:describe_model",
    sketch_models: f"{SKETCHED}:sketches",
}
