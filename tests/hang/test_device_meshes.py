"""A process that takes another's place gets the others' device meshes, without a collective."""

import pickle
from pathlib import Path

import pytest

from nbdist.hang.recovery import merge_groups
from tests.support.torch_ranks import TorchRanks

# All make meshes; some end; the others tell theirs, and all use the same ones afterwards.
TEXT = """
    from IPython.core.interactiveshell import InteractiveShell
    from torch.distributed.device_mesh import DeviceMesh
    from nbdist.hang.rank import device_meshes as meshes
    shell = InteractiveShell.instance()
    replaced = [int(word) for word in os.environ["REPLACED"].split()]
    if is_new:
        survivors = [r for r in range(n) if r not in replaced]
        by_rank = [pickle.loads(data) for data in wait_for("meshes", survivors)]
        bound = meshes.name_meshes(by_rank)
        variables = shell.user_ns
    else:
        mine = dist.new_group([0, 2])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        variables = {
            "mesh": mesh,
            "tp": mesh["tp"],
            "again": mesh,
            "plain": init_device_mesh("cpu", (2, 2)),
            "line": init_device_mesh("cpu", (4,)),
            "part": DeviceMesh("cpu", [3, 1], mesh_dim_names=("odd",)),
            "flat": mesh["dp", "tp"]._flatten("both"),
            "number": 3,
        }
        shell.push(variables)
        names = [str(group.group_name) for group in variables["mesh"].get_all_groups()]
        say("made", pickle.dumps((process_groups.created_groups(), names, this_rank().topology)))
        wait_for("go", [9])
        if rank in replaced:
            time.sleep(100)
        process_groups.recover(1)
        bound = ()
        say("meshes", pickle.dumps(meshes.mesh_names()))
    mesh, tp, plain, line, part, flat = (
        variables[name] for name in ("mesh", "tp", "plain", "line", "part", "flat")
    )
    sheet = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0), Shard(1)])
    other = distribute_tensor(torch.ones(4, 4), plain, [Shard(0), Shard(1)])
    done(
        bound=bound,
        names=[str(group.group_name) for group in mesh.get_all_groups()],
        sums=[total(mesh.get_group("dp")), total(mesh.get_group("tp")), total(tp.get_group())],
        plain=[total(plain.get_group(0)), total(plain.get_group(1)), plain.mesh_dim_names],
        line=[total(line.get_group()), line.mesh.tolist()],
        part=[part.mesh.tolist(), part.get_coordinate(),
              total(part.get_group()) if rank in (1, 3) else 0.0],
        flat=total(flat.get_group()),
        whole=[sheet.full_tensor().sum().item(), other.full_tensor().sum().item()],
        same=[variables["again"] is mesh, tp._get_root_mesh() is mesh, mesh["tp"] == tp,
              mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))],
    )
"""


@pytest.mark.parametrize("replaced", [pytest.param((2,), marks=pytest.mark.faults), (1, 3)])
def test_a_new_process_has_the_meshes_that_the_others_have(
    tmp_path: Path, replaced: tuple[int, ...]
) -> None:
    """The same groups under the same variables, also where a group's members are all new.

    Sums of rank + 1: along dp 0 and 2, 1 and 3; along tp 0 and 1, 2 and 3.
    """
    with TorchRanks(tmp_path, 4, TEXT, REPLACED=" ".join(map(str, replaced))) as ranks:
        said = {r: pickle.loads(ranks.wait_for("made", r)) for r in range(4)}
        for rank in replaced:
            ranks.kill(rank)
        (tmp_path / "go.9").touch()
        groups = merge_groups(said[r][0] for r in said if r not in replaced)
        for rank in replaced:
            ranks.replace(rank, 1, said[0][2], groups)
        results = ranks.results()

    for rank, result in enumerate(results):
        assert result["names"] == said[rank][1]
        tp = [3.0, 3.0, 7.0, 7.0][rank]
        assert result["sums"] == [[4.0, 6.0][rank % 2], tp, tp]
        assert result["plain"] == [[4.0, 6.0][rank % 2], tp, None]
        assert result["line"] == [10.0, [0, 1, 2, 3]]
        assert result["part"] == [
            [3, 1],
            {3: [0], 1: [1]}.get(rank),
            6.0 if rank in {1, 3} else 0.0,
        ]
        assert result["flat"] == 10.0
        assert result["whole"] == [120.0, 16.0]
        assert result["same"] == [True] * 4
        expected = ["mesh", "tp", "again", "plain", "line", "part", "flat"]
        assert result["bound"] == (expected if rank in replaced else [])
