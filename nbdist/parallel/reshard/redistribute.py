"""Every rank's new part of each tensor, brought from the ranks that have it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nbdist.core import madvise
from nbdist.core.progress import BYTES
from nbdist.parallel.base import consensus
from nbdist.rpc.rank import progress
from nbdist.strategy.tensor_layout import (
    Cuts,
    Placement,
    Transfer,
    local_runs,
    local_shape,
    split,
    transfers,
)

# What is sent, and what is received, at once: this much of each is needed beside the tensors.
# Larger buckets are not faster: four Gloo ranks took as long with 16 MiB as with 64.
BUCKET_BYTES = 32 << 20

# A piece of this size goes by itself where it is one stretch of memory on both sides. Gloo
# ranks bring a model's shards together in half the time that buckets take.
DIRECT_BYTES = 256 << 10

# Pieces on their way by themselves at once, and the most that one call is trusted to send.
_DIRECT_COUNT = 256
_CALL_BYTES = 512 << 20

# Pieces begin at multiples of this in a bucket, so that it can be seen as any dtype.
_ALIGNMENT = 16

# Below, malloc mostly has pages at hand that were there before.
_ADVISED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Reshard:
    """One tensor and its placement before and after.

    Attributes:
        name: Key in `local` and in the result.
        old: Placement now. Together the ranks have every element that is needed.
        new: Placement afterwards.
    """

    name: str
    dtype: torch.dtype
    old: Placement
    new: Placement


@dataclass(frozen=True, slots=True)
class _Route:
    """A transfer and the rank that sends it."""

    reshard: Reshard
    transfer: Transfer
    source: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.transfer.shape) * self.reshard.dtype.itemsize

    @property
    def room_bytes(self) -> int:
        return -(-self.size_bytes // _ALIGNMENT) * _ALIGNMENT


class _Progress:
    """How much of what this rank sends and receives has arrived; reported as progress."""

    def __init__(self, rank: int, routes: Sequence[_Route]) -> None:
        self._rank = rank
        self._done = 0
        self._total = self._size_bytes(routes)
        progress.tell("moving", 0, self._total, BYTES)

    def gone(self, routes: Sequence[_Route]) -> None:
        """Count these routes as done and report the progress."""
        if self._total:
            self._done += self._size_bytes(routes)
            progress.tell("moving", min(self._done, self._total), self._total, BYTES)

    def _size_bytes(self, routes: Sequence[_Route]) -> int:
        return sum(
            route.size_bytes
            for route in routes
            if self._rank in (route.source, route.transfer.target)
        )


def redistribute(
    reshards: Sequence[Reshard], local: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return this rank's part of each tensor under its new placement, by name.

    Collective: every rank, with equal reshards in equal order. Nothing is changed: `local` keeps
    its values, also where this fails or is interrupted. No rank ever has more of
    a tensor than its old and its new part, beside two buckets of at most BUCKET_BYTES.

    Args:
        reshards: Also of tensors that stay: they are in the result as well. Names differ.
        local: This rank's local part of each tensor under its old placement: plain tensors
            (a DTensor's to_local()), of the shape that `local_shape` says.
        device: Where the results lie.

    Returns:
        Contiguous tensors; the very tensor of `local` where this rank's part (and its device)
        stays as it is.
    """
    rank, size = consensus.rank(), consensus.world_size()
    with torch.no_grad():
        new = {
            reshard.name: tensor
            for reshard in reshards
            if (tensor := _start_result(reshard, local, rank, device)) is not None
        }
        # Gloo would bring a GPU's tensors to the host and back, piece by piece.
        is_gloo = dist.is_initialized() and f"{device.type}:gloo" in dist.get_backend_config()
        carrier = torch.device("cpu") if is_gloo else device
        is_direct = carrier == device
        local_routes, direct, bundled = [], [], []
        for route in _routes(reshards, size):
            if route.source == route.transfer.target:
                local_routes += [route] if route.source == rank else []
            elif is_direct and route.transfer.is_stretch and route.size_bytes >= DIRECT_BYTES:
                direct.append(route)
            else:
                bundled.append(route)
        transferred = _Progress(rank, [*direct, *bundled])
        for number, works in enumerate(_send_directly(direct, local, new, device)):
            if not number:
                # While the first ones are on their way.
                _copy_own(local_routes, local, new)
            for work in works:
                work.wait()
            transferred.gone(direct[number * _DIRECT_COUNT : (number + 1) * _DIRECT_COUNT])
        if rounds := list(_rounds(bundled, size)):
            _BucketedP2P(local, new, rounds, carrier).deliver(transferred)
    return new


