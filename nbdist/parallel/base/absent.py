"""Parameters and buffers of other stages: a shape without values, which reading them says.

As plain meta tensors they would be saved as nothing, without an error, and fail elsewhere with
torch's words about a device that no user has chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from nbdist.errors import NbdistError

# The same on every rank, so that it is shown once: no name of a parameter is in it.
_INSTEAD = (
    "Where all ranks call it, accelerator.get_state_dict(model) gives all values; so do %dist_save "
    "and %dist_save --export. Or switch first, for example %dist_strategy ddp"
)
READ = (
    "A rank of a pipeline holds one stage, and parameters of other stages, which have no values "
    f"here, were read, copied or computed with. {_INSTEAD}"
)
SAVE = (
    "state_dict() of a pipeline would lack values: a rank holds one stage, and not the parameters "
    f"of the others. {_INSTEAD}"
)
# What needs a number: torch's kernels for meta say so in words of theirs.
_READS = frozenset({torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default})  # noqa: SLF001


class AbsentTensor(torch.Tensor):
    """A meta tensor that raises an NbdistError where its values are needed.

    Shape, dtype, gradient and the like are as of any tensor, at no cost. What is computed of it
    alone is absent too, what writes into it has no effect: `p.mul_(0.9)` over all parameters
    changes those that are here, and load_state_dict fills them.
    """

    # Only what computes is asked for, so that attributes cost nothing.
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001  # torch's way

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # stubs have the base's as a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on meta, or raise where it needs a value."""
        kwargs = kwargs or {}
        if _writes_first(func) and isinstance(args[0], AbsentTensor):
            return args[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device")
        if (
            func in _READS
            or any(not tensor.is_meta for tensor in tensors)
            or (device is not None and torch.device(device).type != "meta")
        ):
            raise NbdistError(READ)
        plain_args, plain_kwargs = tree_map_only(AbsentTensor, _plain, (args, kwargs))
        try:
            result = func(*plain_args, **plain_kwargs)
        except NotImplementedError:  # its shape depends on values
            raise NbdistError(READ) from None
        return tree_map_only(torch.Tensor, absent, result)

    def _refuse_reading(self, *_: Any, **__: Any) -> Any:
        """Raises an NbdistError: these never come to torch's operations."""
        raise NbdistError(READ)

    numpy = tolist = __array__ = _refuse_reading

    def __deepcopy__(self, memo: Any) -> Any:
        """Raises an NbdistError: the copy of a model would be of a stage."""
        raise NbdistError(READ)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises an NbdistError, where torch.save and pickle write it."""
        raise NbdistError(SAVE)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Shape and dtype of the tensor; no values."""
        return f"AbsentTensor(shape={tuple(self.shape)}, dtype={self.dtype}, on another stage)"


def absent(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor or parameter of this shape and dtype, absent; a plain one, of any device."""
    empty = _plain(tensor).as_subclass(AbsentTensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def refuse_state_dict(base: torch.nn.Module) -> None:
    """Let state_dict() raise, of the model and of each module with something absent in it.

    With keep_vars=True it gives what is there, as named_parameters does.
    """
    for module in base.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in tensors):
            module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(_module: torch.nn.Module, _prefix: str, keep_vars: bool) -> None:
    if not keep_vars:
        raise NbdistError(SAVE)


def _writes_first(func: Any) -> bool:
    """Whether an operation writes into its first argument, as those in place do."""
    alias = func._schema.arguments[0].alias_info if func._schema.arguments else None  # noqa: SLF001
    return alias is not None and alias.is_write


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
