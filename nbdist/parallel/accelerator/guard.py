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
    "parallelism_config": "%dist_strategy --dp 2 --tp 2",
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
    for name, instead in _PLUGINS.items():
        if arguments.get(name) is not None:
            raise OptionError(
                f"Accelerator({name}=...) would have no effect here: strategies are chosen outside "
                "the code, so that they can be switched. Leave it out and use, for example, "
                f"{instead}"
            )
