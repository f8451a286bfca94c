"""Functions that the notebook calls on its ranks, by name: each feature declares its own.

The kernel never imports the engine's modules. A test finds every declaration, resolves its name
and compares its types with the function's own.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Caller(Protocol):
    """Something that can call a function by name on one rank or engine."""

    def __call__(self, target: int, name: str, /, *args: Any) -> Future[Any]:
        """A future of the function's result."""
        ...


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
        """A future of the result.

        Args:
            call: The way there.
            rank: Which; for a caller that knows engines, the engine.
            args: Of the function.
            kwargs: None: what crosses the wire has no names.
        """
        assert not kwargs
        return call(rank, self.name, *args)


ping: RankFunction[[], str] = RankFunction("ping")
