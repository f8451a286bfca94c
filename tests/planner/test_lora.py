"""LoRA and QLoRA in plans: published counts and sizes, sums by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nbdist import plan as shown
from nbdist.errors import OptionError
from nbdist.planner.devices import DEVICES, Device
from nbdist.planner.live_model import LiveModel, ParameterKind, by_kinds, shape_of
from nbdist.planner.lora import ALL, with_lora
from nbdist.planner.memory import Memory, memory_of
from nbdist.planner.models import CONFIGS, ModelShape, model_of
from nbdist.planner.plan import PlanRow, SearchSpace, plan
from nbdist.planner.shape.transformer import Lora, Transformer
from nbdist.planner.step_time import model_flops
from nbdist.planner.workload import Workload
from nbdist.strategy.choose import choose

# Two blocks of width 64: q 64 x 64, k and v 64 x 32, out 64 x 64, gate, up, down 64 x 96; norms.
TINY = ModelShape("tiny", 0, Transformer(2, 64, 4, 2, 16, 96, 10))
TINY = replace(TINY, parameters=TINY.shape.parameters)
LINEAR = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96
REST = TINY.parameters - 2 * LINEAR
# r 8 on q and v.
ADAPTERS = 8 * (64 + 64) + 8 * (64 + 32)
LLAMA_65B = {**CONFIGS["llama-2-70b"], "num_key_value_heads": 64, "intermediate_size": 22016}


def tiny(quant: str | None = None, targets: str | None = None) -> ModelShape:
    return with_lora(TINY, 8, targets, quant)


def row(model: ModelShape, name: str, gpu: str = "h100", **given: Any) -> PlanRow:
    """Of eight ranks, or one."""
    ranks = 1 if name == "single" else 8
    device: Device = DEVICES[gpu]
    [result] = plan(SearchSpace(model, device, ranks, Workload(), strategy=name, given=given)).rows
    return result


def memory(model: ModelShape, name: str, **given: Any) -> Memory:
    return memory_of(model, choose(name, {"precision": "bf16", **given}, 4), Workload(4, 16))


QWEN_3B = {
    "model_type": "qwen2", "num_hidden_layers": 36, "hidden_size": 2048, "vocab_size": 151936,
    "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 11008,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "rank", "trained", "all_parameters", "percent"),
    [
        # The README of https://github.com/huggingface/peft (0.17), as its example prints it.
        (QWEN_3B, 16, 3_686_400, 3_089_625_088, "0.1193"),
        # print_trainable_parameters() as it stands in many a model's card and tutorial.
        (CONFIGS["llama-2-7b"], 8, 4_194_304, 6_742_609_920, "0.0622"),
        # 80 x 16 x (2 x 8192 + 8192 + 1024): not the 0.5 % that is often said.
        (CONFIGS["llama-2-70b"], 16, 32_768_000, 69_009_416_192, "0.0475"),
    ],
)
def test_adapters_as_peft_prints_them(
    model: dict[str, Any], rank: int, trained: int, all_parameters: int, percent: str
) -> None:
    """To the last one, on queries and values."""
    adapted = with_lora(model_of(model), rank, None, None)

    assert (adapted.trained, adapted.parameters) == (trained, all_parameters)
    assert f"{100 * trained / all_parameters:.4f}" == percent
    assert adapted.frozen == model_of(model).parameters


@pytest.mark.parametrize(("rank", "trained"), [(1, 4.7e6), (4, 18.9e6), (8, 37.7e6)])
def test_adapters_of_the_paper(rank: int, trained: float) -> None:
    """LoRA's own GPT-3: tables 4 and 5, and section 4.2 with 350 GB of weights in 16 bits."""
    gpt3 = ModelShape("gpt-3", 175_000_000_000, Transformer(96, 12288, 96, 96, 128, 49152, 50257))
    adapted = with_lora(gpt3, rank, "q_proj,v_proj", None)

    assert adapted.trained == pytest.approx(trained, rel=6e-3)
    held = memory_of(adapted, choose("single", {"precision": "bf16"}, 1), Workload())
    assert held.parameters == pytest.approx(350e9, rel=0.01)
    # 1.2 TB of a full training and 350 GB: its states alone are 1.16 TB and more.
    assert held.states / 1e9 == pytest.approx(350 + 16 * trained / 1e9, rel=0.01)