def _start_result(
    reshard: Reshard, local: Mapping[str, torch.Tensor], rank: int, device: torch.device
) -> torch.Tensor | None:
    """Begin this rank's result: its tensor where it stays, else an empty one; None for none."""
    wanted = local_runs(reshard.new.layout, reshard.new.degrees, rank)
    before = local_runs(reshard.old.layout, reshard.old.degrees, rank)
    if before is not None:
        tensor = local[reshard.name]
        assert tensor.dtype == reshard.dtype, (reshard.name, tensor.dtype, reshard.dtype)
        expected = local_shape(reshard.old.layout, reshard.old.degrees, rank)
        assert tuple(tensor.shape) == expected, (reshard.name, tensor.shape, expected)
        if wanted == before:
            return tensor.to(device)
    shape = local_shape(reshard.new.layout, reshard.new.degrees, rank)
    return None if shape is None else room_for(shape, reshard.dtype, device)


def _routes(reshards: Sequence[Reshard], size: int) -> Iterator[_Route]:
    """Each transfer with the rank that sends it; the same on all ranks.

    A rank takes from itself what it has. Else the rank that has sent least so far sends, and
    among those the nearest: neighbours are on one host.
    """
    sent_bytes = [0] * size
    for reshard in reshards:
        for transfer in transfers(reshard.old, reshard.new, size):
            target = transfer.target
            if target in transfer.sources:
                yield _Route(reshard, transfer, target)
                continue
            source = min(transfer.sources, key=lambda rank: (sent_bytes[rank], abs(rank - target)))
            route = _Route(reshard, transfer, source)
            sent_bytes[source] += route.size_bytes
            yield route


def _copy_own(
    routes: Sequence[_Route], local: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
) -> None:
    for route in routes:
        _copy(new[route.reshard.name], local[route.reshard.name], route.transfer.dims)


