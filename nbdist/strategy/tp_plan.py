"""Tensor parallel plans as data: which layers of a model are split, and how.

A plan is a dict of module names to styles. It is found by the usual names of layers (tp_names)
or given by the user (tp_user_plan). What it does not name stays whole on every rank.
Source: Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbdist.errors import OptionError
from nbdist.strategy.degrees import divisors
from nbdist.strategy.options import listed
from nbdist.strategy.tp_names import EMBEDDINGS, FAMILIES, HEAD_NORMS, HEADS, Family


@dataclass(frozen=True, slots=True)
class Style:
    """One word of a plan, read.

    Attributes:
        kind: A key of `STYLES`, without what follows the colon.
        parts: How many parts of equal length are one weight.
        attributes: Which are divided.
    """

    kind: str
    parts: int = 1
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """A module of a model, as far as a plan has to know it.

    Attributes:
        kind: linear, embedding, attention (torch's), norm, pointwise (no parameters, each
            element by itself), sequential, or other.
        n_in, n_out: Widths; of an embedding rows and width, of a norm its width as n_out.
        weight: First name of its weight; tied ones have the same.
        n_own: How many numbers are in parameters that are its own, not of modules in it.
        heads, kv_heads, head_size: Of its attributes, where it has such.
        is_block: It stands in a list of blocks.
        is_in_block: It is in one, or is one.
    """

    kind: str
    n_in: int = 0
    n_out: int = 0
    weight: str = ""
    n_own: int = 0
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    is_block: bool = False
    is_in_block: bool = False


Layers = Mapping[str, Layer]
Plan = dict[str, Style]


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """Plan found by the usual names in a model, and the layers that it misses.

    Attributes:
        plan: Empty where no name is known.
        missed: Layers that a plan should cover, too, and does not.
        headless: Modules with attention that do not say how many heads they have.
    """

    plan: Plan
    missed: tuple[str, ...] = ()
    headless: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Attention:
    """A module, by its name, whose attention heads are split over tp; its colwise layers."""

    owner: str
    columns: tuple[str, ...]  # query first


@dataclass(frozen=True, slots=True)
class Count:
    """Something that tp has to divide: a number and of what."""

    number: int
    what: str


def find_plan(layers: Layers, degree: int) -> FoundPlan:
    """The plan of a model by the usual names of its layers, which are given in its order.

    A vocabulary with fewer words than ranks along tp (the degree) stays whole.
    """
    plan: Plan = {}
    headless: list[str] = []
    for name, layer in layers.items():
        if layer.kind == "attention":
            plan[name] = Style("attention")
        if layer.kind == "sequential":
            plan.update(_in_sequence(name, layers))
        for family in FAMILIES:
            pair = _pair(name, family, layers, plan)
            owner = _parent(next(iter(pair), ""))
            if pair and family.is_attention and not _has_heads(layers[owner]):
                headless.append(owner)
            plan.update(pair)
    if not plan:
        return FoundPlan({})
    plan.update(_vocabulary(layers, plan, degree))
    owners = [attention.owner for attention in attentions(plan, layers)]
    uncovered = (n for n in layers if n not in plan and _is_uncovered(n, owners, plan, layers))
    return FoundPlan(plan, tuple(uncovered), tuple(headless))


def attentions(plan: Plan, layers: Layers) -> tuple[Attention, ...]:
    """Modules of a plan that split heads: those with colwise layers and attributes for heads."""
    columns_by_owner: dict[str, list[str]] = {}
    for name, style in plan.items():
        owner = _parent(name)
        if style.kind == "colwise" and _has_heads(layers[owner]):
            columns_by_owner.setdefault(owner, []).append(name)
    return tuple(Attention(owner, tuple(columns)) for owner, columns in columns_by_owner.items())


def counts(plan: Plan, layers: Layers) -> Iterator[Count]:
    """Counts that tp has to divide without rest, so that a plan can be followed."""
    for name, style in plan.items():
        layer = layers[name]
        if style.kind == "colwise":
            yield Count(layer.n_out // style.parts, f"outputs of {name}")
        elif style.kind == "rowwise":
            yield Count(layer.n_in, f"inputs of {name}")
        elif style.kind == "attention":
            yield Count(layer.heads or 1, f"heads of {name}")
    for attention in attentions(plan, layers):
        yield from _heads(attention, plan, layers)


def check_counts(needed: Iterable[Count], degree: int, world_size: int) -> None:
    """Refuse a degree that does not divide what it has to.

    Raises:
        OptionError: With the first number that it does not divide, and the degrees that do.
    """
    needed = tuple(needed)
    # Heads first: they are what a user knows of a model, and they decide mostly.
    for count in sorted(needed, key=lambda count: "heads" not in count.what):
        if count.number % degree:
            fit = divisors(math.gcd(world_size, *(count.number for count in needed)))
            raise OptionError(
                f"tp={degree} does not divide the {count.number} {count.what}. "
                f"This model can be split with tp={listed(fit, 'or')} on {world_size} ranks."
            )


def _pair(name: str, family: Family, layers: Layers, plan: Plan) -> Plan:
    """The layers of a family in a module, if it has them all and their widths fit."""
    columns = [_join(name, column) for column in family.columns]
    rows = [row for row in (_join(name, child) for child in family.rows) if _is_linear(row, layers)]
    if not rows or not all(_is_linear(column, layers) for column in columns):
        return {}
    if any(layer_name in plan for layer_name in (*columns, rows[0])):
        return {}
    if layers[columns[0]].n_out != family.fused * layers[rows[0]].n_in:
        return {}
    pair = {column: Style("colwise", family.parts) for column in columns}
    pair[rows[0]] = Style("rowwise")
    owner = _parent(columns[0])
    for norm in (_join(owner, norm) for norm in HEAD_NORMS if family.is_attention):
        is_norm = norm in layers and layers[norm].kind == "norm"
        if is_norm and layers[norm].n_out == layers[owner].head_size:
            pair[norm] = Style("shared")
    return pair


def _in_sequence(name: str, layers: Layers) -> Plan:
    """Pairs of linear layers in a Sequential with nothing but activations between them."""
    pairs: Plan = {}
    last: str | None = None
    for child in layers:
        if not child or child == name or _parent(child) != name:
            continue
        kind = layers[child].kind
        if kind == "linear" and last is not None and layers[last].n_out == layers[child].n_in:
            pairs |= {last: Style("colwise"), child: Style("rowwise")}
            last = None
        elif kind == "linear":
            last = child
        elif kind != "pointwise":
            last = None
    return pairs


def _vocabulary(layers: Layers, plan: Plan, degree: int) -> Plan:
    """Embeddings of words, and the layers that make logits of the same vocabulary."""
    tables = [
        name
        for name, layer in layers.items()
        if layer.kind == "embedding"
        and name.rpartition(".")[2] in EMBEDDINGS
        and -(-layer.n_in // degree) * (degree - 1) < layer.n_in
    ]
    styles = dict.fromkeys(tables, Style("embedding"))
    weights = {layers[name].weight for name in tables}
    sizes = {layers[name].n_in for name in tables}
    for name, layer in layers.items():
        is_outside = layer.kind == "linear" and name not in plan and not layer.is_in_block
        is_head = layer.n_out in sizes and name.rpartition(".")[2] in HEADS
        if is_outside and (is_head or layer.weight in weights):
            styles[name] = Style("head")
    # Tied to something that stays whole, it stays whole.
    whole = {layer.weight for name, layer in layers.items() if name not in styles}
    return {name: style for name, style in styles.items() if layers[name].weight not in whole}


def _heads(attention: Attention, plan: Plan, layers: Layers) -> Iterator[Count]:
    owner = layers[attention.owner]
    place = attention.owner or "the model"
    if owner.heads:
        yield Count(owner.heads, f"heads of {place}")
    if owner.kv_heads:
        yield Count(owner.kv_heads, f"key and value heads of {place}")
    widths = {name: layers[name].n_out // plan[name].parts for name in attention.columns}
    size = owner.head_size or 0
    for name, width in widths.items():
        # A block without modules of its own for attention has wider columns, too.
        if size and width % size == 0 and width <= widths[attention.columns[0]]:
            yield Count(width // size, f"heads of {name}")


def _has_heads(owner: Layer) -> bool:
    return owner.heads is not None or owner.head_size is not None


def _is_uncovered(name: str, owners: Sequence[str], plan: Plan, layers: Layers) -> bool:
    """Linear layers of blocks, what has parameters in attention, and norms of what is split."""
    layer = layers[name]
    if name in owners or not layer.n_own:
        return layer.n_own > 0
    if layer.kind == "norm":
        return name.rpartition(".")[2] in HEAD_NORMS or _is_between(name, plan, layers)
    owner = next((owner for owner in owners if name.startswith(f"{owner}." if owner else "")), None)
    in_attention = owner is not None and not layers[owner].is_block
    return in_attention or (layer.kind == "linear" and layer.is_in_block)


def _is_between(name: str, plan: Plan, layers: Layers) -> bool:
    """Whether a norm is as wide as what is split beside it, and not as what is whole."""
    width = layers[name].n_out
    return any(
        layers[neighbour].n_out == width != layers[neighbour].n_in
        for neighbour, style in plan.items()
        if style.kind == "colwise" and _parent(neighbour) == _parent(name)
    )


def _is_linear(name: str, layers: Layers) -> bool:
    return name in layers and layers[name].kind == "linear"


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
