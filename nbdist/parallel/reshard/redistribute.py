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
from nbdist.parallel import consensus
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
# Larger ones are not faster: four Gloo ranks took as long with 16 MiB as with 64.
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
    """One tensor that is to lie otherwise.

    Attributes:
        name: Key in `held` and in the result.
        dtype: Of its elements.
        old: How it lies now. Together the ranks have every element that is needed.
        new: How it will.
    """

    name: str
    dtype: torch.dtype
    old: Placement
    new: Placement


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A piece on its way from one rank to another."""

    move: Reshard
    piece: Transfer
    source: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.piece.shape) * self.move.dtype.itemsize

    @property
    def room_bytes(self) -> int:
        return -(-self.size_bytes // _ALIGNMENT) * _ALIGNMENT


class _Progress:
    """How much of what this rank sends and receives has gone its way; told as progress."""

    def __init__(self, rank: int, parcels: Sequence[_Transfer]) -> None:
        self._rank = rank
        self._done = 0
        self._total = self._size_bytes(parcels)
        progress.tell("moving", 0, self._total, BYTES)

    def gone(self, parcels: Sequence[_Transfer]) -> None:
        """Count these parcels as moved, and tell how far that is."""
        if self._total:
            self._done += self._size_bytes(parcels)
            progress.tell("moving", min(self._done, self._total), self._total, BYTES)

    def _size_bytes(self, parcels: Sequence[_Transfer]) -> int:
        return sum(p.size_bytes for p in parcels if self._rank in (p.source, p.piece.target))


def redistribute(
    moves: Sequence[Reshard], held: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Each tensor's local part on the new side, by name, of those that this rank will hold.

    Collective: every rank, with equal moves in equal order. Nothing is changed: `held` keeps
    its values, and what fails or is interrupted leaves only garbage. No rank ever has more of
    a tensor than its old and its new part, beside two buckets of at most BUCKET_BYTES.

    Args:
        moves: What moves, and what stays: it is in the result as well. Names differ.
        held: This rank's local part of each tensor that it has on the old side: plain tensors
            (a DTensor's to_local()), of the shape that `local_shape` says.
        device: Where the results lie.

    Returns:
        Contiguous tensors; the very tensor of `held` where this rank's part (and its device)
        stays as it is.
    """
    rank, size = consensus.rank(), consensus.world_size()
    with torch.no_grad():
        new = {m.name: t for m in moves if (t := _begun(m, held, rank, device)) is not None}
        carrier = _carrier(device)
        is_direct = carrier == device
        own, direct, bundled = [], [], []
        for move, piece, source in _deliveries(moves, size):
            parcel = _Transfer(move, piece, source)
            if source == piece.target:
                own += [parcel] if source == rank else []
            elif is_direct and piece.is_stretch and parcel.size_bytes >= DIRECT_BYTES:
                direct.append(parcel)
            else:
                bundled.append(parcel)
        way = _Progress(rank, [*direct, *bundled])
        for number, works in enumerate(_sent_directly(direct, held, new, device)):
            if not number:
                # While the first ones are on their way.
                _copy_own(own, held, new)
            for work in works:
                work.wait()
            way.gone(direct[number * _DIRECT_COUNT : (number + 1) * _DIRECT_COUNT])
        if rounds := list(_rounds(bundled, size)):
            _BucketedP2P(held, new, rounds, carrier).deliver(way)
    return new


def moved_bytes(moves: Sequence[Reshard], world_size: int) -> int:
    """How many bytes all ranks together send in an exchange. This rank alone."""
    return sum(
        math.prod(piece.shape) * move.dtype.itemsize
        for move, piece, source in _deliveries(moves, world_size)
        if source != piece.target
    )


