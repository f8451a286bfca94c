"""Counts of this rank for its models' experts, for a picture in the notebook."""

from __future__ import annotations

from typing import Any

from nbdist.parallel.ep import tokens


def count() -> list[tuple[str, dict[str, Any]]]:
    """The class of each model whose experts are shared, and what was counted of them.

    Of the training forwards of the last cell; a model without any is left out. This rank alone.
    """
    return [(type(model.base).__name__, counts) for model, counts in tokens.of_models()]
