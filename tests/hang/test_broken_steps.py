"""A step that breaks off anywhere in a deep sharded model leaves nothing to the next one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nbdist.hang.rank import process_groups
from tests.programs.rank import broken_off, n, rank, refusal, say, user, wait_for
from tests.support.torch_ranks import run_ranks


class Block(nn.Module):
    raises = ""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        if self.raises == "forward":
            raise ValueError(self.raises)
        inner = torch.tanh(self.up(self.norm(x)))
        if self.raises == "backward":  # down has its gradient then, up and norm do not
            inner.register_hook(self.fail)
        return x + self.down(inner)

    def fail(self, gradient):
        raise ValueError(self.raises)


def model_of(kind: str) -> nn.Module:
    """Six blocks, each a group of FSDP2's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(6)), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (n,))
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("replicas", "shards"))
    for layers in (*model[1:-1], model):
        fully_shard(layers, mesh=mesh, reshard_after_forward=kind != "grad-op")
    return model


def backward() -> float:
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    loss = user.model(data).square().mean()
    loss.backward()
    return loss.item()


def step() -> float:
    loss = backward()
    user.optimizer.step()
    user.optimizer.zero_grad()
    return loss


def break_off(broken: int, place: int, phase: str, generation: int) -> str:
    """A rank raises at a block while the others wait for it in a collective; how this one ends."""
    if rank == broken:
        user.model[place].raises = phase
        end = refusal(backward, ValueError)
        user.model[place].raises = ""
        say(f"out{generation}")
    else:
        end, _ = broken_off(backward, lambda: wait_for(f"out{generation}", [broken]))
    process_groups.recover(generation)
    return end


def trains(kind: str, places: str, breaks: bool) -> dict[str, Any]:
    """Each of two ranks in turn breaks off at each block, forward and backward."""
    user.model = model_of(kind)
    user.optimizer = torch.optim.AdamW(user.model.parameters(), 1e-2)
    curve, generation = [step()], 0
    for phase in ("forward", "backward"):
        for place in map(int, places):
            for broken in range(2):
                generation += 1
                if breaks:
                    end = break_off(broken, place, phase, generation)
                    assert end == (phase if rank == broken else "RuntimeError")
                curve.append(step())
    return {"curve": curve}


@pytest.mark.parametrize(
    ("kind", "size", "places"),
    [
        ("full", 2, "3"),
        pytest.param("full", 2, "123456", marks=pytest.mark.faults),
        pytest.param("grad-op", 2, "123456", marks=pytest.mark.faults),
        pytest.param("hybrid", 4, "123456", marks=pytest.mark.faults),
    ],
)
def test_a_break_at_any_block_leaves_the_losses_as_they_were(
    tmp_path: Path, kind: str, size: int, places: str
) -> None:
    """Up to 24 breaks in a row: forward and backward, at each block, on either of two ranks."""
    given = {"kind": kind, "places": places}
    calm, storm = (
        run_ranks(tmp_path / str(breaks), size, trains, arguments={**given, "breaks": breaks})
        for breaks in (False, True)
    )

    assert storm == calm
    assert len(set(calm[0]["curve"])) == 4 * len(places) + 1
