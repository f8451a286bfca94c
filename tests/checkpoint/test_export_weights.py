"""Weights in one file, under every kind of strategy, as transformers and plain torch read them."""

from pathlib import Path

import pytest

from tests.support.torch_ranks import TorchRanks
from tests.support.training import MODEL

TEXT = """
    from nbdist.checkpoint.rank import export_weights as weights
    from nbdist.checkpoint.rank.safetensors_file import WeightsFile
    from safetensors import safe_open
    from safetensors.torch import load_file, load_model
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(os.environ["FOLDER"])

    def gpt2():
        return GPT2LMHeadModel(GPT2Config(
            vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=4,
            bos_token_id=1, eos_token_id=2,
        ))

    def llama():
        config = LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
            tie_word_embeddings=False,
        )
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    ids = torch.randint(96, (2, 8), generator=torch.Generator().manual_seed(1))

    def exported(kind, name):
        "A file that transformers loads, with every value of the model in one process."
        use(name)
        torch.manual_seed(0)
        alone = kind().eval()
        wanted = alone.state_dict()
        torch.manual_seed(rank)  # rank 0's values count
        model = Accelerator().prepare(kind())
        result = weights.export_model(model, folder / f"{kind.__name__}-{name}")
        path = Path(result.path)
        loaded = AutoModelForCausalLM.from_pretrained(path.parent).eval()
        state = loaded.state_dict()
        same = state.keys() == wanted.keys()
        same = same and all(torch.equal(state[key], wanted[key]) for key in wanted)
        with torch.no_grad():
            logits = torch.equal(loaded(ids).logits, alone(ids).logits)
        with safe_open(path, "pt") as file:
            names, metadata = sorted(file.keys()), file.metadata()
        return {
            "type": type(loaded).__name__, "model": result.model, "same": same, "logits": logits,
            "names": names, "metadata": metadata, "count": result.tensors, "tied": result.tied,
            "dtype": str(next(loaded.parameters()).dtype),
            "left": sorted(entry.name for entry in path.parent.iterdir()),
            "size": result.size_bytes == path.stat().st_size,
        }
"""
SOME = ("gpt2 fsdp", "llama tp", "gpt2 pp")
OTHERS_OF_ALL = ("gpt2 ddp", "gpt2 tp", "llama ddp", "llama fsdp", "llama pp")


@pytest.mark.parametrize(
    "cases", [SOME, pytest.param(OTHERS_OF_ALL, marks=pytest.mark.parity)], ids=["some", "others"]
)
def test_transformers_loads_what_was_exported_under_each_strategy(
    tmp_path: Path, cases: tuple[str, ...]
) -> None:
    """A tied GPT-2 and a bf16 Llama: names, dtypes and every value are those of one process."""
    calls = ", ".join("exported({}, {!r})".format(*case.split()) for case in cases)
    text = TEXT + f"    done(exports=[{calls}])\n"
    env = {"FOLDER": str(tmp_path / "weights"), "HF_HUB_OFFLINE": "1"}
    with TorchRanks(tmp_path / "run", 2, MODEL + text, **env) as ranks:
        first, second = ranks.results()

    assert first == second
    for case, export in zip(cases, first["exports"], strict=True):
        if case.startswith("gpt2"):
            assert (export["type"], export["dtype"]) == ("GPT2LMHeadModel", "torch.float32")
            assert export["tied"] == ["lm_head.weight"]
            tied = {"lm_head.weight": "transformer.wte.weight"}
            assert export["metadata"] == {"format": "pt", **tied}
            assert "lm_head.weight" not in export["names"]
        else:
            assert (export["type"], export["dtype"]) == ("LlamaForCausalLM", "torch.bfloat16")
            assert export["tied"] == []
            assert "lm_head.weight" in export["names"]
        assert export["model"] == export["type"]
        assert export["same"]
        assert export["logits"]
        assert export["size"]
        assert export["count"] == len(export["names"])
        assert export["left"] == ["config.json", "generation_config.json", "model.safetensors"]


