"""Tensor parallel plans: found by names, given by users, refused with what would work."""

import pytest

from nbdist.errors import OptionError
from nbdist.strategy.tp_names import FAMILIES, HEADS, STYLES
from nbdist.strategy.tp_plan import (
    Count,
    Layer,
    Style,
    attentions,
    check_counts,
    counts,
    find_plan,
)
from nbdist.strategy.tp_user_plan import incomplete, read_plan, read_style

WIDTH, HIDDEN, HEAD = 32, 64, 8


def linear(n_in: int, n_out: int, **more: object) -> Layer:
    """A linear layer in a block, with a weight of its own."""
    return Layer("linear", n_in, n_out, n_own=n_in * n_out, is_in_block=True, **more)  # type: ignore[arg-type]


def model(**blocks: Layer) -> dict[str, Layer]:
    """One block, `layers.0`, with layers by their names; `_` stands for a dot."""
    layers = {
        "": Layer("other"),
        "layers": Layer("other"),
        "layers.0": Layer("other", is_block=True, is_in_block=True),
    }
    for name, layer in blocks.items():
        path = "layers.0." + name.replace("__", ".")
        parts = path.split(".")
        for end in range(3, len(parts)):
            layers.setdefault(".".join(parts[:end]), Layer("other", is_in_block=True))
        layers[path] = layer
    return layers


def attention(names: str, **owner: int) -> dict[str, Layer]:
    """One block with attention whose layers of these names are as wide as their input."""
    layers = model(**{f"attn__{name}": linear(WIDTH, WIDTH) for name in names.split()})
    return layers | {"layers.0.attn": Layer("other", is_in_block=True, **owner)}  # type: ignore[arg-type]


def feed_forward() -> dict[str, Layer]:
    return model(mlp__up=linear(WIDTH, HIDDEN), mlp__down=linear(HIDDEN, WIDTH))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: " ".join(family.columns))
def test_every_family_is_found_by_its_names(family):
    """In a module of its own, with widths that fit."""
    inner = WIDTH if family.is_attention else HIDDEN
    layers = model(attn=Layer("other", heads=4, is_in_block=True))
    for column in family.columns:
        owner = f"layers.0.attn.{column}".rpartition(".")[0]
        layers[owner] = Layer("other", heads=4, is_in_block=True)
        layers[f"layers.0.attn.{column}"] = linear(WIDTH, family.fused * inner)
    for row in family.rows:
        found_plan = find_plan({**layers, f"layers.0.attn.{row}": linear(inner, WIDTH)}, 2)

        wanted = {
            f"layers.0.attn.{name}": Style("colwise", family.parts) for name in family.columns
        }
        assert found_plan.plan == {**wanted, f"layers.0.attn.{row}": Style("rowwise")}
        assert not found_plan.missed
        assert not found_plan.headless


def test_layers_whose_widths_do_not_fit_are_no_pair():
    """A fused weight of unequal parts, as with grouped heads, is not split, but named."""
    owner = Layer("other", heads=4, is_in_block=True)
    layers = model(attn=owner, attn__qkv=linear(WIDTH, 64), attn__proj=linear(WIDTH, WIDTH))
    layers |= model(mlp__fc1=linear(WIDTH, HIDDEN), mlp__fc2=linear(HIDDEN, WIDTH))
    found_plan = find_plan(layers, 2)

    assert set(found_plan.plan) == {"layers.0.mlp.fc1", "layers.0.mlp.fc2"}
    assert found_plan.missed == ("layers.0.attn.qkv", "layers.0.attn.proj")
    message = incomplete(object(), found_plan.plan, found_plan.missed)
    assert "layers.*.attn.qkv, layers.*.attn.proj" in message
    assert "{'layers.*.mlp.fc1': 'colwise', 'layers.*.mlp.fc2': 'rowwise'}" in message


def test_attention_without_heads_is_named():
    """Without an attribute for heads a split could cut one in two."""
    assert find_plan(attention("q k v o"), 2).headless == ("layers.0.attn",)


