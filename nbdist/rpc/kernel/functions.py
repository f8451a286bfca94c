"""Functions that the notebook calls on its ranks, by name: each feature declares its own.

The kernel never imports the engine's modules. A test finds every declaration, resolves its name
and compares its types with the function's own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


# Calls a function on one rank or engine, by its name; a future of the function's result.
Caller = Callable[Concatenate[int, str, ...], Future[Any]]


@dataclass(frozen=True)
class RankFunction(Generic[P, T]):
    """A function on a rank: its parameters and its result stand in the declaration.

    Attributes:
        name: "module:function" for one that the rank's main thread runs between its cells; a word
            for what its control thread answers at any time, as the table in
            nbdist/engine/responder.py has it.
    """

    name: str

    def __call__(self, call: Caller, rank: int, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """A future of the result on a rank; for a caller that knows engines, on an engine.

        What crosses the wire has no names, so there are no `kwargs`.
        """
        assert not kwargs
        return call(rank, self.name, *args)


ping: RankFunction[[], str] = RankFunction("ping")