OTHERS = """
    import shutil
    from unittest import mock
    from nbdist.checkpoint.folder import explain_errors
    weights.BATCH_BYTES = 2048
    class Tied(Net):
        "The head is the embedding; a buffer is saved and one is not."
        def __init__(self):
            super().__init__()
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.ones(2) * 3)
            self.register_buffer("count", torch.tensor(7))
            self.register_buffer("spare", torch.ones(2), persistent=False)

    class More(Tied):
        "One state is no tensor, which no other program would understand."
        def get_extra_state(self):
            return {"a": 1}
        def set_extra_state(self, state):
            pass

    def refused(function, *args):
        try:
            function(*args)
        except NbdistError as error:
            return str(error)
        return "nothing was refused"

    def plain(name):
        "safetensors' own load_model puts every value, the tied ones too, into a new module."
        torch.manual_seed(0)
        net = wanted = More()
        if name == "own DDP":
            model = DDP(net)
        elif name == "own FSDP":
            torch.manual_seed(0)
            model = fully_shard(More())
        elif name == "none":
            model = net
        else:
            use(name)
            torch.manual_seed(0)
            model = Accelerator().prepare(More())
        result = weights.export_model(model, folder / f"{name}.safetensors")
        fresh = Tied()
        load_model(fresh, result.path)
        same = {
            key: bool((value == wanted.state_dict()[key]).all())
            for key, value in fresh.state_dict().items() if key != "_extra_state"
        }
        return [all(same.values()), len(same), result.tied, result.left_out, result.configs]

    def broken(patch):
        "What is refused while the file's class is changed; the old file stays."
        with patch:
            text = refused(weights.export_model, model, folder / "ddp.safetensors")
        is_unchanged = load_file(folder / "ddp.safetensors")["scale"].tolist() == [3.0, 3.0]
        hidden = sorted(path.name for path in folder.iterdir() if path.name[0] == ".")
        return text, is_unchanged, hidden

    plain_write = WeightsFile.write
    def flipped(self, batch, values):
        values = {k: v + 1 if k == "embed.weight" else v for k, v in values.items()}
        plain_write(self, batch, values)
    def full(self, batch, values):
        with explain_errors(self._target):
            raise OSError(28, "No space left on device")
    def interrupted(self):
        raise NbdistError("stopped here")
    little = shutil.disk_usage("/")._replace(free=100)
    breaks = [
        mock.patch.object(WeightsFile, "write", flipped),
        mock.patch.object(WeightsFile, "write", full),
        mock.patch("shutil.disk_usage", return_value=little),
        mock.patch.object(WeightsFile, "end", interrupted),
    ]

    kinds = ("zero1", "fsdp1", "none", "own DDP", "own FSDP", "ddp")
    exports = {kind: plain(kind) for kind in kinds}
    use("ddp")
    torch.manual_seed(0)
    model = Accelerator().prepare(More())
    broke = [broken(patch) for patch in breaks]
    odd = (
        registry.prepared_of(model).base.blocks, nn.Linear(2 + rank, 2), nn.ReLU(),
        nn.Linear(2, 2).to(torch.complex128),
    )
    odd = [refused(weights.export_model, model, folder / "x.safetensors") for model in odd]
    done(exports=exports, broke=broke, odd=odd)
"""


def test_any_other_model_is_exported_or_refused_with_a_reason(tmp_path: Path) -> None:
    """What no strategy knows, what is sharded by the user's code, tied tensors, other states.

    And a file that cannot be written, or is read back with another value, leaves the earlier one
    and nothing else.
    """
    env = {"FOLDER": str(tmp_path / "weights"), "HF_HUB_OFFLINE": "1", "BLOCKS": "2"}
    with TorchRanks(tmp_path / "run", 2, MODEL + TEXT + OTHERS, **env) as ranks:
        first, second = ranks.results()

    for name, export in first["exports"].items():
        left_out = [] if name == "fsdp1" else ["_extra_state"]  # it lists tensors alone
        assert export == [True, 37, ["head.weight"], left_out, []], name
    texts = [text for text, *_ in first["broke"]]
    assert "384 of 384 values of embed.weight differ from the model's" in texts[0]
    assert "the disk is full" in texts[1]
    assert "only 100 are free there" in texts[2]
    assert all("failed on rank 0" in text for text, *_ in second["broke"])
    assert all(is_unchanged and hidden == [] for _, is_unchanged, hidden in first["broke"])
    assert "ModuleList is a part of a prepared model (0.norm1" in first["odd"][0]
    assert "rank 1's model differs from rank 0's: weight" in first["odd"][1]
    assert "ReLU has no parameters" in first["odd"][2]
    assert "weight has dtype complex128, which safetensors cannot store" in first["odd"][3]
