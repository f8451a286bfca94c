"""Finds the holders of this rank's memory when a cell failed because it ran out.

Frames of the traceback still hold their tensors when the cell has ended, and so do the graphs that
hang on them.
"""

from __future__ import annotations

import contextlib
import resource
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import psutil
import torch

from nbdist.core.rank import this_rank
from nbdist.errors import OptionError
from nbdist.memory.oom_message import HOST, UNKNOWN, OomMessage
from nbdist.memory.oom_remedies import Holder, OomReport
from nbdist.memory.rank import owners, record, saved_tensors
from nbdist.memory.rank.owners import StorageOwner
from nbdist.memory.snapshot import ACTIVATION, BACKWARD, CATEGORIES, FORWARD, STEPPING, RankMemory
from nbdist.memory.snapshot import UNKNOWN as NO_CATEGORY
from nbdist.parallel.base.blocks import find_blocks
from nbdist.parallel.live import live_models, registry

MOST_HOLDERS = 5
# In which of torch's files a frame is while a step does what; the innermost such frame counts.
_PHASES = (
    ("/torch/optim/", STEPPING),
    ("/torch/autograd/", BACKWARD),
    ("/torch/nn/modules/module.py", FORWARD),
)


def make_report(
    message: OomMessage, error: BaseException, before: Mapping[str, Any] | None = None
) -> OomReport:
    """Report a shortage of memory; memory.rank.record keeps the memory as it is.

    Args:
        message: What the error said.
        error: As it was raised, its traceback with it.
        before: torch's snapshot of the GPU when the allocation failed; None where there is none.
    """
    nothing = tuple(0 for _ in CATEGORIES)
    report = OomReport(
        this_rank().place.rank, message, _phase(error), nothing, (), 0, message.free_bytes, None
    )
    try:
        limit, free = _room(message)
        report = replace(report, limit_bytes=limit, free_bytes=free)
        memory = _named_memory(error, before)
        record.keep(memory)
        sizes, category = memory.blocks.size_bytes, memory.blocks.category
        prepared = registry.prepared()
        return replace(
            report,
            categories=tuple(int(sizes[category == n].sum()) for n in range(len(CATEGORIES))),
            holders=tuple(_holders(memory)),
            choice=registry.current() if prepared else None,
            blocks=max((_block_count(model.base) for model in prepared), default=0),
            problem=memory.problem,
        )
    except Exception as problem:  # noqa: BLE001  # the cell's own error is the one to be seen
        return replace(report, problem=f"What held the memory could not be recorded: {problem!r}.")


def _block_count(model: torch.nn.Module) -> int:
    try:
        return len(find_blocks(model).modules)
    except OptionError:  # it has no list of them, or several
        return 0


def _holders(memory: RankMemory) -> list[Holder]:
    """The largest owners; what has no name counts by its category."""
    sums: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    blocks = memory.blocks
    for place in range(len(blocks)):
        name = memory.names[blocks.name[place]] if blocks.name[place] >= 0 else ""
        category = int(blocks.category[place])
        sums[name, category].append(int(blocks.size_bytes[place]))
    every = [Holder(name, kind, sum(sizes), len(sizes)) for (name, kind), sizes in sums.items()]
    return sorted(every, key=lambda holder: -holder.size_bytes)[:MOST_HOLDERS]


def _named_memory(error: BaseException, before: Mapping[str, Any] | None) -> RankMemory:
    """Memory in use, with names for what frames and graphs hold."""
    names = dict(_locals(error))
    saved = {
        (device, address): (size, operation)
        for tensor, operation in saved_tensors.saved_by_graphs(live_models.live(torch.Tensor))
        for device, address, size in owners.storages(tensor)
    }
    owned = []
    owned_keys = set()
    for owner in owners.owners():
        key = (owner.device, owner.address)
        owned_keys.add(key)
        operation = saved[key][1] if key in saved else ""
        name = owner.name or names.get(key) or _saved_for(operation)
        owned.append(owner if name == owner.name else replace(owner, name=name))
    owned += [
        StorageOwner(address, size, NO_CATEGORY, _saved_for(operation), device)
        for (device, address), (size, operation) in saved.items()
        if (device, address) not in owned_keys
    ]
    return _with_activations(record.memory_in_use(owned, before), {address for _, address in saved})


def _saved_for(operation: str) -> str:
    return f"kept for {operation}" if operation else ""


def _with_activations(memory: RankMemory, saved_addresses: set[int]) -> RankMemory:
    """Mark as activations the blocks that a graph keeps and nothing else claims."""
    blocks = memory.blocks
    is_kept = [int(address) in saved_addresses for address in blocks.address]
    is_unowned = (blocks.category == NO_CATEGORY) & is_kept
    category, is_exact = blocks.category.copy(), blocks.is_exact.copy()
    category[is_unowned], is_exact[is_unowned] = ACTIVATION, True
    return replace(memory, blocks=replace(blocks, category=category, is_exact=is_exact))


def _locals(error: BaseException) -> Iterator[tuple[tuple[str, int], str]]:
    """(device, address) -> `x in forward` for the locals of the frames, the outermost first."""
    for frame in _frames(error):
        if frame.f_code.co_name == "<module>":
            continue  # a cell's own variables have their names already
        for name, value in list(frame.f_locals.items()):
            values = value if isinstance(value, list | tuple) else (value,)
            for item in values:
                if isinstance(item, torch.Tensor):
                    for device, address, _ in owners.storages(item):
                        yield (device, address), f"{name} in {frame.f_code.co_name}"


def _frames(error: BaseException) -> Iterator[FrameType]:
    link = error.__traceback__
    while link is not None:
        yield link.tb_frame
        link = link.tb_next


def _phase(error: BaseException) -> str:
    """Phase of the step by the frames: an optimizer's before backward's before forward's."""
    files = {frame.f_code.co_filename.replace("\\", "/") for frame in _frames(error)}
    return next((phase for part, phase in _PHASES if any(part in file for file in files)), "")


def _room(message: OomMessage) -> tuple[int, int]:
    """Total of the memory, and the bytes of it that this process could still have had."""
    if message.memory == HOST:
        host = psutil.virtual_memory()
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY:
            return host.total, host.available
        available = max(0, soft - psutil.Process().memory_info().vms)
        return min(host.total, soft), min(host.available, available)
    total, free = message.total_bytes, message.free_bytes
    with contextlib.suppress(RuntimeError, AssertionError):
        if UNKNOWN in (total, free):
            now_free, total = torch.cuda.mem_get_info(this_rank().place.device)
            free = now_free if free == UNKNOWN else free
    return max(total, 0), free
