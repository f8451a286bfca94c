"""The classes of the prepared models' blocks, as configurations name them."""

from __future__ import annotations

from nbdist.errors import OptionError
from nbdist.parallel.base.blocks import find_blocks
from nbdist.parallel.live import build
from nbdist.parallel.live.registry import current, prepared


def block_classes() -> tuple[str, ...]:
    """Names of the classes of blocks, each once; none of a model without a list of blocks.

    Meets no rank, and changes nothing.
    """
    names: dict[str, None] = {}
    for model in prepared():
        with build.bare(model.built):
            try:
                blocks = find_blocks(model.base, current().options.blocks)
            except OptionError:  # it has none, or several; nobody has asked for them yet
                continue
            names |= dict.fromkeys(type(block).__name__ for block in blocks.modules)
    return tuple(names)
