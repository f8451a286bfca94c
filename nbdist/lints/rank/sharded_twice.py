"""First data of a prepared loader on this rank, before any of it is read.

A forked process reads it, so a stream that can be read once loses nothing, generators draw
nothing, and data that do not come hold nobody up.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import select
import signal
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset

from nbdist.lints.rank import watch
from nbdist.parallel.base import events

# So many samples are read, and up to the most of them while that is quick: those of a file's head
# may be alike.
N_SAMPLES = 3
MOST_SAMPLES = 64
QUICK_S = 0.2
DEADLINE_S = 5.0
MOST_BYTES = 65536
# Their order is random, or each index in turn: prepare makes it equal on all ranks.
_KNOWN_SAMPLERS = ("torch.utils.data.", "accelerate.")

_seen: weakref.WeakSet[Any] = weakref.WeakSet()
# How many loaders of a name this cell has had: each is compared with its own kind alone.
_counts: Counter[str] = Counter()


def install() -> None:
    """Look at loaders from now on."""
    events.on_loop.append(_note)
    watch.undo.append(lambda: events.on_loop.remove(_note))
    _seen.clear()


def begin() -> None:
    """Forget the names of the cell before."""
    _counts.clear()


def end() -> None:
    """All was noted when it was seen."""


@watch.guarded("sharded-twice")
def _note(loader: Any, dataset: Any, batches: Any) -> None:
    """A loop begins over a prepared loader of `dataset`; `batches` draws its indices, if any."""
    if loader in _seen or not sys.platform.startswith("linux"):
        return
    _seen.add(loader)
    name = watch.variable(lambda value: value is loader, f"a loader of {type(dataset).__name__}")
    _counts[name] += 1
    if _counts[name] > 1:
        name = f"{name} (no. {_counts[name]} of this cell)"
    facts = {**read_apart(dataset, batches), "of": dist.get_world_size()}
    watch.note("sharded-twice", name, **facts)
    watch.note_now("sharded-twice", name, facts)


def read_apart(dataset: Any, batches: Any) -> dict[str, str]:
    """Digests of each of the first samples and of the first indices, empty where they say nothing.

    They are words of one text. Ranks may have read more or fewer of them.
    """
    nothing = {"samples": "", "order": ""}
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, of threads
        pid = os.fork()
    if pid == 0:
        _report(writer, dataset, batches)
    os.close(writer)
    try:
        text = _receive(reader, time.monotonic() + DEADLINE_S)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {**nothing, **json.loads(text)} if text else nothing


def _receive(reader: int, deadline: float) -> bytes:
    """All that comes until the other end closes; nothing if that is later than the deadline."""
    parts: list[bytes] = []
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reader, MOST_BYTES)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b""


def _report(writer: int, dataset: Any, batches: Any) -> None:
    """In the forked process: read, send, and end."""
    try:
        # Whatever is open is shared with the rank: its place in a file, its connections.
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(quiet, number)
        os.closerange(3, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
        sys.stdout = sys.stderr = open(1, "w")  # noqa: SIM115  # until this process ends
        _leave_ranks()
        torch.set_num_threads(1)
        digests = {
            "samples": _digests(lambda: _first_samples(dataset), times=_times(dataset)),
            "order": _digests(lambda: _first_indices(batches)),
        }
        os.write(writer, json.dumps(digests).encode())
    finally:
        os._exit(0)


def _leave_ranks() -> None:
    """Stop writing this process's calls into the rank's call log: it is not a rank."""
    from nbdist.hang.rank import call_log

    call_log.uninstall()


def _digests(read: Any, times: int = 2) -> str:
    """Digest what is read; empty where reading fails, gives nothing, or differs the next time."""
    runs: list[list[str]] = []
    for _ in range(times):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  # what data draw from without a generator
        torch.manual_seed(0)
        try:
            runs.append([_digest(value) for value in _while_quick(read())])
        except Exception:  # noqa: BLE001  # the loop itself meets it, or does not
            return ""
    count = min(map(len, runs))
    return " ".join(runs[0][:count]) if runs[0][:count] == runs[-1][:count] else ""


def _while_quick(values: Iterable[Any]) -> Iterator[Any]:
    stop = time.monotonic() + QUICK_S
    for number, value in enumerate(itertools.islice(values, MOST_SAMPLES), start=1):
        yield value
        if number >= N_SAMPLES and time.monotonic() > stop:
            return


def _times(dataset: Any) -> int:
    """How often a dataset can be read: once, if it is made of one iterator."""
    is_once = isinstance(dataset, IterableDataset) and iter(dataset) is iter(dataset)
    return 1 if is_once else 2


def _first_samples(dataset: Any) -> Iterable[Any]:
    if isinstance(dataset, IterableDataset):
        return iter(dataset)
    return (dataset[index] for index in range(len(dataset)))


def _first_indices(batches: Any) -> Iterable[Any]:
    sampler = getattr(batches, "sampler", batches)
    is_known = type(sampler).__module__.startswith(_KNOWN_SAMPLERS)
    if sampler is None or (is_known and not isinstance(sampler, DistributedSampler)):
        return ()
    indices: Iterable[Any] = iter(sampler)
    return indices


def _digest(value: Any) -> str:
    total = hashlib.blake2b(digest_size=4)
    for part in _parts(value):
        total.update(part)
    return total.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    """Bytes that make up a sample; of other objects those of their class and attributes."""
    yield type(value).__name__.encode()
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, str | bytes | int | float | complex | bool | None):
        yield repr(value).encode()
    elif callable(as_bytes := getattr(value, "tobytes", None)):  # an array, a picture
        yield as_bytes()
    else:
        yield from _parts(getattr(value, "__dict__", None))
