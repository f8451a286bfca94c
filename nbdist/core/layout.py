"""Which part of a tensor each rank holds, and who sends what to whom when that changes."""

from __future__ import annotations

from dataclasses import dataclass

# Pieces of one dim that lie one behind the other in a rank's local tensor: (start in the
# whole tensor, length).
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one parameter or buffer lies on the ranks of a mesh.

    First the stages, then tp splits, then dp_shard splits what tp has left. A split is
    torch.chunk's: pieces of ceil(n / degree), the last ones shorter or empty.

    Attributes:
        shape: Of the whole tensor.
        stages: Coordinates along pp that hold it; None for all.
        tp_dim: The dim that tp splits; None if each rank along tp has all of it.
        tp_parts: How many parts of equal length lie side by side in tp_dim, each split for
            itself: 3 where query, key and value are one weight.
        shard_dim: The dim that dp_shard splits; None if each rank along it has all of it.
        ranks: The only ranks that hold it (the optimizer's state under zero1); None for all
            that the axes name.
    """

    shape: tuple[int, ...]
    stages: frozenset[int] | None = None
    tp_dim: int | None = None
    tp_parts: int = 1
    shard_dim: int | None = None
    ranks: frozenset[int] | None = None
