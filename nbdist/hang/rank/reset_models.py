"""Makes live models ready again after a broken step, and compares them between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nbdist.hang.recovery import HALVES, SHARDED
from nbdist.parallel.dp.ddp import forget_step
from nbdist.parallel.live.live_models import NamedModel, find

# A tensor is summed in pieces, so that what is needed beside it stays small.
_PIECE_BYTES = 1 << 22
_WORD_BYTES = 8


def reset(models: tuple[NamedModel, ...] | None = None) -> dict[str, int]:
    """Make models ready for a new step after a broken one: model -> gradients cleared.

    Gradients of a broken step are there on some ranks, on others half or not at all.
    """
    cleared = {}
    for model in find() if models is None else models:
        _reset_shards(model.module)
        forget_step(model.module)
        with_gradient = [p for p in model.module.parameters() if p.grad is not None]
        for parameter in with_gradient:
            parameter.grad = None
        cleared[model.name] = len(with_gradient)
    return cleared


def checksums(models: tuple[NamedModel, ...] | None = None) -> dict[str, str]:
    """Model -> checksum of its parameters, HALVES, checksum of its buffers.

    Equal on two ranks when every bit is. SHARDED for a model of which each rank has a part.
    No communication.
    """
    return {
        model.name: SHARDED
        if model.is_sharded
        else f"{_digest(model.module.named_parameters())}{HALVES}"
        f"{_digest(model.module.named_buffers())}"
        for model in (find() if models is None else models)
    }


def _reset_shards(root: torch.nn.Module) -> None:
    """Bring FSDP2 back to its state between two steps: nothing gathered, noted or half reduced.

    Otherwise ranks that broke off at different places gather different tensors in the next step,
    or add gradients of the broken one to its own. torch's own `reset_iter_state` waits for calls
    that were aborted, and keeps such gradients (2.13).
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for module in root.modules():
        if not issubclass(type(module), FSDPModule):
            continue
        shard: Any = module
        state = shard._get_fsdp_state()  # noqa: SLF001
        state._training_state = TrainingState.IDLE  # noqa: SLF001
        _clear(state, ("_modules_to_run_forward",))
        _clear(state._state_ctx, _OF_STEP)  # noqa: SLF001
        _clear(state._comm_ctx, _OF_COMMUNICATION)  # noqa: SLF001
        # torch 2.11 has one group in a module, later ones several.
        single = getattr(state, "_fsdp_param_group", None)
        for group in getattr(state, "_fsdp_param_groups", [single]):
            if group is not None:
                group._training_state = TrainingState.IDLE  # noqa: SLF001
                _clear(group, _OF_GROUP)
                _drop_gradients(group)
        shard.reshard()


def _drop_gradients(group: Any) -> None:
    """Drop what autograd has added up for whole parameters, and what FSDP2 keeps beside it."""
    for parameter in group.fsdp_params:
        # From torch 2.15 on a property that reads the gradient of the whole parameter.
        if "unsharded_accumulated_grad" in vars(parameter):
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None  # noqa: SLF001
    if hasattr(group, "_set_unsharded_grad_dtypes"):  # from torch 2.15 on
        group._set_unsharded_grad_dtypes(defer_upcast=False)  # noqa: SLF001


# Attributes that FSDP2 sets during a step, in torch 2.11 to 2.15; each version has most.
_OF_STEP = (
    "iter_forward_root", "post_backward_final_callback_queued", "gradient_reduction_pending",
    "manual_backward_finalization_active",
)  # fmt: skip
_OF_COMMUNICATION = (
    "all_gather_state", "reduce_scatter_state", "reduce_scatter_states", "post_forward_order",
    "_last_post_reduce_events", "active_gradient_reduction",
)  # fmt: skip
_OF_GROUP = (
    "_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_partial_reduce_output",
    "_reshard_after_forward_event", "_post_forward_indices", "_partial_reduce_output_layout",
    "_post_backward_pending",
)  # fmt: skip
# A flag that is None between two steps; all others are False.
_UNKNOWN_BETWEEN = "manual_backward_finalization_active"


def _clear(owner: Any, names: Iterable[str]) -> None:
    """Empty the containers among an object's fields, lower the flags, set the rest to None."""
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, list | dict | set):
            value.clear()
        elif value is not None:
            is_flag = isinstance(value, bool) and name != _UNKNOWN_BETWEEN
            setattr(owner, name, False if is_flag else None)


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    total = hashlib.sha1(usedforsecurity=False)
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {checksum(tensor)}".encode())
    return total.hexdigest()[:16]


def checksum(tensor: torch.Tensor) -> int:
    """A number of 64 bits that any change of one word of the tensor changes."""
    return int(sum_words(tensor).item())


def sum_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same number where the tensor lies; nothing waits for a GPU.

    Hashing on the host takes longer than is promised for a whole recovery: 15 s for a model of
    two billion parameters, even where these need not come from a GPU.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()
    n_words = flat.numel() // _WORD_BYTES
    n_piece = max(1, _PIECE_BYTES // _WORD_BYTES)
    words = flat[: n_words * _WORD_BYTES].view(torch.int64)
    # Odd factors, so that no bit of a word is lost where the product wraps around.
    weights = torch.arange(min(n_words, n_piece), device=flat.device) * 2 + 1
    total = flat[n_words * _WORD_BYTES :].sum(dtype=torch.int64)
    for number, piece in enumerate(torch.split(words, n_piece)):
        total += (piece * (weights[: piece.numel()] + 2 * n_piece * number)).sum()
    return total