def _send_directly(
    routes: Sequence[_Route],
    local: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Iterator[Sequence[dist.Work]]:
    """Send each route's elements without a bucket, _DIRECT_COUNT at once; yields at least once.

    Collective. What is yielded is to be waited for before the next ones are sent.
    """
    rank = consensus.rank()
    limited = [part for route in routes for part in _split_route(route, _CALL_BYTES)]
    for first in range(0, max(1, len(limited)), _DIRECT_COUNT):
        calls = []
        for number, route in enumerate(limited[first : first + _DIRECT_COUNT]):
            target = route.transfer.target
            if route.source == rank:
                tensor = local[route.reshard.name].to(device)
                block = [(start, n) for ((start, _, n),) in route.transfer.dims]
                box = _box(tensor, block).contiguous()
                calls.append(dist.P2POp(dist.isend, box, target, tag=number))
            elif target == rank:
                block = [(start, n) for ((_, start, n),) in route.transfer.dims]
                box = _box(new[route.reshard.name], block)
                calls.append(dist.P2POp(dist.irecv, box, route.source, tag=number))
        yield dist.batch_isend_irecv(calls) if calls else ()


def _rounds(routes: Sequence[_Route], size: int) -> Iterator[list[_Route]]:
    """Routes in order, as many at once as fit each rank's two buckets."""
    sent, received = [0] * size, [0] * size
    bucket: list[_Route] = []
    for route in (part for whole in routes for part in _split_route(whole, BUCKET_BYTES)):
        room, source, target = route.room_bytes, route.source, route.transfer.target
        if bucket and max(sent[source], received[target]) + room > BUCKET_BYTES:
            yield bucket
            sent, received, bucket = [0] * size, [0] * size, []
        sent[source] += room
        received[target] += room
        bucket.append(route)
    if bucket:
        yield bucket


def _split_route(route: _Route, limit_bytes: int) -> Iterator[_Route]:
    limit = max(1, limit_bytes // route.reshard.dtype.itemsize)
    parts = split(route.transfer, limit)
    return (_Route(route.reshard, part, route.source) for part in parts)


class _BucketedP2P:
    """Two buckets, and what fills and empties them."""

    def __init__(
        self,
        local: Mapping[str, torch.Tensor],
        new: Mapping[str, torch.Tensor],
        rounds: list[list[_Route]],
        device: torch.device,
    ) -> None:
        self._local = local
        self._new = new
        self._rank, self._size = consensus.rank(), consensus.world_size()
        # In the order that all_to_all_single wants: by target, and by source.
        self._sent = [self._mine(routes, "source", "target") for routes in rounds]
        self._received = [self._mine(routes, "target", "source") for routes in rounds]
        self._outbox = torch.empty(_max_bytes(self._sent), dtype=torch.uint8, device=device)
        self._inbox = torch.empty(_max_bytes(self._received), dtype=torch.uint8, device=device)

    def deliver(self, transferred: _Progress) -> None:
        """Send and receive bucket by bucket. Collective: every rank."""
        for sent, received in zip(self._sent, self._received, strict=True):
            for view, route in self._views(self._outbox, sent):
                cuts = _box_cuts(route.transfer.dims, is_sent=True)
                _copy(view, self._local[route.reshard.name], cuts)
            to_each = self._totals(sent, "target")
            from_each = self._totals(received, "source")
            dist.all_to_all_single(
                self._inbox[: sum(from_each)], self._outbox[: sum(to_each)], from_each, to_each
            )
            for view, route in self._views(self._inbox, received):
                cuts = _box_cuts(route.transfer.dims, is_sent=False)
                _copy(self._new[route.reshard.name], view, cuts)
            transferred.gone([*sent, *received])

    def _mine(self, routes: list[_Route], role: str, other: str) -> list[_Route]:
        mine = [route for route in routes if _end(route, role) == self._rank]
        return sorted(mine, key=lambda route: _end(route, other))

    def _totals(self, routes: list[_Route], other: str) -> list[int]:
        totals = [0] * self._size
        for route in routes:
            totals[_end(route, other)] += route.room_bytes
        return totals

    def _views(
        self, bucket: torch.Tensor, routes: list[_Route]
    ) -> Iterator[tuple[torch.Tensor, _Route]]:
        """Each route's place in a bucket, as a tensor of its dtype and shape."""
        offset = 0
        for route in routes:
            room = bucket[offset : offset + route.size_bytes]
            yield room.view(route.reshard.dtype).view(route.transfer.shape), route
            offset += route.room_bytes


def _end(route: _Route, role: str) -> int:
    return route.source if role == "source" else route.transfer.target


def _max_bytes(rounds: list[list[_Route]]) -> int:
    return max(sum(route.room_bytes for route in routes) for routes in rounds)


def _copy(target: torch.Tensor, source: torch.Tensor, dims: tuple[Cuts, ...]) -> None:
    """Copy a box of elements, one block for each combination of the dims' cuts."""
    for block in itertools.product(*dims):
        there = _box(target, [(at, n) for _, at, n in block])
        there.copy_(_box(source, [(at, n) for at, _, n in block]))


def _box(tensor: torch.Tensor, block: Sequence[tuple[int, int]]) -> torch.Tensor:
    """A view of the elements from a start on, of a length, along each dim."""
    for dim, (start, length) in enumerate(block):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _box_cuts(dims: tuple[Cuts, ...], *, is_sent: bool) -> tuple[Cuts, ...]:
    """Cuts from the source's tensor to the piece by itself, or from that to the target's tensor."""
    boxed = []
    for cuts in dims:
        starts = itertools.accumulate((n for *_, n in cuts[:-1]), initial=0)
        pairs = zip(cuts, starts, strict=True)
        of_dim = ((old, at, n) if is_sent else (at, new, n) for (old, new, n), at in pairs)
        boxed.append(tuple(of_dim))
    return tuple(boxed)


def room_for(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor whose memory has its pages, where the system can give them at once.

    Otherwise each page of 4 KiB comes with an interruption of its own while the tensor is filled.
    A switch of 100 million parameters with AdamW on two CPU ranks took a sixth longer so.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and tensor.nbytes >= _ADVISED_BYTES:
        madvise.advise(tensor.data_ptr(), tensor.nbytes, madvise.POPULATE)
    return tensor
