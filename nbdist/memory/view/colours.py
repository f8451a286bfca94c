"""What each category of memory looks like, and in which order they lie on each other."""

from __future__ import annotations

from nbdist.memory.snapshot import (
    ACTIVATION,
    BUFFER,
    CATEGORIES,
    COMMUNICATION,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    TEMPORARY,
    UNKNOWN,
)

# Okabe and Ito's colours, which people with any colour vision tell apart, but for grey. From the
# bottom: what stays the longest lies lowest, so that it is level.
_COLOUR_OF = {
    PARAMETER: "#0072b2",
    BUFFER: "#56b4e9",
    OPTIMIZER: "#009e73",
    GRADIENT: "#d55e00",
    ACTIVATION: "#e69f00",
    COMMUNICATION: "#cc79a7",
    TEMPORARY: "#f0e442",
    UNKNOWN: "#8a8a8a",
}
ORDER = tuple(_COLOUR_OF)
COLOURS = {CATEGORIES[category]: colour for category, colour in _COLOUR_OF.items()}
# Classes (2 x category + is_exact) from the bottom: of each category the exact part first.
LAYERS = tuple(2 * category + is_exact for category in ORDER for is_exact in (1, 0))
# What is guessed has stripes of this share of the background, as wide and as far apart as that.
PALER = 0.55
STRIPE, PERIOD = 2, 6