def test_4_bits_by_hand() -> None:
    """Half a byte a number, and the scales that each matrix has for itself."""
    held = memory(tiny("4bit"), "ddp")
    double = memory(tiny("4bit-double"), "ddp")
    frozen = 2 * LINEAR / 2 + 2 * REST
    # 64 x 64 numbers have 64 scales, 64 x 32 have 32, 64 x 96 have 96; each fewer than 256.
    scales = 2 * (2 * 64 + 2 * 32 + 3 * 96)

    assert held.parameters == frozen + 4 * scales + 4 * 2 * ADAPTERS
    assert double.parameters == frozen + scales + 2 * 7 * 4 + 4 * 2 * ADAPTERS
    assert (held.gradients, held.optimizer) == (4 * 2 * ADAPTERS, 8 * 2 * ADAPTERS)
    # DDP's buckets, and a copy in bf16 of the largest matrix.
    assert held.buffers == 4 * 2 * ADAPTERS + 2 * 64 * 96


def test_what_qlora_says_of_its_sizes() -> None:
    """0.5 bits a number for scales, 0.127 if these are in 8 bits: 3 GB less for 65 billion.

    And "from >780 GB to <48 GB": 12 bytes for each, all in 16 bits but Adam; r 64 on all layers,
    512 tokens. Its Adam is paged to the host, else it is too much, as section 3 says.
    """
    model, choice = model_of(LLAMA_65B), choose("single", {"precision": "bf16"}, 1)
    load, checkpointed = Workload(1, 512), choose("single", {"bf16": True, "checkpoint": "full"}, 1)
    single, double = (memory_of(with_lora(model, 64, ALL, quant), checkpointed, load)
                      for quant in ("4bit", "4bit-double"))  # fmt: skip
    saved = single.parameters - double.parameters

    assert model.parameters == pytest.approx(65e9, rel=0.01)
    assert saved == pytest.approx(3e9, rel=0.02)
    assert saved * 8 / (64.76e9) == pytest.approx(0.373, abs=0.001)
    full = memory_of(model, choice, Workload(recipe="bf16"))
    assert full.states == pytest.approx(780e9, rel=0.01)
    assert double.peak > 48e9 > double.peak - double.optimizer - double.step


def test_70_billion_in_4_bits() -> None:
    """35 GB are the packed numbers alone; scales, embedding and head make it 39.6."""
    view = shown("70B", lora=16, quant="4bit", ranks=1, gpu="a100", checkpoint="full")
    llama = shown("llama-2-70b", lora=16, quant="4bit", ranks=1, gpu="a100", checkpoint="full")

    assert "in 4 bits, 35.0 GB and 4.4 GB of scales (NF4, a scale in fp32" in view.text
    assert "34.2 GB and 4.3 GB of scales" in llama.text
    assert "embedding, norms, biases and head 1.1 GB, 2 B each" in llama.text
    assert "32,768,000 parameters (0.0475 %) are trained" in llama.text
    assert "recipe 16 B per trained parameter" in llama.text
    assert llama.text.startswith("single: safe (")


def test_what_is_split_and_what_is_sent() -> None:
    """Gradients of adapters alone; what is frozen goes over the wire only where it is split.

    Scales are in no parameter, so fsdp leaves them whole.
    """
    model = tiny("4bit")
    scales = 4 * 2 * (2 * 64 + 2 * 32 + 3 * 96)
    frozen = 2 * LINEAR / 2 + 2 * REST
    sharded = memory(model, "fsdp")
    rows = {name: row(model, name, bf16=True) for name in ("ddp", "fsdp", "zero1")}

    assert sharded.parameters == frozen / 4 + scales + 4 * 2 * ADAPTERS / 4
    assert sharded.gradients == 4 * 2 * ADAPTERS / 4
    assert memory(model, "fsdp", offload="cpu").parameters == scales
    # An all-reduce; two all-gathers, of adapters in 2 bytes, and a reduce-scatter.
    assert rows["ddp"].sent_bytes == pytest.approx(2 * 7 / 8 * 4 * 2 * ADAPTERS)
    assert rows["fsdp"].sent_bytes == pytest.approx(
        7 / 8 * (2 * (frozen + 2 * 2 * ADAPTERS) + 4 * 2 * ADAPTERS)
    )
    # An all-reduce of the gradients, and what each rank has stepped.
    assert rows["zero1"].sent_bytes == pytest.approx(3 * 7 / 8 * 4 * 2 * ADAPTERS)


