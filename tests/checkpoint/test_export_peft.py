"""PEFT's adapters, alone and merged, under each strategy that trains them, as PEFT loads them."""

from typing import Any

import pytest

from tests.support.torch_ranks import NEEDS_PEFT, TorchRanks
from tests.support.training import MODEL

pytestmark = NEEDS_PEFT

TEXT = """
    import copy
    import json
    from nbdist.checkpoint.rank import export_weights as weights
    from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    folder = Path(os.environ["FOLDER"])
    KINDS = {
        "lora": dict(target_modules=["q_proj", "down_proj"], lora_bias=False),
        "dora": dict(target_modules=["v_proj"], use_dora=True, modules_to_save=["lm_head"]),
        "bias": dict(target_modules=["o_proj", "embed_tokens"], bias="lora_only"),
    }

    def llama():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
            attention_bias=True, tie_word_embeddings=False,
        ))

    def adapted(kind):
        "As it is after training: PEFT begins with adapters that change nothing."
        options = {"task_type": "CAUSAL_LM", "r": 4, "init_lora_weights": False} | KINDS[kind]
        model = get_peft_model(llama(), LoraConfig(**options))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) / 10)
        return model

    def configured(path):
        "PEFT keeps names in sets, which are in no certain order."
        values = json.loads((path / "adapter_config.json").read_text())
        return {name: sorted(v) if isinstance(v, list) else v for name, v in values.items()}

    ids = torch.randint(96, (2, 8), generator=torch.Generator().manual_seed(1))

    def logits(model):
        with torch.no_grad():
            return model.eval()(ids).logits

    def exported(strategy, kind):
        use(strategy)
        alone = adapted(kind)
        wanted, plain = logits(alone), logits(llama())
        model = Accelerator().prepare(adapted(kind))
        before = {n: p.detach().clone() for n, p in registry.prepared_of(model).parameters.items()}
        adapter = weights.export_model(model, folder / f"{strategy}-{kind}")
        merged = weights.export_model(model, folder / f"{strategy}-{kind}-merged", is_merged=True)
        after = registry.prepared_of(model).parameters
        loaded = PeftModel.from_pretrained(llama(), str(Path(adapter.path).parent))
        whole, info = AutoModelForCausalLM.from_pretrained(
            Path(merged.path).parent, output_loading_info=True
        )
        stored = folder / f"peft-{strategy}-{kind}"
        if rank == 0:
            alone.save_pretrained(stored)
        names = sorted(path.name for path in Path(adapter.path).parent.iterdir())
        return {
            "titles": [adapter.model, merged.model],
            "names": names,
            "config": rank or configured(Path(adapter.path).parent) == configured(stored),
            "tensors": rank or load_file(adapter.path).keys() == load_file(
                stored / "adapter_model.safetensors").keys(),
            "adapter": torch.equal(logits(loaded), wanted),
            "merged": torch.allclose(logits(whole), wanted, atol=1e-6),
            "counts": not torch.allclose(plain, wanted, atol=1e-3),
            "loading": [len(info[key]) for key in ("missing_keys", "unexpected_keys")],
            "kept": all(a.is_meta or bool((a == before[n]).all()) for n, a in after.items()),
            "unmerged": not any(
                getattr(module, "merged", False) for module in
                registry.prepared_of(model).base.modules()
            ),
        }
"""
SOME = [("ddp", "dora"), ("fsdp", "bias"), ("pp", "lora")]
OTHERS = [("ddp", "lora"), ("fsdp", "dora"), ("fsdp1", "lora")]


@pytest.fixture(
    scope="module",
    params=[SOME, pytest.param(OTHERS, marks=pytest.mark.parity)],
    ids=["some", "others"],
)
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What rank 0 reports."""
    folder = tmp_path_factory.mktemp("exports")
    text = MODEL + TEXT + f"    exports = [exported(*case) for case in {request.param!r}]\n"
    env = {"FOLDER": str(folder / "weights"), "HF_HUB_OFFLINE": "1"}
    with TorchRanks(folder / "run", 2, text + REFUSED, **env) as ranks:
        return ranks.results()[0]


def test_an_adapter_is_what_peft_loads_alone_and_what_transformers_loads_merged(
    told: dict[str, Any],
) -> None:
    """Every logit is that of the model in one process; the model on the ranks stays unmerged."""
    for export in told["exports"]:
        assert export["titles"] == ["adapter default of LlamaForCausalLM", "LlamaForCausalLM"]
        assert export["names"] == ["adapter_config.json", "adapter_model.safetensors"]
        assert export["loading"] == [0, 0]
        shown = ("config", "tensors", "adapter", "merged", "counts", "kept", "unmerged")
        assert {name: bool(export[name]) for name in shown} == dict.fromkeys(shown, True)


REFUSED = """
    folder = folder / "refused"

    def refused(model, **options):
        try:
            weights.export_model(model, folder / "x", **options)
        except NbdistError as error:
            return str(error)
        return "nothing was refused"

    two = adapted("lora")
    two.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    two.base_model.set_adapter(["default", "other"])
    prefix = get_peft_model(
        llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    integrated = llama()
    integrated.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    written = weights.export_model(integrated, folder / "integrated")
    fresh = llama()
    fresh.load_adapter(str(Path(written.path).parent))
    done(
        exports=exports,
        texts=[
            refused(llama(), is_merged=True), refused(two), refused(prefix),
            refused(prefix, is_merged=True),
        ],
        left=sorted(path.name for path in folder.iterdir()),
        integrated=torch.equal(logits(fresh), logits(integrated)),
    )
"""


def test_what_cannot_be_written_so_is_refused_with_a_reason(told: dict[str, Any]) -> None:
    """And transformers' own way to have adapters is exported as PEFT's is."""
    assert "LlamaForCausalLM has no adapters of PEFT to merge" in told["texts"][0]
    assert "2 adapters are active: default, other" in told["texts"][1]
    assert "PEFT computes prompt_embeddings" in told["texts"][2]
    assert "cannot be merged into weights" in told["texts"][3]
    assert told["left"] == ["integrated"]
    assert told["integrated"]
