"""Advice to the system on memory that is about to be filled. Nothing depends on it but time."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

# From Linux 5.14 on, see madvise(2). Older kernels answer EINVAL, and pages come one by one.
POPULATE = 23
# Pages of 2 MB, where the system has them.
LARGE = 14
# What is in them is not needed: the system may take them when memory is short, and until then the
# next to write there has them at once. Of memory of the process's own, from Linux 4.12 on.
FREE = 8


def advise(address: int, size_bytes: int, advice: int) -> None:
    """Give advice on the whole pages in a stretch of memory; elsewhere than on Linux nothing."""
    if sys.platform != "linux":
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        _madvise()(first, length, advice)  # where it is not taken the pages are as ever


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