def test_tp_splits_one_of_two_matrices() -> None:
    """B of a layer whose outputs are split, A of one whose inputs are; the other one is whole."""
    model = with_lora(TINY, 8, "q_proj,o_proj", None)
    held = memory_of(model, choose("tp", {"precision": "bf16"}, 2), Workload())
    adapters = 2 * 8 * ((64 + 64 / 2) + (64 / 2 + 64))

    assert held.gradients == 4 * adapters
    assert held.parameters == 2 * TINY.parameters / 2 + 4 * adapters


def test_a_pipeline_has_the_adapters_of_its_blocks() -> None:
    held = memory_of(tiny(), choose("pp", {"precision": "bf16"}, 2), Workload(2))

    assert held.gradients == 4 * ADAPTERS


def test_two_thirds_of_the_products() -> None:
    """What is frozen has no gradient of weights; 4-bit weights are unpacked in each pass."""
    model = model_of("llama-3-8b")
    adapted, packed = (with_lora(model, 8, None, quant) for quant in (None, "4bit"))
    choice, load = choose("single", {"precision": "bf16"}, 1), Workload(4, 4096)
    times = []
    for each in (model, adapted, packed):
        time = plan(SearchSpace(each, DEVICES["a100-80gb"], 1, load, strategy="single",
                    given={"precision": "bf16"})).rows[0].time  # fmt: skip
        assert time is not None
        times.append(time.step_s)
    # Without attention: what its 12 operations for each pair are is the same.
    pairs = 12 * 32 * 4096 * 4096 * load.batch * load.sequence
    flops = [model_flops(each, choice, load) - pairs for each in (model, adapted)]

    assert flops[1] / flops[0] == pytest.approx(2 / 3, abs=0.001)
    assert 0.6 < times[1] / times[0] < 0.8
    # Twice 2.5 bytes for each of 6.98 billion numbers, at 63 % of 2.039 TB/s.
    moved_s = 2 * 2.5 * 6.98e9 / (0.63 * 2.039e12)
    assert times[2] - times[1] == pytest.approx(moved_s, rel=0.1)


def test_adapters_cost_less_memory_than_all() -> None:
    """In each row: no gradients, no Adam, and fewer activations."""
    full, adapted = (
        {row.typed: row.memory for row in shown("llama-3-8b", gpu="h100", lora=lora).plan.rows}  # type: ignore[union-attr]
        for lora in (None, 16)
    )
    for typed, whole in full.items():
        memory_there = adapted[typed]
        if whole is None or memory_there is None:
            continue
        assert memory_there.activations < whole.activations, typed
        assert memory_there.gradients + memory_there.optimizer < 0.02 * (
            whole.gradients + whole.optimizer
        ), typed
        assert memory_there.peak < whole.peak, typed


def test_what_goes_without_4_bits_or_the_frozen_base() -> None:
    """tp cannot split packed weights, and zb has no gradients of weights to fill its time with."""
    view = shown("llama-2-70b", lora=16, quant="4bit", ranks=8, gpu="a100")
    assert view.plan is not None
    problems = {row.typed: row.problem for row in view.plan.rows if row.problem}

    assert {"tp", "fsdp --tp 2"} <= {*problems}
    assert "4-bit weights are packed into lists of bytes" in problems["tp"]
    with pytest.raises(OptionError, match="zb fills idle time with gradients of weights"):
        shown("llama-2-70b", lora=16, ranks=8, gpu="a100", pp=8, schedule="zb", batch=8)


