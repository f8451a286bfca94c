"""The classes of the prepared models' blocks, as configurations name them."""

from __future__ import annotations

from nbdist.engine.parallel import build
from nbdist.engine.parallel.blocks import find_blocks
from nbdist.engine.parallel.registry import current, prepared
from nbdist.errors import OptionError


def block_classes() -> tuple[str, ...]:
    """Names of the classes of blocks, each once; none of a model without a list of blocks.

    Meets no rank, and changes nothing.
    """
    found: dict[str, None] = {}
    for one in prepared():
        with build.bare(one.built):
            try:
                blocks = find_blocks(one.base, current().options.blocks)
            except OptionError:  # it has none, or several; nobody has asked for them yet
                continue
            found |= dict.fromkeys(type(block).__name__ for block in blocks.modules)
    return tuple(found)
