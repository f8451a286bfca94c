"""Which modules of a model are the experts of a layer, and what says how many there are.

Experts are one module whose parameters are stacked, expert by expert, in their first dim, and
whose forward takes hidden states (tokens, width), the experts of each token (tokens, k) and their
weights (tokens, k), and returns what is added up for each token (tokens, width). So are those of
transformers' models. For others `model.ep_plan = {"layers.*.moe.experts": "experts"}` names them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nbdist.errors import OptionError
from nbdist.parallel.libraries.peft_layers import PREFIX, inner_model, is_adapted
from nbdist.strategy.options import listed
from nbdist.strategy.tp_user_plan import attribute_for, match_names

# Names of the forward's second and third argument in transformers 5.
_ARGUMENTS = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))
_STYLE = "experts"
# What is in the module that torch.compile(module) returns.
_COMPILED = "_orig_mod"
_CONTRACT = (
    "Experts are one module with stacked parameters (experts, ...) and forward(hidden_states, "
    "top_k_index, top_k_weights), as transformers has them."
)


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The experts of one layer.

    Attributes:
        count: How many there are, on all ranks together.
        counts: Attributes of the module that say so.
    """

    count: int
    counts: tuple[str, ...]


def find_experts(base: torch.nn.Module) -> dict[str, LayerExperts]:
    """The experts of each layer, by the name of their module: the user's plan, or those known.

    Raises:
        OptionError: There are none; or what a plan names are none.
    """
    inside = dict(base.named_children()).get(_COMPILED, base)
    for holder, prefix in {inner_model(base): PREFIX, inside: "", base: ""}.items():
        plan = vars(holder).get("ep_plan", getattr(type(holder), "ep_plan", None))
        if isinstance(plan, Mapping) and plan:
            return _of_plan(base, {f"{prefix}{pattern}": word for pattern, word in plan.items()})
    names = [name for name, module in base.named_modules() if _takes_tokens(module)]
    if not names:
        title = type(base).__name__
        raise OptionError(
            f"{title} has no experts that nbdist knows, so ep has nothing to share. Use ddp or "
            f"fsdp. {_CONTRACT} Name yours before prepare(): "
            f'{attribute_for(base, "ep_plan")} = {{"layers.*.moe.experts": "{_STYLE}"}}'
        )
    return {name: _layer(base.get_submodule(name), name) for name in names}


def _of_plan(base: torch.nn.Module, plan: Mapping[str, object]) -> dict[str, LayerExperts]:
    modules = dict(base.named_modules())
    # By their names without torch.compile; of a wrapper and what is in it, the latter.
    paths = {".".join(p for p in path.split(".") if p != _COMPILED): path for path in modules}
    experts = {}
    for pattern, style in plan.items():
        if style != _STYLE:
            raise OptionError(f"ep_plan: {pattern} has the style {style!r}. There is {_STYLE!r}.")
        names = match_names(pattern, paths)
        if not names:
            raise OptionError(f"ep_plan: {pattern} matches no module of {type(base).__name__}.")
        experts.update({paths[name]: _layer(modules[paths[name]], name) for name in names})
    return experts


def _takes_tokens(module: torch.nn.Module) -> bool:
    """Whether it has transformers' form of experts."""
    if not any(True for _ in module.parameters(recurse=False)):
        return False
    # Of the function that a decorator of transformers is around.
    arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
    return len(arguments) == 3 and arguments[1:] in _ARGUMENTS


def _layer(module: torch.nn.Module, name: str) -> LayerExperts:
    if any(is_adapted(inner) for inner in module.modules()):
        raise OptionError(
            f"{name} has adapters of PEFT, which ep does not share. Use ddp or fsdp, or adapters "
            "on other layers."
        )
    sizes = {key: tuple(p.shape) for key, p in module.named_parameters()}
    firsts = {shape[:1] for shape in sizes.values()}
    stacked = [key for key, buffer in module.named_buffers() if buffer.shape[:1] in firsts]
    if stacked:
        raise OptionError(
            f"{name} keeps {stacked[0]} of its experts in a buffer, which ep does not share. Make "
            "it a parameter with requires_grad=False."
        )
    if len(firsts) != 1 or firsts == {()} or any("." in key for key in sizes):
        shapes = listed(f"{key} {shape}" for key, shape in sizes.items()) if sizes else "nothing"
        raise OptionError(
            f"{name} is no stack of experts: its parameters are {shapes}, and have no first dim in "
            f"common. {_CONTRACT}"
        )
    ((count,),) = firsts
    # `num_experts`, `n_routed_experts`, ...: the forward counts by them.
    counts = (key for key, value in vars(module).items() if "expert" in key and value == count)
    return LayerExperts(count, tuple(key for key in counts if type(vars(module)[key]) is int))
