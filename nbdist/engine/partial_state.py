"""Accelerate's PartialState() on CPU ranks is of all ranks, as its Accelerator() is.

Without a launcher's word it takes a rank without a GPU for alone, and `split_between_processes`
then gives everything to everybody.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "accelerate.state"


def install() -> None:
    """Let PartialState take the CPU by default, from the import of Accelerate on. On CPU ranks."""
    if _MODULE in sys.modules:
        _use_cpu(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Hands on to the finders behind it, and wraps what the one module defines. Works once."""

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
                _use_cpu(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _use_cpu(module: ModuleType) -> None:
    cls: Any = module.PartialState
    construct = cls.__init__

    @functools.wraps(construct)
    def init(self: Any, cpu: bool = True, **kwargs: Any) -> None:
        construct(self, cpu, **kwargs)

    cls.__init__ = init
