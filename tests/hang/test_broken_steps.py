"""A step that breaks off anywhere in a deep sharded model leaves nothing to the next one."""

from pathlib import Path

import pytest

from tests.support.torch_ranks import run_ranks

# Six blocks, each a group of FSDP2's; in turn each rank raises at each block, forward and backward,
# while the others wait for it in a collective until they are broken off.
BREAKS = """
    from torch import nn
    torch.manual_seed(0)

    class Block(nn.Module):
        raises = ""

        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            if self.raises == "forward":
                raise ValueError("forward")
            inner = torch.tanh(self.up(self.norm(x)))
            if self.raises == "backward":  # down has its gradient then, up and norm do not
                inner.register_hook(self.fail)
            return x + self.down(inner)

        def fail(self, gradient):
            raise ValueError("backward")

    kind = os.environ["KIND"]
    model = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(6)), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (n,))
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("replicas", "shards"))
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh, reshard_after_forward=kind != "grad-op")
    fully_shard(model, mesh=mesh, reshard_after_forward=kind != "grad-op")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))

    def backward():
        loss = model(data).square().mean()
        loss.backward()
        return loss.item()

    def step():
        loss = backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    curve, ends, generation = [step()], [], 0
    for phase in ("forward", "backward"):
        for place in map(int, os.environ["PLACES"]):
            for broken in range(2):
                generation += 1
                if os.environ["FAULT"] == "1":
                    if rank == broken:
                        model[place].raises = phase
                        ends.append(refusal(backward, ValueError))
                        model[place].raises = ""
                        say(f"out{generation}")
                    else:
                        is_out = lambda: wait_for(f"out{generation}", [broken])
                        ends.append(broken_off(backward, is_out)[0])
                    process_groups.recover(generation)
                curve.append(step())
    done(curve=curve, ends=ends)
"""


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
    calm = run_ranks(tmp_path / "calm", size, BREAKS, KIND=kind, PLACES=places, FAULT="0")
    storm = run_ranks(tmp_path / "storm", size, BREAKS, KIND=kind, PLACES=places, FAULT="1")

    assert [result["curve"] for result in storm] == [result["curve"] for result in calm]
    assert len(set(calm[0]["curve"])) == 4 * len(places) + 1
    for rank, result in enumerate(storm[:2]):
        expected = ["forward"] * 2 * len(places) + ["backward"] * 2 * len(places)
        raised = [end for end in result["ends"] if end != "RuntimeError"]
        assert raised == expected[rank::2]
