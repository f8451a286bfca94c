"""LoRA's plans beside PEFT's own models: adapters, what is frozen in 4 bits, kept activations."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from nbdist.planner.activations import block_bytes
from nbdist.planner.fake.run import answer
from nbdist.planner.fake_protocol import FakeRequest
from nbdist.planner.live_model import shape_of
from nbdist.planner.lora import ALL, QUANTS, scales_bytes, with_lora
from nbdist.planner.memory import memory_of
from nbdist.planner.models import CONFIGS, model_of, of_config
from nbdist.planner.rank import describe_model
from nbdist.planner.workload import Widths, Workload
from nbdist.strategy.choose import choose
from tests.planner.test_models_rank import BATCH, FORMS, TOKENS, kept_by

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # PEFT 0.21 asks for it
)


def on_meta(name: str) -> Any:
    """A model of the catalogue, without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]))


def adapted_model(
    model: nn.Module, rank: int, modules: Any = None, *, is_gpt2: bool = False, **options: Any
) -> Any:
    """Adapters as PEFT has them; gpt2's linear layers have their matrices the other way round."""
    from peft import LoraConfig, get_peft_model  # late: not at collection

    config = LoraConfig(
        r=rank, target_modules=modules, fan_in_fan_out=is_gpt2, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config, **options)


_NAMES, _TARGETS = ("gpt2", "llama-2-70b", "qwen2.5-7b"), (None, ALL, "first")
_SOME = {("gpt2", None), ("gpt2", "first"), ("qwen2.5-7b", ALL)}
more = pytest.mark.parity


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        pytest.param(*case, marks=() if case in _SOME else more)
        for case in itertools.product(_NAMES, _TARGETS)
    ],
)
def test_adapters_are_those_that_peft_makes(name: str, targets: str | None) -> None:
    """To the last parameter, with PEFT's usual layers, all of them, and another one."""
    model = on_meta(name)
    other = "c_proj" if name == "gpt2" else "k_proj,down_proj"
    typed = other if targets == "first" else targets
    modules = typed if typed in (None, ALL) else str(typed).split(",")
    planned = with_lora(model_of(name), 16, typed, None)

    with torch.device("meta"):
        adapted = adapted_model(model, 16, modules, is_gpt2=name == "gpt2")

    assert adapted.get_nb_trainable_parameters() == (planned.trained, planned.parameters)
    assert planned.shape.parameters == planned.parameters
    if targets is None:
        from peft.utils import constants

        usual = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        assert planned.lora is not None
        assert set(planned.lora.targets) == {*usual[CONFIGS[name]["model_type"]]}


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama-3.2-1b", *(pytest.param(name, marks=more) for name in _NAMES[1:])],
)
def test_what_is_in_4_bits_is_what_transformers_converts(name: str) -> None:
    """Every linear layer but the head: load_in_4bit leaves the embedding, norms and biases."""
    model, left = on_meta(name), None
    left = get_keys_to_not_convert(model)
    converted = [
        module.weight.numel()
        for key, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and key not in left
    ]
    shape = with_lora(model_of(name), 8, None, "4bit")
    double = with_lora(model_of(name), 8, None, "4bit-double")
    scales = [math.ceil(count / 64) for count in converted]

    assert shape.packed * shape.shape.layers == sum(converted)
    assert scales_bytes(shape) * shape.shape.layers == 4 * sum(scales)
    assert scales_bytes(double) * shape.shape.layers == sum(
        count + 4 * math.ceil(count / 256) for count in scales
    )
    assert {*QUANTS} == {"4bit", "4bit-double"}


# How it is trained -> type of what is frozen, whether adapters are in fp32, autocast, and bytes.
_WAYS = {
    "fp32": (torch.float32, True, False, Widths(4, 4, 0, 4, 4, 4)),
    "bf16, as fsdp gathers": (torch.bfloat16, False, False, Widths(2, 2, 0, 2, 4, 2)),
    "autocast over bf16": (torch.bfloat16, True, True, Widths(2, 2, 2, 4, 4, 2)),
    "autocast over fp32": (torch.float32, True, True, Widths(2, 4, 2, 4, 4, 4)),
}