def _begun(
    move: Reshard, held: Mapping[str, torch.Tensor], rank: int, device: torch.device
) -> torch.Tensor | None:
    """This rank's result: the held tensor where it stays, else room for it; None without one."""
    wanted = local_runs(move.new.layout, move.new.degrees, rank)
    before = local_runs(move.old.layout, move.old.degrees, rank)
    if before is not None:
        own = held[move.name]
        assert own.dtype == move.dtype, (move.name, own.dtype, move.dtype)
        expected = local_shape(move.old.layout, move.old.degrees, rank)
        assert tuple(own.shape) == expected, (move.name, own.shape, expected)
        if wanted == before:
            return own.to(device)
    shape = local_shape(move.new.layout, move.new.degrees, rank)
    return None if shape is None else room_for(shape, move.dtype, device)


def _deliveries(moves: Sequence[Reshard], size: int) -> Iterator[tuple[Reshard, Transfer, int]]:
    """What each rank needs, with the rank that gives it; the same on all ranks.

    A rank takes from itself what it has. Else the rank that has sent least so far sends, and
    among those the nearest: neighbours are on one host.
    """
    sent_bytes = [0] * size
    for move in moves:
        for piece in transfers(move.old, move.new, size):
            target = piece.target
            if target in piece.sources:
                yield move, piece, target
                continue
            source = min(piece.sources, key=lambda one: (sent_bytes[one], abs(one - target)))
            sent_bytes[source] += math.prod(piece.shape) * move.dtype.itemsize
            yield move, piece, source


def _copy_own(
    parcels: Sequence[_Transfer], held: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
) -> None:
    """What a rank takes from itself."""
    for one in parcels:
        _copy(new[one.move.name], held[one.move.name], one.piece.dims)


