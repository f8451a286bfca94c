"""Fits the constants of the model of time that no source has: python -m tests.accuracy.fit.

The rule: of vTrain's and of llm-foundry's models, in order of size, every second one (the second,
the fourth ...). Both sets weigh the same. What is minimized is the square of the logarithm of
predicted by measured, beyond 15 % its absolute value; a constant moves away from where it begins
as far as its spread, in logarithms, says. The product has the result, rounded.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from nbdist.planner.block_time import Speeds
from tests.accuracy.steps import Step, fitted_names, llm_foundry, vtrain

# Name -> where it begins, and its spread in logarithms.
BEGIN: Mapping[str, tuple[float, float]] = {
    "a100": (0.84, 0.1), "h100": (0.68, 0.2), "attention": (0.5, 0.4), "streams": (0.7, 0.4),
    "network": (0.6, 0.4), "contention": (0.05, 0.8),
}  # fmt: skip
DEVICES = ("a100", "h100")
_ROUNDS = 6
_FAR = 0.15  # from here on an outlier counts less
_NOISE = 0.08
_STEP = 0.02


def fit(steps: Sequence[Step]) -> dict[str, float]:
    """The constants that fit these steps best, by name."""
    counts = Counter(step.source for step in steps)
    weights = np.array([10 / counts[step.source] ** 0.5 for step in steps])
    measured = np.log([step.measured_s for step in steps])
    spreads = np.array([spread for _, spread in BEGIN.values()])
    moved = np.zeros(len(BEGIN))
    for _ in range(_ROUNDS):
        rest = measured - _predicted(steps, moved)
        units = _STEP * np.eye(len(moved))
        slopes = np.stack(
            [
                (_predicted(steps, moved + unit) - _predicted(steps, moved - unit)) / (2 * _STEP)
                for unit in units
            ],
            axis=1,
        )
        softened = np.minimum(1, _FAR / np.maximum(np.abs(rest), 1e-9)) ** 0.5
        scale = weights * softened / _NOISE
        normal = (slopes * scale[:, None]).T @ (slopes * scale[:, None]) + np.diag(spreads**-2)
        wanted = (slopes * scale[:, None]).T @ (rest * scale) - moved / spreads**2
        moved = moved + np.clip(np.linalg.solve(normal, wanted), -0.3, 0.3)
    return dict(zip(BEGIN, _values(moved), strict=True))


def halves() -> tuple[list[Step], list[Step]]:
    """The steps that constants are fitted on, and the rest of both sets."""
    fitted: list[Step] = []
    rest: list[Step] = []
    for steps in (list(vtrain()), list(llm_foundry())):
        names = fitted_names(steps)
        fitted += [step for step in steps if step.name in names]
        rest += [step for step in steps if step.name not in names]
    return fitted, rest


def times_by(step: Step, constants: Mapping[str, float]) -> float:
    """A step's prediction by constants of `fit`."""
    speeds = replace(Speeds(), **{k: v for k, v in constants.items() if k not in DEVICES})
    parts = {name: constants[name] for name in DEVICES}
    return step.predicted(speeds, parts).step_s


def _values(moved: npt.NDArray[np.float64]) -> list[float]:
    return [float(begin * np.exp(x)) for (begin, _), x in zip(BEGIN.values(), moved, strict=True)]


def _predicted(steps: Sequence[Step], moved: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    constants = dict(zip(BEGIN, _values(moved), strict=True))
    return np.log([times_by(step, constants) for step in steps])


if __name__ == "__main__":
    first, second = halves()
    for title, steps in (("the rule's half", first), ("the other half", second)):
        values = ", ".join(f"{name} {value:.3f}" for name, value in fit(steps).items())
        sys.stdout.write(f"{title}: {values}\n")
