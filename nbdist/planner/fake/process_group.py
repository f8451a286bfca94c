"""A process group of many ranks in one process, and what fake tensors cannot do stood in for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class CannotRun(Exception):
    """Why there is no run of a case, as a phrase."""


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Be rank 0 of so many ranks, whose collectives return at once and move nothing.

    torch's own for this, "fake", and its store are in a private module: nothing public has a
    group without its processes. (torch 2.11 and 2.13; checked by tests/planner/test_fake.py.)

    Raises:
        CannotRun: torch has it no more.
    """
    try:
        store = importlib.import_module(_FAKE_GROUP).FakeStore()
    except (ImportError, AttributeError) as error:
        raise CannotRun(f"this torch has no fake process group ({error})") from error
    dist.init_process_group("fake", store=store, rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


_FAKE_GROUP = "torch.testing._internal.distributed.fake_pg"


def stand_in() -> None:
    """Replace, for this process, what looks at values, which fake tensors have not.

    Random streams of tensor parallelism agree on seeds by value, and take no memory.
    """
    from nbdist.parallel.tp.rng import Streams  # with it comes torch._dynamo, for seconds

    Streams.attach = _nothing  # type: ignore[method-assign]


def never_packed() -> None:
    """Let transformers' attention go the way that it goes with real tensors.

    It looks whether several samples are packed into one sequence. Of a fake tensor it cannot, so
    it makes a mask, repeats keys and values for it, and keeps more than a real step does. (The
    function is no public one: transformers 5; checked by tests/planner/test_fake.py.)
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if hasattr(masks, "find_packed_sequence_indices"):
        masks.find_packed_sequence_indices = _nothing


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None