def _sent_directly(
    parcels: Sequence[_Transfer],
    held: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Iterator[Sequence[dist.Work]]:
    """Send each parcel from where it lies to where it will lie: so many at once, once at least.

    Collective. What is yielded is to be waited for before the next ones are sent.
    """
    rank = consensus.rank()
    limited = [part for one in parcels for part in _limited(one, _CALL_BYTES)]
    for first in range(0, max(1, len(limited)), _DIRECT_COUNT):
        calls = []
        for number, parcel in enumerate(limited[first : first + _DIRECT_COUNT]):
            target = parcel.piece.target
            if parcel.source == rank:
                own = held[parcel.move.name].to(device)
                box = _box(own, [(old, n) for ((old, _, n),) in parcel.piece.dims]).contiguous()
                calls.append(dist.P2POp(dist.isend, box, target, tag=number))
            elif target == rank:
                box = _box(new[parcel.move.name], [(at, n) for ((_, at, n),) in parcel.piece.dims])
                calls.append(dist.P2POp(dist.irecv, box, parcel.source, tag=number))
        yield dist.batch_isend_irecv(calls) if calls else ()


def _rounds(parcels: Sequence[_Transfer], size: int) -> Iterator[list[_Transfer]]:
    """Parcels in order, so many at once as fit each rank's two buckets."""
    sent, received = [0] * size, [0] * size
    together: list[_Transfer] = []
    for parcel in (part for one in parcels for part in _limited(one, BUCKET_BYTES)):
        room, source, target = parcel.room_bytes, parcel.source, parcel.piece.target
        if together and max(sent[source], received[target]) + room > BUCKET_BYTES:
            yield together
            sent, received, together = [0] * size, [0] * size, []
        sent[source] += room
        received[target] += room
        together.append(parcel)
    if together:
        yield together


def _limited(parcel: _Transfer, limit_bytes: int) -> Iterator[_Transfer]:
    """A parcel in parts of at most so many bytes."""
    limit = max(1, limit_bytes // parcel.move.dtype.itemsize)
    return (_Transfer(parcel.move, one, parcel.source) for one in split(parcel.piece, limit))


class _BucketedP2P:
    """Two buckets, and what fills and empties them."""

    def __init__(
        self,
        held: Mapping[str, torch.Tensor],
        new: Mapping[str, torch.Tensor],
        rounds: list[list[_Transfer]],
        device: torch.device,
    ) -> None:
        self._held = held
        self._new = new
        self._rank, self._size = consensus.rank(), consensus.world_size()
        # In the order that all_to_all_single wants: by target, and by source.
        self._sent = [self._own(one, "source", "target") for one in rounds]
        self._received = [self._own(one, "target", "source") for one in rounds]
        self._outbox = torch.empty(_most(self._sent), dtype=torch.uint8, device=device)
        self._inbox = torch.empty(_most(self._received), dtype=torch.uint8, device=device)

    def deliver(self, way: _Progress) -> None:
        """Send and receive bucket by bucket. Collective: every rank."""
        for sent, received in zip(self._sent, self._received, strict=True):
            for view, parcel in self._views(self._outbox, sent):
                _copy(view, self._held[parcel.move.name], _to_box(parcel.piece.dims))
            to_each = self._totals(sent, "target")
            from_each = self._totals(received, "source")
            dist.all_to_all_single(
                self._inbox[: sum(from_each)], self._outbox[: sum(to_each)], from_each, to_each
            )
            for view, parcel in self._views(self._inbox, received):
                _copy(self._new[parcel.move.name], view, _from_box(parcel.piece.dims))
            way.gone([*sent, *received])

    def _own(self, parcels: list[_Transfer], role: str, other: str) -> list[_Transfer]:
        own = [one for one in parcels if _end(one, role) == self._rank]
        return sorted(own, key=lambda one: _end(one, other))

    def _totals(self, parcels: list[_Transfer], other: str) -> list[int]:
        totals = [0] * self._size
        for parcel in parcels:
            totals[_end(parcel, other)] += parcel.room_bytes
        return totals

    def _views(
        self, bucket: torch.Tensor, parcels: list[_Transfer]
    ) -> Iterator[tuple[torch.Tensor, _Transfer]]:
        """Each parcel's place in a bucket, as a tensor of its dtype and shape."""
        at = 0
        for parcel in parcels:
            room = bucket[at : at + parcel.size_bytes]
            yield room.view(parcel.move.dtype).view(parcel.piece.shape), parcel
            at += parcel.room_bytes


def _end(parcel: _Transfer, role: str) -> int:
    return parcel.source if role == "source" else parcel.piece.target


def _most(rounds: list[list[_Transfer]]) -> int:
    return max(sum(parcel.room_bytes for parcel in one) for one in rounds)


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


def _to_box(dims: tuple[Cuts, ...]) -> tuple[Cuts, ...]:
    """Cuts from the source's tensor to the piece by itself."""
    return tuple(
        tuple((old, at, n) for (old, _, n), at in zip(cuts, _starts(cuts), strict=True))
        for cuts in dims
    )


def _from_box(dims: tuple[Cuts, ...]) -> tuple[Cuts, ...]:
    """Cuts from the piece by itself to the target's tensor."""
    return tuple(
        tuple((at, new, n) for (_, new, n), at in zip(cuts, _starts(cuts), strict=True))
        for cuts in dims
    )


def _starts(cuts: Cuts) -> list[int]:
    return list(itertools.accumulate((n for *_, n in cuts[:-1]), initial=0))


def _carrier(device: torch.device) -> torch.device:
    """Where buckets lie. Gloo would bring a GPU's to the host and back, piece by piece."""
    is_gloo = dist.is_initialized() and f"{device.type}:gloo" in dist.get_backend_config()
    return torch.device("cpu") if is_gloo else device


def room_for(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor whose memory has its pages, where the system can give them at once.

    Otherwise each page of 4 KiB comes with an interruption of its own while the tensor is filled.
    A switch of 100 million parameters with AdamW on two CPU ranks took a sixth longer so.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and tensor.nbytes >= _ADVISED_BYTES:
        madvise.advise(tensor.data_ptr(), tensor.nbytes, madvise.POPULATE)
    return tensor
