"""Time of a message as latency and bandwidth, fitted to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Fit:
    """The time of one operation as latency and bandwidth: t = alpha + wire bytes * beta.

    Attributes:
        alpha_s: Time of a message without content.
        beta_s: Seconds per byte on the wire: 1 over the bus bandwidth of large messages.
        error: Half of the sizes are predicted this well or better: |predicted / measured - 1|.
        sizes: How many sizes it was fitted to.
    """

    alpha_s: float
    beta_s: float
    error: float
    sizes: int


# Rounds of reweighting; it stands still after ten or so. Residuals beyond HUBER spreads count
# as outliers. Source: P. J. Huber, Robust Statistics (1981), section 7.8.
_ROUNDS = 30
_HUBER = 1.345


def fit(wire_bytes: Sequence[float], times_s: Sequence[float]) -> Fit:
    """Latency and seconds per byte by robust least squares in the relative error.

    The relative error counts small and large messages alike; a size that was disturbed counts
    little. Neither result is negative.
    """
    x, t = np.asarray(wire_bytes, float), np.asarray(times_s, float)
    weights = np.ones_like(t)
    alpha, beta = 0.0, 0.0
    for _ in range(_ROUNDS):
        alpha, beta = _least_squares(x, t, weights)
        residuals = np.abs((alpha + beta * x) / t - 1)
        spread = max(1.4826 * float(np.median(residuals)), 1e-9)
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-12))
    error = float(np.median(np.abs((alpha + beta * x) / t - 1)))
    return Fit(alpha, beta, error, len(t))


def _least_squares(x: Floats, t: Floats, weights: Floats) -> tuple[float, float]:
    """(alpha, beta), not negative, that make (alpha + beta x) / t closest to 1."""
    root = np.sqrt(weights)
    columns = np.stack([root / t, root * x / t], axis=1)
    # Bytes are large numbers and seconds small ones: scaled, so that both columns count.
    scale = np.linalg.norm(columns, axis=0)
    alpha, beta = np.linalg.lstsq(columns / scale, root, rcond=None)[0] / scale
    if alpha < 0:
        alpha, beta = 0.0, _alone(columns[:, 1], root)
    elif beta < 0:
        alpha, beta = _alone(columns[:, 0], root), 0.0
    return float(alpha), float(beta)


def _alone(column: Floats, target: Floats) -> float:
    return float(column @ target / (column @ column))
