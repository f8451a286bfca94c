"""DDP's options give the gradients of a single process, exactly or as closely as they can."""

from pathlib import Path

import pytest

from tests.support.torch_ranks import run_ranks
from tests.switch.test_rank import TRAINING

OPTIONS = """
    def net():
        torch.manual_seed(3)
        L = torch.nn.Linear
        return torch.nn.Sequential(L(8, 64), torch.nn.Tanh(), L(64, 64), torch.nn.Tanh(), L(64, 8))
    def batch(step):
        return torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    def curve(model, part):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        values = []
        for step in range(6):
            inputs = part(batch(step))
            value = (model(inputs) - inputs.flip(-1)).square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(value.detach())
        return torch.stack(values)
    alone = curve(net(), lambda inputs: inputs)
    outcomes = {}
    for name, options in (
        ("plain", {}), ("bucket", {"bucket": 0.005}), ("static", {"static_graph": True}),
        ("unused", {"find_unused": True}), ("fp16", {"hook": "fp16"}),
        ("bf16", {"hook": "bf16"}), ("powersgd", {"hook": "powersgd"}),
    ):
        registry.set_choice(pick("ddp", **options))
        model = live.prepare_model(net())
        values = curve(model, lambda inputs: inputs.chunk(n)[rank])
        dist.all_reduce(values)
        logged = model._get_ddp_logging_data()
        sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
        off = (values / n - alone).abs().max().item()
        outcomes[name] = [off, len(str(sizes).split(","))]
    # A model that trains nothing is not wrapped: DDP would refuse it.
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    outcomes["frozen"] = [float(live.prepare_model(frozen) is not frozen), 0]
    done(**outcomes)
"""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.parity)])
def test_options_of_ddp(tmp_path: Path, size: int) -> None:
    """Buckets, static graph and unused parameters change nothing; compression changes little."""
    results = run_ranks(tmp_path, size, TRAINING + OPTIONS)

    for result in results:
        for exact in ("plain", "bucket", "static", "unused"):
            assert result[exact][0] < 2e-6, exact
        assert 0 < result["fp16"][0] < 1e-4
        assert 0 < result["bf16"][0] < 1e-3
        # Steps 0 and 1 are exact; then gradients of rank 4.
        assert 0 < result["powersgd"][0] < 2e-2
        assert result["bucket"][1] > result["plain"][1]
        # More than one ends the process with Gloo.
        assert result["powersgd"][1] == 1
        assert result["frozen"][0] == 0.0


SHARED_GPU = """
    from nbdist.parallel.mesh import build_mesh
    torch.cuda.is_available = lambda: True  # with Gloo: the ranks share a GPU
    before = c10d._world.group_count
    grids = {name: build_mesh(pick(name), "cpu") for name in ("ddp", "fsdp", "tp")}
    made = c10d._world.group_count - before
    groups = [grids["ddp"].group("dp_replicate"), grids["fsdp"].mesh.get_group(),
              grids["tp"].submesh("tp").get_group()]
    done(made=made, are_world=[group is dist.group.WORLD for group in groups],
         ranks=grids["tp"].mesh.mesh.tolist())
"""


def test_a_mesh_of_all_ranks_makes_no_group(tmp_path: Path) -> None:
    """Torch's own would where Gloo and a GPU are there; a replaced rank waited in it for ever."""
    for result in run_ranks(tmp_path, 2, TRAINING + SHARED_GPU):
        assert result == {"made": 0, "are_world": [True] * 3, "ranks": [0, 1]}


MEMORY = """
    import itertools
    def conv():
        torch.manual_seed(3 + rank)  # rank 0's values are to win
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Tanh(), torch.nn.Conv2d(8, 4, 3),
            torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(16, 6))
        net[5].weight = torch.nn.Parameter(torch.randn(16, 6).t())
        return net
    def strides(net):
        return [p.stride() for p in net.parameters()]
    def batch(step):
        drawn = torch.Generator().manual_seed(step)
        return torch.randn(8, 3, 9, 9, generator=drawn), torch.randint(6, (8,), generator=drawn)
    def train(model, optimizer, steps, share=lambda t: t):
        for step in steps:
            x, y = map(share, batch(step))
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step(); optimizer.zero_grad()
    outcomes = {}
    for when, name in itertools.product(("before", "after", "never"), ("ddp", "zero1")):
        model = conv()
        if when == "before":
            model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        switch.switch(pick(name))
        model = live.prepare_model(model)
        live.bind(optimizer)
        if when == "after":
            model = model.to(memory_format=torch.channels_last)
        alone = copy.deepcopy(registry.prepared_of(model).base)
        single = torch.optim.Adam(alone.parameters(), lr=1e-2)
        train(alone, single, range(4))
        train(model, optimizer, range(2), lambda t: t.chunk(n)[rank])
        for other in ("fsdp", name):
            switch.switch(pick(other))
        train(model, optimizer, range(2, 4), lambda t: t.chunk(n)[rank])
        off = max((p - q).abs().max().item() for p, q in zip(
            model.parameters(), alone.parameters(), strict=True))
        assert all(
            state["exp_avg"].stride() == p.stride() for p, state in optimizer.state.items())
        outcomes[f"{when} {name}"] = [off, strides(model) == strides(alone), strides(alone)[0]]
        del model, optimizer
    done(**outcomes)
"""


def test_channels_last_and_transposed_parameters(tmp_path: Path) -> None:
    """Each rank keeps the order in memory that the user chose, before prepare or after it.

    DDP adds buckets up as they lie: with another order on another rank gradients are wrong.
    """
    for result in run_ranks(tmp_path, 2, TRAINING + MEMORY):
        for case, (off, is_kept, strides) in result.items():
            assert off < 1e-5, (case, off)
            assert strides == ([27, 9, 3, 1] if "never" in case else [27, 1, 9, 3])
            assert is_kept == ("after" not in case), case  # switches bring back what prepare saw
