"""The page of `remote` for checkpoints: functions of the engines, by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nbdist.checkpoint.results import Begun, Loaded, Saving
from nbdist.rpc.kernel.functions import Caller

SAVE = "nbdist.checkpoint.rank.save"
LOAD = "nbdist.checkpoint.rank.load"


def begin_save(call: Caller, engine: int, path: str, token: str, is_async: bool) -> Future[Begun]:
    """Let a thread of the rank write its part of a checkpoint. On every rank at once."""
    return call(engine, f"{SAVE}:begin", path, token, is_async)


def load_checkpoint(call: Caller, engine: int, path: str, is_models_only: bool) -> Future[Loaded]:
    """Read a checkpoint into the rank's models and optimizers. On every rank at once."""
    return call(engine, f"{LOAD}:load", path, is_models_only)


def save_state(ask: Caller, engine: int, token: str) -> Future[Saving]:
    """How far the rank is with a save."""
    return ask(engine, "save_state", token)


def stop_save(ask: Caller, engine: int, token: str, why: str) -> Future[bool]:
    """Let the rank end a save that is going on."""
    return ask(engine, "stop_save", token, why)


REMOTE_FUNCTIONS: dict[Callable[..., Future[Any]], str] = {
    begin_save: f"{SAVE}:begin",
    load_checkpoint: f"{LOAD}:load",
}

CONTROL_FUNCTIONS: dict[Callable[..., Future[Any]], str] = {
    one: one.__name__ for one in (save_state, stop_save)
}
