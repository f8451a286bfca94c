"""Sizes of messages as they are typed and shown: 1K is 1024 bytes, as in nccl-tests."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbdist.errors import OptionError

ITEM_BYTES = 4  # float32
# From one size to the next in a range.
STEP = 4
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
LARGEST_BYTES = 2**40
DEFAULT_SIZES = {"nccl": "1K:1G", "gloo": "1K:64M"}


def parse_sizes(text: str | Sequence[int], n: int) -> tuple[int, ...]:
    """The sizes that are meant, rising, each a whole number of float32 per rank.

    Args:
        text: `4M`, `1K,1M`, a range `1K:1G` (each size is 4 times the one before; the end is
            always in it), or several of these with commas. Or numbers of bytes.
        n: Ranks. Sizes are rounded down to a multiple of n * 4 bytes.

    Raises:
        OptionError: If it has another form, or a size is too small or too large.
    """
    parts = text.split(",") if isinstance(text, str) else [str(size) for size in text]
    sizes = [size for part in parts for size in _range(part.strip())]
    unit = n * ITEM_BYTES
    if too_small := [size for size in sizes if size < unit]:
        raise OptionError(
            f"A size of {too_small[0]} bytes is less than one float32 for each of {n} ranks. "
            f"Use {unit} or more."
        )
    return tuple(sorted({size // unit * unit for size in sizes}))


def _range(text: str) -> list[int]:
    first, colon, last = text.partition(":")
    begin = _size(first, text)
    if not colon:
        return [begin]
    end = _size(last, text)
    if end < begin:
        raise OptionError(f"The sizes {text} go down. Write {last}:{first}.")
    sizes = []
    while begin < end:
        sizes.append(begin)
        begin *= STEP
    return [*sizes, end]


def _size(text: str, whole: str) -> int:
    match = re.fullmatch(r"(\d{1,13})([KMG]?)", text.strip().upper(), re.ASCII)
    if match is None or int(match[1]) == 0:
        what = f"{text!r} in {whole!r}" if text != whole else repr(text)
        raise OptionError(
            f"{what} is not a valid size. Write bytes such as 4096, 64K, 4M or 1G (K, M and G are "
            "1024, 1024^2 and 1024^3, as in nccl-tests), several with commas, or a range such as "
            "1K:1G."
        )
    size = int(match[1]) * UNITS[match[2]]
    if size > LARGEST_BYTES:
        raise OptionError(f"The size {text} is more than 1024G.")
    return size


def size_text(size_bytes: int) -> str:
    """`64 MiB`: in the largest unit that says it exactly."""
    for letter, unit in reversed(UNITS.items()):
        if size_bytes % unit == 0 and size_bytes >= unit:
            return f"{size_bytes // unit} {letter}iB" if letter else f"{size_bytes} B"
    return f"{size_bytes} B"
