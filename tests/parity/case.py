"""A strategy that is compared with one process: as typed, with which model, and how close."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.torch_ranks import TorchRanks

LOG = "NBDIST_PARITY_LOG"
"""Names the JSON lines file that every comparison is added to."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far numbers may be from those of one process; None where they are only shown.

    Attributes:
        loss: Absolute, of each step's.
        gradients: Absolute, of gradients that are clipped to a norm of 0.5 over the model.
        parameters: Absolute, after some steps of AdamW, which makes much of small gradients.
    """

    loss: float
    gradients: float | None = None
    parameters: float | None = None


EXACT = 2e-6
# Moments are compared by their largest value, and drift over hundreds of steps; a lost one is 1.
LIMITS = {"loss": EXACT, "parameters": EXACT, "moments": 1e-5}
# Word of what is typed -> how close. In half precision the process by itself computes in it too.
ROUNDED = {
    # Gradients: bf16's relative error, 2 ** -8, of the norm 0.5. FSDP2's bf16 parameters round
    # more than autocast does: sums of residuals, and of a bias's gradient, are bf16 too.
    "--bf16": Tolerance(1.4e-3, 0.5 * 2**-8),
    "--fp16": Tolerance(1.2e-4, 1.2e-4),
    "--hook bf16": Tolerance(6e-5, 1.4e-3),
    "--hook fp16": Tolerance(3e-5, 1.2e-4),
    "--hook powersgd": Tolerance(7e-3),
}


# A token whose experts are nearly equal to its router may go to another one when bf16 rounds.
_ROUTED_BF16 = Tolerance(0.5 * 2**-8, 0.5 * 2**-8)
_MIXTURES = ("experts", "mixtral")


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: what is typed behind %dist_strategy, and a key of MODELS."""

    typed: str
    model: str = "plain"

    @property
    def tolerance(self) -> Tolerance:
        """How close it has to come."""
        if self.model in _MIXTURES and "--bf16" in self.typed:
            return _ROUTED_BF16
        tolerances = [tolerance for words, tolerance in ROUNDED.items() if words in self.typed]
        return tolerances[0] if tolerances else Tolerance(EXACT, EXACT, EXACT)


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of a table in docs/parity.md.

    Attributes:
        kind: row, switch or checkpoint.
        typed: The strategy; of a switch the one before, of a checkpoint the one that it was saved
            under.
        after: Of a switch, the strategy after it; of a checkpoint, under which it was loaded.
        n: Ranks; of a checkpoint, those that loaded it.
        loss, gradients, parameters: Largest difference to one process; None where not looked at.
        tolerance: That the loss's had to stay below.
        before_n: Of a checkpoint, how many ranks have saved it.
    """

    kind: str
    typed: str
    model: str
    n: int
    loss: float
    gradients: float | None
    parameters: float
    tolerance: float
    after: str = ""
    before_n: int = 0


def worst_of_ranks(
    ranks: TorchRanks, cases: Sequence[tuple[object, Mapping[str, float | None]]]
) -> list[dict[str, Any]]:
    """The largest differences of any rank in each comparison, none of which is too large.

    Args:
        ranks: They end with `differences`: for each case its differences, or an error's text.
        cases: For each what it is, for messages, and its limits; None where there is none.
    """
    results = [result["differences"] for result in ranks.results()]
    worst = []
    for number, (case, limits) in enumerate(cases):
        differences = [result[number] for result in results]
        for of_rank in differences:
            assert isinstance(of_rank, dict), f"{case}\n{of_rank}"
        values = {key: [of_rank[key] for of_rank in differences] for key in differences[0]}
        worst.append({key: None if None in each else max(each) for key, each in values.items()})
        far = {key: worst[-1][key] for key, limit in limits.items() if limit is not None}
        far = {key: value for key, value in far.items() if value and value > limits[key]}
        assert not far, (case, far)
    return worst


def record(measured: Measured) -> None:
    """Add a comparison to the file that NBDIST_PARITY_LOG names, if it names one."""
    path = os.environ.get(LOG)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(asdict(measured)) + "\n")
