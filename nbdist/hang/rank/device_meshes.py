"""The user's device meshes, for a process that takes another's place.

Making a mesh is collective, so a new process cannot make one by itself, as it could a variable.
Its groups have come back by then, and a mesh is no more than ranks in order and a group for
each dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from nbdist.hang.recovery import MeshSpec
from nbdist.rpc.rank import namespace

# Versions of torch differ, or a mesh cannot be built: its variable is reported as lacking.
UNBUILT = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


def mesh_names() -> dict[str, MeshSpec]:
    """Variable -> mesh, for the user's variables that are device meshes."""
    return {name: _spec_of(value) for name, value in namespace.values_of(DeviceMesh).items()}


def name_meshes(by_rank: Sequence[Mapping[str, MeshSpec]]) -> tuple[str, ...]:
    """Make the other ranks' meshes here, without communication; return the variables' names.

    Called on a rank that takes another's place, once its groups are there, with `mesh_names` of
    each other rank: each knows its own groups. Meshes that cannot be built are left out.
    """
    built: dict[Any, DeviceMesh] = {}
    variables = {}
    for name in dict.fromkeys(name for meshes in by_rank for name in meshes):
        try:
            variables[name] = _mesh([meshes[name] for meshes in by_rank if name in meshes], built)
        except UNBUILT:
            continue
    namespace.push(variables)
    return tuple(variables)


def _spec_of(mesh: DeviceMesh) -> MeshSpec:
    # No public function gives the mesh that this is a part of; without it a part is a whole mesh.
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    groups = [] if mesh.get_coordinate() is None else mesh.get_all_groups()
    return MeshSpec(
        device_type=mesh.device_type,
        shape=tuple(mesh.mesh.shape),
        ranks=tuple(mesh.mesh.flatten().tolist()),
        dim_names=mesh.mesh_dim_names,
        groups=tuple(str(group.group_name) for group in groups),
        root=None if root is mesh else _spec_of(root),
    )


def _mesh(specs: Sequence[MeshSpec], built: dict[Any, DeviceMesh]) -> DeviceMesh:
    """Build the mesh that the others describe; the same object for the same groups."""
    rank = dist.get_rank()
    spec = next((spec for spec in specs if rank in spec.ranks), specs[0])
    roots = [other.root for other in specs if other.root is not None]
    if roots and spec.dim_names:
        root = _mesh(roots, built)
        if set(spec.dim_names) <= set(root.mesh_dim_names or ()):
            return root[spec.dim_names]
    same = [other for other in specs if (other.shape, other.ranks) == (spec.shape, spec.ranks)]
    groups = _groups(spec, same, rank)
    key = spec.device_type, spec.shape, spec.ranks, spec.dim_names, *map(id, groups)
    if key not in built:
        built[key] = _form(spec, groups)
    return built[key]


def _groups(spec: MeshSpec, same_mesh: Sequence[MeshSpec], rank: int) -> list[Any]:
    """Find this rank's group of each dimension; none where the rank is not in the mesh.

    If several groups have the right ranks, the one that another member names is used. If no member
    names one, all members are new and choose the first.
    """
    if rank not in spec.ranks:
        return []
    place = spec.ranks.index(rank)
    groups_here = {str(name): pg for pg, name in c10d._world.pg_names.items()}  # noqa: SLF001
    groups = []
    for dim, size in enumerate(spec.shape):
        step = math.prod(spec.shape[dim + 1 :])
        first = place - place // step % size * step
        ranks = sorted(spec.ranks[first + step * index] for index in range(size))
        fit = [
            n for n, pg in groups_here.items() if sorted(dist.get_process_group_ranks(pg)) == ranks
        ]
        named = {other.groups[dim] for other in same_mesh if other.groups}
        fit.sort(key=lambda name: name not in named)
        if not fit:
            raise KeyError(f"no group of ranks {ranks}")
        groups.append(groups_here[fit[0]])
    return groups


def _form(spec: MeshSpec, groups: Sequence[Any]) -> DeviceMesh:
    """A mesh of groups that there are. No collective."""
    ranks = torch.tensor(spec.ranks, dtype=torch.int).reshape(spec.shape)
    if not groups:
        # The mesh that torch makes on a rank outside of it; of public functions only
        # init_device_mesh does so, and it makes the groups.
        return DeviceMesh(
            spec.device_type, ranks, mesh_dim_names=spec.dim_names, _init_backend=False
        )
    names = spec.dim_names or tuple(f"dim{dim}" for dim in range(len(spec.shape)))
    mesh = DeviceMesh.from_group(list(groups), spec.device_type, ranks, mesh_dim_names=names)
    if spec.dim_names is None:
        # from_group asks for names with several groups, and meshes with other names differ.
        if not hasattr(mesh, "_mesh_dim_names"):
            raise NotImplementedError("a mesh without names for its dimensions")
        mesh._mesh_dim_names = None  # noqa: SLF001
    return mesh
