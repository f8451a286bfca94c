"""Buffers that each rank's forward has changed for itself: whose are saved, and who says so."""

from pathlib import Path

from tests.support.torch_ranks import run_ranks
from tests.support.training import MODEL

TEXT = (
    MODEL
    + """
    import warnings
    from safetensors.torch import load_file
    from nbdist.checkpoint.rank import export_weights, jobs, load as loading, save as saving

    class Counted(Net):
        "A codebook that every forward moves, a counter that is equal everywhere, a wide constant."
        def __init__(self):
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

    MOVED = ("first", "second")
    folder = Path(os.environ["FOLDER"])

    def tried(name):
        use(name)
        accelerator = Accelerator()
        torch.manual_seed(0)
        model = accelerator.prepare(Counted())
        at = slice(4 * rank, 4 * rank + 4) if accelerator.num_processes > 1 else slice(0, 8)
        model(tokens[at], labels[at])
        base = accelerator.unwrap_model(model)
        mine = {key: getattr(base, key).clone() for key in MOVED}
        rank_0 = [mine if rank == 0 else None]
        dist.broadcast_object_list(rank_0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = accelerator.get_state_dict(model)
        is_own = all(torch.equal(state[key], mine[key]) for key in MOVED)
        saved = saving.begin(f"{folder}/{name}", name, False)
        jobs.wait(name)
        dist.barrier()
        exported = export_weights.export_model(model, folder / f"{name}.safetensors")
        weights = load_file(exported.path)
        for key in MOVED:
            getattr(base, key).fill_(-1.0)
        loading.load(f"{folder}/{name}")
        return {
            "asked": [str(warning.message) for warning in caught],
            "saved": [note for note in saved.notes if "buffers" in note],
            "exported": exported.notes,
            "own": is_own,
            "file": all(torch.equal(weights[key], rank_0[0][key]) for key in MOVED),
            "loaded": all(torch.equal(getattr(base, key), rank_0[0][key]) for key in MOVED),
        }

    results = {name: tried(name) for name in ("fsdp", "ddp", "tp")}
    done(**results)
"""
)


def test_whose_buffers_are_saved_is_said_where_ranks_differ(tmp_path: Path) -> None:
    """Rank 0's, all of them; nothing is said where ranks agree or DDP sends rank 0's."""
    for end in run_ranks(tmp_path, 2, TEXT, FOLDER=str(tmp_path)):
        for name, kinds in end.items():
            assert kinds["own"], name
            assert kinds["file"], name
            assert kinds["loaded"], name
        told = end["fsdp"]
        for notes, whose in (
            (told["asked"], "each rank gets its own, so what rank 0 saves"),
            (told["saved"], "rank 0's are written"),
            (told["exported"], "rank 0's are written"),
        ):
            (note,) = notes
            assert "differ between the ranks (first, second)" in note
            assert whose in note
        for name in ("ddp", "tp"):
            assert not any(end[name][key] for key in ("asked", "saved", "exported")), end[name]
