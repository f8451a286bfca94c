"""One training step of a model that a variable holds: its inputs, loss and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.errors import OptionError
from nbdist.parallel.libraries.peft_layers import inner_model
from nbdist.parallel.live import registry
from nbdist.rpc.rank import namespace


def inputs_of(name: str) -> tuple[tuple[Any, ...] | None, Mapping[str, Any]]:
    """Arguments and keyword arguments in a variable; None and nothing without a name.

    Raises:
        OptionError: There is no such variable, or no tensor in it.
    """
    if not name:
        return None, {}
    variables = namespace.everything()
    if name not in variables:
        raise OptionError(
            f"--inputs {name}: there is no such variable on the ranks. Name one that holds "
            "the model's inputs: a tensor, a tuple, or a dict of keyword arguments."
        )
    value = variables[name]
    if isinstance(value, Mapping):
        return (), dict(value)
    args = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not any(isinstance(argument, torch.Tensor) for argument in args):
        raise OptionError(
            f"--inputs {name} holds a {type(value).__name__} without a tensor. Name a tensor, a "
            "tuple, or a dict of keyword arguments."
        )
    return args, {}


def random_tokens(
    base: torch.nn.Module, batch: int, sequence: int, seed: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Draw random arguments for a language model of transformers: (args, kwargs).

    Raises:
        OptionError: It is another model, and nobody knows what it is called with.
    """
    if not is_language_model(base):
        raise OptionError(
            f"The inputs of {type(base).__name__} are not known. Name a variable that holds them "
            "with --inputs: a tensor, a tuple, or a dict of keyword arguments."
        )
    generator = torch.Generator().manual_seed(seed)
    words = base.config.vocab_size  # type: ignore[union-attr]
    tokens = torch.randint(0, int(words), (batch, sequence), generator=generator)  # type: ignore[arg-type]
    tokens = tokens.to(registry.device())
    return (), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def is_language_model(model: torch.nn.Module) -> bool:
    """Whether a model is one of transformers that takes tokens and labels, inside of PEFT's too."""
    inner = inner_model(model)
    name = type(inner).__name__
    is_causal = "ForCausalLM" in name or "LMHead" in name
    return is_causal and hasattr(getattr(inner, "config", None), "vocab_size")


def optimizer_of(base: torch.nn.Module, prepared: Any) -> Optimizer | None:
    """The first optimizer in a variable that steps parameters of the model."""
    parameter_ids = {id(p) for p in base.parameters()}
    for value in list(namespace.everything().values()):
        # By type, and without code of theirs: a lazy object would load, another raise, and the
        # ranks' own `accelerator` be set up.
        inner = namespace.attributes(value).get("optimizer")
        optimizers = (each for each in (inner, value) if issubclass(type(each), Optimizer))
        candidate: Optimizer | None = next(optimizers, None)
        if candidate is None:
            continue
        parameters = [p for group in candidate.param_groups for p in group["params"]]
        if any(
            id(p) in parameter_ids or (prepared is not None and prepared.name_of(p) is not None)
            for p in parameters
        ):
            return candidate
    return None


def loss_of(output: Any) -> torch.Tensor:
    """Choose the tensor for backward: the output's loss, or the mean of its first tensor.

    Raises:
        OptionError: There is no tensor in it.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = torch.utils._pytree.tree_leaves(output)  # noqa: SLF001
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.float().mean() if leaf.ndim else leaf
    raise OptionError(
        f"The model returned a {type(output).__name__} without a tensor to start backward from. "
        "Its forward has to return a loss, or a tensor of floating-point numbers."
    )
