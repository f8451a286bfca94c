"""Accelerate's PartialState() knows what this rank's device and backend are.

Without a launcher's word it takes a rank without a GPU for alone, and `split_between_processes`
then gives everything to everybody. A rank with a GPU it takes for one with NCCL, also where Gloo is
used because ranks share the GPU, and its `gather` then makes a call that Gloo refuses.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "accelerate.state"


def install(device_type: str, backend: str) -> None:
    """Let PartialState take this rank's device and backend, from the import of Accelerate on."""
    is_cpu = device_type == "cpu"
    if not is_cpu and backend != "gloo":
        return  # as Accelerate takes it
    wrap = functools.partial(_choose, is_cpu=is_cpu, more={} if is_cpu else {"backend": backend})
    if _MODULE in sys.modules:
        wrap(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder(wrap))


class _Finder(MetaPathFinder):
    """Hands on to the finders behind it, and wraps what the one module defines. Works once."""

    def __init__(self, wrap: Callable[[ModuleType], None]) -> None:
        self._wrap = wrap

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Loader = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._wrap(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _choose(module: ModuleType, *, is_cpu: bool, more: Mapping[str, Any]) -> None:
    """Give PartialState's constructor other defaults."""
    cls: Any = module.PartialState
    construct = cls.__init__

    @functools.wraps(construct)
    def init(self: Any, cpu: bool = is_cpu, **kwargs: Any) -> None:
        # transformers' Trainer gives its ddp_backend, which is None until the user names one.
        given = {name: value for name, value in kwargs.items() if value is not None}
        construct(self, cpu, **{**more, **given})

    cls.__init__ = init
