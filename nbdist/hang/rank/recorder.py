"""Wraps torch.distributed's functions, so that each call of the user is in the call log.

Only the outermost call of a thread is recorded. What C++ calls by itself (DDP's reducer, compiled
graphs) does not come through Python: torch's flight recorder knows it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from nbdist.core.ranks import rank_label
from nbdist.hang.call_log import (
    DONE,
    ISSUED,
    NO_CHANNEL,
    NO_PEER,
    RAISED,
    CallLogWriter,
    Entry,
    pack_what,
)
from nbdist.hang.rank import recv_anysource, rendezvous
from nbdist.hang.rank.source_line import UserFrameFinder

Function = Callable[..., Any]
MAX_DETAILS = MAX_PENDING = 1024
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
    "gather_into_tensor": "dst",
    "gather_object": "dst",
    "gather_single": "dst",
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
# Its table maps torch's own functions to functional ones; with ours in it torch.compile would
# not know the others.
KEEPS_ORIGINALS = "torch.distributed._functional_collectives"


# The message of a call between an abort and the recovery (core/failures.py knows it).
BROKEN_OFF = "{op} was not called: the collectives of this rank were broken off"

# Channel, operation and detail, peer, and 0 for a call that is not counted.
Described = tuple[int, bytes, int, int | None]

_SUM = dist.ReduceOp.SUM
# Within a wrapped call that has no record (yet).
_INSIDE: Entry = (0, 0, 0, NO_CHANNEL, b"", NO_PEER)


class _Thread(threading.local):
    """The record of the call that one thread is in; None outside of all."""

    entry: Entry | None = None


class CallRecorder:
    """Records the calls of this process in a log, from `install` to `uninstall`."""

    def __init__(self, log: CallLogWriter, places: UserFrameFinder) -> None:
        self.log = log
        self.places = places
        self.channels: dict[str, int] = {}
        self._thread = _Thread()
        # Work takes no attributes: id -> (weak reference, record). Bounded, the oldest go first.
        self._pending: dict[int, tuple[weakref.ref[Any], Entry]] = {}
        self._replaced: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Put the wrappers in place. Functions that this torch lacks are passed over."""
        for op in (*GROUP_CALLS, *TRANSFERS):
            self._replace(c10d, op, functools.partial(self._wrap_call, op))
        for name in ("init_process_group", "destroy_process_group"):
            self._replace(c10d, name, self._wrap_group_change)
        self._replace(c10d, "split_group", functools.partial(self._wrap_meeting, "split_group"))
        # Every caller of new_group comes through this private function, also torch's modules
        # that hold new_group itself, as init_device_mesh does.
        has_helper = hasattr(c10d, "_new_group_with_tag")
        name = "_new_group_with_tag" if has_helper else "new_group"
        self._replace(c10d, name, functools.partial(self._wrap_meeting, "new_group"))
        self._replace(dist.ProcessGroup, "recv_anysource", recv_anysource.remember_issued)
        self._replace(
            dist.Work, "wait", lambda wait: self._wrap_wait(recv_anysource.abortable(wait))
        )
        # DTensor waits here.
        self._replace(functional, "wait_tensor", self._wrap_wait)
        self.know_groups()

    def uninstall(self) -> None:
        """Put torch's own functions back."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)

    def reset(self) -> None:
        """Forget what was issued before a recovery."""
        self._pending.clear()

    def begin_cell(self) -> None:
        """A new cell: what an interrupt has cut short in this thread is over."""
        self.places.forget()
        self._take_back()
        self._thread.entry = None

    def know_groups(self) -> None:
        """Give each group a channel, before its first call, and drop those destroyed."""
        living = living_groups()
        gone = [name for name in self.channels if name not in living]
        self.log.drop(gone)
        for name in gone:
            del self.channels[name]
        for name, group in living.items():
            if name not in self.channels:
                ranks = dist.get_process_group_ranks(group)
                self.channels[name] = self.log.group(name, ranks, group_description(group))

    def channel(self, name: str) -> int:
        """The channel of the group with this name."""
        if name not in self.channels:
            self.know_groups()
        return self.channels.get(name, NO_CHANNEL)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Function], Function]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return
        wrapper = wrap(original)
        for place, attribute in _holders(owner, name, original):
            self._replaced.append((place, attribute, original))
            setattr(place, attribute, wrapper)

    def _wrap_call(self, op: str, original: Function) -> Function:
        describe = Describer(self, op, original).describe
        thread, log, packed = self._thread, self.log, self.places.pack_line
        begin, end, frame = log.begin, log.end, sys._getframe  # noqa: SLF001
        is_broken_off = rendezvous.is_broken_off

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or thread.entry is not None:
                return original(*args, **kwargs)
            if is_broken_off():
                raise RuntimeError(BROKEN_OFF.format(op=op))
            thread.entry = _INSIDE
            try:
                described = describe(args, kwargs)
                if described is None:
                    return original(*args, **kwargs)
                channel, what, peer, number = described
                thread.entry = entry = begin(channel, what, packed(frame(1)), peer, number)
                result = original(*args, **kwargs)
                if result is not None and isinstance(result, dist.Work):
                    self._remember(result, entry)
                    end(entry, ISSUED)
                else:
                    end(entry, DONE)
            except BaseException:
                self._take_back()
                raise
            finally:
                thread.entry = None
            return result

        return call

    def _take_back(self) -> None:
        entry = self._thread.entry
        if entry is not None and entry is not _INSIDE:
            self.log.take_back(entry)

    def _remember(self, work: dist.Work, entry: Entry) -> None:
        while len(self._pending) >= MAX_PENDING:
            self._pending.pop(next(iter(self._pending)), None)
        self._pending[id(work)] = (weakref.ref(work), entry)

    def _wrap_wait(self, original: Function) -> Function:
        """Wrap Work.wait and wait_tensor: record the awaited call, else one named "wait"."""
        thread = self._thread

        @functools.wraps(original)
        def wait(awaited: Any, *args: Any, **kwargs: Any) -> Any:
            if thread.entry is not None or is_dynamo_compiling():
                return original(awaited, *args, **kwargs)
            thread.entry = _INSIDE
            try:
                place = self.places.pack_line(sys._getframe(1))  # noqa: SLF001
                work, entry = self._pending.get(id(awaited), (None, None))
                if entry is not None and work is not None and work() is awaited:
                    entry = self.log.wait(entry, place)
                else:
                    detail = tensor_label(awaited) if isinstance(awaited, torch.Tensor) else ""
                    entry = self.log.begin(NO_CHANNEL, pack_what("wait", detail), place)
                thread.entry = entry
                result = original(awaited, *args, **kwargs)
                self.log.end(entry, DONE)
                self._pending.pop(id(awaited), None)
            except BaseException:
                if thread.entry is not _INSIDE:
                    self.log.end(thread.entry, RAISED)  # it was issued, so it counts
                raise
            finally:
                thread.entry = None
            return result

        return wait

    def _wrap_group_change(self, original: Function) -> Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self.know_groups()

        return call

    def _wrap_meeting(self, op: str, original: Function) -> Function:
        """Wrap what forms groups: nothing would end a wait in the store's C++ code."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            ranks = None if self._thread.entry is not None else _who_meets(op, arguments)
            if ranks is None:
                return original(*args, **kwargs)
            self._thread.entry = _INSIDE
            try:
                place = self.places.pack_line(sys._getframe(1))  # noqa: SLF001
                world = group_name(None)
                channel = NO_CHANNEL if world is None else self.channel(world)
                what = pack_what(op, f"ranks {rank_label(arguments.get('ranks') or ranks)}")
                # One that not all ranks come to is not counted: the others' counts would differ.
                number = None if len(ranks) == dist.get_world_size() else 0
                entry = self.log.begin(channel, what, place, number=number)
                self._thread.entry = entry
                rendezvous.meet(ranks, self.log.generation, arguments.get("timeout"), op)
                result = original(*args, **kwargs)
                self.know_groups()
                self.log.end(entry, DONE)
            except BaseException:
                self._take_back()
                raise
            finally:
                self._thread.entry = None
            return result

        return call


