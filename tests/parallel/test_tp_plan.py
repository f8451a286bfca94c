"""What tensor parallelism finds in a model before anything changes, and what it refuses."""

import copy
import re
import warnings

import pytest
from torch import nn

from nbdist.errors import OptionError
from nbdist.parallel.tp import tp
from nbdist.parallel.tp.attention_check import fit
from nbdist.parallel.tp.model import layers_of
from nbdist.strategy.choice import Degrees, Options, Strategy
from nbdist.strategy.tensor_layout import TensorLayout
from nbdist.strategy.tp_plan import attentions, find_plan
from tests.programs.parity import build_alone
from tests.support import tp_models


def planned(model, degree=2, world_size=None, **options):
    choice = Strategy("tp", Degrees(tp=degree), world_size or degree, Options(**options))
    shapes = {name: TensorLayout(tuple(p.shape)) for name, p in model.named_parameters()}
    return tp.STEP.plan(build_alone(model, choice), shapes)


def test_layouts_say_what_is_split():
    """Rows, columns, three parts of a fused weight; tied weights by their first name."""
    layouts = planned(tp_models.MODELS["nano"]())
    split = {name: (layout.tp_dim, layout.tp_parts) for name, layout in layouts.items()}

    assert split["emb.weight"] == (0, 1)
    assert "head.weight" not in split
    assert split["layers.0.attn.c_attn.weight"] == split["layers.0.attn.c_attn.bias"] == (0, 3)
    assert split["layers.0.attn.c_proj.weight"] == (1, 1)
    assert split["layers.0.attn.c_proj.bias"] == split["pos.weight"] == (None, 1)
    assert planned(tp_models.MODELS["gpt2"]())[
        "model.transformer.h.0.attn.c_attn.weight"
    ] == TensorLayout((32, 96), tp_dim=1, tp_parts=3)
    assert planned(nn.TransformerEncoderLayer(32, 4))["self_attn.in_proj_weight"].tp_parts == 3


def test_an_unknown_model_is_told_how_to_give_a_plan():
    """The example is a plan that works where names are like these."""

    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha, self.beta = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.beta(self.alpha(x).relu())

    model = Strange()
    with pytest.raises(OptionError, match=re.escape('model.tp_plan = {"layers.*.attn.wq"')):
        planned(model)

    model.tp_plan = {"alpha": "colwise", "beta": "rowwise"}
    layouts = planned(model)
    assert (layouts["alpha.weight"].tp_dim, layouts["beta.weight"].tp_dim) == (0, 1)

    model.tp_plan = {"gamma": "colwise"}
    with pytest.raises(OptionError, match=r"gamma matches no module.*alpha, beta"):
        planned(model)