def test_norms_of_heads_are_shared_and_others_in_the_way():
    """q_norm over one head sums its gradients; over all heads it cannot be computed on a part."""
    layers = attention("q k v o", heads=4, head_size=HEAD)
    layers["layers.0.attn.q_norm"] = Layer("norm", n_out=HEAD, n_own=HEAD, is_in_block=True)

    assert find_plan(layers, 2).plan["layers.0.attn.q_norm"] == Style("shared")

    layers["layers.0.attn.q_norm"] = Layer("norm", n_out=WIDTH, n_own=WIDTH, is_in_block=True)
    assert find_plan(layers, 2).missed == ("layers.0.attn.q_norm",)


def test_a_norm_between_split_layers_is_in_the_way():
    """It would see a part of what it takes the mean of."""
    layers = feed_forward()
    layers["layers.0.mlp.norm"] = Layer("norm", n_out=HIDDEN, n_own=HIDDEN, is_in_block=True)

    assert find_plan(layers, 2).missed == ("layers.0.mlp.norm",)


def test_parameters_in_attention_that_no_plan_knows_are_named():
    """Such as a bias of positions, which has one column for each head."""
    layers = attention("q k v o", heads=4)
    layers["layers.0.attn.bias"] = Layer("embedding", 16, 4, n_own=64, is_in_block=True)

    assert find_plan(layers, 2).missed == ("layers.0.attn.bias",)


def test_pairs_in_a_sequential_have_only_activations_between_them():
    """Each second layer ends what the first one splits; anything else in between ends the pair."""
    layers = model(mlp=Layer("sequential", is_in_block=True))
    chain = [linear(WIDTH, HIDDEN), Layer("pointwise"), linear(HIDDEN, WIDTH), Layer("pointwise")]
    layers |= {f"layers.0.mlp.{n}": layer for n, layer in enumerate(chain)}

    pair = {"layers.0.mlp.0": Style("colwise"), "layers.0.mlp.2": Style("rowwise")}
    assert find_plan(layers, 2).plan == pair

    layers["layers.0.mlp.1"] = Layer("other")
    assert find_plan(layers, 2).plan == {}


def vocabulary(n_words: int = 257, tied: str = "emb.weight", **more: Layer) -> dict[str, Layer]:
    """A model with a feed-forward part, an embedding and a head."""
    table = Layer("embedding", n_words, WIDTH, weight="emb.weight", n_own=n_words * WIDTH)
    return {
        **feed_forward(),
        "emb": table,
        "head": Layer("linear", WIDTH, n_words, weight=tied),
        **more,
    }


def test_a_vocabulary_is_split_with_its_head():
    """Unevenly, if need be; logits are put together again."""
    plan = find_plan(vocabulary(), 4).plan

    assert (plan["emb"].kind, plan["head"].kind) == ("embedding", "head")


def test_a_head_is_known_by_its_width():
    """What has another width than the vocabulary is no head of it."""
    layers = vocabulary(tied="head.weight")
    assert "head" in find_plan(layers, 2).plan

    layers["head"] = Layer("linear", WIDTH, 10, weight="head.weight")
    plan = find_plan(layers, 2).plan
    assert "head" not in plan
    assert plan["emb"].kind == "embedding"


def test_what_is_tied_to_something_whole_stays_whole():
    """A parameter lies one way."""
    twin = Layer("other", weight="emb.weight")

    assert {"emb", "head"}.isdisjoint(find_plan(vocabulary(twin=twin), 2).plan)


def test_a_vocabulary_with_fewer_words_than_chunks_stays_whole():
    """Five words on four ranks: 2, 2, 1, 0."""
    assert {"emb", "head"}.isdisjoint(find_plan(vocabulary(5), 4).plan)
    assert {"emb", "head"} <= set(find_plan(vocabulary(5), 2).plan)


def test_nothing_known_is_no_plan():
    """A vocabulary alone is not worth it."""
    layers = {"": Layer("other"), "emb": Layer("embedding", 9, 4), "head": linear(4, 9)}

    assert find_plan(layers, 2).plan == {}


