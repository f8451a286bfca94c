"""Hooks around split layers: inputs are shared, gathered and split, random numbers change.

Hooks only, on the user's modules; the modules stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from nbdist.errors import OptionError
from nbdist.parallel.libraries.peft_layers import is_adapted
from nbdist.parallel.tp.attention import spread
from nbdist.parallel.tp.rng import Streams

# By which name models pass what goes from block to block, where it has no place.
_HIDDEN = ("hidden_states", "x", "src", "tgt", "input", "inputs", "h", "query")


class Between:
    """The state shared between a colwise layer and the rowwise one after it.

    Query, key and value have one input. As one DTensor its gradients from the three are added
    before the ranks sum them, once, and it is gathered once.
    """

    def __init__(self, mesh: DeviceMesh, streams: Streams) -> None:
        self.mesh = mesh
        self.streams = streams
        self._input: torch.Tensor | None = None
        self._whole: DTensor | None = None
        self._has_gradient = False

    def __deepcopy__(self, _memo: object) -> Self:
        """Itself: between two forwards it holds nothing."""
        return self

    def watch_column(
        self, layer: torch.nn.Module, place: Placement, owner: torch.nn.Module | None
    ) -> None:
        """A colwise layer, whose input lies as `place` says.

        After it each rank draws random numbers of its own, for the owner; None for alike ones.
        """
        layer.register_forward_pre_hook(functools.partial(self._share, place), prepend=True)
        if owner is not None and is_adapted(layer):  # a dropout in it is of the whole input
            layer.register_forward_pre_hook(functools.partial(_draw_alike, self.streams))
        if owner is not None:
            layer.register_forward_hook(functools.partial(_draw_own, self.streams, id(owner)))

    def watch_row(self, layer: torch.nn.Module, *, draws_alike: bool) -> None:
        """A rowwise layer: what was split ends here; from it on ranks may draw alike again."""
        layer.register_forward_pre_hook(self._forget, prepend=True)
        if draws_alike:
            hook = functools.partial(_draw_alike, self.streams)
            if is_adapted(layer):  # a dropout in it is of this rank's part of the input
                layer.register_forward_hook(hook)
            else:
                layer.register_forward_pre_hook(hook, prepend=True)

    def remember(self, tensor: torch.Tensor, whole: DTensor) -> None:
        """Remember the tensor that colwise layers get instead, until the next rowwise one."""
        self._input = tensor
        self._whole = whole
        self._has_gradient = torch.is_grad_enabled()

    def _share(self, place: Placement, _layer: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        if not args or isinstance(args[0], DTensor):
            return None
        tensor = args[0]
        if self._input is not tensor or self._has_gradient != torch.is_grad_enabled():
            self.remember(tensor, spread(tensor, self.mesh, place))
        return (self._whole, *args[1:])

    def _forget(self, *_: Any) -> None:
        self._input = self._whole = None


def watch_owner(
    owner: torch.nn.Module, between: Between, place: Placement, n_shown: int | None
) -> None:
    """Let a module with split heads see an input that fits what it computes with.

    Args:
        owner: It has the colwise layers in it, and gets their input.
        between: Of the model.
        place: How its input lies: whole, or split along the sequence. It sees it whole.
        n_shown: How wide the input is shown to it, to a forward that takes widths from there: as
            wide as its own heads together. Its layers get the real one. None for as it is.
    """

    def show(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = _hidden(args, kwargs)
        if key is None:
            return None
        tensor = args[key] if isinstance(key, int) else kwargs[key]
        whole = spread(tensor, between.mesh, place)
        shown = tensor if place == Replicate() else whole.to_local()
        if n_shown is not None:
            shown = shown.detach()[..., :n_shown]
        between.remember(shown, whole)
        return _with(args, kwargs, key, shown)

    owner.register_forward_pre_hook(show, with_kwargs=True)


def split_blocks(modules: Sequence[torch.nn.Module], between: Between, dim: int) -> None:
    """Split what goes through a list of blocks along the sequence; it is whole before and after.

    Args:
        modules: The blocks of one list and this stage, in order.
        between: Of the model: inside of blocks each rank draws numbers of its own.
        dim: The sequence's.
    """
    for module in modules:
        module.register_forward_pre_hook(functools.partial(_draw_own, between.streams, id(module)))
        module.register_forward_hook(functools.partial(_draw_alike, between.streams))
    first = functools.partial(_split_input, between, dim)
    modules[0].register_forward_pre_hook(first, with_kwargs=True, prepend=True)
    modules[-1].register_forward_hook(functools.partial(_gather_output, between, dim))


def sum_gradient(parameter: DTensor) -> None:
    """Let a DTensor's gradient lie as it does itself, once backward has it.

    Of a parameter that is whole while activations are split, each rank has a part of the sum.
    Under FSDP2 this does nothing: that does the same before it reduces gradients.
    """
    requires_grad = parameter.requires_grad
    # Also where it is frozen now: it may be thawed later.
    parameter.requires_grad_(True)
    hook = functools.partial(_as_placed, parameter.placements)
    parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(requires_grad)


def _as_placed(placements: tuple[Placement, ...], gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, DTensor) and gradient.placements != placements:
        return gradient.redistribute(placements=placements)
    return gradient


def _draw_own(streams: Streams, owner: int, *_: Any) -> None:
    streams.enter(owner)


def _draw_alike(streams: Streams, *_: Any) -> None:
    streams.leave()


def _split_input(
    between: Between,
    dim: int,
    block: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    mesh = between.mesh
    key = _hidden(args, kwargs)
    if key is None:
        raise OptionError(
            f"{type(block).__name__} gets no hidden states that could be split along the sequence. "
            "Leave --sequence-parallel out."
        )
    whole = args[key] if isinstance(key, int) else kwargs[key]
    length = whole.shape[dim] if whole.dim() > dim else 0
    if not length or length % mesh.size():
        raise OptionError(
            f"a sequence of {length} cannot be split over tp={mesh.size()}, as --sequence-parallel "
            f"does. Pad or cut sequences to a multiple of {mesh.size()}, or leave it out."
        )
    part = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    part = part.redistribute(placements=[Shard(dim)])
    return _with(args, kwargs, key, part.to_local())


def _gather_output(
    between: Between, dim: int, _block: torch.nn.Module, _args: Any, result: Any
) -> Any:
    if isinstance(result, torch.Tensor):
        return spread(result, between.mesh, Shard(dim)).to_local()
    if isinstance(result, tuple | list) and result:
        first = _gather_output(between, dim, _block, _args, result[0])
        return type(result)((first, *result[1:]))
    return result


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Find the hidden states among arguments: the first, or the usual name."""
    if args:
        return 0 if isinstance(args[0], torch.Tensor) else None
    return next((key for key in _HIDDEN if isinstance(kwargs.get(key), torch.Tensor)), None)


def _with(args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, value: Any) -> Any:
    if isinstance(key, int):
        return (*args[:key], value, *args[key + 1 :]), kwargs
    return args, {**kwargs, key: value}
