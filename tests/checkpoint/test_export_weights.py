"""Weights in one file, under every kind of strategy, as transformers and plain torch read them."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nbdist.checkpoint.folder import explain_errors
from nbdist.checkpoint.rank import export_weights
from nbdist.checkpoint.rank.export_weights import export_model
from nbdist.checkpoint.rank.safetensors_file import WeightsFile
from nbdist.errors import NbdistError
from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.live import registry
from tests.programs import saving
from tests.programs.rank import rank, refusal, run_dir
from tests.programs.training import use
from tests.support.torch_ranks import on_ranks


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 96, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def llama() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(saving.llama_config(), dtype=torch.bfloat16)


def exported(kind: Any, name: str) -> tuple[Any, nn.Module]:
    """A file that transformers loads, with every value of the model in one process."""
    from transformers import AutoModelForCausalLM

    use(name)
    torch.manual_seed(0)
    alone = kind().eval()
    torch.manual_seed(rank)  # rank 0's values count
    model = Accelerator().prepare(kind())
    result = export_model(model, run_dir / f"{kind.__name__}-{name}")
    path = Path(result.path)
    loaded = AutoModelForCausalLM.from_pretrained(path.parent).eval()
    state, wanted = loaded.state_dict(), alone.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)
    assert torch.equal(saving.logits(loaded), saving.logits(alone))
    assert result.model == type(loaded).__name__
    assert result.size_bytes == path.stat().st_size
    left = sorted(entry.name for entry in path.parent.iterdir())
    assert left == ["config.json", "generation_config.json", "model.safetensors"]
    return result, loaded


@pytest.mark.parametrize(
    "cases",
    [
        ["gpt2 fsdp", "llama tp", "gpt2 pp"],
        pytest.param(
            ["gpt2 ddp", "gpt2 tp", "llama ddp", "llama fsdp", "llama pp"],
            marks=pytest.mark.parity,
        ),
    ],
    ids=["some", "others"],
)
@on_ranks(2, HF_HUB_OFFLINE="1")
def test_transformers_loads_what_was_exported_under_each_strategy(cases: list[str]) -> None:
    """A tied GPT-2 and a bf16 Llama: names, dtypes and every value are those of one process."""
    for case in cases:
        kind, name = case.split()
        result, loaded = exported({"gpt2": gpt2, "llama": llama}[kind], name)
        with safe_open(result.path, "pt") as file:
            names, metadata = set(file.keys()), file.metadata()
        assert result.tensors == len(names)
        form = type(loaded).__name__, next(loaded.parameters()).dtype
        if kind == "gpt2":
            assert form == ("GPT2LMHeadModel", torch.float32)
            assert list(result.tied) == ["lm_head.weight"]
            assert metadata == {"format": "pt", "lm_head.weight": "transformer.wte.weight"}
            assert "lm_head.weight" not in names
        else:
            assert form == ("LlamaForCausalLM", torch.bfloat16)
            assert not result.tied
            assert "lm_head.weight" in names


class Tied(saving.Tied):
    """The head is the embedding; of three buffers one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(7))


class More(Tied):
    """One state is no tensor, which no other program would understand."""

    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


def placed(name: str) -> Any:
    """By a strategy, by the user's code, or not at all."""
    torch.manual_seed(0)
    net = More()
    if name == "own DDP":
        return DistributedDataParallel(net)
    if name == "own FSDP":
        return fully_shard(net)
    if name == "none":
        return net
    use(name)
    return Accelerator().prepare(net)


def is_read_by_safetensors(name: str) -> nn.Module:
    """Its own load_model puts every value, the tied ones too, into a new module."""
    torch.manual_seed(0)
    wanted = More().state_dict()
    model = placed(name)
    result = export_model(model, run_dir / f"{name}.safetensors")
    net = Tied()
    load_model(net, result.path)
    state = net.state_dict()
    assert len(state) == 37, name
    assert all(torch.equal(value, wanted[key]) for key, value in state.items()), name
    assert list(result.tied) == ["head.weight"], name
    # fsdp1 lists tensors alone.
    assert list(result.left_out) == ([] if name == "fsdp1" else ["_extra_state"]), name
    assert not result.configs, name
    return model


WRITE = WeightsFile.write


def flipped(file: WeightsFile, batch: Any, values: Any) -> None:
    changed = {k: v + 1 if k == "embed.weight" else v for k, v in values.items()}
    WRITE(file, batch, changed)


def full(file: WeightsFile, batch: Any, values: Any) -> None:
    with explain_errors(file._target):
        raise OSError(28, "No space left on device")


def breaks_off(model: nn.Module) -> None:
    """A file that cannot be written, or is read back with another value."""
    little = shutil.disk_usage("/")._replace(free=100)
    stopped = NbdistError("stopped here")
    path = run_dir / "ddp.safetensors"
    for patch, words in (
        (
            mock.patch.object(WeightsFile, "write", flipped),
            "384 of 384 values of embed.weight differ from the model's",
        ),
        (mock.patch.object(WeightsFile, "write", full), "the disk is full"),
        (mock.patch("shutil.disk_usage", return_value=little), "only 100 are free there"),
        (mock.patch.object(WeightsFile, "end", side_effect=stopped), "stopped here"),
    ):
        with patch:
            text = refusal(lambda: export_model(model, path))
        assert words in text
        assert rank == 0 or "failed on rank 0" in text
        assert load_file(path)["scale"].tolist() == [3.0, 3.0]
        assert rank == 1 or not list(run_dir.glob(".*"))


@on_ranks(2, BLOCKS="2")
def test_any_other_model_is_exported_or_refused_with_a_reason() -> None:
    """What no strategy knows, what is sharded by the user's code, tied tensors, other states.

    And a file that cannot be written, or is read back with another value, leaves the earlier one
    and nothing else.
    """
    export_weights.BATCH_BYTES = 2048
    for name in ("zero1", "fsdp1", "none", "own DDP", "own FSDP", "ddp"):
        model = is_read_by_safetensors(name)
    breaks_off(model)
    for part, words in (
        (registry.prepared_of(model).base.blocks, "is a part of a prepared model (0.norm1"),
        (nn.Linear(2 + rank, 2), "rank 1's model differs from rank 0's: weight"),
        (nn.ReLU(), "ReLU has no parameters"),
        (
            nn.Linear(2, 2).to(torch.complex128),
            "weight has dtype complex128, which safetensors cannot store",
        ),
    ):
        text = refusal(lambda part=part: export_model(part, run_dir / "x.safetensors"))
        assert words in text
