"""Weights leave a notebook as one file that transformers loads."""

from pathlib import Path

from tests.support.kernel import Kernel

MODEL = """%%distributed
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=8)
gpt = accelerator.prepare(GPT2LMHeadModel(config))
total = sum(p.double().abs().sum() for p in gpt.parameters()).item()
"""
LOADED = """%%rank[0]
from transformers import AutoModelForCausalLM
loaded = AutoModelForCausalLM.from_pretrained("{folder}", local_files_only=True)
same = sum(p.double().abs().sum() for p in loaded.parameters()).item()
del loaded, AutoModelForCausalLM"""
END = """%%distributed
import gc
del gpt, other, config, total, GPT2Config, GPT2LMHeadModel
gc.collect()
0
"""


def test_a_models_weights_become_a_file_that_transformers_loads(
    kernel: Kernel, shared_folder: Path
) -> None:
    """By magic and by Python call; which model is asked where there are two; nothing is left."""
    assert kernel.run("%dist_strategy ddp").status == "ok"  # each rank has all of it
    assert kernel.run(MODEL).status == "ok"
    folder = shared_folder / "weights"

    saved = kernel.run("%dist_save --export weights")
    assert saved.status == "ok", saved.visible
    assert f"{folder}/model.safetensors: GPT2LMHeadModel, 28 tensors, " in saved.visible
    assert "tied weights, stored once: lm_head.weight" in saved.visible
    assert f'load it: GPT2LMHeadModel.from_pretrained("{folder}")' in saved.visible

    loaded = kernel.run(f"{LOADED.format(folder=folder)}\nprint(abs(same / total - 1) < 1e-12)")
    assert loaded.text == "[0] True\n", loaded.visible

    assert kernel.run("%%distributed\nother = accelerator.prepare(nn.Linear(2, 2))").status == "ok"
    refused = kernel.run("%dist_save --export weights/x.safetensors")
    assert "Which model? There are 2: gpt (" in refused.visible
    assert "Name one of these variables" in refused.visible
    call = "told = nbdist.session().export_weights('weights/x.safetensors', 'other'); told.tensors"
    assert kernel.run(f"import nbdist\n{call}").visible.strip() == "2"
    for odd, why in (
        ("--export x --async", "cannot be combined"),
        ("x --model other", "--model is for --export"),
        ("x --merged", "--merged is for --export"),
        ("--export x --merged --model other", "Linear has no adapters of PEFT to merge"),
        ("--export x --model nothing", "There is no variable nothing on the ranks"),
    ):
        assert why in kernel.run(f"%dist_save {odd}").visible

    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "x.safetensors",
    ]  # fmt: skip
    assert kernel.run(END).status == "ok"
