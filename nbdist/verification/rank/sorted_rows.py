"""Tensors whose rows a model sorts over the batch, as a mixture of experts sorts tokens.

A rank has its own rows, sorted among themselves; those of the reference are sorted among the rows
of all ranks. So places say nothing there, and each row is compared with the nearest one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nbdist.parallel.base.consensus import all_gather_object
from nbdist.verification.differences import TensorKey

# A row is taken for another one that differs by no more than this share of a row's size.
_NEAR = 0.05
# Rows here times rows of the reference: what is larger is compared by places alone.
_MOST_PAIRS = 2**22
# How often nearer rows have to be than places, to be taken.
_BETTER = 10.0


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor of this rank, and the whole one of the reference.

    Attributes:
        error: By places, as a share of the reference's size; inf where no places fit.
        share: The rows that are this rank's where rows are in the order of the batch.
    """

    here: torch.Tensor
    whole: torch.Tensor
    error: float
    share: range

    @property
    def is_suspect(self) -> bool:
        """Whether places say that it is wrong, or nothing."""
        return not self.error <= _NEAR


def matches(
    tables: Mapping[TensorKey, Rows], peers: Sequence[int]
) -> dict[TensorKey, torch.Tensor]:
    """Key -> for each row here its row of the reference. Collective: every rank, in this order.

    Only where nearest rows explain what places do not: on all peers, and together they have every
    row of the reference. Rows of the own share in another order are a mistake, and no match.
    """
    suspects = all_gather_object({key for key, rows in tables.items() if rows.is_suspect})
    keys = set().union(*suspects)
    nearest: dict[TensorKey, tuple[torch.Tensor, torch.Tensor]] = {}
    for key, rows in tables.items():
        if key in keys:
            match = _match(rows)
            if match is not None:
                nearest[key] = match
            elif math.isfinite(rows.error):  # what is wrong here is wrong in all that follows
                break
    of_ranks = all_gather_object({key: has_row for key, (_, has_row) in nearest.items()})
    return {
        key: rows
        for key, (rows, _) in nearest.items()
        if all(key in of_ranks[peer] for peer in peers)
        and bool(torch.stack([of_ranks[peer][key] for peer in peers]).any(0).all())
    }


def _match(rows: Rows) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Match each row with the reference's nearest, and say which of these are here; or None."""
    here, whole = (t.flatten(1).double() for t in (rows.here, rows.whole))
    if here.shape[0] * whole.shape[0] > _MOST_PAIRS:
        return None
    distances = torch.cdist(here, whole, compute_mode="donot_use_mm_for_euclid_dist")
    limit = _NEAR * float(whole.norm()) / max(1, whole.shape[0]) ** 0.5
    nearest, index = distances.min(1)
    size = float(whole[index].norm())
    error = float(nearest.norm()) / size if size else 0.0
    is_own = math.isfinite(rows.error) and all(int(row) in rows.share for row in index)
    if rows.is_suspect and (is_own or not error <= min(_NEAR, rows.error / _BETTER)):
        return None
    return index, distances.min(0).values <= limit
