"""PEFT's adapters, alone and merged, under each strategy that trains them, as PEFT loads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nbdist.checkpoint.rank.export_weights import export_model
from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.live import registry
from tests.programs.rank import rank, refusal, run_dir
from tests.programs.saving import llama_config, logits
from tests.programs.training import use
from tests.support.torch_ranks import NEEDS_PEFT, on_ranks

pytestmark = NEEDS_PEFT

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "down_proj"], "lora_bias": False},
    "dora": {"target_modules": ["v_proj"], "use_dora": True, "modules_to_save": ["lm_head"]},
    "bias": {"target_modules": ["o_proj", "embed_tokens"], "bias": "lora_only"},
}


def llama() -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(attention_bias=True))


def adapted(kind: str) -> Any:
    """As it is after training: PEFT begins with adapters that change nothing."""
    from peft import LoraConfig, get_peft_model

    options = {"task_type": "CAUSAL_LM", "r": 4, "init_lora_weights": False} | KINDS[kind]
    model = get_peft_model(llama(), LoraConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 10)
    return model


def configured(folder: Path) -> dict[str, Any]:
    """PEFT keeps names in sets, which are in no certain order."""
    values = json.loads((folder / "adapter_config.json").read_text())
    return {name: sorted(v) if isinstance(v, list) else v for name, v in values.items()}


@pytest.mark.parametrize(
    "cases",
    [
        [("ddp", "dora"), ("fsdp", "bias"), ("pp", "lora")],
        pytest.param(
            [("ddp", "lora"), ("fsdp", "dora"), ("fsdp1", "lora")], marks=pytest.mark.parity
        ),
    ],
    ids=["some", "others"],
)
@on_ranks(2, HF_HUB_OFFLINE="1")
def test_an_adapter_is_what_peft_loads_alone_and_what_transformers_loads_merged(
    cases: list[tuple[str, str]],
) -> None:
    """Every logit is that of the model in one process; the model on the ranks stays unmerged."""
    for strategy, kind in cases:
        use(strategy)
        alone = adapted(kind)
        assert not torch.allclose(logits(llama()), logits(alone), atol=1e-3)
        model = Accelerator().prepare(adapted(kind))
        parameters = registry.prepared_of(model).parameters
        before = {name: p.detach().clone() for name, p in parameters.items()}
        folder = run_dir / f"{strategy}-{kind}"
        is_loaded_by_peft(model, folder, alone)
        is_loaded_merged(model, run_dir / f"{strategy}-{kind}-merged", logits(alone))
        prepared = registry.prepared_of(model)
        for name, p in prepared.parameters.items():
            assert p.is_meta or bool((p == before[name]).all()), name
        assert not any(getattr(part, "merged", False) for part in prepared.base.modules())


def is_loaded_by_peft(model: nn.Module, folder: Path, alone: Any) -> None:
    from peft import PeftModel

    exported = export_model(model, folder)
    assert exported.model == "adapter default of LlamaForCausalLM"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(llama(), str(folder))
    assert torch.equal(logits(loaded), logits(alone))
    stored = folder.with_suffix(f".peft{rank}")
    alone.save_pretrained(stored)
    assert configured(folder) == configured(stored)
    tensors = load_file(stored / "adapter_model.safetensors")
    assert load_file(exported.path).keys() == tensors.keys()


def is_loaded_merged(model: nn.Module, folder: Path, wanted: torch.Tensor) -> None:
    from transformers import AutoModelForCausalLM

    assert export_model(model, folder, is_merged=True).model == "LlamaForCausalLM"
    whole, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.allclose(logits(whole), wanted, atol=1e-6)


@pytest.mark.parametrize("strategy", ["pp", pytest.param("fsdp1", marks=pytest.mark.parity)])
@on_ranks(2, HF_HUB_OFFLINE="1")
def test_what_cannot_be_written_so_is_refused_with_a_reason(strategy: str) -> None:
    """And transformers' own way to have adapters is exported as PEFT's is."""
    from peft import LoraConfig, PrefixTuningConfig, get_peft_model

    use(strategy)
    folder = run_dir / "refused"

    def refused(model: nn.Module, **options: Any) -> str:
        return refusal(lambda: export_model(model, folder / "x", **options))

    text = refused(llama(), is_merged=True)
    assert "LlamaForCausalLM has no adapters of PEFT to merge" in text
    two = adapted("lora")
    two.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    two.base_model.set_adapter(["default", "other"])
    assert "2 adapters are active: default, other" in refused(two)
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    prefix = get_peft_model(llama(), config)
    assert "PEFT computes prompt_embeddings" in refused(prefix)
    assert "cannot be merged into weights" in refused(prefix, is_merged=True)
    integrated = llama()
    integrated.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    written = export_model(integrated, folder / "integrated")
    loaded = llama()
    loaded.load_adapter(str(Path(written.path).parent))
    assert torch.equal(logits(loaded), logits(integrated))
    assert [path.name for path in folder.iterdir()] == ["integrated"]
