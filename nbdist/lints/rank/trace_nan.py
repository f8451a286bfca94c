"""Finds the module whose output is not finite first, in the order in which modules run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from nbdist.lints.rank import optimizer_steps, watch
from nbdist.rpc.rank import namespace


@dataclass(slots=True)
class _State:
    """Whether the next cell is traced, and the hook of the one that runs."""

    is_armed: bool = False
    handle: Any = None
    began: int = 0


_state = _State()


def trace_nan() -> None:
    """Look at what every module of the next cell gives, until one gives NaN or inf."""
    watch.add(__name__)
    watch.undo.append(_disarm)
    _state.is_armed = True


def _disarm() -> None:
    _state.is_armed = False
    end()


def begin() -> None:
    """Hook all modules if this cell is to be traced."""
    if _state.is_armed:
        _state.is_armed = False
        _state.began = optimizer_steps.count()
        _state.handle = register_module_forward_hook(_after)


def end() -> None:
    """Remove the hook of a cell that has ended."""
    if _state.handle is not None:
        _state.handle.remove()
        _state.handle = None


@watch.guarded("--trace-nan")
def _after(module: torch.nn.Module, inputs: object, output: object) -> None:
    """After a module's forward; those inside it came before."""
    if _state.handle is None or torch.compiler.is_compiling() or _is_finite(output):
        return
    step = optimizer_steps.count() - _state.began + 1
    end()
    reason = "its input was finite" if _is_finite(inputs) else "its input was not finite either"
    bad_names = [name for name, p in module.named_parameters() if not _is_finite(p)]
    if bad_names:
        reason += f", and its {bad_names[0]} is not finite"
    sys.stderr.write(
        f"step {step} of this cell: {_name(module)} is the first module whose output is not "
        f"finite; {reason}\n"
    )
    sys.stderr.flush()


def _name(module: torch.nn.Module) -> str:
    from nbdist.parallel.live import live_models

    for variable, outer in live_models.user_modules().items():
        for name, child in namespace.unwrapped(outer).named_modules():
            if child is module:
                where = f"{variable}.{name}" if name else variable
                return f"{where} ({type(module).__name__})"
    return f"a {type(module).__name__}"


def _is_finite(value: object) -> bool:
    tensors = (leaf for leaf in watch.leaves(value) if isinstance(leaf, torch.Tensor))
    return all(
        bool(torch.isfinite(tensor.detach()).all())
        for tensor in tensors
        if (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta
    )