class Attention(nn.Module):
    """Attention whose code decides whether it can be split."""

    def __init__(self, heads=4, **more):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.heads = heads
        vars(self).update(more)

    def split(self, x):
        """(batch, length, all heads) -> (batch, heads, length, one head)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        """Attention with whatever `split` makes of heads."""
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(1, 2).flatten(2))


class ByWidth(Attention):
    """Counts heads by what is there; its attribute is not to be divided."""

    def split(self, x):
        """As wide as the whole model says."""
        return x.unflatten(-1, (-1, 32 // self.heads)).transpose(1, 2)


class Elsewhere(Attention):
    """Takes the number of heads from somewhere else: nothing divides it."""

    def split(self, x):
        """Four heads, of whatever width."""
        return x.unflatten(-1, (4, -1)).transpose(1, 2)


class Late(Elsewhere):
    """The same with a width for which there is an attribute of another name."""

    def split(self, x):
        """As many heads as an unusual attribute says."""
        return x.unflatten(-1, (self.many, -1)).transpose(1, 2)


def block(attention, mlp=None):
    block = tp_models.Block(attention, mlp or tp_models.Plain())
    return nn.Sequential(*(copy.deepcopy(block) for _ in range(2)))


def found_fit(attention):
    """How the first attention of a model has to be changed."""
    model = block(attention)
    layers = layers_of(model)
    plan = find_plan(layers, 2).plan
    first = attentions(plan, layers)[0]
    return fit(model[0].attn, first.owner, plan, first.columns, 2)


def test_attention_is_tried_out_before_it_is_split():
    """An attribute is divided where the code needs it, and only there."""
    assert found_fit(Attention()).values == {"heads": 2}
    assert found_fit(ByWidth()).values == {}
    nano = found_fit(tp_models.NanoAttention())
    assert (nano.values, nano.n_shown) == ({"n_head": 2, "n_embd": 16}, 16)


def normed(norm):
    """A model with a layer whose weight is computed from others."""
    model = block(Attention())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the older one
        norm(model[1].attn.q)
    return model


@pytest.mark.parametrize(
    ("make", "degree", "message"),
    [
        (
            lambda: tp_models.llama(hidden_size=48, num_attention_heads=6), 4,
            r"the 6 heads of model\.model\.layers\.0\.self_attn\.q_proj\. .*tp=1 or 2 on 8 ranks",
        ),
        (
            lambda: tp_models.llama(num_key_value_heads=4, intermediate_size=50), 4,
            "50 outputs of .*gate_proj.* tp=1 or 2 on 8",
        ),
        (lambda: nn.TransformerEncoderLayer(30, 3, 64), 4, "3 heads of self_attn.*tp=1 on 8"),
        (tp_models.MODELS["grouped"], 4, "2 key and value heads of layers.0.attn"),
        # Four heads of half the width have all the right shapes, and would give wrong numbers.
        (lambda: block(Elsewhere()), 2, r"Elsewhere does not compute the same.*divide:n_heads"),
        # torch's own; rarely used.
        (lambda: nn.Sequential(nn.MultiheadAttention(32, 4, add_bias_kv=True)), 2, "add_bias_kv"),
        (lambda: normed(nn.utils.parametrizations.weight_norm), 2, r"1\.attn\.q: .* is computed"),
        (lambda: normed(nn.utils.weight_norm), 2, r"cannot split 1\.attn\.q: .*ddp, fsdp or pp"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_with_what_can(make, degree, message):
    """Heads, those of keys and values, hidden widths; attention whose code is tried out."""
    with pytest.raises(OptionError, match=message):
        planned(make(), degree, 8)


def test_a_plan_says_what_is_divided():
    """Where the attribute has a name of its own."""
    model = block(Late(many=4))
    model.tp_plan = {
        **{f"*.attn.{name}": "colwise" for name in "qkv"}, "*.attn.o": "rowwise",
        "*.attn": "divide:many",
    }  # fmt: skip
    assert planned(model)["0.attn.q.weight"].tp_dim == 0


def test_a_half_known_model_is_refused_with_the_half():
    """Attention is known, what follows is not: the message has the plan so far."""
    strange = nn.ModuleDict({"alpha": nn.Linear(32, 64), "beta": nn.Linear(64, 32)})
    model = block(Attention(), strange)
    with pytest.raises(
        OptionError, match=r"not know how to split \*\.mlp\.alpha, \*\.mlp\.beta"
    ) as refusal:
        planned(model)

    plan = re.search(r"model\.tp_plan = (\{.*?\})", str(refusal.value))
    assert plan is not None
    model.tp_plan = dict(re.findall(r"'(.*?)': '(.*?)'", plan[1]))
    assert planned(model)["0.attn.o.weight"].tp_dim == 1


def test_tied_weights_have_to_lie_alike():
    """A plan of the user's that names only one of them."""
    model = tp_models.Model(lambda: tp_models.Block(Attention(), tp_models.Gated()), is_tied=True)
    parts = {f"layers.*.attn.{name}": "colwise" for name in "qkv"}
    model.tp_plan = {**parts, "layers.*.attn.o": "rowwise", "emb": "embedding"}

    with pytest.raises(OptionError, match=r"emb\.weight and head\.weight are one parameter"):
        planned(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tp_models.MODELS["flat"], "computes attention in the block itself"),
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), "no list of blocks"),
        (
            lambda: block(Attention(), nn.Sequential(nn.LayerNorm(32), *tp_models.Plain())),
            r"0\.mlp\.0 has parameters of its own inside 0\.mlp",
        ),
    ],
)
def test_sequence_parallelism_refuses_what_it_cannot_split(make, message):
    """Before anything changes, with the way round."""
    planned(make())
    with pytest.raises(OptionError, match=f"{message}.*Leave --sequence-parallel out"):
        planned(make(), has_sequence_parallel=True)