@pytest.mark.parametrize(("keys", "works"), [(2, "1 or 2"), (3, "1"), (12, "1, 2, 3 or 6")])
def test_heads_that_do_not_divide_are_refused_with_degrees(keys, works):
    """The message has the number, of what it is, and what divides all counts and the ranks."""
    ranks = 18 if keys == 12 else 8
    needed = [Count(48, "outputs of up"), Count(6, "heads of attn"), Count(keys, "heads of k")]

    with pytest.raises(OptionError) as error:
        check_counts(needed, 4, ranks)

    assert str(error.value) == (
        "tp=4 does not divide the 6 heads of attn. "
        f"This model can be split with tp={works} on {ranks} ranks."
    )
    check_counts(needed[:2], 2, ranks)


def test_counts_are_of_heads_widths_and_parts():
    """Grouped heads count for themselves; a fused weight by one of its parts."""
    layers = attention("q o", heads=4, kv_heads=2, head_size=HEAD)
    layers["layers.0.attn.k"] = layers["layers.0.attn.v"] = linear(WIDTH, 2 * HEAD)
    layers |= model(mlp__gate_up_proj=linear(WIDTH, 96), mlp__down_proj=linear(48, WIDTH))
    plan = find_plan(layers, 2).plan
    numbers = {count.what: count.number for count in counts(plan, layers)}

    assert numbers["heads of layers.0.attn"] == 4
    assert numbers["key and value heads of layers.0.attn"] == 2
    assert numbers["heads of layers.0.attn.k"] == 2
    assert numbers["outputs of layers.0.mlp.gate_up_proj"] == 48
    assert numbers["inputs of layers.0.mlp.down_proj"] == 48
    assert [attention.owner for attention in attentions(plan, layers)] == ["layers.0.attn"]


def test_styles_are_read():
    """Hugging Face's words are known, too."""
    assert read_style("colwise", "a") == Style("colwise")
    assert read_style("colwise:3", "a") == Style("colwise", parts=3)
    assert read_style("divide:heads, width", "a") == Style("divide", attributes=("heads", "width"))
    assert read_style("colwise_gather_output", "a") == Style("head")


@pytest.mark.parametrize("text", ["", "column", "colwise:", "colwise:x", "divide", "rowwise:2", 3])
def test_unknown_styles_are_refused_with_all_that_there_are(text):
    """Each with what it does."""
    with pytest.raises(OptionError) as error:
        read_style(text, "layers.*.up")

    assert "layers.*.up" in str(error.value)
    assert all(meaning in str(error.value) for meaning in STYLES.values())


def given_layers() -> dict[str, Layer]:
    """Two blocks of a model with names that nobody knows."""
    layers = {
        "a": linear(WIDTH, HIDDEN),
        "b": linear(HIDDEN, WIDTH),
        "emb": Layer("embedding", 9, 4),
    }
    return {f"net.{block}.{name}": layer for block in (0, 1) for name, layer in layers.items()}


def test_patterns_are_put_out_into_modules():
    """A star is one part of a name."""
    plan = read_plan({"net.*.a": "colwise", "net.*.b": "rowwise"}, given_layers())

    assert {name: style.kind for name, style in plan.items()} == {
        "net.0.a": "colwise", "net.1.a": "colwise", "net.0.b": "rowwise", "net.1.b": "rowwise",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"net.a": "colwise"}, "net.a matches no module"),
        ({"*": "colwise"}, "matches no module"),
        ({"net.*.a": "colwise"}, "without a rowwise one"),
        ({"net.*.b": "rowwise"}, "splits nothing"),
        ({"net.*.emb": "colwise"}, "net.0.emb is colwise, which only goes with a torch.nn.Linear"),
        ({"net.*.a": "embedding"}, "only goes with a torch.nn.Embedding"),
        ({"net.*.a": "colwise:3", "net.*.b": "rowwise"}, "64 outputs, which are not 3 equal"),
    ],
)
def test_plans_that_cannot_be_followed_are_refused(patterns, message):
    """Before anything changes."""
    with pytest.raises(OptionError, match=message.replace("*", r"\*")):
        read_plan(patterns, given_layers())


def test_names_of_heads_and_rows_do_not_shadow_each_other():
    """`proj` and `out` end attention, too: in a block they are no heads."""
    layers = vocabulary(WIDTH)
    layers |= attention("q k v proj", heads=4)

    assert "proj" in HEADS
    assert find_plan(layers, 2).plan["layers.0.attn.proj"] == Style("rowwise")
