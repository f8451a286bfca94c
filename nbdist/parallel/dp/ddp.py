"""Distributed data parallel: torch's wrapper, its options, and compressed gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from nbdist.parallel.base.transform import ModelBuild, Transform
from nbdist.parallel.live import live_models

# PowerSGD with less than two exact steps first has nothing to start its error feedback from.
# torch's default, step 1000, is never reached in a notebook. Source: torch's PowerSGDState.
_POWERSGD_START = 2
_POWERSGD_RANK = 4
# More than any model: all gradients in one bucket.
_ONE_BUCKET_MB = 1 << 20

# Of the weight of a convolution over images; with fewer there is no memory format.
_IMAGE_DIMS = 4

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def _wrap(job: ModelBuild, outer: torch.nn.Module) -> torch.nn.Module:
    """Wrap what is trained; a model without trained parameters has no gradients to reduce."""
    if not any(parameter.requires_grad for parameter in outer.parameters()):
        return outer
    group = job.mesh.group("dp_replicate", "cp")
    ddp = DistributedDataParallel(outer, **_arguments(job), process_group=group)
    handler, hook = getattr(job.accelerator, "ddp_handler", None), job.choice.options.hook
    if hook:
        ddp.register_comm_hook(*HOOKS[hook](group))
    elif handler is not None:
        handler.register_comm_hook(ddp)
    ddp.register_forward_pre_hook(_ReducerRenewal(ddp))
    return ddp


class _ReducerRenewal:
    """Gives a DDP model a new reducer where parameters are trained or lie otherwise than before.

    As where another adapter is set, or a layer is unfrozen: DDP reduces what was trained when it
    was made, and what comes later would be another on each rank, without a word. And as after
    `model.to(memory_format=...)`: the first gradients are wrong then (torch 2.13).
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._parameters = list(ddp.parameters())
        # Those of convolutions, which have a memory format.
        self._formatted = [p for p in self._parameters if p.dim() >= _IMAGE_DIMS]
        self._before = self._look()

    def __call__(self, ddp: torch.nn.Module, _args: Any) -> None:
        """Before a forward; alike on all ranks. Meets no rank."""
        look = self._look()
        if look != self._before and any(look[0]):
            self._before = look
            assert isinstance(ddp, DistributedDataParallel)
            live_models.rebuild_reducer(ddp)

    def _look(self) -> tuple[list[bool], list[tuple[int, ...]]]:
        are_trained = [parameter.requires_grad for parameter in self._parameters]
        return are_trained, [parameter.stride() for parameter in self._formatted]


def _arguments(job: ModelBuild) -> dict[str, Any]:
    """DDP's options: the accelerator's own handler's, over them what the choice names."""
    options = job.choice.options
    handler = getattr(job.accelerator, "ddp_handler", None)
    kwargs: dict[str, Any] = handler.to_kwargs() if handler is not None else {}
    for name in ("comm_hook", "comm_wrapper", "comm_state_option"):
        kwargs.pop(name, None)  # of Accelerate, and not of DDP
    if options.bucket_mb is not None:
        kwargs["bucket_cap_mb"] = options.bucket_mb
    backends = dist.get_backend_config() if dist.is_initialized() else ""
    if options.hook == "powersgd" and f"{job.device.type}:gloo" in backends:
        kwargs["bucket_cap_mb"] = _ONE_BUCKET_MB
    if options.has_static_graph:
        kwargs["static_graph"] = True
    if options.finds_unused:
        kwargs["find_unused_parameters"] = True
    if job.device.type != "cpu":
        kwargs["device_ids"] = [job.device]
    # Every rank has the same values already.
    return {**kwargs, "init_sync": False}


def forget_step(model: torch.nn.Module) -> None:
    """Let the next forward begin anew where a step was broken off; DDP alone has something to do.

    Private: without it the reducer of a rank whose backward did not end raises in the next
    forward, while other ranks may wait for it. torch itself calls it so.
    """
    reducer: Any = getattr(model, "reducer", None)
    if reducer is not None:
        reducer._reset_state()  # noqa: SLF001


# With the signature of torch's, which DDP asks for; without its name.
@functools.wraps(default_hooks.bf16_compress_hook, assigned=())
def reduce_as_bf16(*args: Any) -> torch.futures.Future[torch.Tensor]:
    """Reduce gradients as bfloat16.

    torch's own hook under another name: DDP refuses that name, and not what it does, without
    NCCL (torch 2.11 and 2.13, DistributedDataParallel._check_comm_hook).
    """
    return default_hooks.bf16_compress_hook(*args)


def _powersgd(group: dist.ProcessGroup | None) -> tuple[Any, Hook]:
    state = powerSGD_hook.PowerSGDState(
        process_group=group,
        matrix_approximation_rank=_POWERSGD_RANK,
        start_powerSGD_iter=_POWERSGD_START,
    )
    return state, powerSGD_hook.powerSGD_hook


# --hook -> its state and the function that reduces a bucket. With Gloo PowerSGD has to have one
# bucket: its collectives of several come in no order, which ends the process
# (gloo::EnforceNotMet, 4 ranks, torch 2.13).
HOOKS: dict[str, Callable[[dist.ProcessGroup | None], tuple[Any, Hook]]] = {
    "fp16": lambda group: (group, default_hooks.fp16_compress_hook),
    "bf16": lambda group: (group, reduce_as_bf16),
    "powersgd": _powersgd,
}


STEP = Transform(wrap=_wrap)
