"""What a call of torch.distributed says of itself: its group, its tensor, its peer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.hang.call_log import NO_PEER, CallLogWriter, pack_what

# Called by every member of a group -> the argument that names its root, "" without one.
GROUP_CALLS = {
    "all_gather": "",
    "all_gather_coalesced": "",
    "all_gather_into_tensor": "",
    "all_gather_object": "",
    "all_gather_single": "",
    "all_reduce": "",
    "all_reduce_coalesced": "",
    "all_to_all": "",
    "all_to_all_single": "",
    "barrier": "",
    "broadcast": "src",
    "broadcast_object_list": "src",
    "gather": "dst",
    "gather_object": "dst",
    "monitored_barrier": "",
    "reduce": "dst",
    "reduce_scatter": "",
    "reduce_scatter_single": "",
    "reduce_scatter_tensor": "",
    "scatter": "src",
    "scatter_object_list": "src",
}
# Between two ranks -> the argument that names the other. batch_isend_irecv calls these.
TRANSFERS = {
    "irecv": "src",
    "isend": "dst",
    "recv": "src",
    "recv_object_list": "src",
    "send": "dst",
    "send_object_list": "dst",
}
MAX_DETAILS = 1024

# Channel, operation and detail, peer, and 0 for a call that is not counted.
Described = tuple[int, bytes, int, int | None]


class Channels(Protocol):
    """What a describer needs of the recorder."""

    box: CallLogWriter
    channels: dict[str, int]

    def channel(self, name: str) -> int:
        """The channel of a group."""


class Describer:
    """Says of each call of one function where it counts and what stands in its record."""

    def __init__(self, recorder: Channels, op: str, original: Callable[..., Any]) -> None:
        names = list(inspect.signature(original).parameters)
        self._op = op
        self._recorder = recorder
        self._names = names
        self._at = {name: position for position, name in enumerate(names)}
        self._group_at = self._at["group"]
        self._has_tensor = "barrier" not in op and "object" not in op
        self._has_reduction = "op" in self._at
        self._reduction_at = self._at.get("op", 0)
        self._root = "" if "object" in op else GROUP_CALLS.get(op, "")
        self._other = TRANSFERS.get(op, "")
        self._details: dict[Any, bytes] = {}

    def describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Described | None:
        """None for a call that is not to be recorded: by no member of the group, or invalid."""
        at = self._group_at
        group = args[at] if len(args) > at else kwargs.get("group")
        name = group_name(group)
        if name is None:
            return None
        channel = self._recorder.channels.get(name)
        if channel is None:
            channel = self._recorder.channel(name)
        try:
            if self._other:
                return self._transfer(channel, group, args, kwargs)
            return channel, self._what(group, args, kwargs), NO_PEER, None
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError):
            return None  # wrong arguments: torch says so itself, in better words

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = self._at[name]
        return args[at] if len(args) > at else kwargs.get(name)

    def _what(self, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        key: Any = None
        if self._has_tensor:
            tensor = args[0] if args else kwargs[self._names[0]]
            while type(tensor) in (list, tuple):
                tensor = tensor[0]
            key = (tensor.dtype, tensor.shape)
        if self._has_reduction:
            at = self._reduction_at
            reduction = args[at] if len(args) > at else kwargs.get("op")
            if reduction is not None and reduction is not _SUM:
                key = (key, getattr(reduction, "name", str(reduction)))
        if self._root:
            key = (key, self._rank(self._root, group, args, kwargs) or 0, 0)
        packed = self._details.get(key)
        if packed is None:
            if len(self._details) >= MAX_DETAILS:
                self._details.clear()
            packed = self._details[key] = pack_what(self._op, self._detail(key))
        return packed

    def _detail(self, key: Any) -> str:
        """The key as words; it was made above from its parts, in this order."""
        root = reduction = ""
        if self._root and key is not None:
            root = f"{self._root}={key[1]}"
            key = key[0]
        if self._has_reduction and key is not None and isinstance(key[1], str):
            reduction = f"op={key[1]}"
            key = key[0]
        tensor = "" if key is None else f"{str(key[0]).removeprefix('torch.')}{list(key[1])}"
        return ", ".join(part for part in (tensor, root, reduction) if part)

    def _transfer(
        self, group_channel: int, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Described:
        what = self._what(group, args, kwargs)
        peer = self._rank(self._other, group, args, kwargs)
        if peer is None:  # from whoever sends first: no order to compare
            return group_channel, what, NO_PEER, 0
        this = dist.get_rank()
        ends = (this, peer) if self._other == "dst" else (peer, this)
        return self._recorder.box.transfer(group_channel, *ends), what, peer, None

    def _rank(
        self, name: str, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int | None:
        """A root or a peer by its global rank."""
        rank = self._argument(name, args, kwargs)
        if rank is None:
            within = self._argument(f"group_{name}", args, kwargs)
            if within is not None:
                world: Any = dist.group.WORLD
                rank = dist.get_global_rank(group or world, within)
        return rank if rank is None else int(rank)


_SUM = dist.ReduceOp.SUM


def group_name(group: Any) -> str | None:
    """The name of a group, the same on all members; None where this rank is no member.

    None as the group is the world. Torch has the name in a private table alone that also knows
    whether the group still lives.
    """
    world: Any = c10d._world  # noqa: SLF001
    name: str | None = world.pg_names.get(world.default_pg if group is None else group)
    return name


def living_groups() -> dict[str, dist.ProcessGroup]:
    """By name, the groups that this rank is a member of, from the same table."""
    world: Any = c10d._world  # noqa: SLF001
    return {name: group for group, name in world.pg_names.items()}


def tensor_label(tensor: torch.Tensor) -> str:
    """A tensor as "float32[3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
