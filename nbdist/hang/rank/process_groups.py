"""Process groups that survive: the same objects get new connections.

torch's ProcessGroup object only hands calls on to a backend. A recovery connects a new backend
and registers it in the object's place for the old one, so everything that holds the object
(DDP's reducer, FSDP2, meshes, DTensors, the user's variables) goes on. The new backends meet
under the store prefixes that `init_process_group` and `new_group` use, so a new process can
take a dead rank's place with plain calls.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from nbdist.core.rank import this_rank
from nbdist.core.ranks import rank_label
from nbdist.errors import NbdistError
from nbdist.hang.rank import (
    call_log,
    common_store,
    debug_checks,
    device_health,
    gloo_abort,
    main_thread,
    nccl_abort,
    rendezvous,
)
from nbdist.hang.recovery import DEADLINE_S, GroupSpec, RecoveryResult
from nbdist.rpc.rank import gc_pause


@dataclass(slots=True)
class _Registry:
    """Facts about this process's groups that torch does not keep.

    Attributes:
        groups: The groups that the user's code made, in order.
        stores: ProcessGroup -> the stores of its backends; C++ keeps these alive no more than
            half, and the backends that were replaced stay in the object.
        local_counts: Global ranks -> how many groups they made without the other ranks, since
            all ranks met last.
        local_base: The number that all ranks agreed on then; no such group had a higher one.
        is_installed: Whether torch's helper is wrapped.
    """

    groups: list[GroupSpec] = field(default_factory=list)
    stores: dict[Any, list[dist.Store]] = field(default_factory=dict)
    local_counts: dict[tuple[int, ...], int] = field(default_factory=dict)
    local_base: int = 0
    is_installed: bool = False

    def local_number(self) -> int:
        """The highest number of a group that some ranks made without the others."""
        return self.local_base + max(self.local_counts.values(), default=0)


_registry = _Registry()


class _DeadlineStore(dist.Store):
    """A store in which a rank waits no longer than the deadline, whatever it asks for.

    Gloo waits for the others as long as a collective may take, half an hour, and needs that
    number at construction: a shorter one would later end the user's send and recv.
    """

    def __init__(self, store: dist.Store, deadline_s: float) -> None:
        super().__init__()
        self._store = store
        self._until_s = time.monotonic() + deadline_s

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if rendezvous.await_keys(self._store, keys, self._until_s - time.monotonic()):
            raise NbdistError(f"nobody has written {', '.join(keys)} for {DEADLINE_S:.0f} s")


def install() -> None:
    """Note every group that is made from now on. Once per process, before its first group.

    No communicator is split off another: a split is collective over all ranks, so ranks that
    recover cannot meet a new one in it, and its group is made in C++, where nothing notes it.
    """
    if _registry.is_installed:
        return
    _registry.is_installed = True
    # Below new_group, init_device_mesh and the rest; nothing public sees the chosen name.
    helper = c10d._new_process_group_helper  # noqa: SLF001

    def note_and_make(*args: Any, **kwargs: Any) -> Any:
        arguments = _arguments(args, kwargs)
        if arguments["ranks"] and "nccl" in str(arguments["backend"]):
            # Connected now: in its first collective it could not be aborted.
            kwargs["device_id"] = kwargs.get("device_id") or _world().default_pg.bound_device_id
        result = helper(*args, **kwargs)
        _note(result[0], arguments)
        return result

    c10d._new_process_group_helper = note_and_make  # noqa: SLF001
    # Private. Torch numbers a group that is made with use_local_synchronization by what differs
    # between its members: the groups that a rank is in (2.13), so that the group hangs, or has
    # made (2.15), which numbers later groups of all ranks too: these hang.
    if hasattr(c10d, "_process_group_name"):
        c10d._process_group_name = _with_own_count(c10d._process_group_name)  # noqa: SLF001
    # Private; without it new_group splits where ranks are bound to GPUs.
    if hasattr(c10d, "_get_split_source"):
        c10d._get_split_source = lambda pg: None  # noqa: SLF001
    for module in (c10d, device_mesh, dist):
        if hasattr(module, "split_group"):
            module.split_group = _split_group  # type: ignore[attr-defined]


def _with_own_count(name: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's name of a group; one that its members make alone has a number of theirs alone."""

    @functools.wraps(name)
    def name_of(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        if not (args[0] if args else kwargs.get("use_hashed_name")):
            return name(ranks, *args, **kwargs)
        members = tuple(ranks)
        _registry.local_counts[members] = _registry.local_counts.get(members, 0) + 1
        number = _registry.local_base + _registry.local_counts[members]
        text = "_".join(map(str, (*members, number)))
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()  # as torch does

    return name_of


@functools.wraps(getattr(c10d, "split_group", c10d.new_group))
def _split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> Any:
    """Instead of torch's split_group: a new group for each list. Collective: the parent's ranks.

    Raises:
        ValueError: There are no lists.
    """
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    members = dist.get_process_group_ranks(parent_pg)
    is_whole = len(members) == dist.get_world_size()
    own_group = None
    for places in split_ranks:
        ranks = [members[place] for place in places]
        is_member = dist.get_rank() in ranks
        if is_whole or is_member:
            group = dist.new_group(
                ranks, timeout, backend, pg_options,
                use_local_synchronization=not is_whole, group_desc=group_desc,
            )  # fmt: skip
            own_group = group if is_member else own_group
    return own_group


def generation_store(store: dist.Store, generation: int) -> dist.Store:
    """The part of the ranks' common store in which groups of a generation meet."""
    return dist.PrefixStore(f"group/{generation}", store)


@gc_pause.gc_paused()  # all ranks would wait for one's finalizer
def recover(generation: int, dead: tuple[int, ...] = ()) -> RecoveryResult:
    """Give each process group that all its members have new connections, and reset models.

    Collective: every living rank, in its main thread, with the same arguments; a rank that
    takes a dead one's place calls `join.rejoin` with the generation meanwhile, which is higher
    than ever before. Connections of the old groups, and what still waits in them, are ended
    once all ranks have come; the dead are global ranks that do not.

    Raises:
        NbdistError: A rank has not come or connected within DEADLINE_S, named; a call with a
            higher generation can be tried. Or a rank's GPU does not work any more. Or a group has
            had 249 new backends, which is all that torch allows.
    """
    common_store.leave(dead)
    state = this_rank()
    world = _world()
    groups = {pg: tuple(world.pg_group_ranks[pg]) for pg in world.pg_map}
    whole = [pg for pg, ranks in groups.items() if not set(ranks) & set(dead)]
    for pg in whole:
        debug_checks.unused_type(pg)
    for closed in [pg for pg in _registry.stores if pg not in world.pg_map]:  # by the user
        del _registry.stores[closed]
    living = [r for r in range(state.topology.world_size) if r not in dead]
    store = generation_store(state.store, generation)
    lacking = _find_lacking(_meet_with_groups(store, living), groups, whole)
    whole = [pg for pg in whole if pg not in lacking]
    # Also when nothing waits: the old connections would stay open as long as the objects. Not
    # earlier: a rank that has not come yet may be connecting, and would fail by it.
    gloo_abort.outdate(generation)
    device_health.drain()
    nccl_abort.abort()  # a communicator can only be renewed once the old one is gone
    device_health.refuse_broken(store, state.place, living)
    fresh = [_connect(pg, store) for pg in whole]
    for new in fresh:
        debug_checks.register(new.pg, new.backends)
        world.pg_map[new.pg] = (world.pg_map[new.pg][0], new.store)
        _registry.stores.setdefault(new.pg, []).extend(new.stores)
    _name_default_store(store)
    # Calls that an aborted cell began in torch's coalescing manager would fail the next cell.
    world.pg_coalesce_state.clear()
    # Half a second of torch, which no start should wait for.
    from nbdist.hang.rank import reset_models
    from nbdist.parallel.live import live_models

    models = live_models.find()  # all of Python's objects are looked at, so once
    gradients = reset_models.reset(models)
    call_log.reset(generation)
    main_thread.mark_recovered()
    return RecoveryResult(
        skipped={
            str(world.pg_names[pg]): groups[pg]
            for pg in groups
            if pg not in whole and pg not in lacking
        },
        closed=tuple((groups[pg], ranks) for pg, ranks in lacking.items()),
        gradients=gradients,
        checksums=reset_models.checksums(models),
    )


def meet(store: dist.Store, rank: int, living: Sequence[int]) -> None:
    """Wait until all living ranks are here. Collective: each of them.

    It comes before anything is connected, so that a rank that is missing is named.

    Raises:
        NbdistError: After DEADLINE_S, naming who is missing.
    """
    store.set(f"here/{rank}", "here")
    missing = rendezvous.await_keys(store, [f"here/{other}" for other in living], DEADLINE_S)
    if missing:
        raise NbdistError(
            f"rank {rank} waited {DEADLINE_S:.0f} s to recover the process groups, and rank(s) "
            f"{rank_label([living[place] for place in missing])} did not come. Their cell may "
            "still run: %dist_status shows it, and %dist_restart replaces them."
        )


def _meet_with_groups(store: dist.Store, living: Sequence[int]) -> dict[int, dict[str, list[int]]]:
    """Wait for all living ranks, and exchange who has which groups. Collective: each of them."""
    rank = this_rank().place.rank
    common_store.announce(store, rank)
    announce_groups(store, rank, created_groups())
    meet(store, rank, living)
    common_store.note_others(store, living)
    return agree_on_groups(store, living)


def announce_groups(store: dist.Store, rank: int, specs: Iterable[GroupSpec]) -> None:
    """Say which of these groups this rank has or will have; before the ranks meet in the store."""
    open_groups = {s.name: s.ranks for s in specs if s.is_open and rank in s.ranks}
    counts = int(_world().group_count), _registry.local_number()
    store.set(f"groups/{rank}", json.dumps([counts, open_groups]))


def agree_on_groups(store: dist.Store, living: Sequence[int]) -> dict[int, dict[str, list[int]]]:
    """Read what each living rank announced, once all have met: name -> global ranks of a group.

    Groups made from now on have the same name on all ranks: torch counts them, also one that was
    begun on some ranks alone, and broken off.
    """
    texts = store.multi_get([f"groups/{rank}" for rank in living])
    counts, groups = zip(*(json.loads(text) for text in texts), strict=True)
    world_counts, local_numbers = zip(*counts, strict=True)
    _world().group_count = max(_world().group_count, *world_counts)
    _registry.local_base = max(local_numbers)
    _registry.local_counts.clear()
    return dict(zip(living, groups, strict=True))


def _find_lacking(
    announced: Mapping[int, Mapping[str, list[int]]],
    groups: Mapping[Any, tuple[int, ...]],
    whole: Iterable[Any],
) -> dict[Any, tuple[int, ...]]:
    """Groups of this rank that members do not have (any more) -> those members.

    They could not be connected: the others would be waited for.
    """
    world = _world()
    lacking = {}
    for pg in whole:
        name, ranks = str(world.pg_names[pg]), groups[pg]
        missing = tuple(r for r in ranks if announced[r].get(name) != list(ranks))
        if missing and pg is not world.default_pg:
            lacking[pg] = missing
    return lacking


def created_groups() -> tuple[GroupSpec, ...]:
    """The groups that the user's code made on this rank, in order, also as no member of them."""
    world = _world()
    names = {str(name) for name in world.pg_names.values()}
    return tuple(
        replace(spec, is_open=spec.name in names if spec.is_member else True)
        for spec in _registry.groups
    )


def rejoin(specs: Iterable[GroupSpec]) -> None:
    """Make the groups that others made before this process came.

    On a rank that takes a dead one's place, while the others are in `recover`; once the
    default group is formed, with `merge_groups` of the survivors' `created_groups`. It waits for
    the members of each group and for no other rank.
    """
    world = _world()
    rank = dist.get_rank()
    for spec in specs:
        _registry.groups.append(replace(spec, is_member=rank in spec.ranks))
        if spec.is_open and rank in spec.ranks:
            _make(world, spec, rank)
        # Groups made later must get the same names on all ranks.
        world.group_count = max(world.group_count, spec.count)


def _make(world: Any, spec: GroupSpec, rank: int) -> None:
    """Make one group as new_group does, by a given name and without meeting non-members."""
    default = world.default_pg
    noted = list(_registry.groups)
    pg, _ = c10d._new_process_group_helper(  # noqa: SLF001  # see install
        len(spec.ranks),
        spec.ranks.index(rank),
        list(spec.ranks),
        c10d.Backend(spec.backend),
        world.pg_map[default][1],
        spec.name,  # type: ignore[arg-type]  # a NewType of str in newer versions
        timeout=timedelta(seconds=spec.timeout_s),
        pg_tag=spec.tag or None,
        device_id=default.bound_device_id,
        group_desc=spec.description,
    )
    _registry.groups[:] = noted
    world.pg_group_ranks[pg] = {member: place for place, member in enumerate(spec.ranks)}


@dataclass(frozen=True, slots=True)
class _NewBackends:
    """A group's new backends, connected and not yet in use."""

    pg: Any
    store: dist.Store
    backends: dict[str, Any]
    stores: list[dist.Store]


def _connect(pg: Any, store: dist.Store) -> _NewBackends:
    """Connect new backends for a group. Collective: its members."""
    world = _world()
    # new_group nests a group's prefix in the default group's, and so must we: a new rank uses it.
    default = world.default_pg
    outer = store if pg is default else _default_store(store)
    group_store = dist.PrefixStore(f"{world.pg_names[pg]}/", outer)
    kinds = c10d.BackendConfig(c10d.Backend(world.pg_backend_config[pg])).get_device_backend_map()
    fresh = _NewBackends(pg, group_store, {}, [])
    for device, kind in kinds.items():
        if kind.startswith(c10d.Backend.NCCL):  # "nccl2" is one as well
            # In this place, as a new rank makes one group after the other, and each whole.
            old = pg._get_backend(torch.device(device))  # noqa: SLF001
            timeout = getattr(old, "wrapped_pg", old).options._timeout  # noqa: SLF001
            nccl_abort.renew(pg, group_store, timeout)
        if kind != c10d.Backend.GLOO:
            continue
        hurried = _DeadlineStore(group_store, DEADLINE_S)
        backend = _gloo(pg, dist.PrefixStore(f"{device}/", hurried), device)
        fresh.stores.append(hurried)
        # One kind for all devices: torch makes it once, under the first device's prefix.
        if len(set(kinds.values())) == 1:
            fresh.backends.update(dict.fromkeys(kinds, backend))
            break
        fresh.backends[device] = backend
    return fresh


def _default_store(store: dist.Store) -> dist.Store:
    world = _world()
    return dist.PrefixStore(f"{world.pg_names[world.default_pg]}/", store)


def _name_default_store(store: dist.Store) -> None:
    """Let groups that are made later meet here, also where the default group stays broken."""
    world = _world()
    world.pg_map[world.default_pg] = world.pg_map[world.default_pg][0], _default_store(store)


def _gloo(pg: Any, store: dist.Store, device: str) -> Any:
    """A connected Gloo backend like the group's old one: same timeout, same name."""
    world = _world()
    old = pg._get_backend(torch.device(device))  # noqa: SLF001  # the only way to it
    inner = getattr(old, "wrapped_pg", old)
    timeout = inner.options._timeout  # noqa: SLF001
    name = world.pg_names[pg]
    try:
        backend: Any = dist.ProcessGroupGloo(store, pg.rank(), pg.size(), timeout=timeout)
        backend.options.global_ranks_in_group = list(world.pg_group_ranks[pg])
        backend.options.group_name = name
        if inner is not old:  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            backend = debug_checks.around(backend, pg, store, timeout)
    except (RuntimeError, NbdistError) as error:
        raise NbdistError(
            f"group {name} (ranks {rank_label(world.pg_group_ranks[pg])}) could not be connected "
            f"again within {DEADLINE_S:.0f} s: {str(error).splitlines()[0]}"
        ) from error
    return backend


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call of torch's helper, by name."""
    names = ("size", "rank", "ranks", "backend", "store", "name")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _note(pg: Any, arguments: dict[str, Any]) -> None:
    """Remember a group, from what torch's helper was called with."""
    if not arguments["ranks"]:  # the default group: every rank makes it by itself, and first
        _registry.groups.clear()
        return
    world = _world()
    name = str(arguments["name"])
    if any(spec.name == name and spec.is_open for spec in created_groups()):
        return  # same tag and ranks: torch hands out the group that there is
    timeout: timedelta = arguments.get("timeout") or c10d.default_pg_timeout
    _registry.groups.append(
        GroupSpec(
            name=name,
            ranks=tuple(arguments["ranks"]),
            backend=str(arguments["backend"]),
            timeout_s=timeout.total_seconds(),
            description=arguments.get("group_desc") or "undefined",
            tag=arguments.get("pg_tag") or "",
            count=int(world.group_count),
            is_member=pg is not dist.GroupMember.NON_GROUP_MEMBER,
            is_open=True,
        )
    )


def _world() -> Any:
    """The table of torch's process groups; nothing public lists them."""
    return c10d._world  # noqa: SLF001
