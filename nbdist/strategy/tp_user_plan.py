"""Tensor parallel plans that users give, and the messages where one is needed.

    model.tp_plan = {"layers.*.attn.wq": "colwise", "layers.*.attn.wo": "rowwise"}

`*` stands for one part of a name.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping

from nbdist.errors import OptionError
from nbdist.strategy.tp_names import HEAD_COUNTS, HEAD_SIZES, STYLES
from nbdist.strategy.tp_plan import Layer, Layers, Plan, Style

# Hugging Face's words for the same.
_SYNONYMS = {
    "colwise_gather_output": "head",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "shared",
}
_EXAMPLE = (
    ' = {"layers.*.attn.wq": "colwise", "layers.*.attn.wk": "colwise", '
    '"layers.*.attn.wv": "colwise", "layers.*.attn.wo": "rowwise", '
    '"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}'
)
_SHOWN = 4


def read_style(text: object, name: str) -> Style:
    """Parse one word of a plan.

    Raises:
        OptionError: There is no such style.
    """
    word, colon, rest = str(text).partition(":")
    kind = _SYNONYMS.get(word, word)
    if kind == "colwise" and rest.isdecimal() and int(rest):
        return Style(kind, parts=int(rest))
    if kind == "divide" and rest:
        return Style(kind, attributes=tuple(part.strip() for part in rest.split(",")))
    if kind in STYLES and not colon:
        return Style(kind)
    styles = "\n".join(f"  {style}: {meaning}" for style, meaning in STYLES.items())
    raise OptionError(f"tp_plan: {name} has the style {text!r}. Styles are:\n{styles}")


def match_names(pattern: str, names: Iterable[str]) -> list[str]:
    """The names of modules that a pattern of a plan means: `*` stands for one part."""
    wanted = pattern.split(".")
    return [
        name
        for name in names
        if len(parts := name.split(".")) == len(wanted)
        and all(map(fnmatch.fnmatchcase, parts, wanted))
    ]


def read_plan(patterns: Mapping[str, object], layers: Layers) -> Plan:
    """A plan of the user's, each pattern put out into the modules that it names.

    Raises:
        OptionError: A pattern names nothing, or a style does not go with the module.
    """
    plan = {}
    for pattern, text in patterns.items():
        style, names = read_style(text, pattern), match_names(pattern, layers)
        if not names:
            raise OptionError(
                f"tp_plan: {pattern} matches no module. Modules are, for example: "
                f"{_join_patterns([name for name in layers if name], 12)}"
            )
        for name in names:
            _check_style(name, style, layers[name])
            plan[name] = style
    kinds = {style.kind for style in plan.values()}
    if not kinds & {"colwise", "attention", "embedding", "head"}:
        raise OptionError(
            f"tp_plan splits nothing: no module in it is colwise. As in: tp_plan{_EXAMPLE}"
        )
    if ("colwise" in kinds) != ("rowwise" in kinds):
        raise OptionError(
            "tp_plan has colwise layers without a rowwise one, or the other way round: what a "
            "colwise layer splits, a rowwise one puts together again. As in: tp_plan" + _EXAMPLE
        )
    return plan


def attribute_for(model: object, name: str) -> str:
    """Name of the attribute to which the user assigns a plan of this name.

    transformers' models have properties of such names, which refuse nbdist's styles.
    """
    is_property = isinstance(getattr(type(model), name, None), property)
    return f'vars(model)["{name}"]' if is_property else f"model.{name}"


def unknown(model: object) -> str:
    """The message for a model without a plan."""
    return (
        f"{type(model).__name__}: nbdist knows none of its layer names, and cannot tell what to "
        "split (it knows names such as q_proj k_proj v_proj -> o_proj, up -> down, fc1 -> fc2, and "
        "torch.nn.MultiheadAttention). Give a plan before prepare(): "
        f"{attribute_for(model, 'tp_plan')}{_EXAMPLE}. "
        "colwise splits a layer by its outputs; rowwise splits by inputs and sums the results."
    )


def incomplete(model: object, plan: Plan, uncovered: tuple[str, ...]) -> str:
    """The message for a model of which a part has no known names; with the plan of the rest.

    Nothing is split in a module that has layers which are not known: both may work on the same
    heads.
    """
    half_known = {name[: dot.start()] for name in uncovered for dot in re.finditer(r"\.", name)}
    styles = {
        _pattern(name): f"{style.kind}:{style.parts}" if style.parts > 1 else style.kind
        for name, style in plan.items()
        if style.kind in {"embedding", "head"} or name.rpartition(".")[0] not in half_known
    }
    return (
        f"{type(model).__name__}: nbdist does not know how to split "
        f"{_join_patterns(uncovered, _SHOWN)}. Every rank would hold these layers whole. If that "
        "is right, give this plan before prepare(), otherwise one with more layers in it: "
        f"{attribute_for(model, 'tp_plan')} = {styles}"
    )


def headless(model: object, name: str) -> str:
    """The message for attention without an attribute for its heads."""
    return (
        f"{name} has no attribute that says how many heads it has or how wide they are (such as "
        f"{', '.join(HEAD_COUNTS[:3])}, {HEAD_SIZES[0]}), so it cannot be split by heads. Give it "
        "one, or say in a plan which attributes are divided, beside its colwise and rowwise "
        f'layers: {attribute_for(model, "tp_plan")} = {{"{_pattern(name)}": "divide:NAME", ...}}.'
    )


def _check_style(name: str, style: Style, layer: Layer) -> None:
    wanted = "linear" if style.kind in {"colwise", "rowwise", "head"} else style.kind
    if wanted in _KINDS and layer.kind != wanted:
        raise OptionError(
            f"tp_plan: {name} is {style.kind}, which only goes with {_KINDS[wanted]}."
        )
    if style.kind == "colwise" and layer.n_out % style.parts:
        raise OptionError(
            f"tp_plan: {name} has {layer.n_out} outputs, which are not {style.parts} equal parts."
        )


_KINDS = {
    "linear": "a torch.nn.Linear (or a Conv1D of Hugging Face's)",
    "embedding": "a torch.nn.Embedding without max_norm, sparse or scale_grad_by_freq",
    "attention": "a torch.nn.MultiheadAttention",
}


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _join_patterns(names: Iterable[str], n_shown: int) -> str:
    patterns = list(dict.fromkeys(map(_pattern, names)))
    more = f" and {len(patterns) - n_shown} more" if len(patterns) > n_shown else ""
    return ", ".join(patterns[:n_shown]) + more
