"""Buffers that each rank's forward has changed for itself: whose are saved, and who says so."""

import warnings
from typing import Any

import torch
from safetensors.torch import load_file

from nbdist.checkpoint.rank import export_weights
from nbdist.checkpoint.rank.load import load
from nbdist.parallel.accelerator.accelerator import Accelerator
from tests.programs.rank import everyone, rank, run_dir
from tests.programs.saving import save
from tests.programs.training import Net, labels, tokens, use
from tests.support.torch_ranks import on_ranks

MOVED = ("first", "second")


class Counted(Net):
    """A codebook that every forward moves, a counter that is equal everywhere, a wide constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(16))
        self.register_buffer("second", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("wide", torch.zeros(4000))

    def forward(self, x, y):
        h = self.embed(x).detach()
        with torch.no_grad():
            self.first += h.mean((0, 1))
            self.second += h.std((0, 1))
            self.steps += 1
        return super().forward(x, y)


def are_rank_0s(buffers: Any, mine: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(buffers[key], everyone(mine[key])[0]) for key in MOVED)


def saved_under(name: str) -> list[list[str]]:
    """Rank 0's, all of them; what is said when they are asked for, saved and exported."""
    use(name)
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = accelerator.prepare(Counted())
    at = slice(4 * rank, 4 * rank + 4) if accelerator.num_processes > 1 else slice(0, 8)
    model(tokens[at], labels[at])
    base = accelerator.unwrap_model(model)
    mine = {key: getattr(base, key).clone() for key in MOVED}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = accelerator.get_state_dict(model)
    assert all(torch.equal(state[key], mine[key]) for key in MOVED)
    saved = save(str(run_dir / name))
    exported = export_weights.export_model(model, run_dir / f"{name}.safetensors")
    are_rank_0s(load_file(exported.path), mine)
    for key in MOVED:
        getattr(base, key).fill_(-1.0)
    load(str(run_dir / name))
    are_rank_0s({key: getattr(base, key) for key in MOVED}, mine)
    of_save = [note for note in saved.notes if "buffers" in note]
    return [[str(warning.message) for warning in caught], of_save, list(exported.notes)]


@on_ranks(2)
def test_whose_buffers_are_saved_is_said_where_ranks_differ() -> None:
    """Rank 0's, all of them; nothing is said where ranks agree or DDP sends rank 0's."""
    ((asked,), (saved,), (exported,)) = saved_under("fsdp")
    for note in (asked, saved, exported):
        assert "differ between the ranks (first, second)" in note
    assert "each rank gets its own, so what rank 0 saves" in asked
    assert "rank 0's are written" in saved
    assert "rank 0's are written" in exported
    for name in ("ddp", "tp"):
        assert saved_under(name) == [[], [], []]