class Describer:
    """Says of each call of one function where it counts and what stands in its record."""

    def __init__(self, recorder: CallRecorder, op: str, original: Callable[..., Any]) -> None:
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
        return self._recorder.log.transfer(group_channel, *ends), what, peer, None

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


def _who_meets(op: str, arguments: Mapping[str, Any]) -> Sequence[int] | None:
    """The global ranks that have to come before a group can be formed; None: torch says what."""
    if not dist.is_initialized():
        return None
    if op == "split_group":
        return dist.get_process_group_ranks(arguments.get("parent_pg"))
    if not arguments.get("use_local_synchronization"):
        return range(dist.get_world_size())
    ranks: Sequence[int] | None = arguments.get("ranks")
    return ranks if ranks is not None and dist.get_rank() in ranks else None


def _holders(owner: Any, name: str, original: Any) -> list[tuple[Any, str]]:
    """Attributes in which torch holds this function: its module's, and those of who imported it."""
    if not isinstance(owner, ModuleType) or owner.__name__ == KEEPS_ORIGINALS:
        return [(owner, name)]
    loaded = [
        module
        for title, module in list(sys.modules.items())
        if title.startswith("torch.distributed") and title != KEEPS_ORIGINALS
    ]
    return [
        (module, attribute)
        for module in loaded
        for attribute, value in list(getattr(module, "__dict__", {}).items())
        if value is original
    ]


def group_name(group: Any) -> str | None:
    """The name of a group, the same on all members; None where this rank is no member.

    None as the group is the world. Torch has the name in a private table alone that also knows
    whether the group still lives.
    """
    world: Any = c10d._world  # noqa: SLF001
    name: str | None = world.pg_names.get(world.default_pg if group is None else group)
    return name


def group_description(group: dist.ProcessGroup) -> str:
    """The description given when a group was made; empty without one."""
    description = str(group.group_desc).replace("\0", "")
    return "" if description == "undefined" else description


def living_groups() -> dict[str, dist.ProcessGroup]:
    """Return the groups that this rank is a member of, by name, from the same table."""
    world: Any = c10d._world  # noqa: SLF001
    return {name: group for group, name in world.pg_names.items()}


def tensor_label(tensor: torch.Tensor) -> str:
    """A tensor as "float32[3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
