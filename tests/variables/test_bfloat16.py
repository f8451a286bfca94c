"""Small floats become float32 of the same values; the expected ones are the standards' own."""

import math

import numpy as np
import pytest

from nbdist.variables import bfloat16

# Bits -> value, from the tables of the OCP specification and of arXiv 2206.02915.
_KNOWN = {
    "float8_e4m3fn": {0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x7E: 448.0,
                      0xFE: -448.0, 0x7F: math.nan, 0xFF: math.nan},
    "float8_e5m2": {0x00: 0.0, 0x01: 2**-16, 0x04: 2**-14, 0x3C: 1.0, 0x7B: 57344.0, 0x7C: math.inf,
                    0xFC: -math.inf, 0x7D: math.nan},
    "float8_e4m3fnuz": {0x01: 2**-10, 0x40: 1.0, 0x7F: 240.0, 0xFF: -240.0, 0x80: math.nan},
    "float8_e5m2fnuz": {0x01: 2**-17, 0x40: 1.0, 0x7F: 57344.0, 0x80: math.nan},
    "float8_e8m0fnu": {0x00: 2.0**-127, 0x7F: 1.0, 0x80: 2.0, 0xFE: 2.0**127, 0xFF: math.nan},
    "bfloat16": {0x0000: 0.0, 0x3F80: 1.0, 0xC049: -3.140625, 0x7F80: math.inf, 0x7FC0: math.nan,
                 0x0001: 2.0**-133},
}  # fmt: skip


@pytest.mark.parametrize("name", bfloat16.BITS)
def test_known_patterns_have_their_values(name: str) -> None:
    """The largest, the smallest, one, infinities and NaN of each type."""
    known = _KNOWN[name]
    bits = np.array(list(known), bfloat16.BITS[name])
    values = bfloat16.to_float32(bits, name)

    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.array(list(known.values()), np.float32))


@pytest.mark.parametrize("shape", [(), (0,), (1, 1), (2, 3)])
def test_the_shape_stays(shape: tuple[int, ...]) -> None:
    """Arrays without dims or elements too."""
    for name, kind in bfloat16.BITS.items():
        assert bfloat16.to_float32(np.zeros(shape, kind), name).shape == shape


def test_a_negative_zero_is_kept() -> None:
    """Where the type has one."""
    for name, bits in {"float8_e4m3fn": 0x80, "float8_e5m2": 0x80, "bfloat16": 0x8000}.items():
        value = bfloat16.to_float32(np.array([bits], bfloat16.BITS[name]), name)

        assert (value[0], np.signbit(value[0])) == (0, True)
