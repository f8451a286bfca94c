"""Requests to a run with fake tensors and its answers, and how both become text."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.planner.memory import Memory
from nbdist.planner.workload import Workload
from nbdist.strategy.choice import Strategy

NAME = "fake run"
# A message begins so, as cluster/agent/agent.py has it.
MARK = "nbdist-agent "


@dataclass(frozen=True, slots=True)
class Source:
    """The description with which a process makes a model without memory.

    Attributes:
        config: Of a model of transformers, as in its config.json; empty for another one.
        pickled: By planner.fake.pickle_by_value: a live model, its inputs and its optimizer; empty
        else.
        sys_path, folder: Where the live model's own modules are found.
        has_optimizer: The live model's own optimizer counts, not that of the load.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    pickled: bytes = b""
    sys_path: tuple[str, ...] = ()
    folder: str = ""
    has_optimizer: bool = True


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """Asks for one fake run of a model under a strategy.

    Attributes:
        source: None for that of the run before.
        choice, load: As for planner.memory.memory_of.
    """

    source: Source | None
    choice: Strategy
    load: Workload


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """The counts of a fake run, or the reason why it failed.

    Attributes:
        memory: With `is_partial` where states are exact but no step could be run; None where
            nothing could be counted.
        refused: The strategy does not go with the model, as `prepare` would say it.
        problem: Why there was no run, or none of a whole step; a phrase.
    """

    memory: Memory | None = None
    refused: str = ""
    problem: str = ""


def pack(record: FakeRequest | FakeAnswer) -> str:
    """A record as text for a line of JSON."""
    return base64.b64encode(pickle.dumps(record)).decode()


def unpack(text: str) -> Any:
    """The record; both ends are processes of the same user and of this package."""
    return pickle.loads(base64.b64decode(text))  # noqa: S301
