"""A process that takes another's place gets the others' device meshes, without a collective."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nbdist.core.rank import this_rank
from nbdist.hang.rank import device_meshes, process_groups
from nbdist.hang.recovery import merge_groups
from tests.programs.rank import is_new, n, rank, say, total, wait_for
from tests.support.torch_ranks import TorchRanks

NAMES = ["mesh", "tp", "again", "plain", "line", "part", "flat"]


def names_of(mesh: DeviceMesh) -> list[str]:
    return [str(group.group_name) for group in mesh.get_all_groups()]


def survive(shell: InteractiveShell, replaced: tuple[int, ...]) -> None:
    """Make meshes, and tell them once some ranks have ended."""
    dist.new_group([0, 2])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    part = DeviceMesh("cpu", [3, 1], mesh_dim_names=("odd",))
    meshes = [mesh, mesh["tp"], mesh, plain, line, part, mesh["dp", "tp"]._flatten("both")]
    shell.push(dict(zip(NAMES, meshes, strict=True)) | {"number": 3})
    made = process_groups.created_groups(), names_of(mesh), this_rank().topology
    say("made", pickle.dumps(made))
    wait_for("dead", replaced)
    process_groups.recover(1)
    say("meshes", pickle.dumps(device_meshes.mesh_names()))


def told_meshes(replaced: tuple[int, ...]) -> list[str]:
    survivors = [r for r in range(n) if r not in replaced]
    return list(device_meshes.name_meshes([pickle.loads(m) for m in wait_for("meshes", survivors)]))


def use_meshes(replaced: tuple[int, ...]) -> dict[str, Any]:
    """Sums of rank + 1: along dp 0 and 2, 1 and 3; along tp 0 and 1, 2 and 3."""
    shell = InteractiveShell.instance()
    if is_new:
        assert told_meshes(replaced) == NAMES
    else:
        survive(shell, replaced)
    mesh, tp, again, plain, line, part, flat = (shell.user_ns[name] for name in NAMES)
    sums = [[4.0, 6.0][rank % 2], [3.0, 7.0][rank // 2]]
    sheet = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0), Shard(1)])
    other = distribute_tensor(torch.ones(4, 4), plain, [Shard(0), Shard(1)])
    assert [total(mesh.get_group(axis)) for axis in ("dp", "tp")] == sums
    assert total(tp.get_group()) == sums[1]
    assert [total(plain.get_group(axis)) for axis in (0, 1)] == sums
    assert plain.mesh_dim_names is None
    assert (total(line.get_group()), line.mesh.tolist()) == (10.0, [0, 1, 2, 3])
    assert part.mesh.tolist() == [3, 1]
    assert [*(part.get_coordinate() or ())] == {3: [0], 1: [1]}.get(rank, [])
    assert rank not in {1, 3} or total(part.get_group()) == 6.0
    assert total(flat.get_group()) == 10.0
    assert [whole.full_tensor().sum() for whole in (sheet, other)] == [120.0, 16.0]
    assert again is tp._get_root_mesh() is mesh
    assert mesh["tp"] == tp
    assert mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {"names": names_of(mesh)}


@pytest.mark.parametrize("replaced", [pytest.param((2,), marks=pytest.mark.faults), (1, 3)])
def test_a_new_process_has_the_meshes_that_the_others_have(
    tmp_path: Path, replaced: tuple[int, ...]
) -> None:
    """The same groups under the same variables, also where a group's members are all new."""
    with TorchRanks(tmp_path, 4, use_meshes, arguments={"replaced": replaced}) as ranks:
        said = [pickle.loads(ranks.wait_for("made", r)) for r in range(4)]
        for rank in replaced:
            ranks.kill(rank)
        groups = merge_groups(said[r][0] for r in range(4) if r not in replaced)
        for rank in replaced:
            ranks.replace(rank, 1, said[0][2], groups)
        results = ranks.results()

    assert [result["names"] for result in results] == [names for _, names, _ in said]
