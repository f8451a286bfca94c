"""Activation checkpointing: what a block computes in forward is computed again in backward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from nbdist.errors import OptionError
from nbdist.parallel.base.blocks import BlockList
from nbdist.parallel.base.sdpa import with_backend

_ATEN = torch.ops.aten

# What selective keeps: products of matrices and attention, which cost most to compute again.
# Norms, activations and dropout are cheap and hold as much memory.
_KEPT = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
    _ATEN._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
    _ATEN._scaled_dot_product_flash_attention.default,  # noqa: SLF001
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
]


def blocks_to_checkpoint(how: str, blocks: BlockList) -> tuple[torch.nn.Module, ...]:
    """The blocks that are computed again: all, or with a number k the k-th, 2k-th and so on.

    A block that stands in the list several times counts at its first place.

    Raises:
        OptionError: There are fewer than k blocks.
    """
    modules = tuple(dict.fromkeys(blocks.modules))
    if not how.isdecimal():
        return modules
    every = int(how)
    if not 1 <= every <= len(modules):
        raise OptionError(
            f"--checkpoint {how}: {blocks.name or 'the model'} has {len(modules)} blocks, so none "
            f"would be recomputed. Use a number from 1 to {len(modules)}, full or selective."
        )
    return modules[every - 1 :: every]


def checkpoint_block(block: torch.nn.Module, how: str, sdpa: str) -> None:
    """Let a block compute its activations again in backward. Sets `block.forward`.

    Args:
        block: Keeps its class, its hooks and the names of its parameters.
        how: selective, or anything else for all of a block.
        sdpa: Backend of attention, chosen again when it is computed again; "" for torch's choice.
    """
    run = block.forward
    # No closure: copy.deepcopy makes a partial's bound method one of the copy.
    again: Any = functools.partial(_run_checkpointed, run, how == "selective", sdpa)
    block.forward = functools.update_wrapper(again, run)


def _run_checkpointed(
    run: Callable[..., Any], is_selective: bool, sdpa: str, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    args, kwargs = _without_caches(args, kwargs)
    inner = functools.partial(with_backend, sdpa, run) if sdpa else run
    # dynamo does not trace torch's default when it is given.
    contexts: dict[str, Any] = {}
    if is_selective:
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _KEPT)
    return checkpoint(inner, *args, use_reentrant=False, **contexts, **kwargs)


def _without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, with None for each of Hugging Face's caches of keys and values.

    A block adds to its cache: computed again it would see every key twice. Training needs
    none, yet the models make one by themselves.
    """
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return args, kwargs
    kind = library.Cache
    return (
        tuple(None if isinstance(value, kind) else value for value in args),
        {key: None if isinstance(value, kind) else value for key, value in kwargs.items()},
    )
