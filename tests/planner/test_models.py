"""Parameters of models: published counts, a recount by hand, and what is refused."""

from typing import Any

import pytest

from nbdist.errors import OptionError
from nbdist.planner.models import CONFIGS, model_of, of_count
from nbdist.planner.shape.transformer import Experts, Transformer

# As the models' cards and papers print them, or as their safetensors add up to.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_known_models_have_their_published_parameters(name: str) -> None:
    """To the last one; GPT-3's paper says 175 billion, in tokens of 50257."""
    parameters = model_of(name).parameters

    if name == "gpt-3":
        assert parameters == pytest.approx(175e9, rel=3e-3)
    else:
        assert parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39), ("qwen1.5-moe-a2.7b", 2.7),
     ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22), ("deepseek-v3", 37)],
)  # fmt: skip
def test_active_parameters_are_those_of_the_models_cards(name: str, billions: float) -> None:
    """As they round them; gpt-oss's card leaves the embedding out: 3.6 and 5.1 billion."""
    assert model_of(name).shape.active_parameters == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.6), ("gpt-oss-120b", 5.1)])
def test_active_parameters_of_gpt_oss(name: str, billions: float) -> None:
    shape = model_of(name).shape

    active = shape.active_parameters - shape.embedding_parameters
    assert active == pytest.approx(billions * 1e9, rel=0.01)


def test_a_small_transformer_recounted_by_hand() -> None:
    """Width 4, two heads that share one head of keys, MLP of 6 with a gate, 10 tokens, 3 blocks."""
    shape = Transformer(layers=3, hidden=4, heads=2, kv_heads=1, head_size=2, ffn=6, vocab=10)

    # q 4x4, k 4x2, v 4x2, out 4x4: 48. gate, up, down 4x6 each: 72. Two norms of 4: 8.
    assert shape.block_parameters == 48 + 72 + 8
    # Embedding 10x4, last norm 4, head 4x10.
    assert (shape.embedding_parameters, shape.head_parameters) == (40, 44)
    assert shape.parameters == 3 * 128 + 84


@pytest.mark.parametrize(
    ("text", "parameters"),
    [("7e9", 7e9), ("7B", 7e9), ("1.5b", 1.5e9), ("350M", 350e6), ("7_000_000_000", 7e9),
     ("405 B", 405e9), ("1T", 1e12), (7e9, 7e9), (124439808, 124439808), ("1", 1)],
)  # fmt: skip
def test_counts(text: str | float, parameters: float) -> None:
    """Numbers as people write them; the shape is assumed, the number is not."""
    model = model_of(text)

    assert model.parameters == parameters
    assert model.is_assumed


@pytest.mark.parametrize("count", [1e8, 7e9, 13e9, 70e9, 405e9])
def test_an_assumed_shape_has_about_the_parameters(count: float) -> None:
    """Its blocks hold what was asked for to within a tenth, and are as deep as such models are."""
    shape = of_count(count, "?").shape

    assert shape.layers * shape.block_parameters == pytest.approx(count, rel=0.1)
    assert 64 < shape.hidden / shape.layers < 256


@pytest.mark.parametrize(
    "name", ["Llama-3-8B", "meta-llama/Meta-Llama-3-8B", "llama_3_8b", "meta-llama/llama-3-8b-hf"]
)
def test_names_as_they_are_written(name: str) -> None:
    assert model_of(name).parameters == PUBLISHED["llama-3-8b"]


