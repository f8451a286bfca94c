"""Accelerate's own idea of strategies: its Accelerator means DDP, its plugins have no effect."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import accelerate

from nbdist.errors import OptionError

# What Accelerate takes for a strategy or an option of one -> how it is asked for here.
_PLUGINS = {
    "fsdp_plugin": "%dist_strategy fsdp",
    "deepspeed_plugin": "%dist_strategy deepspeed",
    "deepspeed_plugins": "%dist_strategy deepspeed",
    "megatron_lm_plugin": "%dist_strategy --tp 2 --pp 2",
    "torch_tp_plugin": "%dist_strategy tp",
    "dynamo_backend": "%dist_strategy ddp --compile",
    "dynamo_plugin": "%dist_strategy ddp --compile",
}


@functools.cache  # once in a process
def watch(strategy: Callable[[], str]) -> None:
    """Tell, once on this rank, when Accelerate's own class is used and the strategy is not ddp.

    Its constructor is wrapped: nothing of Accelerate's says that one was made. The class stays
    what it is.
    """
    cls: Any = accelerate.Accelerator
    construct = cls.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if type(self) is cls and strategy() != "ddp":
            _warn(strategy)

    cls.__init__ = init


@functools.cache  # once in a process
def _warn(strategy: Callable[[], str]) -> None:
    print(  # noqa: T201  # into the cell's output
        f"The strategy is {strategy()}. Accelerate's own Accelerator() does not know it and always "
        "uses ddp: use `accelerator`, or make yours with `from nbdist import Accelerator`.",
        file=sys.stderr,
    )


def refuse_strategies(arguments: Mapping[str, Any]) -> None:
    """Raises an OptionError if arguments of an Accelerator() name a strategy."""
    mesh = arguments.get("parallelism_config")
    lines = _PLUGINS if mesh is None else {**_PLUGINS, "parallelism_config": mesh_line(mesh)}
    for name, instead in lines.items():
        if arguments.get(name) is not None:
            raise OptionError(
                f"Accelerator({name}=...) would have no effect here: strategies are chosen outside "
                "the code, so that they can be switched. Leave it out and use, for example, "
                f"{instead}"
            )


def mesh_line(config: Any) -> str:
    """The line that asks for the mesh of an accelerate.ParallelismConfig, on as many ranks.

    A split sequence has copies of the model here, where Accelerate has parts of it too.
    """

    def size(axis: str) -> int:
        return int(getattr(config, f"{axis}_size", 1) or 1)

    words = ["%dist_strategy"]
    if size("cp") * size("sp") > 1:
        words.append("ulysses" if size("sp") > 1 else "cp")
    elif size("dp_shard") > 1:
        words.append("fsdp")
        if size("dp_replicate") > 1:
            words.append(f"--shard hybrid --replicas {size('dp_replicate')}")
    degrees = {
        "dp": size("dp_shard") * size("dp_replicate"),
        "tp": size("tp"),
        "cp": size("cp") * size("sp"),
    }
    typed = [f"--{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    return " ".join([*words, *typed]) if len(words) > 1 or typed else "%dist_strategy ddp"