# Each type for one architecture; what differs between these is not the type.
_BOTH = ("fp32", "autocast over bf16")
_CASES = [
    *((form, targets, way) for form, targets in (("llama", None), ("llama", ALL)) for way in _WAYS),
    *((form, targets, way)
      for form, targets in (("llama", "o_proj,up_proj"), ("qwen3", None), ("gpt2", None),
                            ("gpt2 with torch's gelu", ALL))
      for way in _BOTH),
]  # fmt: skip


_SHORT = {
    ("llama", None, "fp32"),
    ("llama", None, "bf16, as fsdp gathers"),
    ("llama", ALL, "autocast over fp32"),
    ("qwen3", None, "autocast over bf16"),
    ("gpt2 with torch's gelu", ALL, "fp32"),
}


@pytest.mark.parametrize(
    ("form", "targets", "way"),
    [pytest.param(*case, marks=() if case in _SHORT else more) for case in _CASES],
)
def test_activations_beside_frozen_layers_are_what_autograd_keeps(
    form: str, targets: str | None, way: str
) -> None:
    """To within 2 %: a model of three blocks against one of two; statistics come on top."""
    kind, is_fp32, is_autocast, widths = _WAYS[way]

    def kept(layers: int) -> int:
        model = AutoModelForCausalLM.from_config(FORMS[form](layers), dtype=kind)
        modules = targets if targets in (None, ALL) else str(targets).split(",")
        is_gpt2 = form.startswith("gpt2")
        adapted = adapted_model(model, 8, modules, is_gpt2=is_gpt2, autocast_adapter_dtype=is_fp32)
        adapted.enable_input_require_grads()  # else nothing before the first adapter is kept
        return kept_by(adapted, is_autocast=is_autocast)

    shape = with_lora(of_config(FORMS[form](2).to_dict()), 8, targets, None).shape
    planned = block_bytes(shape, Workload(BATCH, TOKENS), widths, choose("single", {}, 1))
    cast = shape.adapters() if widths.frozen == 2 else shape.block_parameters

    assert kept(3) - kept(2) == pytest.approx(planned + widths.cast * cast, rel=0.02)


_PLANS = {("single", False), ("fsdp", True)}
_TINY: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 640, "vocab_size": 512, "num_hidden_layers": 4, "model_type": "llama",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize(
    ("name", "half"),
    [
        pytest.param(name, half, marks=() if (name, half) in _PLANS else more)
        for name in ("single", "ddp", "fsdp", "fsdp --shard grad-op")
        for half in (False, True)
    ],
)
def test_a_plan_of_a_config_is_that_of_the_model_that_peft_has_made(
    name: str, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States to the byte; what is frozen is in bf16 under --bf16, and adapters stay in fp32."""
    monkeypatch.setattr(describe_model, "optimizer_of", lambda *_args: None)
    word, _, shard = name.partition(" --shard ")
    given = {"precision": "bf16"} if half else {}
    choice = choose(word, {**given, **({"shard": shard} if shard else {})}, 2)
    load = Workload(2, 64, has_gpu=False)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**_TINY), dtype=torch.bfloat16 if half else torch.float32
    )
    adapted = adapted_model(model, 8)
    live = describe_model.describe("model", adapted, None, {})
    counted = answer(FakeRequest(live.source, choice, load), live.source)
    run = counted.memory
    typed = with_lora(of_config(_TINY), 8, None, None)
    planned = memory_of(typed, choice, load)
    alike = shape_of(live)

    assert run is not None
    assert not counted.problem
    assert (run.parameters, run.gradients, run.optimizer) == (
        planned.parameters, planned.gradients, planned.optimizer,
    )  # fmt: skip
    assert planned.peak == pytest.approx(run.peak, rel=0.05)
    assert alike.lora == replace(typed.lora, stored=2 if half else 4)  # type: ignore[type-var]
    assert (alike.parameters, alike.frozen) == (typed.parameters, typed.frozen)
    assert memory_of(alike, choice, load) == planned
