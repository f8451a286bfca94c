"""Tokens that the experts of a model got on all ranks, by layer and expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """Counts of one model by the ranks; a token counts once for each of its experts.

    Attributes:
        ranks: Rank -> tokens that its experts computed.
        layers: Name of a layer's experts -> tokens by expert, of all its copies together.
        shares: The ranks that have the first experts of each layer, those with the next, and so on.
    """

    ranks: Mapping[int, int]
    layers: Mapping[str, Counter[int]]
    shares: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, counted: Mapping[int, Mapping[str, Any]]) -> Self:
        """From each rank's `layers` (tokens of each expert there) and which `share` these are."""
        layers: dict[str, Counter[int]] = {}
        for counts in counted.values():
            for layer, tokens in counts["layers"].items():
                first = counts["share"] * len(tokens)
                numbered = {first + number: count for number, count in enumerate(tokens)}
                layers.setdefault(layer, Counter()).update(numbered)
        ranks = {rank: sum(map(sum, counts["layers"].values())) for rank, counts in counted.items()}
        shares: dict[int, tuple[int, ...]] = {}
        for rank, counts in sorted(counted.items(), key=lambda item: item[1]["share"]):
            shares[counts["share"]] = (*shares.get(counts["share"], ()), rank)
        return cls(ranks, layers, tuple(shares.values()))

    @property
    def total(self) -> int:
        """Tokens of all layers."""
        return sum(self.ranks.values())

    @property
    def busiest_rank(self) -> tuple[int, float]:
        """(the rank that computed most, how many times the mean of all ranks that is)."""
        rank = max(self.ranks, key=lambda rank: self.ranks[rank])
        return rank, self.ranks[rank] * len(self.ranks) / max(1, self.total)

    @property
    def busiest_expert(self) -> tuple[str, int, float]:
        """(layer, expert, its share of that layer's tokens), of the largest share."""
        layer, counts = max(self.layers.items(), key=lambda item: _largest(item[1]))
        return layer, counts.most_common(1)[0][0], _largest(counts)

    def even(self, layer: str) -> float:
        """The share of each expert of a layer if all got as many."""
        return 1 / len(self.layers[layer])


def _largest(counts: Counter[int]) -> float:
    return max(counts.values()) / max(1, counts.total())