def test_a_search_keeps_to_what_goes() -> None:
    """No row with tp in 4 bits, none with zb; and what is trained is said."""
    view = shown("llama-2-70b", lora=16, quant="4bit", ranks=8, gpu="a100", samples=8, search=True)
    choices = [row.choice for row in view.plan.rows if row.choice]  # type: ignore[union-attr]

    assert len(choices) > 10
    assert all(choice.degrees.tp == 1 for choice in choices)
    assert all(choice.options.schedule != "zb" for choice in choices if choice.degrees.pp > 1)
    assert "LoRA: r 16 on q_proj and v_proj" in view.text
    with pytest.raises(OptionError, match="Leave --engine fake out"):
        shown("7e9", lora=16, engine="fake", gpu="h100")


def test_4_bits_are_what_would_help() -> None:
    """After --checkpoint full and a batch of 1: no ranks more, no other strategy."""
    view = shown("llama-2-70b", lora=16, ranks=1, gpu="a100")
    assert view.advice is not None

    assert view.advice.row is None
    assert view.advice.sentences[1].startswith(
        "With --checkpoint full --quant 4bit, single is safe ("
    )


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"lora": 16, "targets": "q_porj"}, r"no --targets q_porj\. Did you mean q_proj\? Choose"),
        ({"lora": 16, "targets": "c_attn"}, "Choose one of q_proj, k_proj, v_proj, o_proj, gate_p"),
        ({"lora": 16, "targets": " ,"}, "There is no --targets ''. Choose one of"),
        ({"lora": 16, "targets": ["q_proj", "lm_head"]}, "no --targets lm_head"),
        ({"lora": 0}, "--lora 0 is no rank. It is the r of the adapters, such as 16"),
        ({"lora": -4}, "--lora -4 is no rank"),
        ({"lora": 1025}, "--lora 1025 is more than v_proj has: it is 4096 x 1024, and of rank 10"),
        ({"targets": "q_proj"}, "--targets names the layers that --lora adds to. Type --lora 16"),
        ({"quant": "4bit"}, "--quant 4bit needs --lora: numbers of 4 bits cannot be trained"),
        ({"lora": 16, "quant": "3bit"}, "no --quant 3bit. .*Choose one of 4bit, 4bit-double"),
    ],
)
def test_a_mistake_says_what_to_type(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        shown("llama-3-8b", gpu="h100", **asked)


def test_types_that_no_formula_knows() -> None:
    """Their numbers are refused as without adapters; of a number the layers are assumed."""
    with pytest.raises(OptionError, match="no formula for the parameters of a model of type 'jam"):
        shown({"model_type": "jamba"}, lora=16, gpu="h100")
    with pytest.raises(OptionError, match="adapters beside experts are not planned"):
        shown("mixtral-8x7b", lora=16, gpu="h100")
    view = shown("7e9", lora=16, gpu="h100")

    assert "(assumed: 33 blocks of width 4224)" in view.text
    # 33 x 16 x 4 x 4224
    assert "8,921,088 parameters (0.1273 %) are trained" in view.text


LIVE = LiveModel(
    "model", "PeftModelForCausalLM",
    (ParameterKind("bfloat16", False, model_of("gpt2").parameters, 2 * model_of("gpt2").parameters),
     ParameterKind("float32", True, 12 * 8 * (768 + 2304), 4 * 12 * 8 * (768 + 2304))),
    config=CONFIGS["gpt2"], lora=Lora(8, ("c_attn",)),
)  # fmt: skip


def test_a_model_on_the_ranks_with_adapters() -> None:
    """By its own config, if that explains every parameter; what it stores is as it is there."""
    shape = shape_of(LIVE)
    typed = with_lora(model_of("gpt2"), 8, None, None)
    choice = choose("fsdp", {"precision": "bf16"}, 4)
    more = replace(LIVE, kinds=(*LIVE.kinds, ParameterKind("float32", True, 9, 36)))

    assert shape.lora == Lora(8, ("c_attn",), stored=2)
    assert by_kinds(LIVE, shape, choice, Workload()) == memory_of(typed, choice, Workload())
    assert shape_of(more).lora is None
    assert shape_of(more).has_shape
    assert shape_of(more).trained == typed.trained + 9
