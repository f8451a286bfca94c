"""What each category of memory looks like, and in which order they lie on each other."""

from __future__ import annotations

from nbdist.memory.snapshot import CATEGORIES

# Okabe and Ito's colours, which people with any colour vision tell apart, but for grey.
COLOURS = dict(
    zip(
        CATEGORIES,
        (
            "#0072b2",
            "#d55e00",
            "#009e73",
            "#56b4e9",
            "#e69f00",
            "#cc79a7",
            "#f0e442",
            "#8a8a8a",
        ),
        strict=True,
    )
)
# From the bottom: what stays the longest lies lowest, so that it is level.
ORDER = tuple(
    map(
        CATEGORIES.index,
        (
            "parameters",
            "buffers",
            "optimizer state",
            "gradients",
            "activations",
            "communication",
            "temporary",
            "unknown",
        ),
    )
)
# Classes (2 x category + is_exact) from the bottom: of each category the exact part first.
LAYERS = tuple(2 * category + is_exact for category in ORDER for is_exact in (1, 0))
# What is guessed has stripes of this share of the background, as wide and as far apart as that.
PALER = 0.55
STRIPE, PERIOD = 2, 6
