"""Weights leave a notebook as one file that transformers loads."""

import ast
from pathlib import Path

import pytest

from tests.front.test_checkpoint import ok
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


# Each token goes to two experts of four; a loss of each rank's own data.
EXPERTS = """%%distributed
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
config = Qwen3MoeConfig(
    vocab_size=24, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, head_dim=8,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts=4,
    num_experts_per_tok=2, max_position_embeddings=16)
torch.manual_seed({seed} + rank)
moe = Qwen3MoeForCausalLM(config)
moe, steps = accelerator.prepare(moe, torch.optim.AdamW(moe.parameters(), lr=0.01, eps=1e-4))
"""
TRAINED = """%%distributed
losses = []
for number in range(3):
    draws = torch.Generator().manual_seed({first} + number)
    words = torch.randint(24, (8, 12), generator=draws).chunk(2)[rank]
    loss = moe(words, labels=words).loss
    accelerator.backward(loss)
    steps.step()
    steps.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
losses"""
LOGITS = """%%distributed
import gc
moe.eval()
with torch.no_grad():
    logits = moe(torch.arange(12)[None]).logits
moe.train();"""
# What hub files call them, and the file that has them, on rank 0 alone.
OPENED = """%%rank[0]
from safetensors.torch import load_file, load_model
hub = Qwen3MoeForCausalLM(config)
load_model(hub, "{folder}/model.safetensors")
hub.save_pretrained("{folder}/hub")
names = [sorted(load_file("{folder}" + at + "/model.safetensors")) for at in ("", "/hub")]
offs = []
for at in ("{folder}", "{folder}/hub"):
    opened = Qwen3MoeForCausalLM.from_pretrained(at, local_files_only=True).eval()
    with torch.no_grad():
        offs.append((opened(torch.arange(12)[None]).logits - logits).abs().max().item())
shown = max(offs), [[name for name in each if "layers.1.mlp.experts" in name] for each in names]
del hub, opened
gc.collect()
print(shown)"""
_EXPERT = "model.layers.1.mlp.experts"


def _losses(kernel: Kernel, first: int) -> list[float]:
    """Of three steps, alike on both ranks; each has other data, from this number on."""
    cell = kernel.run(TRAINED.format(first=first))
    assert cell.status == "ok", cell.visible
    return list(ast.literal_eval(cell.text.partition("] ")[2]))


def test_experts_that_were_trained_apart_are_saved_for_every_strategy_and_for_transformers(
    kernel: Kernel, shared_folder: Path
) -> None:
    """Under ep: with moments for fsdp --ep 2 and ddp, as a file with stacked experts for others."""
    for code in ("%dist_strategy ep", EXPERTS.format(seed=0)):
        ok(kernel, code)
    before = _losses(kernel, 0)
    for code in ("%dist_save mixture", LOGITS, "%dist_save --export stacked"):
        ok(kernel, code)
    opened = ok(kernel, OPENED.format(folder=shared_folder / "stacked"))
    after = _losses(kernel, 3)
    others = {}
    for number, name in enumerate(("fsdp --ep 2", "ddp"), 1):
        for code in (f"%dist_strategy {name}", EXPERTS.format(seed=number)):
            ok(kernel, code)
        fresh = _losses(kernel, 3)
        ok(kernel, "%dist_load mixture")
        others[name] = _losses(kernel, 3), fresh

    assert before[0] > before[-1]
    for name, (losses, fresh) in others.items():
        assert losses == pytest.approx(after, abs=2e-6), name
        assert abs(fresh[0] - after[0]) > 1e-2, name
    off, (stacked, hub) = ast.literal_eval(opened.partition("] ")[2])
    assert off < 1e-6
    assert stacked == [f"{_EXPERT}.down_proj", f"{_EXPERT}.gate_up_proj"]
    assert len(hub) == 12
    assert hub[:3] == [f"{_EXPERT}.0.{part}_proj.weight" for part in ("down", "gate", "up")]