def _llama(**changes: Any) -> dict[str, Any]:
    return {**CONFIGS["llama-3-8b"], **changes}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("0", "A model of 0 parameters has nothing to plan for. Type 1 or more"),
        ("0.2", "nothing to plan for"),
        ("0e9", "nothing to plan for"),
        ("2e15", "more than 1e[+]15"),
        ("-7e9", "no model '-7e9' to plan for"),
        ("nan", "no model 'nan' to plan for"),
        ("lama-3-8b", "Did you mean llama-3-8b"),
        ("xyzzy", "Type its number of parameters"),
        ({"model_type": "jamba"}, "parameters of a model of type 'jamba'"),
        ({"model_type": "mixtral"}, "num_hidden_layers = None"),
        ({**CONFIGS["mixtral-8x7b"], "num_experts_per_tok": 9}, "cannot choose 9 of 8 experts"),
        ({**CONFIGS["mixtral-8x7b"], "num_local_experts": 0}, "cannot choose 2 of 0 experts"),
        ({}, "num_attention_heads|hidden_size = None"),
        (_llama(hidden_size="big"), "hidden_size = 'big'"),
        (_llama(hidden_size=True), "hidden_size = True"),
        (_llama(num_hidden_layers=0), "layers 0 has no parameters"),
        (_llama(num_attention_heads=33), "4096 cannot be divided into 33 heads"),
        (_llama(num_attention_heads=0), "cannot be divided into 0 heads"),
        (_llama(num_key_value_heads=5), "32 heads cannot share 5"),
    ],
)
def test_what_is_no_model_is_refused(asked: Any, expected: str) -> None:
    """With what is wrong, and what to type."""
    with pytest.raises(OptionError, match=expected):
        model_of(asked)


def test_a_block_of_experts_recounted_by_hand() -> None:
    """Width 4, 2 heads, 5 experts of 3 of which 2 are chosen, one shared of 6, one dense block."""
    experts = Experts(count=5, chosen=2, ffn=3, shared=6, dense_blocks=1)
    shape = Transformer(
        layers=3, hidden=4, heads=2, kv_heads=1, head_size=2, ffn=7, vocab=10, experts=experts
    )
    [(one, dense), (two, routed)] = shape.kinds

    # As above attention is 48, norms are 8. An expert is 3 x 4 x 3, a router 5 x 4.
    assert (one, dense.block_parameters) == (1, 48 + 8 + 3 * 4 * 7)
    assert (two, routed.block_parameters) == (2, 48 + 8 + 5 * 36 + 20 + 3 * 4 * 6)
    assert shape.parameters == 140 + 2 * 328 + 84
    assert (shape.stacked_parameters, shape.routed_blocks) == (2 * 180, 2)
    assert shape.active_parameters == shape.parameters - 2 * 3 * 36


def test_dense_blocks_of_qwen_are_counted() -> None:
    """Those between and those that are named; where all are dense there are no experts."""
    config = {**CONFIGS["qwen3-30b-a3b"], "num_hidden_layers": 6}

    def routed(**more: object) -> int:
        return model_of({**config, **more}).shape.routed_blocks

    assert (routed(), routed(decoder_sparse_step=2), routed(decoder_sparse_step=4)) == (6, 3, 1)
    assert routed(mlp_only_layers=[0, 5]) == 4
    assert routed(mlp_only_layers=[0, 1], decoder_sparse_step=2) == 2
    assert model_of({**config, "decoder_sparse_step": 7}).shape.experts is None


def test_stages_of_experts_and_dense_blocks() -> None:
    """deepseek-v3's three dense blocks are on the first of 61 / 4 blocks; the last one has most."""
    model = model_of("deepseek-v3")
    dense, routed = (kind.block_parameters for _, kind in model.shape.kinds)

    assert model.stage_parameters(1) == model.parameters
    # 16 blocks, 15, 15 and 15; the head is as large as the embedding.
    last = 15 * routed + 129280 * 7168 + 7168
    assert model.stage_parameters(4) == last > 3 * dense + 13 * routed + 129280 * 7168


def test_stages_of_a_pipeline() -> None:
    """The largest one counts: with the embedding, or with the head; a tied head is on both ends."""
    llama, gpt = model_of("llama-3-8b"), model_of("gpt2")

    assert llama.stage_parameters(1) == llama.parameters
    assert llama.stage_parameters(2) == 16 * llama.shape.block_parameters + 128256 * 4096 + 4096
    assert gpt.stage_parameters(2) == 6 * gpt.shape.block_parameters + (50257 + 1024) * 768
    assert model_of("8e9").stage_parameters(4) == 2e9
