"""A shortage of memory in words: one block of text below the error."""

from __future__ import annotations

from collections.abc import Iterator

from nbdist.core.units import size
from nbdist.memory.oom_message import HOST, UNKNOWN, OomMessage
from nbdist.memory.oom_remedies import OomReport, Remedy, remedies
from nbdist.memory.snapshot import CATEGORIES, OPTIMIZER

_PHASES = {
    "forward": " in forward", "backward": " in backward", "optimizer": " in the optimizer's step",
}  # fmt: skip
_FITS = {True: "fits", False: "not enough", None: ""}
MORE = "%dist_memory shows what was in use when it failed"


def block(shortage: OomReport) -> str:
    """Lines on the memory that ran out, its holders, and the ladder of remedies."""
    return "\n".join((*_what(shortage), *_usage(shortage), *_ladder(shortage), MORE))


def block_without_report(rank: int, message: OomMessage, why: str) -> str:
    """Lines on the memory that ran out, where the rank could not name its holders."""
    what = f"rank {rank} ran out of {_memory(message)}{_request(message)}"
    return f"{what}; what held it is unknown: {why}"


def _memory(message: OomMessage) -> str:
    if message.memory == HOST:
        return "the host's memory"
    number = f" {message.device}" if message.device != UNKNOWN else ""
    return f"memory of its GPU{number}"


def _request(message: OomMessage) -> str:
    by = f" by {message.by}" if message.by not in {"CUDA", "HIP", "XPU", "CPU"} else ""
    return f": {size(message.asked_bytes)} requested{by}" if message.asked_bytes != UNKNOWN else by


def _what(shortage: OomReport) -> Iterator[str]:
    message = shortage.message
    free = f"; {size(shortage.free_bytes)} free" if shortage.free_bytes != UNKNOWN else ""
    limit = f" of {size(shortage.limit_bytes)}" if free and shortage.limit_bytes else ""
    yield (
        f"rank {shortage.rank} ran out of {_memory(message)}{_request(message)}"
        f"{_PHASES.get(shortage.phase, '')}{free}{limit}"
    )
    if message.others_bytes > 0:
        yield f"other processes hold {size(message.others_bytes)} of it"
    if message.unused_bytes > 0:
        yield f"torch's allocator holds {size(message.unused_bytes)} unused"
    if 0 < shortage.limit_bytes < message.asked_bytes:
        yield (
            "this tensor alone is larger than all memory there is: no strategy makes room for it. "
            "Check its shape"
        )


def _usage(shortage: OomReport) -> Iterator[str]:
    if shortage.problem:
        yield shortage.problem
    parts = [
        f"{name} {size(bytes_)}"
        for name, bytes_ in zip(CATEGORIES, shortage.categories, strict=True)
        if bytes_
    ]
    if parts:
        yield f"in use by tensors: {size(sum(shortage.categories))}: {', '.join(parts)}"
    largest = [
        f"{holder.name or 'unnamed'} {size(holder.size_bytes)}"
        + (f" in {holder.count} blocks" if holder.count > 1 else "")
        + f" ({CATEGORIES[holder.category]})"
        for holder in shortage.holders
    ]
    if largest:
        yield f"largest: {'; '.join(largest)}"


def _ladder(shortage: OomReport) -> Iterator[str]:
    rungs = remedies(shortage)
    yield (
        "what would help, cheapest first; gains are predicted from what this rank held"
        + (f"; short by {size(shortage.shortfall_bytes)}" if shortage.shortfall_bytes > 0 else "")
    )
    rows = [(rung.what, _gain(rung), _FITS[rung.fits], rung.why) for rung in rungs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        yield f"  {'  '.join(cells)}".rstrip()
    if shortage.choice is not None and not shortage.categories[OPTIMIZER]:
        yield "the optimizer has no state yet: its first step will add to what is in use"


def _gain(rung: Remedy) -> str:
    return "-" if rung.gain_bytes == UNKNOWN else f"-{size(rung.gain_bytes)}"
