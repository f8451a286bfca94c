"""Floating-point types that numpy lacks, as float32 of exactly the same values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class _Small:
    """How the eight bits of a small float are to be read: sign, exponent, mantissa.

    Attributes:
        mantissa_bits: The lowest bits; the exponent has the others but one.
        bias: Taken off the exponent.
        kind: "ieee" has infinities, "fn" only NaN, "fnuz" neither those nor a negative zero.
    """

    mantissa_bits: int
    bias: int
    kind: str


# Source: OCP 8-bit Floating Point Specification 1.0; fnuz as in arXiv 2206.02915.
_SMALL = {
    "float8_e4m3fn": _Small(3, 7, "fn"),
    "float8_e5m2": _Small(2, 15, "ieee"),
    "float8_e4m3fnuz": _Small(3, 8, "fnuz"),
    "float8_e5m2fnuz": _Small(2, 16, "fnuz"),
}
# The types of torch that `to_float32` takes, with numpy's type for their bits.
BITS = {
    "bfloat16": "uint16",
    "float8_e8m0fnu": "uint8",
    **dict.fromkeys(_SMALL, "uint8"),
}


def to_float32(bits: np.ndarray, name: str) -> np.ndarray:
    """The same values as float32, in the same shape.

    Args:
        bits: Of the numpy type that BITS has for the name.
        name: Of torch's type, without `torch.`.
    """
    flat: np.ndarray = bits.reshape(-1)  # 0-dim arrays would become scalars
    if name == "bfloat16":
        found: np.ndarray = (flat.astype(np.uint32) << 16).view(np.float32)
    else:
        found = (_powers() if name == "float8_e8m0fnu" else _table(_SMALL[name]))[flat]
    return np.asarray(found).reshape(bits.shape)


def _powers() -> np.ndarray:
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


def _table(form: _Small) -> np.ndarray:
    """The value of each of the 256 patterns."""
    codes = np.arange(256)
    top = (1 << (7 - form.mantissa_bits)) - 1
    exponent = codes >> form.mantissa_bits & top
    part = (codes & (1 << form.mantissa_bits) - 1) / (1 << form.mantissa_bits)
    is_normal = exponent > 0
    power = np.where(is_normal, exponent, 1) - form.bias
    values: np.ndarray = np.ldexp(is_normal + part, power) * np.where(codes >> 7, -1, 1)
    if form.kind == "fnuz":
        values[0x80] = np.nan
    elif form.kind == "fn":
        values[[0x7F, 0xFF]] = np.nan
    else:
        is_last = exponent == top
        values[is_last] = np.where(part[is_last] == 0, np.copysign(np.inf, values[is_last]), np.nan)
    return values.astype(np.float32)
