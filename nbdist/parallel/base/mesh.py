"""The ranks as a mesh: who is where along each axis, and the groups along the axes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nbdist.strategy.choice import AXES, Degrees, Strategy


@dataclass(slots=True)
class ParallelMesh:
    """A mesh of all ranks. Made by `build_mesh`.

    Attributes:
        degrees: How many ranks lie along each axis.
        coordinate: Where this rank is along each axis.
        device_mesh: The mesh with the axes that count; None where every rank is by itself.
        expert_mesh: The same ranks with those that see different data as edp x ep: along ep they
            share the experts, along edp they have the same ones. None without ep.
    """

    degrees: Degrees
    rank: int
    coordinate: Degrees
    device_mesh: DeviceMesh | None
    expert_mesh: DeviceMesh | None = None
    _groups: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)

    def submesh(self, *axes: str) -> DeviceMesh:
        """The mesh along these axes (in AXES' order) through this rank."""
        assert self.device_mesh is not None
        names = tuple(axis for axis in AXES if axis in axes)
        return self.device_mesh[names] if len(names) > 1 else self.device_mesh[names[0]]

    def size(self, *axes: str) -> int:
        """How many ranks differ from this one in no other axes."""
        return math.prod(getattr(self.degrees, axis) for axis in axes)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in these axes only; None where it is alone.

        Collective at the first use for a set of axes: every rank, at the same place.
        """
        wanted = tuple(a for a in AXES if a in axes and getattr(self.degrees, a) > 1)
        if not wanted:
            return None
        if wanted not in self._groups:
            assert self.device_mesh is not None
            if len(wanted) == 1:
                group: dist.ProcessGroup | None = self.device_mesh[wanted[0]].get_group()
            elif self.size(*wanted) == dist.get_world_size():
                group = dist.group.WORLD
            else:
                groups = _ranks_along(self.degrees, wanted)
                group, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
            assert group is not None
            self._groups[wanted] = group
        return self._groups[wanted]


def build_mesh(choice: Strategy, device_type: str) -> ParallelMesh:
    """The mesh of a choice. Collective: every rank, with the same choice."""
    degrees = choice.degrees
    rank = dist.get_rank()
    if choice.name == "single":
        return ParallelMesh(degrees, rank, degrees.coordinate(0), None)
    names = tuple(a for a in AXES if getattr(degrees, a) > 1) or ("dp_shard",)
    shape = tuple(getattr(degrees, axis) for axis in names)
    mesh = _device_mesh(device_type, shape, names)
    experts = None
    if degrees.ep > 1:
        copies = degrees.dp // degrees.ep
        sizes = {"pp": degrees.pp, "edp": copies, "ep": degrees.ep, "tp": degrees.tp}
        sizes = {name: size for name, size in sizes.items() if size > 1}
        experts = _device_mesh(device_type, tuple(sizes.values()), tuple(sizes))
    return ParallelMesh(degrees, rank, degrees.coordinate(rank), mesh, experts)


def _device_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    if shape == (dist.get_world_size(),):
        # Torch would make one more group of all ranks where they share a GPU, and a rank that
        # replaces another would wait for the rest in it.
        world: Any = dist.group.WORLD
        return DeviceMesh.from_group(world, device_type, mesh_dim_names=names)
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def _ranks_along(degrees: Degrees, axes: tuple[str, ...]) -> list[list[int]]:
    """All ranks, in lists of those that differ in these axes only."""

    def others(rank: int) -> tuple[int, ...]:
        coordinate = degrees.coordinate(rank)
        return tuple(getattr(coordinate, axis) for axis in AXES if axis not in axes)

    ranks = sorted(range(degrees.product), key=others)
    return [list(members) for _, members in itertools.groupby(ranks, key=others)]
