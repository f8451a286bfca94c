"""Report of a rank on the links of its host, and on NCCL's log in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import psutil

from nbdist.core import gpus
from nbdist.core.rank import this_rank
from nbdist.diagnostics import links
from nbdist.diagnostics.links import NcclLog, RankLinks

_NCCL_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE")
# The file in memory that NCCL writes to; None where it has not been asked.
_log: int | None = None


def describe_links() -> RankLinks:
    """Describe the links of this rank's host, its interface, and the network of NCCL."""
    this = this_rank()
    readings = gpus.GpuReadings() if this.place.device == "cpu" else gpus.read_once()
    its_links = links.read_links(psutil.net_if_addrs(), os.environ, readings)
    return replace(its_links, chosen=this.interface, nccl=read_nccl_log())


@contextlib.contextmanager
def captured_nccl_log(*, is_wanted: bool) -> Iterator[None]:
    """Let NCCL write what it does in here, at its first communicator, into a file in memory.

    Nothing public of torch or NCCL tells which network NCCL has chosen: its log does. NCCL reads
    the variables once, and they are taken back, so no child process has them. A user's own are
    left alone; then, and on systems without files in memory, the network is not known.
    """
    global _log  # noqa: PLW0603  # as long as the process: NCCL goes on writing
    has_own = any(name in os.environ for name in _NCCL_VARIABLES)
    if not is_wanted or has_own or not hasattr(os, "memfd_create"):
        yield
        return
    _log = os.memfd_create("nbdist-nccl")
    path = f"/proc/{os.getpid()}/fd/{_log}"
    os.environ.update(zip(_NCCL_VARIABLES, ("INFO", path), strict=True))
    try:
        yield
    finally:
        for name in _NCCL_VARIABLES:
            os.environ.pop(name, None)


def read_nccl_log() -> NcclLog | None:
    """Read NCCL's log so far; None where none was asked for."""
    if _log is None:
        return None
    text = os.pread(_log, os.fstat(_log).st_size, 0).decode(errors="replace")
    return links.parse_nccl_log(text)
