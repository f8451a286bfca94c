"""Scripts that form and end the group of all ranks themselves run unchanged on ranks.

torchrun's scripts begin with `init_process_group` and end with `destroy_process_group`. Here the
group is formed before them, and the next cell needs it. They also take LOCAL_RANK for the number of
a rank's GPU, which it need not be here: ranks can share one.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

from nbdist.core.rank import this_rank
from nbdist.errors import NbdistError

# Arguments of init_process_group that have no effect on a group that is formed.
_WITHOUT_EFFECT = ("init_method", "store", "timeout", "pg_options", "device_id")


@functools.cache  # once in a process
def install() -> None:
    """Let these calls agree with the group that is formed. Once it is."""
    wrappers = {
        "init_process_group": _accept,
        "destroy_process_group": _keep,
        "barrier": _on_own_gpu,
    }
    for name, wrap in wrappers.items():
        wrapped = wrap(getattr(c10d, name))
        for module in (c10d, dist):
            setattr(module, name, wrapped)
    rpc.init_rpc = _refuse_rpc
    ddp: Any = DistributedDataParallel
    ddp.__init__ = _on_modules_gpu(ddp.__init__)


def _accept(original: Callable[..., None]) -> Callable[..., None]:
    """init_process_group, which does nothing where it asks for what the ranks have."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            original(*args, **kwargs)
            return
        arguments = signature.bind(*args, **kwargs).arguments
        _compare(arguments)
        ignored = [name for name in _WITHOUT_EFFECT if arguments.get(name) is not None]
        effect = f"; {', '.join(ignored)} had no effect" if ignored else ""
        _print_once(
            f"init_process_group: the ranks have a group already, which is used (backend "
            f"{this_rank().topology.backend}, {dist.get_world_size()} ranks){effect}."
        )

    return init_process_group


def _compare(arguments: dict[str, Any]) -> None:
    """Raises a ValueError, as torch does, if other ranks or another backend are asked for."""
    topology = this_rank().topology
    # "cpu:gloo,cuda:nccl" names one for each device; with NCCL there is Gloo for the CPU as well.
    asked = {part.split(":")[-1] for part in str(arguments.get("backend") or "").lower().split(",")}
    missing = asked - {"", topology.backend, "gloo"}
    if missing:
        raise ValueError(
            f"init_process_group asks for {', '.join(sorted(missing))}, but the ranks have "
            f"{topology.backend}: {topology.why}. Leave the backend out, or start the ranks with "
            "%dist_init --backend or nbdist run --backend."
        )
    for name, present in (("world_size", dist.get_world_size()), ("rank", dist.get_rank())):
        if (value := arguments.get(name, -1)) not in {-1, present}:
            raise ValueError(
                f"init_process_group got {name}={value}, but it is {present} here. Leave it out, "
                "or take `rank` and `world_size`, which every rank has; %dist_init -n and "
                "nbdist run -n start another number of ranks."
            )


def _keep(original: Callable[..., None]) -> Callable[..., None]:
    """destroy_process_group, which ends the user's own groups and keeps that of all ranks."""

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            original(group)
        elif dist.is_initialized():
            _print_once(
                "destroy_process_group: nbdist keeps the group of all ranks until the ranks end."
            )

    return destroy_process_group


def _on_own_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call barrier on this rank's GPU whatever number device_ids has; on CPU ranks on none.

    Scripts and Accelerate's `wait_for_everyone` write LOCAL_RANK. torch makes a tensor there: on
    another rank's GPU, or on one that no rank has, and then fails while the other ranks wait.
    """
    signature = inspect.signature(original)
    place_of_ids = [*signature.parameters].index("device_ids")

    @functools.wraps(original)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        if "device_ids" not in kwargs and len(args) <= place_of_ids:
            return original(*args, **kwargs)  # to bind arguments would cost a quarter of a call
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("device_ids"):
            place = torch.device(this_rank().place.device)
            bound.arguments["device_ids"] = None if place.type == "cpu" else [place.index]
        return original(*bound.args, **bound.kwargs)

    return barrier


def _on_modules_gpu(construct: Callable[..., None]) -> Callable[..., None]:
    """DDP's constructor, on the GPU where the module is, whatever number device_ids has.

    Scripts and Accelerate's `prepare` write LOCAL_RANK here too; the first forward would fail.
    """

    @functools.wraps(construct)
    def init(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        places = {parameter.device for parameter in module.parameters()} if device_ids else set()
        if len(places) == 1 and next(iter(places)).type == "cuda":
            device_ids, output_device = [*places], None
        construct(self, module, device_ids, output_device, *args, **kwargs)

    return init


def _refuse_rpc(*_args: Any, **_kwargs: Any) -> NoReturn:
    """init_rpc, which would start threads that no interrupt ends, and only once in a process."""
    raise NbdistError(
        "init_rpc: nbdist does not run torch.distributed.rpc on ranks, because a call of it that "
        "hangs can be neither named nor interrupted. Use collectives or dist.send and dist.recv, "
        f"or run the program with: torchrun --nproc-per-node {dist.get_world_size()} FILE"
    )


@functools.cache  # each once in a process
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201  # into the cell's output
