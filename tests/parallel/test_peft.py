"""What strategies find in PEFT's models before anything changes, and what they refuse."""

import re

import pytest
import torch
from torch import nn

from nbdist.engine import error_notes
from nbdist.errors import OptionError
from nbdist.parallel.libraries import quantized
from nbdist.parallel.live.training_step import is_language_model
from nbdist.parallel.sequence import split_sequence
from nbdist.parallel.tp import tp
from nbdist.strategy.choice import Degrees, Options, Strategy
from nbdist.strategy.tensor_layout import TensorLayout, owners
from tests.programs.parity import build_alone
from tests.support.torch_ranks import NEEDS_PEFT

pytestmark = NEEDS_PEFT


class Attention(nn.Module):
    """Of the user's own, so that it is tried out."""

    def __init__(self):
        super().__init__()
        self.n_heads = 4
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x, mask=None, position_ids=None):
        for layer in self.layers:
            x = layer(x)
        return x


def lora(**options):
    from peft import LoraConfig  # late: not at collection

    return LoraConfig(**{"r": 4, "target_modules": ["wq", "wo"], **options})


def ia3(**options):
    from peft import IA3Config

    return IA3Config(**options)


def adapted(model=None, config=None, **options):
    from peft import get_peft_model

    return get_peft_model(model or Model(), config or lora(**options))


def planned(model):
    choice = Strategy("tp", Degrees(tp=2), 2, Options())
    shapes = {name: TensorLayout(tuple(p.shape)) for name, p in model.named_parameters()}
    return tp.STEP.plan(build_alone(model, choice), shapes)


def test_tp_splits_adapters_as_their_layer():
    """A colwise layer's B by outputs, a rowwise one's A by inputs; each adapter of a layer."""
    model = adapted(lora_bias=True)
    model.add_adapter("other", lora(r=2, target_modules=["wo"]))
    layouts = planned(model)
    query, out = (f"base_model.model.layers.1.{name}" for name in ("wq", "wo"))
    split = {name: layout.tp_dim for name, layout in layouts.items() if "layers.1" in name}

    assert {name for name, dim in split.items() if dim == 0} == {
        *(f"{query}.{name}" for name in ("base_layer.weight", "base_layer.bias")),
        *(f"{query}.lora_B.default.{name}" for name in ("weight", "bias")),
        *(f"base_model.model.layers.1.{name}" for name in ("wk.weight", "wk.bias")),
        *(f"base_model.model.layers.1.{name}" for name in ("wv.weight", "wv.bias")),
    }
    assert {name for name, dim in split.items() if dim == 1} == {
        f"{out}.base_layer.weight", f"{out}.lora_A.default.weight", f"{out}.lora_A.other.weight"
    }  # fmt: skip


def test_a_plan_is_the_models_own():
    """Given before the adapters came, or by the names that it has with them."""
    model = adapted()
    words = {f"layers.0.{name}": "colwise" for name in ("wq", "wk", "wv")}
    words["layers.0.wo"] = "rowwise"
    model.get_base_model().tp_plan = words
    layouts = planned(model)
    assert layouts["base_model.model.layers.0.wq.lora_B.default.weight"].tp_dim == 0
    assert layouts["base_model.model.layers.1.wk.weight"].tp_dim is None

    model.tp_plan = {f"base_model.model.{name}": word for name, word in words.items()}
    assert planned(model) == layouts


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (lambda: lora(target_modules=["wq"], use_dora=True), "Dora, lora"),
        (lambda: ia3(target_modules=["wq"], feedforward_modules=[]), "ia3"),
    ],
)
def test_tp_refuses_other_adapters_of_a_layer_that_it_splits(config, kind):
    """One sentence says which, and what to take instead."""
    model = adapted(config=config())
    sentence = f"layers.0.wq: of PEFT's adapters it splits LoRA's alone, and this one is {kind}."
    with pytest.raises(OptionError, match=re.escape(sentence) + " Use fsdp, ddp or pp"):
        planned(model)


def test_a_call_of_peft_is_one_of_the_model_inside():
    """By names, whatever the order outside; what the model inside does not know is an error."""
    x, mask = torch.ones(1, 4, 16), torch.ones(1, 4)
    call = split_sequence.bind(adapted(), (x,), {"mask": mask})

    assert call.arguments == {"x": x, "mask": mask}
    assert call.args == ()
    assert call.kwargs == {"x": x, "mask": mask}
    assert "position_ids" in call.signature.parameters
    with pytest.raises(TypeError, match="words"):
        split_sequence.bind(adapted(), (x,), {"words": mask})


def test_a_target_that_there_is_not_is_told_which_there_are():
    """Behind PEFT's own words, from the model that it was given and no other that is there."""
    _another = nn.ModuleDict({"elsewhere": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="not found in the base model") as caught:
        adapted(target_modules=["q_proj"])

    sentence = "Linear layers and embeddings in it are called: wk, wo, wq, wv"
    assert error_notes.explain(caught.value) == sentence


def test_8_bit_weights_are_refused():
    """Known by the class that bitsandbytes gives them."""
    model = Model()
    kind = type("Int8Params", (nn.Parameter,), {})
    model.layers[1].wo.weight = kind(torch.zeros(16, 16), requires_grad=False)
    job = build_alone(model, Strategy("ddp", Degrees(dp_replicate=2), 2, Options()))

    with pytest.raises(OptionError, match=r"layers\.1\.wo\.weight has 8-bit weights.*in 4 bit"):
        quantized.check(job)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks
def test_a_language_model_is_one_inside_of_pefts_model_too():
    """So that `%dist_plan model --check` needs no inputs."""
    config = {"vocab_size": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))

    assert is_language_model(adapted(model, target_modules=["c_attn"], fan_in_fan_out=True))
    assert not is_language_model(adapted())


def test_packed_weights_are_compared_as_bytes():
    """What lies as float32 may be NaN, and is no number."""
    packed = nn.Parameter(torch.full((3, 1), torch.nan), requires_grad=False)
    plain = quantized.comparable(packed, packed.detach())
    packed.quant_state = object()
    data = quantized.comparable(packed, packed.detach())

    assert plain.isnan().all()
    assert (data.dtype, tuple(data.shape)) == (torch.uint8, (3, 4))


def test_fsdp_of_an_older_torch_refuses_packed_integers(monkeypatch):
    """Their storage may be a float type there; later releases split them as they are."""
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
    model.weight.quant_state = object()
    choice = Strategy("fsdp", Degrees(dp_shard=2), 2, Options())
    job = build_alone(model, choice)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    quantized.check(job)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")

    with pytest.raises(OptionError, match=r"fsdp with torch 2\.11\.0\+cu130 .* use ddp"):
        quantized.check(job)


def test_zero1_shares_out_what_is_trained():
    """Frozen weights, which have no state, do not decide who has that of adapters."""
    sizes = {"base.0": 1000, "base.1": 10, "a": 8, "b": 8, "c": 4, "d": 4}
    layouts = {name: TensorLayout((size,)) for name, size in sizes.items()}
    owner_of = owners(layouts, 2, frozen={"base.0", "base.1"})
    loads = [sum(sizes[n] for n in "abcd" if owner_of[n] == rank) for rank in range(2)]

    assert loads == [12, 12]
